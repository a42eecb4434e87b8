"""The pipe between an agent and one of its ranks: one JSON object a line.

A rank runs the user's code, so every message of it is bounded, at both ends of the pipe: what
people read is cut with a mark, what must be exact is refused.
"""

import itertools
import math
from typing import Annotated, Final, Literal

from pydantic import BeforeValidator, Field, StringConstraints, TypeAdapter

from services.contract.ids import CheckpointId, JobId
from services.contract.manifests import ShardFile
from services.contract.messages.base import Message
from services.contract.plans import GangPlan
from services.contract.rank_channel import MAX_GROUPS, MAX_STEP
from services.contract.specs import CarriedSpec

LINE_BYTES: Final = 1 << 20
"""No message is longer."""

ERROR_CHARACTERS: Final = 4_096
TRACEBACK_CHARACTERS: Final = 32_768
NAME_CHARACTERS: Final = 256
BASELINES_KEPT: Final = 8
METRIC_NAMES_KEPT: Final = 64
"""So many names of a user's metrics are kept of a job."""
METRIC_NAME_CHARACTERS: Final = 64
_ERROR_TYPES_KEPT: Final = 32
_MOST_UNITS: Final = 4_096
_MOST: Final = (1 << 63) - 1


def shortened(text: str, limit: int) -> str:
    """``text``, its middle cut where it has more than ``limit`` characters, with a mark.

    The two ends say where and what.
    """
    if len(text) <= limit:
        return text
    mark = f" … {len(text) - limit} characters cut … "
    half = (limit - len(mark)) // 2
    return f"{text[:half]}{mark}{text[-half:]}"


def few_baselines(baselines: object) -> object:
    """The first of them that are finite, for JSON has no word for other numbers; names cut."""
    if not isinstance(baselines, dict):
        return baselines
    finite = [
        (shortened(str(name), NAME_CHARACTERS), float(value))
        for name, value in baselines.items()
        if _is_finite(value)
    ]
    return dict(finite[:BASELINES_KEPT])


def few_metrics(values: object) -> object:
    """The first 64 of them; names cut, and without what would break a line or a list of names.

    None in place of what is no finite number.
    """
    if not isinstance(values, dict):
        return values
    return {
        metric_name(str(name)): float(value) if _is_finite(value) else None
        for name, value in itertools.islice(values.items(), METRIC_NAMES_KEPT)
    }


def metric_name(name: str) -> str:
    """A metric's name as it is kept: printable, without commas, of at most 64 characters."""
    plain = "".join(c if c.isprintable() and c != "," else "_" for c in name)
    return shortened(plain, METRIC_NAME_CHARACTERS) or "_"


def _is_finite(value: object) -> bool:
    if isinstance(value, float):
        return math.isfinite(value)
    return isinstance(value, int) and abs(value) <= _MOST


def _cut_to(limit: int) -> BeforeValidator:
    def cut(value: object) -> object:
        return shortened(value, limit) if isinstance(value, str) else value

    return BeforeValidator(cut)


def _first_types(types: object) -> object:
    return types[:_ERROR_TYPES_KEPT] if isinstance(types, list | tuple) else types


_Text = Annotated[str, _cut_to(ERROR_CHARACTERS)]
_Name = Annotated[str, _cut_to(NAME_CHARACTERS)]
_GroupName = Annotated[str, StringConstraints(max_length=64)]
_Digest = Annotated[str, StringConstraints(max_length=1_024)]
_Step = Annotated[int, Field(ge=0, le=MAX_STEP)]
MetricValues = Annotated[dict[str, float | None], BeforeValidator(few_metrics)]
"""Values by name, at most 64; None: no finite number."""


class RankSeat(Message):
    """What a rank is told when it is forked: all that it needs, and no credential of ours.

    ``secrets`` are those that the spec refers to, by name; they are nowhere else. Built-in data
    sources read below ``data_roots`` alone. ``code_folder`` holds the code that was uploaded for the job.
    ``hears_metrics``: the agent knows ``RankMetrics``.
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
    code_folder: str | None = None
    hears_metrics: bool = False


class RankReady(Message):
    """Rank to agent: built and loaded; these are the names behind the board's numbers."""

    kind: Literal["rank_ready"] = "rank_ready"
    units: tuple[_Name, ...] = Field(max_length=_MOST_UNITS)
    groups: tuple[_GroupName, ...] = Field(max_length=MAX_GROUPS)
    parameters: int = Field(ge=0, le=_MOST)
    data_digest: _Digest


