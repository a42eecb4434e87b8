"""Reduce-scatters through memory that the ranks of one host share.

Each rank leaves in a box of its segment what the others need of its gradients. Once all have announced
theirs, each adds the parts that are its slices, in the order of ranks. So every element is written once for
another rank and read once, and the sum of three or more does not depend on where an element lies.

How a box is laid out depends on what the gradients are:

- `_Tensors`: each whole tensor has a place, of which a rank fills the parts that are not its own;
- `_Rows`: there is a row for each rank, in which its slices of all tensors lie end to end, its own row too. Then
  all of them are added at once. For small tensors, to cut off a part takes longer than to copy it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Final

import torch
from torch.distributed import ReduceOp

from fsdp_core import torch_private
from fsdp_core.layout import Packing, aligned, are_left_in_rows

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from fsdp_core.comm import OutBox, Reduction, SharedMemoryAxis
    from fsdp_core.layout import Slicing

_MOST_PLANS: Final = 32
"""Of a group, each for other tensors."""
_AT_ONCE: Final = 1 << 16
"""Elements that are added, and then divided, while they are in the processor's cache."""


class _Plan(ABC):
    """What a reduction of certain tensors needs at each step; made once.

    Attributes:
        slicings: How each tensor is cut.
        packing: How their slices lie in one row.
        dtype: In which they are added.
        box_bytes: Of what a rank leaves.
    """

    box_bytes: int

    def __init__(
        self, slicings: tuple[Slicing, ...], dtype: torch.dtype, axis: SharedMemoryAxis
    ) -> None:
        self.slicings = slicings
        self.packing = Packing.of([each.row for each in slicings], axis.size)
        self.dtype = dtype
        self._axis = axis

    @staticmethod
    def of(slicings: tuple[Slicing, ...], dtype: torch.dtype, axis: SharedMemoryAxis) -> _Plan:
        """The one that suits the tensors."""
        kind = _Rows if are_left_in_rows(slicings, dtype.itemsize) else _Tensors
        return kind(slicings, dtype, axis)

    @abstractmethod
    def leave(
        self, wholes: Sequence[torch.Tensor], box: OutBox, divisor: float
    ) -> list[torch.Tensor]:
        """Fills this rank's box, and divides by `divisor`.

        Returns:
            This rank's own part, as `total` takes it.
        """

    @abstractmethod
    def total(
        self, own: list[torch.Tensor], places: Sequence[int], divisor: int
    ) -> list[torch.Tensor]:
        """Adds all ranks' parts and divides the sums.

        Args:
            own: From `leave`.
            places: Of all ranks' boxes.
            divisor: 1 for the sum.

        Returns:
            This rank's slice of each tensor, without padding.
        """


class _Rows(_Plan):
    """Rows of small tensors."""

    def __init__(
        self, slicings: tuple[Slicing, ...], dtype: torch.dtype, axis: SharedMemoryAxis
    ) -> None:
        super().__init__(slicings, dtype, axis)
        self.box_bytes = self.packing.total * dtype.itemsize
        self._boxes: dict[int, torch.Tensor] = {}
        self._own_rows: dict[tuple[int, int], torch.Tensor] = {}
        self._views = self.packing.views([each.shape_of(axis.rank) for each in slicings])

    def leave(
        self, wholes: Sequence[torch.Tensor], box: OutBox, divisor: float
    ) -> list[torch.Tensor]:
        if (rows := self._boxes.get(box.place)) is None:
            rows = self._boxes[box.place] = self._rows(self._axis.rank, box.place)
        tensors = [
            whole if slicing.dim == 0 else whole.expand(self._axis.size, -1)
            for whole, slicing in zip(wholes, self.slicings, strict=True)
            if slicing.total  # one of no elements the operator refuses
        ]
        if len({each.dtype for each in tensors}) > 1:
            tensors = [each.to(self.dtype) for each in tensors]
        if tensors:
            torch_private.chunk_cat(tensors, self._axis.size, rows)
        if divisor != 1:
            rows.div_(divisor)
        return []

    def total(
        self, own: list[torch.Tensor], places: Sequence[int], divisor: int
    ) -> list[torch.Tensor]:
        del own
        first, second, *more = (self._row_for_us(*left) for left in enumerate(places))
        total = first + second
        for row in more:
            total += row
        if divisor != 1:
            total.div_(divisor)
        return [total.as_strided(*view) for view in self._views]

    def _row_for_us(self, rank: int, place: int) -> torch.Tensor:
        if (known := self._own_rows.get((rank, place))) is None:
            known = self._own_rows[rank, place] = self._rows(rank, place)[self._axis.rank]
        return known

    def _rows(self, rank: int, place: int) -> torch.Tensor:
        flat = self._axis.view(rank, place, self.packing.total, self.dtype)
        return flat.view(self.packing.parts, self.packing.row)


