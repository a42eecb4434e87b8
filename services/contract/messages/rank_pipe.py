"""The pipe between an agent and one of its ranks: one JSON object a line."""

from typing import Annotated, Literal

from pydantic import Field, TypeAdapter

from services.contract.ids import CheckpointId, JobId
from services.contract.manifests import ShardFile
from services.contract.messages.base import Message
from services.contract.plans import GangPlan
from services.contract.specs import CarriedSpec


class RankSeat(Message):
    """What a rank is told when it is forked: all that it needs, and no credential of ours.

    ``secrets`` are those that the spec refers to, by name; they are nowhere else. Built-in data
    sources read below ``data_roots`` alone.
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


class RankReady(Message):
    """Rank to agent: built and loaded; these are the names behind the board's numbers."""

    kind: Literal["rank_ready"] = "rank_ready"
    units: tuple[str, ...]
    groups: tuple[str, ...]
    parameters: int
    data_digest: str


class RankCheckpointBegan(Message):
    """Rank to agent: this rank begins to write its shard."""

    kind: Literal["rank_checkpoint_began"] = "rank_checkpoint_began"
    checkpoint_id: CheckpointId
    step: int


class RankVote(Message):
    """Rank to agent: this rank's shard is durable."""

    kind: Literal["rank_vote"] = "rank_vote"
    checkpoint_id: CheckpointId
    step: int
    shard: ShardFile
    loss: float | None = None
    data_digest: str = ""


class RankCheckpointWaits(Message):
    """Rank to agent: this rank could not write its shard of the last checkpoint, and tries again.

    ``condition``: what of the node prevents it.
    """

    kind: Literal["rank_checkpoint_waits"] = "rank_checkpoint_waits"
    checkpoint_id: CheckpointId
    step: int
    condition: str


class RankCheckpointFailed(Message):
    """Rank to agent: this rank could not write its shard."""

    kind: Literal["rank_checkpoint_failed"] = "rank_checkpoint_failed"
    checkpoint_id: CheckpointId
    reason: str


class RankFoundCorrupt(Message):
    """Rank to agent: the checkpoint that it was to load is not what was committed."""

    kind: Literal["rank_found_corrupt"] = "rank_found_corrupt"
    checkpoint_id: CheckpointId
    file: str
    reason: str


class RankEvaluated(Message):
    """Rank 0 to agent: a validation pass over all ranks is done. No finite loss: null."""

    kind: Literal["rank_evaluated"] = "rank_evaluated"
    step: int
    loss: float | None
    tokens: int
    baselines: dict[str, float] = Field(default_factory=dict)


class RankFailed(Message):
    """Rank to agent: an exception ends this rank.

    ``error_types`` are the qualified names of its class and of those that it inherits from.
    """

    kind: Literal["rank_failed"] = "rank_failed"
    error: str
    error_types: tuple[str, ...] = ()
    traceback: str
    step: int


class RankFinished(Message):
    """Rank to agent: the last vote is cast and the rank is about to exit with code 0."""

    kind: Literal["rank_finished"] = "rank_finished"
    step: int
    drained: bool


RankMessage = Annotated[
    RankReady
    | RankCheckpointBegan
    | RankVote
    | RankCheckpointWaits
    | RankCheckpointFailed
    | RankFoundCorrupt
    | RankEvaluated
    | RankFailed
    | RankFinished,
    Field(discriminator="kind"),
]


RANK_MESSAGE: TypeAdapter[RankMessage] = TypeAdapter(RankMessage)


class RankOrder(Message):
    """Agent to rank: checkpoint at the next agreed step; ``stop``: and then exit."""

    checkpoint: bool
    stop: bool
