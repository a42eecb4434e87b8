"""Who comes late to the collectives: the arrivals of the ranks of one node, compared.

The time of a collective, and so of a backward pass, is the same on all ranks, for the early ones
wait in it; it names nobody. What differs is when each rank issues it. Boards keep these moments
on the node's one monotonic clock, and here they are set side by side.

Two figures come of it for each rank, both smoothed over the last seconds:

*lag*: how much later than the first rank it issued a collective, on average over collectives.

*score*: the share of the time in which it was late, from the moment at which half of the ranks had
issued a collective until it did. Collectives of which several are in flight count once, and none for
longer than a usual step takes: a single long delay makes no straggler, the same in many steps does.
"""

import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

ArrivalKey = tuple[str, int]
"""A process group and a collective's number in it."""

_NS: Final = 1_000_000_000
_SHORTEST_MEMORY_S: Final = 10.0
_STEPS_REMEMBERED: Final = 32
"""The window of the figures. A busy host delays one rank or the other for some steps: over a
shorter window that alone costs 10 % of a step."""
_READ_EVERY_S: Final = 1.0
_TELLING_S: Final = 1.0
"""Less time than this says nothing: in their first steps ranks warm up each in its own time."""


@dataclass(frozen=True)
class Lateness:
    """Of one rank: mean lag in seconds, and the share of the time in which it kept others."""

    lag_s: float
    score: float


class ArrivalPacing:
    """When the arrivals on the boards are to be read: often enough for a fair sample, not oftener.

    The rings hold the last ``kept`` arrivals. Where they hold two whole steps, one reading a second is
    such a sample, however short the steps are. Longer steps are read before half of a ring is written
    over: else always the same part of a step could be seen.

    Args:
        kept: How many arrivals a ring holds.
    """

    def __init__(self, kept: int) -> None:
        self._kept = kept
        self._issued = 0
        self._step = 0
        self._read_at: float | None = None

    def is_due(self, issued: int, step: int, now: float) -> bool:
        """Whether to read now; if so, that counts as done.

        Args:
            issued: The number of the newest collective, of the group with the most.
            step: The last finished step.
            now: The monotonic clock, seconds.
        """
        new = issued - self._issued
        a_step = new / max(step - self._step, 1)
        waited = self._read_at is None or now - self._read_at >= _READ_EVERY_S
        is_short = 2 * a_step <= self._kept
        if not (waited and new != 0) and (is_short or 2 * new < self._kept):
            return False
        self._issued, self._step, self._read_at = issued, step, now
        return True


class ArrivalMeter:
    """Compares ranks that take part in the same collectives.

    Args:
        ranks: Their numbers; with fewer than two nobody is late.
    """

    def __init__(self, ranks: tuple[int, ...]) -> None:
        self._ranks = ranks
        self._newest: dict[str, int] = {}
        self._first_before: int | None = None
        self._late_until = dict.fromkeys(ranks, 0)
        self._collectives = 0.0
        self._elapsed_s = 0.0
        self._lag_s = dict.fromkeys(ranks, 0.0)
        self._late_s = dict.fromkeys(ranks, 0.0)

    def take(
        self, arrivals: Mapping[int, Mapping[ArrivalKey, int]], step_time_s: float | None
    ) -> None:
        """Take in what the boards hold; a collective counts once, when all ranks have issued it.

        Args:
            arrivals: By rank, nanoseconds of the node's monotonic clock.
            step_time_s: Of a usual step; figures are remembered for 32 of them.
        """
        if len(self._ranks) < 2 or any(rank not in arrivals for rank in self._ranks):  # noqa: PLR2004 a comparison takes two
            return
        memory_s = max(_SHORTEST_MEMORY_S, _STEPS_REMEMBERED * (step_time_s or 0.0))
        common = set.intersection(*(set(arrivals[rank]) for rank in self._ranks))
        new = [key for key in common if key[1] > self._newest.get(key[0], 0)]
        moments = {key: {rank: arrivals[rank][key] for rank in self._ranks} for key in new}
        most_s = step_time_s or math.inf
        for key in sorted(new, key=lambda key: (min(moments[key].values()), key)):
            self._count(key, moments[key], memory_s, most_s)

    def of(self, rank: int) -> Lateness | None:
        """The figures of ``rank``; None before there is enough to compare."""
        if self._elapsed_s < _TELLING_S:
            return None
        return Lateness(
            lag_s=self._lag_s[rank] / self._collectives,
            score=min(self._late_s[rank] / self._elapsed_s, 1.0),
        )

    def _count(
        self, key: ArrivalKey, moments: Mapping[int, int], memory_s: float, most_s: float
    ) -> None:
        group, number = key
        first = min(moments.values())
        # The upper half waits for the rest; of two ranks the first waits for the second.
        usual = statistics.median_low(moments.values())
        follows = number == self._newest.get(group, 0) + 1 and self._first_before is not None
        passed_s = max(first - (self._first_before or 0), 0) / _NS if follows else 0.0
        self._fade(math.exp(-passed_s / memory_s))
        self._newest[group] = number
        self._first_before = max(first, self._first_before or 0)
        self._elapsed_s += passed_s
        self._collectives += 1
        for rank, moment in moments.items():
            self._lag_s[rank] += (moment - first) / _NS
            late_from = max(usual, self._late_until[rank])
            if follows and moment > late_from:
                self._late_s[rank] += min((moment - late_from) / _NS, most_s)
            self._late_until[rank] = max(self._late_until[rank], moment)

    def _fade(self, factor: float) -> None:
        self._collectives *= factor
        self._elapsed_s *= factor
        for rank in self._ranks:
            self._lag_s[rank] *= factor
            self._late_s[rank] *= factor
