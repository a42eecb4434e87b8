"""A whole number that grows with the micro-batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise
from math import ceil


@dataclass(frozen=True)
class Growth:
    """``base + slope * micro_batch``, or a table where measurements do not lie on a line.

    Beyond a table it goes on in a line, or in a parabola where samples see each other.

    Attributes:
        base: At a micro-batch of none.
        slope: For each sample.
        table: (micro-batch, value), ascending; empty if the line holds. Between its rows and
            beyond them values are interpolated.
        curved: Whether that is along the parabola through its last three rows, from the first of
            these on.
    """

    base: int
    slope: int
    table: tuple[tuple[int, int], ...] = ()
    curved: bool = False

    @classmethod
    def through(cls, points: Mapping[int, int]) -> Growth:
        """Through measured points; a line if they lie on one.

        Args:
            points: Value by micro-batch; one alone counts as constant. A parabola through the
                last three is believed if it says what a fourth is.
        """
        known = sorted(points.items())
        (first, low), (last, high) = known[0], known[-1]
        if first == last:
            return cls(low, 0)
        slope, rest = divmod(high - low, last - first)
        line = cls(low - slope * first, slope)
        if rest or any(line.at(size) != value for size, value in known):
            return cls(0, 0, tuple(known), _is_curved(known))
        return line

    def at(self, micro_batch: int) -> int:
        """The value for a micro-batch of so many samples."""
        if not self.table:
            return self.base + self.slope * micro_batch
        if self.curved and micro_batch > self.table[-_OF_PARABOLA][0]:
            return _on_parabola(self.table[-_OF_PARABOLA:], micro_batch)
        neighbours = list(pairwise(self.table))
        low, high = next((pair for pair in neighbours if micro_batch <= pair[1][0]), neighbours[-1])
        span, rise = high[0] - low[0], high[1] - low[1]
        return low[1] - (-rise * (micro_batch - low[0]) // span)


_OF_PARABOLA = 3
# What padding and blocks of allocators make of values on a parabola.
_NEARLY = 0.01


def _is_curved(known: Sequence[tuple[int, int]]) -> bool:
    if len(known) <= _OF_PARABOLA:
        return False
    *_, (size, value), first, second, third = known
    predicted = _on_parabola((first, second, third), size)
    rises = [(b - a) / (n - m) for (m, a), (n, b) in pairwise((first, second, third))]
    return rises[1] > rises[0] and abs(predicted - value) <= _NEARLY * third[1]


def _on_parabola(rows: Sequence[tuple[int, int]], micro_batch: int) -> int:
    """By divided differences (Newton's form)."""
    (m, a), (n, b), (o, c) = rows
    first, second = Fraction(b - a, n - m), Fraction(c - b, o - n)
    third = (second - first) / (o - m)
    return ceil(a + (micro_batch - m) * (first + (micro_batch - n) * third))


@dataclass(frozen=True)
class Highest:
    """The largest of several numbers that grow with the micro-batch.

    Memory in a stretch of a step is at its highest at one operator for small micro-batches, at
    another for large ones.

    Attributes:
        lines: Those that are highest somewhere; at least one.
        seen: (micro-batch, value) where it was measured, and the lines do not say the same.
    """

    lines: tuple[Growth, ...]
    seen: tuple[tuple[int, int], ...] = ()

    @classmethod
    def through(cls, levels: Mapping[int, Sequence[int]]) -> Highest:
        """Of numbers measured one after the other, alike for each micro-batch.

        Args:
            levels: By micro-batch; none counts as zero.
        """
        known = sorted((size, tuple(each) or (0,)) for size, each in levels.items())
        tops = {size: max(each) for size, each in known}
        last = known[-2:]
        of_tops = Growth.through(tops)
        if of_tops.curved or len({len(each) for _, each in last}) > 1:
            return cls((of_tops,))
        columns = zip(*(each for _, each in last), strict=True)
        sizes = [size for size, _ in last]
        rising = {Growth.through(dict(zip(sizes, column, strict=True))) for column in columns}
        lines = _hull(rising)
        best = cls(lines)
        return cls(lines, tuple((size, top) for size, top in tops.items() if best.at(size) != top))

    def at(self, micro_batch: int) -> int:
        """The value for a micro-batch of so many samples."""
        for size, value in self.seen:
            if size == micro_batch:
                return value
        return max(line.at(micro_batch) for line in self.lines)


_SMALLEST, _LARGEST = 1, 1 << 20


def _hull(lines: set[Growth]) -> tuple[Growth, ...]:
    """Those of `lines` that are highest for some micro-batch, the highest at 1 first."""
    kept: list[Growth] = []
    at_first = sorted(lines, key=lambda line: (-line.at(_SMALLEST), -line.at(_LARGEST)))
    for line in at_first:
        # Whoever starts lower must end higher to count, and pass before the next one does.
        if kept and line.at(_LARGEST) <= kept[-1].at(_LARGEST):
            continue
        while len(kept) > 1 and _passing(kept[-2], line) <= _passing(kept[-2], kept[-1]):
            kept.pop()
        kept.append(line)
    return tuple(kept)


def _passing(low: Growth, high: Growth) -> float:
    """The micro-batch, by the slopes, from which `high` is above `low`."""
    begin = low.at(_SMALLEST) - high.at(_SMALLEST)
    end = high.at(_LARGEST) - low.at(_LARGEST)
    return begin / (begin + end) if begin + end else 0.0
