"""Whether the ranks of a gang hang: a pure function of what their boards show and of the time.

Ranks wait for each other in collectives, so one that stands still soon stops all. A gang hangs
when no rank's board has moved (its step, its phase, the numbers of its collectives) for longer
than it is allowed to. It is allowed ``max(5 s, 3 x usual step)``, or what the spec says. Where a
usual step says nothing (before the first step is done, while a checkpoint is loaded or written,
during an evaluation, while the profiler gives out a trace) it is allowed five minutes at least. Ranks that
meet may wait for other nodes as long; but where one of them sends to a link that carries nothing, 20 s.

Of a script only its reports are seen, and not whether it evaluates between two of them: it is allowed
a minute where our loop is allowed 5 s. Before its first report it is allowed any time, for it may
never make one: then only the end of a process counts, and a process that is stopped.

A rank whose process is stopped (by a signal, or for a tracer) can do nothing of all that it is given time
for. It may be stopped for a minute, or what the spec says, whatever others on the node do meanwhile.

Time during which the agent itself did not look, because it or the machine was stopped, is not
held against the ranks.
"""

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Final

from services.contract.words.states import RankPhase

SHORTEST_S: Final = 5.0
SHORTEST_OF_SCRIPT_S: Final = 60.0
STEPS_ALLOWED: Final = 3.0
SLOW_PHASE_S: Final = 300.0
STOPPED_ALLOWED_S: Final = 60.0
CUT_OFF_S: Final = 20.0
"""Long enough for a link that is down for seconds; by then a kernel has sent four times to one that is cut."""
LOOKS_EVERY_S: Final = 0.5
"""A longer break between two looks, which come ten times a second, was not the ranks' fault: the
machine was stopped, or has so much else to do that they may starve as well."""

_SLOW_PHASES: Final = frozenset(
    {
        RankPhase.SPAWNED,
        RankPhase.INIT,
        RankPhase.RENDEZVOUS,
        RankPhase.BUILD,
        RankPhase.LOAD,
        RankPhase.EVAL,
        RankPhase.CHECKPOINT,
        RankPhase.TRACE,
    }
)


@dataclass(frozen=True)
class Mark:
    """What moves on a rank's board while it makes progress."""

    step: int
    phase: RankPhase
    issued: tuple[int, ...]
    completed: tuple[int, ...]
    unit_index: int | None = None


@dataclass(frozen=True)
class Progress:
    """What was seen at the last look. ``moved_at`` is when something had last moved.

    ``stopped``: the ranks whose processes were stopped, and since when. ``still``: since when each rank has
    stood still.
    """

    marks: Mapping[int, Mark] = field(default_factory=dict)
    moved_at: float | None = None
    looked_at: float | None = None
    stopped: Mapping[int, float] = field(default_factory=dict)
    still: Mapping[int, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Stall:
    """No rank moved for ``still_s`` seconds; ``allowed_s`` is what they have."""

    still_s: float
    allowed_s: float

    @property
    def is_hang(self) -> bool:
        """Whether that is too long."""
        return self.still_s > self.allowed_s


def allowance_s(
    marks: Mapping[int, Mark],
    *,
    stepped: bool,
    usual_step_s: float | None,
    asked_s: float | None,
    is_script: bool = False,
    cut_off: bool = False,
) -> float:
    """How long the ranks may stand still.

    Args:
        marks: Of the ranks that are still to do something.
        stepped: Whether each of them has finished a step of this attempt; of a script, any of them.
        usual_step_s: The median of the last steps.
        asked_s: ``faults.hang_timeout_s``, None for auto.
        is_script: Whether the steps are those that a script reports.
        cut_off: Whether one of them, as they meet, sends to a link that carries nothing.
    """
    if cut_off and any(mark.phase is RankPhase.RENDEZVOUS for mark in marks.values()):
        return CUT_OFF_S
    if is_script and not stepped:
        return math.inf
    shortest = SHORTEST_OF_SCRIPT_S if is_script else SHORTEST_S
    allowed = asked_s or max(shortest, STEPS_ALLOWED * (usual_step_s or 0.0))
    is_slow = not stepped or any(mark.phase in _SLOW_PHASES for mark in marks.values())
    return max(allowed, SLOW_PHASE_S) if is_slow else allowed


def look(
    before: Progress, marks: Mapping[int, Mark], allowed_s: float, now: float
) -> tuple[Progress, Stall]:
    """The progress after a look, and for how long all stood still (monotonic clock, seconds).

    Args:
        before: The progress at the last look.
        marks: What the boards show now, of the ranks that are still to do something.
        allowed_s: See ``allowance_s``.
        now: The moment of the look.
    """
    moved_at, missed_s = before.moved_at, _missed_s(before, now)
    if moved_at is None or before.looked_at is None or marks != before.marks:
        moved_at = now
    else:
        moved_at += missed_s
    still = {
        rank: min(before.still.get(rank, now) + missed_s, now)
        if before.marks.get(rank) == mark
        else now
        for rank, mark in marks.items()
    }
    after = replace(before, marks=dict(marks), moved_at=moved_at, looked_at=now, still=still)
    return after, Stall(still_s=now - moved_at, allowed_s=allowed_s)


def look_at_stopped(
    before: Progress, stopped: Collection[int], asked_s: float | None, now: float
) -> tuple[Progress, Stall]:
    """The same for processes that are stopped; to be called before ``look``, which tells the time.

    Args:
        before: The progress at the last look.
        stopped: The ranks whose processes are stopped now, of those that are still to do something.
        asked_s: ``faults.hang_timeout_s``, None for auto.
        now: The moment of the look.
    """
    missed_s = _missed_s(before, now)
    since = {rank: before.stopped.get(rank, now - missed_s) + missed_s for rank in stopped}
    longest_s = max((now - at for at in since.values()), default=0.0)
    return replace(before, stopped=since), Stall(longest_s, asked_s or STOPPED_ALLOWED_S)


def _missed_s(before: Progress, now: float) -> float:
    """How long the agent itself did not look."""
    away_s = 0.0 if before.looked_at is None else now - before.looked_at
    return away_s if away_s > LOOKS_EVERY_S else 0.0
