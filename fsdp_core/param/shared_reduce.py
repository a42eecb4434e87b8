"""Reduce-scatters through memory that the ranks of one host share.

Each rank leaves in its segment what the others need of its gradients, and keeps its own part. Once all
have announced theirs, each adds the parts of its slices in the order of ranks, straight into the result.
So every element is written once for another rank and read once, and the sum of three or more does not
depend on where an element lies.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch.distributed import ReduceOp

from fsdp_core import torch_private

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from fsdp_core.comm import OutBox, Reduction, SharedMemoryAxis
    from fsdp_core.layout import Packing, Slicing


@dataclass(frozen=True)
class Contribution:
    """What takes part in a reduction: a whole gradient, or values that every rank needs whole.

    Attributes:
        whole: The tensor.
        slicing: How it is cut over the ranks.
    """

    whole: torch.Tensor
    slicing: Slicing

    def piece(self, rank: int) -> torch.Tensor:
        """What `rank` gets of it, without padding."""
        if self.slicing.dim is None:
            return self.whole
        return self.whole.narrow(self.slicing.dim, *self.slicing.bounds(rank))


@dataclass
class SharedReducer:
    """Reductions of the groups on one axis; it keeps the views that they need at each step.

    Attributes:
        axis: Whose ranks share memory.
    """

    axis: SharedMemoryAxis
    _targets: dict[tuple[object, ...], list[torch.Tensor]] = field(default_factory=dict)
    _rows: dict[tuple[object, ...], list[torch.Tensor]] = field(default_factory=dict)

    def start(
        self,
        contributions: Sequence[Contribution],
        packing: Packing,
        dtype: torch.dtype,
        reduction: Reduction,
        what: str,
        *,
        on_complete: Callable[[], None],
    ) -> SharedReduction:
        """Leaves to each other rank its part and announces it.

        Args:
            contributions: In packing order.
            packing: Of the parts, padded.
            dtype: In which they are added.
            reduction: What else is done to them.
            what: Names the reduction, alike on all ranks.
            on_complete: Called when the reduction was waited for.

        Raises:
            PeerError: A rank has ended.
            StateError: Too many collectives are in flight.
        """
        axis = self.axis
        others = [rank for rank in range(axis.size) if rank != axis.rank]
        row_bytes = packing.row * dtype.itemsize
        box = axis.take_box(row_bytes * len(others))
        slicings = tuple(each.slicing for each in contributions)
        targets = self._targets_in(box, others, slicings, packing, dtype)
        pieces = [each.piece(rank) for rank in others for each in contributions]
        pieces = [piece for piece in pieces if piece.numel()]
        torch_private.foreach_copy(targets, pieces)
        own = [each.piece(axis.rank).reshape(-1) for each in contributions]
        own = [piece if piece.dtype == dtype else piece.to(dtype) for piece in own]
        if reduction.pre_divide != 1:
            own = [piece.div(reduction.pre_divide) for piece in own]
            for target in targets:
                target.div_(reduction.pre_divide)
        number = axis.start(what, box.place)
        return SharedReduction(self, box, own, packing, dtype, reduction, number, what, on_complete)

    def rows(
        self,
        rank: int,
        place: int,
        packing: Packing,
        own: Sequence[torch.Tensor],
        dtype: torch.dtype,
    ) -> list[torch.Tensor]:
        """What `rank` has left for this rank in its box at `place`: 1D, as long as `own` are."""
        key = (rank, place, packing, dtype)
        if (known := self._rows.get(key)) is None:
            index = self.axis.rank - (self.axis.rank > rank)
            start = place + index * packing.row * dtype.itemsize
            row = self.axis.view(rank, start, packing.row, dtype)
            known = [
                row[offset : offset + mine.numel()]
                for offset, mine in zip(packing.offsets, own, strict=True)
            ]
            self._rows[key] = known
        return known

    def _targets_in(
        self,
        box: OutBox,
        others: Sequence[int],
        slicings: tuple[Slicing, ...],
        packing: Packing,
        dtype: torch.dtype,
    ) -> list[torch.Tensor]:
        key = (box.place, slicings, dtype)
        if (known := self._targets.get(key)) is not None:
            return known
        targets = []
        numel = packing.row * len(others)
        rows = self.axis.view(self.axis.rank, box.place, numel, dtype).view(len(others), -1)
        for rank, row in zip(others, rows.unbind(), strict=True):
            for slicing, start in zip(slicings, packing.offsets, strict=True):
                shape = torch.Size(slicing.shape_of(rank))
                if shape.numel():
                    targets.append(row[start : start + shape.numel()].view(shape))
        self._targets[key] = targets
        return targets


@dataclass(eq=False)
class SharedReduction:
    """A reduction in flight; `wait` ends it.

    Attributes:
        reducer: That started it.
        box: Where the others find their parts.
        own: This rank's part of each contribution, 1D, without padding.
        packing: See `SharedReducer.start`; so are the rest.
        number: Among the axis's collectives.
    """

    reducer: SharedReducer
    box: OutBox
    own: list[torch.Tensor]
    packing: Packing
    dtype: torch.dtype
    reduction: Reduction
    number: int
    what: str
    on_complete: Callable[[], None]

    def drop(self) -> None:
        """Forgets it without waiting: the others may have failed elsewhere, and never start it."""
        axis = self.reducer.axis
        axis.abandon(self.number)
        axis.give_back(self.box)
        self.own.clear()
        self.on_complete()

    def wait(self) -> torch.Tensor:
        """Waits for all ranks' parts and adds them: 1D, one padded row.

        Raises:
            DesyncError: A rank has started another collective in its place.
            PeerError: A rank has ended.
        """
        axis, packing = self.reducer.axis, self.packing
        places = axis.await_started(self.number, self.what)
        result = torch.empty(packing.row, dtype=self.dtype)
        by_rank = [
            self.own
            if rank == axis.rank
            else self.reducer.rows(rank, place, packing, self.own, self.dtype)
            for rank, place in enumerate(places)
        ]
        totals = torch.split(result, list(packing.sizes))
        for total, parts in zip(totals, zip(*by_rank, strict=True), strict=True):
            numel = parts[0].numel()
            if numel < len(total):
                total[numel:].zero_()
                total = total[:numel]  # noqa: PLW2901 - without its padding
            torch.add(parts[0], parts[1], out=total)
            for part in parts[2:]:
                total += part  # noqa: PLW2901 - in place
        axis.give_back(self.box)
        self.own.clear()
        if self.reduction.scatter_op == ReduceOp.AVG:
            result.div_(axis.size)
        self.on_complete()
        return result
