"""Numbers, times and states as people read them."""

from datetime import UTC, datetime
from typing import Final

import humanize
from rich.text import Text

from services.contract.api.views import JobView, Progress
from services.contract.words.states import CheckpointState, JobState, NodeState

_STATE_STYLES: Final = {
    JobState.RUNNING: "cyan",
    JobState.SUCCEEDED: "green",
    JobState.FAILED: "bold red",
    JobState.CANCELLED: "yellow",
    JobState.PAUSED: "yellow",
    CheckpointState.COMMITTED: "green",
    CheckpointState.ABORTED: "red",
    CheckpointState.CORRUPT: "bold red",
    NodeState.READY: "green",
    NodeState.DRAINING: "yellow",
    NodeState.LOST: "bold red",
}
_AGES: Final = ((86_400, "d"), (3_600, "h"), (60, "m"))


def state_text(state: JobState | CheckpointState | NodeState) -> Text:
    """The state's word in its colour."""
    return Text(state, style=_STATE_STYLES.get(state, "blue"))


def number(value: float | None, pattern: str) -> str:
    """The value in its pattern, or a dash where there is none."""
    return "-" if value is None else pattern.format(value)


def figure(value: float | None) -> str:
    """A number of any size in few digits; a metric without a value was no finite number."""
    return "not finite" if value is None else f"{value:.5g}"


def steps_of(job: JobView) -> str:
    """How far a job is, such as 20/40; a script may not say how many steps it makes."""
    progress = job.progress
    return f"{progress.step}/{'?' if progress.of is None else progress.of}"


def loss(value: float | None, progress: Progress) -> str:
    """A loss of a job, with its unit where that is known."""
    return number(value, f"{{:.5f}} {progress.loss_unit}".rstrip())


def throughput(progress: Progress) -> str:
    """What a job's data counts in a second, or a dash."""
    return number(progress.tokens_per_s, f"{{:,.0f}} {per_s(progress)}")


def per_s(progress: Progress) -> str:
    """The unit of a job's throughput."""
    return f"{progress.throughput_unit}/s"


def duration(seconds: float | None) -> str:
    """Seconds as ``4m 03s``, or a dash."""
    if seconds is None:
        return "-"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h {minutes:02d}m" if hours else f"{minutes}m {rest:02d}s"


def age(moment: datetime) -> str:
    """How long ago a moment was, in words."""
    return humanize.naturaldelta(datetime.now(UTC) - moment)


def short_age(moment: datetime) -> str:
    """How long ago a moment was, such as ``42s`` or ``3d``."""
    seconds = max(int((datetime.now(UTC) - moment).total_seconds()), 0)
    for unit, letter in _AGES:
        if seconds >= unit:
            return f"{seconds // unit}{letter}"
    return f"{seconds}s"


def size(nbytes: int) -> str:
    """Bytes for people."""
    return humanize.naturalsize(nbytes, binary=True)


def plural(count: int, word: str) -> str:
    """A count and its word: ``1 restart``, ``2 restarts``."""
    return f"{count} {word}{'s' * (count != 1)}"
