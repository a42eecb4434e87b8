"""What an agent shows of its ranks: overwritten or trimmed, never decided."""

from typing import Annotated, Final, Literal

from pydantic import Field

from services.contract.messages.base import Message
from services.contract.words.bounds import (
    MOST_SECONDS,
    MetricValues,
    Moment,
    Name,
    Numbers,
    Positive,
    Traceback,
    Whole,
    cut_to,
)
from services.contract.words.ids import NodeId

LINE_CHARACTERS: Final = 16_384


class RankProgress(Message):
    """What of a rank's sample is read for its job alone; of a thousand ranks that takes a fifth of the time."""

    rank: Whole
    fence: Positive
    step: Whole
    peak_bytes: Whole | None = None
    fragments_bytes: Whole | None = None


class RankSample(RankProgress):
    """What an agent read last from a rank's board.

    ``issued`` and ``completed`` are collective sequence numbers by process group. Times in
    seconds, memory in bytes: on GPUs the most that PyTorch's allocator had given out by the end of
    the last step, on CPUs what of the process was resident then. ``peak_bytes`` is the most that
    the steps of this attempt took so far: on GPUs the same, on CPUs without the process itself
    (``services.worker.rank.loop.step_memory``); ``fragments_bytes`` what the allocator of a GPU held
    over that; both are None where they are not known. ``beat_age_s`` is the age of the board's last
    store when sampled.

    ``arrival_lag_s`` is how much later than the first rank this one issues a collective, on
    average; ``straggler_score`` the share of the time in which it was late at a collective that
    most others had issued. Both are None where nobody is compared with it.
    """

    local_rank: Whole
    node_id: NodeId
    device: Name
    pid: Whole
    phase: Name
    unit: Name | None = None
    loss: float | None = None
    tokens_per_s: float | None = None
    step_time_s: float | None = Field(default=None, ge=0, le=MOST_SECONDS)
    data_wait_s: float | None = Field(
        default=None,
        ge=0,
        le=MOST_SECONDS,
        description="of step_time_s, spent waiting for the rank's data",
    )
    memory_bytes: Whole = 0
    issued: Numbers = Field(default_factory=dict)
    completed: Numbers = Field(default_factory=dict)
    beat_age_s: float = Field(default=0.0, ge=0)
    arrival_lag_s: float | None = Field(default=None, ge=0)
    straggler_score: float | None = Field(default=None, ge=0, le=1)
    seen_ms: Moment = Field(default=0, description="Redis TIME of the beat, milliseconds")


class RankStacks(Message):
    """The Python stacks of all threads of a rank, when it was last inspected.

    Empty where it did not answer.
    """

    rank: Whole
    fence: Positive
    node_id: NodeId
    text: Traceback


class StepRecord(Message):
    """One training step of a job: the loss is the mean over the global batch.

    ``tokens_per_s`` counts samples where the data has no tokens. A loss that is no finite number is
    null, for JSON has no word for it.
    """

    step: Positive
    fence: Positive
    loss: float | None
    grad_norm: float | None = None
    learning_rate: float | None = None
    tokens_per_s: float = Field(allow_inf_nan=False)
    step_time_s: float = Field(ge=0, le=MOST_SECONDS)
    data_wait_s: float | None = Field(
        default=None,
        ge=0,
        le=MOST_SECONDS,
        description="of step_time_s, what rank 0 waited for its data",
    )
    memory_bytes: Whole | None = Field(
        default=None,
        ge=0,
        description="the most that a rank on the node of rank 0 held after the step, as of a sample",
    )
    time_ms: Moment | None = Field(
        default=None, description="when rank 0 ended the step, by the clock of its node"
    )
    of: Positive | None = Field(
        default=None, description="how many steps there will be, as the job's script says"
    )


class MetricRecord(Message):
    """What the user's code measured at a step; of a validation pass the names begin with ``validation/``.

    None: no finite number. ``left_out``: how many further names the attempt had by then, of which
    nothing is kept.
    """

    step: Whole
    fence: Positive
    values: MetricValues = Field(default_factory=dict)
    left_out: Whole = 0


class LogLine(Message):
    """One line that a rank wrote. ``time_ms`` is the node's wall clock when the agent read it."""

    rank: Whole
    fence: Positive
    stream: Literal["stdout", "stderr"]
    level: Literal["debug", "info", "warning", "error"] = "info"
    time_ms: Moment
    text: Annotated[str, cut_to(LINE_CHARACTERS)]
