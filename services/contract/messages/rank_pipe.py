"""The pipe between an agent and one of its ranks: one JSON object a line.

A rank runs the user's code, so every message of it is bounded, at both ends of the pipe: what
people read is cut with a mark, what must be exact is refused.
"""

from typing import Annotated, Final, Literal

from pydantic import FailFast, Field, TypeAdapter

from services.contract.jobs.plans import GangPlan
from services.contract.jobs.spec_parts import MOST_RANKS
from services.contract.jobs.specs import CarriedSpec
from services.contract.jobs.traces import MOST_STEPS
from services.contract.messages.base import Message
from services.contract.messages.board import MAX_GROUPS, MAX_STEP
from services.contract.storage.manifests import ShardFile
from services.contract.words.bounds import (
    Baselines,
    Digest,
    ErrorTypes,
    EvaluationMetrics,
    GroupName,
    MetricValues,
    Name,
    Notices,
    Text,
    Traceback,
)
from services.contract.words.ids import CheckpointId, JobId, TraceId

LINE_BYTES: Final = 1 << 20
"""No message is longer."""

_MOST_UNITS: Final = 4_096
_MOST: Final = (1 << 63) - 1


_Step = Annotated[int, Field(ge=0, le=MAX_STEP)]
ThroughputUnit = Literal["tokens", "samples"]
LossUnit = Literal["nats", ""]
"""Nats a token where the loss is that of the next token; else it has no unit that we know."""


class RankSeat(Message):
    """What a rank is told when it is forked: all that it needs, and no credential of ours.

    ``secrets`` are those that the spec refers to, by name; they are nowhere else. Built-in data
    sources read below ``data_roots`` alone, and in no ``private_folders`` of the node. ``code_folder`` holds the code that was uploaded for the job.
    ``hears_metrics``: the agent knows ``RankMetrics``. ``returns``: its replica was lost, and gets its
    state from the memory of another one.
    """

    job_id: JobId
    fence: int = Field(ge=1)
    rank: int = Field(ge=0)
    local_rank: int = Field(ge=0)
    device: str
    spec: CarriedSpec
    plan: GangPlan
    resume_from: CheckpointId | None = None
    storage_root: str
    board_path: str
    log_folder: str
    store_host: str
    store_port: int
    threads: int = Field(ge=1)
    secrets: dict[str, str] = Field(default_factory=dict, repr=False)
    data_roots: tuple[str, ...] = ()
    private_folders: tuple[str, ...] = ()
    code_folder: str | None = None
    hears_metrics: bool = False
    returns: bool = False


class RankReady(Message):
    """Rank to agent: built and loaded; these are the names behind the board's numbers.

    ``throughput_unit``: what its ``tokens_per_s`` counts. ``loss_unit``: that of its loss.
    ``notices``: what of the job has no effect. A script says it again when it knows more.
    """

    kind: Literal["rank_ready"] = "rank_ready"
    # A line of a megabyte has room for a third of a million errors: the first is enough.
    units: Annotated[tuple[Name, ...], Field(max_length=_MOST_UNITS), FailFast()]
    groups: Annotated[tuple[GroupName, ...], Field(max_length=MAX_GROUPS), FailFast()]
    parameters: int = Field(ge=0, le=_MOST)
    data_digest: Digest
    throughput_unit: ThroughputUnit = "tokens"
    loss_unit: LossUnit = "nats"
    notices: Notices = ()


class RankCheckpointBegan(Message):
    """Rank to agent: this rank begins to write its shard."""

    kind: Literal["rank_checkpoint_began"] = "rank_checkpoint_began"
    checkpoint_id: CheckpointId
    step: _Step


class RankVote(Message):
    """Rank to agent: this rank's shard is durable.

    ``evaluation``: the validation loss after this step and metrics; empty without a validation pass.
    """

    kind: Literal["rank_vote"] = "rank_vote"
    checkpoint_id: CheckpointId
    step: _Step
    shard: ShardFile
    loss: float | None = None
    data_digest: Digest = ""
    evaluation: EvaluationMetrics = Field(default_factory=dict)


class RankCheckpointWaits(Message):
    """Rank to agent: this rank could not write its shard of the last checkpoint, and tries again.

    ``condition``: what of the node prevents it.
    """

    kind: Literal["rank_checkpoint_waits"] = "rank_checkpoint_waits"
    checkpoint_id: CheckpointId
    step: _Step
    condition: Text


class RankCheckpointFailed(Message):
    """Rank to agent: this rank could not write its shard."""

    kind: Literal["rank_checkpoint_failed"] = "rank_checkpoint_failed"
    checkpoint_id: CheckpointId
    reason: Text


