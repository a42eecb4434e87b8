"""Reduce-scatters through memory that the ranks of one host share.

Each rank has a box in its segment in which whole gradients would lie one after another. It leaves there
what the others need of its gradients. Once all have announced theirs, each adds the parts that are its
slices, in the order of ranks, straight into new slices. So every element is written once for another
rank and read once, and the sum of three or more does not depend on where an element lies.

Of small gradients a rank leaves its own part as well: to cut it off takes longer than to copy it.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Final

import torch
from torch.distributed import ReduceOp

from fsdp_core import torch_private
from fsdp_core.layout import Packing

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from fsdp_core.comm import OutBox, Reduction, SharedMemoryAxis
    from fsdp_core.layout import Slicing

_ALIGNMENT: Final = 64
_SMALL_BYTES: Final = 1 << 18
"""Of whole gradients: so many are copied in about the time that cutting them takes."""


class _Plan:
    """What a reduction of certain tensors needs at each step; made once.

    Attributes:
        slicings: How each tensor is cut.
        packing: How their slices lie in one row.
        dtype: In which they are added.
        is_small: Whether a rank leaves whole tensors in its box, its own parts included.
    """

    def __init__(
        self, slicings: tuple[Slicing, ...], dtype: torch.dtype, axis: SharedMemoryAxis
    ) -> None:
        self.slicings = slicings
        self.packing = Packing.of([each.row for each in slicings], axis.size)
        self.dtype = dtype
        self._axis = axis
        sizes = [_aligned(each.total * dtype.itemsize) for each in slicings]
        *self._places, self.box_bytes = accumulate(sizes, initial=0)
        self.is_small = self.box_bytes <= _SMALL_BYTES
        self._targets: dict[int, list[torch.Tensor]] = {}
        self._parts: dict[tuple[int, int], list[torch.Tensor]] = {}

    def targets(self, box: OutBox) -> list[torch.Tensor]:
        """Where each of what `left` gives is left."""
        if (known := self._targets.get(box.place)) is None:
            known = self._targets[box.place] = self.left(self._wholes(self._axis.rank, box.place))
        return known

    def left(self, wholes: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Views of what this rank leaves of the tensors: all, or what is not its own part."""
        if self.is_small:
            return list(wholes)
        rank, left = self._axis.rank, []
        for whole, slicing in zip(wholes, self.slicings, strict=True):
            if slicing.dim is None:
                left.append(whole)
                continue
            start, length = slicing.bounds(rank)
            end = start + length
            if start > 0:
                left.append(whole.narrow(slicing.dim, 0, start))
            if end < slicing.shape[slicing.dim]:
                left.append(whole.narrow(slicing.dim, end, slicing.shape[slicing.dim] - end))
        return left

    def own(self, wholes: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Views of this rank's slices of the tensors."""
        return [
            whole if slicing.dim is None else whole.narrow(slicing.dim, *slicing.bounds(rank))
            for rank in [self._axis.rank]
            for whole, slicing in zip(wholes, self.slicings, strict=True)
        ]

    def left_by(self, rank: int, place: int) -> list[torch.Tensor]:
        """This rank's slices of what `rank` has in its box at `place`."""
        if (known := self._parts.get((rank, place))) is None:
            known = self._parts[rank, place] = self.own(self._wholes(rank, place))
        return known

    def _wholes(self, rank: int, place: int) -> list[torch.Tensor]:
        return [
            self._axis.view(rank, place + start, slicing.total, self.dtype).view(slicing.shape)
            for start, slicing in zip(self._places, self.slicings, strict=True)
        ]


class SharedReducer:
    """Reductions of one group.

    Args:
        axis: Whose ranks share memory.
    """

    def __init__(self, axis: SharedMemoryAxis) -> None:
        self.axis = axis
        self._plans: dict[tuple[tuple[Slicing, ...], torch.dtype], _Plan] = {}
        self._last: _Plan | None = None

    def start(
        self,
        wholes: Sequence[torch.Tensor],
        slicings: tuple[Slicing, ...],
        reduction: Reduction,
        what: Callable[[Packing], str],
        *,
        dtype: torch.dtype,
        on_complete: Callable[[], None],
    ) -> SharedReduction:
        """Leaves to each other rank its part and announces it.

        Args:
            wholes: Gradients, or values that every rank needs whole.
            slicings: How each is cut over the ranks.
            reduction: How parts become a sum or a mean.
            what: Names the reduction, alike on all ranks.
            dtype: In which parts are added.
            on_complete: Called when the reduction was waited for.

        Raises:
            PeerError: A rank has ended.
            StateError: Too many collectives are in flight.
        """
        plan = self._plan_of(slicings, dtype)
        box = self.axis.take_box(plan.box_bytes)
        targets = plan.targets(box)
        if targets:
            torch_private.foreach_copy(targets, plan.left(wholes))
        own = plan.left_by(self.axis.rank, box.place) if plan.is_small else plan.own(wholes)
        if reduction.pre_divide != 1:
            torch_private.foreach_div(targets, reduction.pre_divide)
        if not plan.is_small:
            own = [part if part.dtype == dtype else part.to(dtype) for part in own]
            if reduction.pre_divide != 1:
                own = [part.div(reduction.pre_divide) for part in own]
        name = what(plan.packing)
        number = self.axis.start(name, box.place)
        return SharedReduction(self.axis, plan, box, own, reduction, number, name, on_complete)

    def _plan_of(self, slicings: tuple[Slicing, ...], dtype: torch.dtype) -> _Plan:
        # Comparing what is the same object is quick; hashing many slicings is not.
        last = self._last
        if last is None or last.slicings is not slicings or last.dtype != dtype:
            if (last := self._plans.get((slicings, dtype))) is None:
                last = self._plans[slicings, dtype] = _Plan(slicings, dtype, self.axis)
            self._last = last
        return last


@dataclass(eq=False)
class SharedReduction:
    """A reduction in flight; `wait` or `wait_for_slices` ends it.

    Attributes:
        axis: Whose ranks share memory.
        plan: Of the tensors that are reduced.
        box: Where the others find their parts.
        own: This rank's part of each tensor.
        reduction: How parts become a sum or a mean.
        number: Among the axis's collectives.
        what: Its name.
        on_complete: Called when it was waited for.
    """

    axis: SharedMemoryAxis
    plan: _Plan
    box: OutBox
    own: list[torch.Tensor]
    reduction: Reduction
    number: int
    what: str
    on_complete: Callable[[], None]

    @property
    def packing(self) -> Packing:
        """How the result of `wait` lies."""
        return self.plan.packing

    def drop(self) -> None:
        """Forgets it without waiting: the others may have failed elsewhere, and never start it."""
        self.axis.abandon(self.number)
        self._end()

    def wait(self) -> torch.Tensor:
        """Waits for all ranks' parts and adds them: 1D, one padded row.

        Raises:
            DesyncError: A rank has started another collective in its place.
            PeerError: A rank has ended.
        """
        slices = self.wait_for_slices()
        row = torch.zeros(self.packing.row, dtype=self.plan.dtype)
        starts = self.packing.offsets
        torch_private.foreach_copy(
            [
                row[start : start + each.numel()].view(each.shape)
                for start, each in zip(starts, slices, strict=True)
            ],
            slices,
        )
        return row

    def wait_for_slices(self) -> list[torch.Tensor]:
        """Waits for all ranks' parts and adds them: this rank's slice of each tensor, unpadded.

        Raises:
            DesyncError: A rank has started another collective in its place.
            PeerError: A rank has ended.
        """
        axis, plan = self.axis, self.plan
        places = axis.await_started(self.number, self.what)
        parts = [
            self.own if rank == axis.rank else plan.left_by(rank, place)
            for rank, place in enumerate(places)
        ]
        # What lies in a box is contiguous, and the first summand decides how the sum lies.
        first, second = (parts[1], parts[0]) if axis.rank == 0 else (parts[0], parts[1])
        totals = torch_private.foreach_sum(first, second)
        for more in parts[2:]:
            torch_private.foreach_add(totals, more)
        self._end()
        if self.reduction.scatter_op == ReduceOp.AVG:
            torch_private.foreach_div(totals, axis.size)
        return totals

    def _end(self) -> None:
        self.axis.give_back(self.box)
        self.own = []
        self.on_complete()


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT
