"""What one rank's part of the memory that ranks of a host share takes.

Slices that lie there take what they would take elsewhere, and of whole parameters that are one copy
for all ranks each rank has as much as its slices; so both are counted as slices. What comes to that
is counted here: the heads of segments, cast copies of slices, and the boxes of reductions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fsdp_core.plan.model.shares import UnitShare

_PAGE = 4096
# The words that ranks count in, and the ring of what they have started, which is full in the end.
_GROUP_HEAD = _PAGE
_AXIS_HEAD = 63 * _PAGE


@dataclass
class _Box:
    """Memory in which a rank leaves to the others their parts of one reduction at a time."""

    nbytes: int
    in_use: bool = True
    ended_as: int = 0


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

    def take_box(self, nbytes: int) -> tuple[int, int]:
        """A box for a reduction that begins.

        Args:
            nbytes: That it leaves to the others.

        Returns:
            Which one, for `give_back`, and by how many bytes the segments have grown.
        """
        for place, box in enumerate(self._boxes):
            if not box.in_use and box.nbytes >= nbytes and self._all_ended(box):
                box.in_use = True
                return place, 0
        taken = -(-nbytes // _PAGE) * _PAGE
        self._boxes.append(_Box(taken))
        self.nbytes += taken
        return len(self._boxes) - 1, taken

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