class RankFoundCorrupt(Message):
    """Rank to agent: the checkpoint that it was to load is not what was committed."""

    kind: Literal["rank_found_corrupt"] = "rank_found_corrupt"
    checkpoint_id: CheckpointId
    file: Name
    reason: Text


class RankEvaluated(Message):
    """Rank 0 to agent: a validation pass over all ranks is done. No finite loss: null.

    ``tokens`` are samples where the data has none. Of ``baselines`` the first eight are kept that
    are finite; ``metrics`` are the user's, the first 16.
    """

    kind: Literal["rank_evaluated"] = "rank_evaluated"
    step: _Step
    loss: float | None
    tokens: int = Field(ge=1, le=_MOST)
    baselines: Baselines = Field(default_factory=dict)
    metrics: EvaluationMetrics = Field(default_factory=dict)


class MetricPoint(Message):
    """The user's metrics at a step; those of a validation pass have names in ``validation/``."""

    step: _Step
    values: MetricValues


class RankMetrics(Message):
    """Rank 0 to agent: what the user's code measures, oldest first. Telemetry, so never a fact.

    Sent only to an agent whose seat ``hears_metrics``: an older one takes it for a fault.
    """

    kind: Literal["rank_metrics"] = "rank_metrics"
    points: Annotated[tuple[MetricPoint, ...], Field(max_length=64), FailFast()]
    left_out: int = Field(
        default=0, ge=0, le=_MOST, description="further names, which are not reported"
    )


class RankTraced(Message):
    """Rank to agent: its file of a trace is written, of the steps first to last."""

    kind: Literal["rank_traced"] = "rank_traced"
    trace_id: TraceId
    bytes: int = Field(ge=0, le=_MOST)
    first_step: _Step
    last_step: _Step


class RankTraceFailed(Message):
    """Rank to agent: it did not record, and left no file. Training goes on."""

    kind: Literal["rank_trace_failed"] = "rank_trace_failed"
    trace_id: TraceId
    reason: Text


class RankEpochBroken(Message):
    """Rank to agent: the connections between replicas broke, and for some seconds nobody said that a replica is lost."""

    kind: Literal["rank_epoch_broken"] = "rank_epoch_broken"
    epoch: Annotated[int, Field(ge=1, le=_MOST)]


class RankFailed(Message):
    """Rank to agent: an exception ends this rank.

    ``error_types`` are the qualified names of its class and of those that it inherits from.
    """

    kind: Literal["rank_failed"] = "rank_failed"
    error: Text
    error_types: ErrorTypes = ()
    traceback: Traceback
    step: _Step


class RankFinished(Message):
    """Rank to agent: the last vote is cast and the rank is about to exit with code 0.

    ``early``: why it made no more steps than these, though nobody asked it to stop.
    """

    kind: Literal["rank_finished"] = "rank_finished"
    step: _Step
    drained: bool
    early: Text | None = None


RankMessage = Annotated[
    RankReady
    | RankCheckpointBegan
    | RankVote
    | RankCheckpointWaits
    | RankCheckpointFailed
    | RankFoundCorrupt
    | RankEvaluated
    | RankMetrics
    | RankTraced
    | RankTraceFailed
    | RankEpochBroken
    | RankFailed
    | RankFinished,
    Field(discriminator="kind"),
]


RANK_MESSAGE: TypeAdapter[RankMessage] = TypeAdapter(RankMessage)


class TraceOrder(Message):
    """Record the next ``steps`` whole steps."""

    trace_id: TraceId
    steps: int = Field(ge=1, le=MOST_STEPS)


class ReplicaSet(Message):
    """The replicas that take part in steps from now on, if a job continues without lost ones.

    Attributes:
        epoch: Its number; a set of a higher one replaces it.
        members: Numbers of replicas, ascending.
        host: Where the first rank of one of them listens for the others.
        port: The same.
    """

    epoch: int = Field(ge=1, le=_MOST)
    members: Annotated[tuple[int, ...], Field(min_length=1, max_length=MOST_RANKS), FailFast()]
    host: Name
    port: int = Field(ge=1, le=65_535)


class RankOrder(Message):
    """Agent to rank: checkpoint at the next agreed step; ``stop``: and then exit.

    ``trace``: this rank alone, from its own next step on. ``replicas``: who takes part from now on.
    """

    checkpoint: bool = False
    stop: bool = False
    trace: TraceOrder | None = None
    replicas: ReplicaSet | None = None
