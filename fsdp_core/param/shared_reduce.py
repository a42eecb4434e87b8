"""Reduce-scatters through memory that the ranks of one host share.

Each rank leaves in its segment what the others need of its gradients, and keeps its own part. Once all
have announced theirs, each adds the parts of its slices in the order of ranks, straight into the result.
So every element is written once for another rank and read once, and the sum of three or more does not
depend on where an element lies.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch.distributed import ReduceOp

from fsdp_core import torch_private
from fsdp_core.layout import Packing

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from fsdp_core.comm import OutBox, Reduction, SharedMemoryAxis
    from fsdp_core.layout import Slicing


@dataclass(frozen=True)
class _Piece:
    """The part of a contribution that one rank gets.

    Attributes:
        index: Of the contribution.
        dim: On which it is cut; None: the whole.
        start: Of the part, along `dim`.
        length: Of it.
        shape: The part's.
        offset: In the packed row of the rank, in elements.
    """

    index: int
    dim: int | None
    start: int
    length: int
    shape: torch.Size
    offset: int

    def of(self, wholes: Sequence[torch.Tensor]) -> torch.Tensor:
        """A view."""
        whole = wholes[self.index]
        return whole if self.dim is None else whole.narrow(self.dim, self.start, self.length)


class _Plan:
    """What a reduction of certain tensors needs at each step; made once."""

    def __init__(
        self, slicings: Sequence[Slicing], dtype: torch.dtype, axis: SharedMemoryAxis
    ) -> None:
        self.packing = Packing.of([each.row for each in slicings], axis.size)
        self.dtype = dtype
        self._axis = axis
        self.others = [rank for rank in range(axis.size) if rank != axis.rank]
        self._by_rank = [_pieces(slicings, self.packing, rank) for rank in range(axis.size)]
        self.own = self._by_rank[axis.rank]
        # In the order of `targets`; what is empty is not copied.
        self.to_others = [
            piece for rank in self.others for piece in self._by_rank[rank] if piece.shape.numel()
        ]
        self.has_padding = any(
            piece.shape.numel() < size
            for piece, size in zip(self.own, self.packing.sizes, strict=True)
        )
        self._targets: dict[int, list[torch.Tensor]] = {}
        self._rows: dict[tuple[int, int], list[torch.Tensor]] = {}

    @property
    def box_bytes(self) -> int:
        """Of what this rank leaves to the others."""
        return self.packing.row * self.dtype.itemsize * len(self.others)

    def targets(self, box: OutBox) -> list[torch.Tensor]:
        """Where each of `to_others` is left."""
        if (known := self._targets.get(box.place)) is None:
            numel = self.packing.row * len(self.others)
            rows = self._axis.view(self._axis.rank, box.place, numel, self.dtype)
            known = self._targets[box.place] = [
                row[piece.offset : piece.offset + piece.shape.numel()].view(piece.shape)
                for rank, row in zip(self.others, rows.view(len(self.others), -1), strict=True)
                for piece in self._by_rank[rank]
                if piece.shape.numel()
            ]
        return known

    def left_by(self, rank: int, place: int) -> list[torch.Tensor]:
        """What `rank` has left for this rank in its box at `place`, 1D, without padding."""
        if (known := self._rows.get((rank, place))) is None:
            index = self._axis.rank - (self._axis.rank > rank)
            start = place + index * self.packing.row * self.dtype.itemsize
            row = self._axis.view(rank, start, self.packing.row, self.dtype)
            known = self._rows[rank, place] = [
                row[piece.offset : piece.offset + piece.shape.numel()] for piece in self.own
            ]
        return known


def _pieces(slicings: Sequence[Slicing], packing: Packing, rank: int) -> list[_Piece]:
    return [
        _Piece(
            index,
            slicing.dim,
            *((0, 0) if slicing.dim is None else slicing.bounds(rank)),
            torch.Size(slicing.shape_of(rank)),
            offset,
        )
        for index, (slicing, offset) in enumerate(zip(slicings, packing.offsets, strict=True))
    ]


class SharedReducer:
    """Reductions of one group.

    Args:
        axis: Whose ranks share memory.
    """

    def __init__(self, axis: SharedMemoryAxis) -> None:
        self.axis = axis
        self._plans: dict[tuple[tuple[Slicing, ...], torch.dtype], _Plan] = {}

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
        key = (slicings, dtype)
        if (plan := self._plans.get(key)) is None:
            plan = self._plans[key] = _Plan(slicings, dtype, self.axis)
        box = self.axis.take_box(plan.box_bytes)
        targets = plan.targets(box)
        if targets:
            torch_private.foreach_copy(targets, [piece.of(wholes) for piece in plan.to_others])
        own = [piece.of(wholes).reshape(-1) for piece in plan.own]
        own = [part if part.dtype == dtype else part.to(dtype) for part in own]
        if reduction.pre_divide != 1:
            own = [part.div(reduction.pre_divide) for part in own]
            for target in targets:
                target.div_(reduction.pre_divide)
        name = what(plan.packing)
        number = self.axis.start(name, box.place)
        return SharedReduction(self.axis, plan, box, own, reduction, number, name, on_complete)


@dataclass(eq=False)
class SharedReduction:
    """A reduction in flight; `wait` ends it.

    Attributes:
        axis: Whose ranks share memory.
        plan: Of the tensors that are reduced.
        box: Where the others find their parts.
        own: This rank's part of each tensor, 1D, without padding.
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
        """How the result lies."""
        return self.plan.packing

    def drop(self) -> None:
        """Forgets it without waiting: the others may have failed elsewhere, and never start it."""
        self.axis.abandon(self.number)
        self.axis.give_back(self.box)
        self.own.clear()
        self.on_complete()

    def wait(self) -> torch.Tensor:
        """Waits for all ranks' parts and adds them: 1D, one padded row.

        Raises:
            DesyncError: A rank has started another collective in its place.
            PeerError: A rank has ended.
        """
        axis, plan = self.axis, self.plan
        places = axis.await_started(self.number, self.what)
        make = torch.zeros if plan.has_padding else torch.empty
        result = make(plan.packing.row, dtype=plan.dtype)
        parts = [
            self.own if rank == axis.rank else plan.left_by(rank, place)
            for rank, place in enumerate(places)
        ]
        totals = torch.split(result, list(plan.packing.sizes))
        if plan.has_padding:
            totals = tuple(
                total[: own.numel()] for total, own in zip(totals, self.own, strict=True)
            )
        for total, first, second in zip(totals, parts[0], parts[1], strict=True):
            torch.add(first, second, out=total)
        for more in parts[2:]:
            torch_private.foreach_add(list(totals), more)
        axis.give_back(self.box)
        self.own.clear()
        if self.reduction.scatter_op == ReduceOp.AVG:
            result.div_(axis.size)
        self.on_complete()
        return result