class _Tensors(_Plan):
    """Places for whole tensors."""

    def __init__(
        self, slicings: tuple[Slicing, ...], dtype: torch.dtype, axis: SharedMemoryAxis
    ) -> None:
        super().__init__(slicings, dtype, axis)
        sizes = [aligned(each.total * dtype.itemsize) for each in slicings]
        *self._places, self.box_bytes = accumulate(sizes, initial=0)
        self._targets: dict[int, list[torch.Tensor]] = {}
        self._parts: dict[tuple[int, int], list[torch.Tensor]] = {}

    def leave(
        self, wholes: Sequence[torch.Tensor], box: OutBox, divisor: float
    ) -> list[torch.Tensor]:
        if (targets := self._targets.get(box.place)) is None:
            targets = self._for_others(self._wholes(self._axis.rank, box.place))
            self._targets[box.place] = targets
        own = [
            part if part.dtype == self.dtype else part.to(self.dtype) for part in self._own(wholes)
        ]
        if targets:
            torch_private.foreach_copy(targets, self._for_others(wholes))
        if divisor != 1:
            if targets:
                torch_private.foreach_div(targets, divisor)
            own = [part.div(divisor) for part in own]
        return own

    def total(
        self, own: list[torch.Tensor], places: Sequence[int], divisor: int
    ) -> list[torch.Tensor]:
        rank = self._axis.rank
        parts = [own if each == rank else self._left_by(each, at) for each, at in enumerate(places)]
        return [_mean(tensors, divisor) for tensors in zip(*parts, strict=True)]

    def _for_others(self, wholes: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Views of what is not this rank's slice, and of what every rank needs."""
        views = []
        for whole, slicing in zip(wholes, self.slicings, strict=True):
            if slicing.dim is None:
                views.append(whole)
                continue
            start, length = slicing.bounds(self._axis.rank)
            end = start + length
            if start > 0:
                views.append(whole.narrow(slicing.dim, 0, start))
            if end < slicing.shape[slicing.dim]:
                views.append(whole.narrow(slicing.dim, end, slicing.shape[slicing.dim] - end))
        return views

    def _own(self, wholes: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        rank = self._axis.rank
        return [
            whole if slicing.dim is None else whole.narrow(slicing.dim, *slicing.bounds(rank))
            for whole, slicing in zip(wholes, self.slicings, strict=True)
        ]

    def _left_by(self, rank: int, place: int) -> list[torch.Tensor]:
        if (known := self._parts.get((rank, place))) is None:
            known = self._parts[rank, place] = self._own(self._wholes(rank, place))
        return known

    def _wholes(self, rank: int, place: int) -> list[torch.Tensor]:
        return [
            self._axis.view(rank, place + start, slicing.total, self.dtype).view(slicing.shape)
            for start, slicing in zip(self._places, self.slicings, strict=True)
        ]


def _mean(parts: Sequence[torch.Tensor], divisor: int) -> torch.Tensor:
    """The sum of `parts` in their order, divided; contiguous."""
    total = torch.empty(parts[0].shape, dtype=parts[0].dtype)
    is_flat = all(part.is_contiguous() for part in parts)
    flats = [each.view(-1) if is_flat else each for each in (total, *parts)]
    length = _AT_ONCE if is_flat else max(len(flats[0]), 1)
    for start in range(0, len(flats[0]), length):
        sums, first, second, *more = (each[start : start + length] for each in flats)
        torch.add(first, second, out=sums)
        for part in more:
            sums += part
        if divisor != 1:
            sums.div_(divisor)
    return total


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
        """
        plan = self._plan_of(slicings, dtype)
        box = self.axis.take_box(plan.box_bytes)
        own = plan.leave(wholes, box, reduction.pre_divide)
        name = what(plan.packing)
        number = self.axis.start(name, box)
        return SharedReduction(self.axis, plan, box, own, reduction, number, name, on_complete)

    def _plan_of(self, slicings: tuple[Slicing, ...], dtype: torch.dtype) -> _Plan:
        # Comparing what is the same object is quick; hashing many slicings is not.
        last = self._last
        if last is None or last.slicings is not slicings or last.dtype != dtype:
            if (last := self._plans.get((slicings, dtype))) is None:
                if (
                    len(self._plans) >= _MOST_PLANS
                ):  # as where other parameters are frozen at every step
                    self._plans.clear()
                last = self._plans[slicings, dtype] = _Plan.of(slicings, dtype, self.axis)
            self._last = last
        return last


@dataclass(eq=False)
class SharedReduction:
    """A reduction in flight; `wait` or `wait_for_slices` ends it.

    Attributes:
        axis: Whose ranks share memory.
        plan: Of the tensors that are reduced.
        box: Where the others find their parts.
        own: This rank's part, unless it lies in the box.
        reduction: How parts become a sum or a mean.
        number: Among the axis's collectives.
        what: Its name.
        on_complete: Called when it was waited for.
        has_ended: Whether it was waited for or dropped.
    """

    axis: SharedMemoryAxis
    plan: _Plan
    box: OutBox
    own: list[torch.Tensor]
    reduction: Reduction
    number: int
    what: str
    on_complete: Callable[[], None]
    has_ended: bool = False

    def __del__(self) -> None:
        """Of a model that is gone, whose backward raised: its box serves others again."""
        if not self.has_ended:
            self.axis.give_back(self.box)

    @property
    def packing(self) -> Packing:
        """How the result of `wait` lies."""
        return self.plan.packing

    def drop(self) -> None:
        """Forgets it without waiting: the others may have failed elsewhere, and never start it."""
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
        places = self.axis.await_started(self.number, self.what)
        is_mean = self.reduction.scatter_op == ReduceOp.AVG
        slices = self.plan.total(self.own, places, self.axis.size if is_mean else 1)
        self._end()
        return slices

    def _end(self) -> None:
        self.has_ended = True
        self.axis.give_back(self.box)
        self.own = []
        self.on_complete()
