"""What one rank's part of the memory that ranks of a host share takes.

Slices that lie there take what they would take elsewhere, and of whole parameters that are one copy
for all ranks each rank has as much as its slices; so both are counted as slices. What comes to that
is counted here: the heads of segments, cast copies of slices, and the boxes of reductions, of which
those pages take memory that were written.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from fsdp_core.layout import Slicing, aligned, are_left_in_rows
from fsdp_core.plan.model.shares import UnitShare

_PAGE = 4096
# The words that ranks count in, and the ring of what they have started, which is full in the end.
_GROUP_HEAD = _PAGE
_AXIS_HEAD = 63 * _PAGE

Range = tuple[int, int]


@dataclass(frozen=True)
class BoxUse:
    """What a reduction does with a box.

    Attributes:
        nbytes: That the box needs to have.
        written: (begin, end) of what a rank leaves to others.
        holds_own: Whether the rank's own part is left there, too.
    """

    nbytes: int
    written: tuple[Range, ...]
    holds_own: bool

    @classmethod
    def of(cls, slicings: Sequence[Slicing], itemsize: int, rank: int) -> BoxUse:
        """That of a reduction of tensors.

        Args:
            slicings: How each is cut over the ranks; flags among them.
            itemsize: Bytes of an element on its way.
            rank: Whose box it is.
        """
        if are_left_in_rows(slicings, itemsize):
            nbytes = itemsize * sum(each.row * each.parts for each in slicings)
            return cls(nbytes, ((0, nbytes),), holds_own=True)
        written: list[Range] = []
        end = 0
        for each in slicings:
            begin, size = end, each.total * itemsize
            end += aligned(size)
            if each.dim != 0:
                written.append((begin, begin + size))
                continue
            line = size // each.shape[0] if each.shape[0] else 0
            start, length = each.bounds(rank)
            written.append((begin, begin + start * line))
            written.append((begin + (start + length) * line, begin + size))
        return cls(end, tuple(written), holds_own=False)


@dataclass
class _Box:
    """Memory in which a rank leaves to the others their parts of one reduction at a time."""

    nbytes: int
    in_use: bool = True
    ended_as: int = 0
    known: set[BoxUse] = field(default_factory=set)
    pages: int = 0

    def write(self, use: BoxUse) -> int:
        """By how many bytes it grows."""
        if use in self.known:
            return 0
        self.known.add(use)
        before, self.pages = self.pages, _pages(each for use in self.known for each in use.written)
        return (self.pages - before) * _PAGE


class Segments:
    """The segments of one rank.

    Others may still read the box of the last reduction that this rank has ended, so it is taken to be
    in use until the end of backward: that is the most that there can be. Boxes are never freed.

    Attributes:
        nbytes: What they take so far, without slices in their own dtype.
    """

    def __init__(self, units: Sequence[UnitShare], *, with_heads: bool) -> None:
        """Segments as they are once all units are sharded.

        Args:
            units: Of one rank.
            with_heads: Whether to count what is in segments besides tensors.
        """
        sharing = [unit for unit in units if unit.shared != "none" and unit.own]
        self.nbytes = sum(_cast_rows(unit) for unit in sharing)
        if with_heads and sharing:
            self.nbytes += _AXIS_HEAD + _GROUP_HEAD * len(sharing)
        self._boxes: list[_Box] = []
        self._ended = 0

    def take_box(self, use: BoxUse) -> tuple[int, int]:
        """A box for a reduction that begins.

        Args:
            use: What it leaves there.

        Returns:
            Which one, for `give_back`, and by how many bytes the segments have grown.
        """
        fitting = (
            place
            for place, box in enumerate(self._boxes)
            if not box.in_use and box.nbytes >= use.nbytes and self._all_ended(box)
        )
        place = next(fitting, len(self._boxes))
        if place == len(self._boxes):
            self._boxes.append(_Box(_rounded(use.nbytes, _PAGE)))
        self._boxes[place].in_use = True
        grown = self._boxes[place].write(use)
        self.nbytes += grown
        return place, grown

    def give_back(self, place: int) -> None:
        """This rank has ended the reduction."""
        self._ended += 1
        self._boxes[place].in_use = False
        self._boxes[place].ended_as = self._ended

    def end_backward(self) -> None:
        """Before another reduction begins, all ranks have ended those that there were."""
        self._ended += 1

    def _all_ended(self, box: _Box) -> bool:
        # A rank starts a reduction once it has ended the one before.
        return box.ended_as < self._ended


def _cast_rows(unit: UnitShare) -> int:
    return sum(param.slicing.row * param.compute for param in unit.own if param.is_cast)


def _rounded(nbytes: int, to: int) -> int:
    return -(-nbytes // to) * to


def _pages(written: Iterable[Range]) -> int:
    """How many pages have any of these bytes."""
    count = done = 0
    for begin, end in sorted(each for each in written if each[0] < each[1]):
        first, last = max(begin // _PAGE, done), -(-end // _PAGE)
        count += max(last - first, 0)
        done = max(done, last)
    return count