class RankCheckpointBegan(Message):
    """Rank to agent: this rank begins to write its shard."""

    kind: Literal["rank_checkpoint_began"] = "rank_checkpoint_began"
    checkpoint_id: CheckpointId
    step: _Step


class RankVote(Message):
    """Rank to agent: this rank's shard is durable."""

    kind: Literal["rank_vote"] = "rank_vote"
    checkpoint_id: CheckpointId
    step: _Step
    shard: ShardFile
    loss: float | None = None
    data_digest: _Digest = ""


class RankCheckpointWaits(Message):
    """Rank to agent: this rank could not write its shard of the last checkpoint, and tries again.

    ``condition``: what of the node prevents it.
    """

    kind: Literal["rank_checkpoint_waits"] = "rank_checkpoint_waits"
    checkpoint_id: CheckpointId
    step: _Step
    condition: _Text


class RankCheckpointFailed(Message):
    """Rank to agent: this rank could not write its shard."""

    kind: Literal["rank_checkpoint_failed"] = "rank_checkpoint_failed"
    checkpoint_id: CheckpointId
    reason: _Text


class RankFoundCorrupt(Message):
    """Rank to agent: the checkpoint that it was to load is not what was committed."""

    kind: Literal["rank_found_corrupt"] = "rank_found_corrupt"
    checkpoint_id: CheckpointId
    file: _Name
    reason: _Text


class RankEvaluated(Message):
    """Rank 0 to agent: a validation pass over all ranks is done. No finite loss: null.

    Of ``baselines`` the first eight are kept that are finite.
    """

    kind: Literal["rank_evaluated"] = "rank_evaluated"
    step: _Step
    loss: float | None
    tokens: int = Field(ge=1, le=_MOST)
    baselines: Annotated[dict[str, float], BeforeValidator(few_baselines)] = Field(
        default_factory=dict
    )


class MetricPoint(Message):
    """The user's metrics at a step; those of a validation pass have names in ``validation/``."""

    step: _Step
    values: MetricValues


class RankMetrics(Message):
    """Rank 0 to agent: what the user's code measures, oldest first. Telemetry, so never a fact.

    Sent only to an agent whose seat ``hears_metrics``: an older one takes it for a fault.
    """

    kind: Literal["rank_metrics"] = "rank_metrics"
    points: tuple[MetricPoint, ...] = Field(max_length=64)
    left_out: int = Field(
        default=0, ge=0, le=_MOST, description="further names, of which nothing is told"
    )


class RankFailed(Message):
    """Rank to agent: an exception ends this rank.

    ``error_types`` are the qualified names of its class and of those that it inherits from.
    """

    kind: Literal["rank_failed"] = "rank_failed"
    error: _Text
    error_types: Annotated[tuple[_Name, ...], BeforeValidator(_first_types)] = ()
    traceback: Annotated[str, _cut_to(TRACEBACK_CHARACTERS)]
    step: _Step


class RankFinished(Message):
    """Rank to agent: the last vote is cast and the rank is about to exit with code 0."""

    kind: Literal["rank_finished"] = "rank_finished"
    step: _Step
    drained: bool


RankMessage = Annotated[
    RankReady
    | RankCheckpointBegan
    | RankVote
    | RankCheckpointWaits
    | RankCheckpointFailed
    | RankFoundCorrupt
    | RankEvaluated
    | RankMetrics
    | RankFailed
    | RankFinished,
    Field(discriminator="kind"),
]


RANK_MESSAGE: TypeAdapter[RankMessage] = TypeAdapter(RankMessage)


class RankOrder(Message):
    """Agent to rank: checkpoint at the next agreed step; ``stop``: and then exit."""

    checkpoint: bool
    stop: bool
