"""Slices of a group's parameters in memory that the ranks of one host share, and gathers from it.

Each rank has a segment for each group, which all ranks map. In it lie the rank's padded slices: those
that modules compute with as they are lie there for good, and are what the optimizer updates; of those
that are cast, a cast copy is made at each gather. A gather announces that the slices are ready, waits
for the others, and copies all rows straight into the whole parameters.

Nobody may write a slice before all others have copied it. So each rank counts its landed gathers of the
group in the first word of its segment, and whoever is about to write waits for the others' counts.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Self, cast

import torch

from fsdp_core import torch_private
from fsdp_core.comm import Counters
from fsdp_core.errors import StateError

if TYPE_CHECKING:
    import mmap
    from collections.abc import Sequence

    from fsdp_core.comm import CommLink, SharedMemoryAxis
    from fsdp_core.param.fsdp_param import FSDPParam
    from fsdp_core.param.unsharded_param import UnshardedParam

_WORDS: Final = 16
_ROWS_START: Final = 4096
_ALIGNMENT: Final = 64


@dataclass(frozen=True)
class _Row:
    """Where a parameter's slice lies in every rank's segment.

    Attributes:
        dtype: In which it lies there.
        numel: Padded.
        place: Byte of the segment.
        is_cast: Whether it is a copy of the slice in another dtype.
    """

    dtype: torch.dtype
    numel: int
    place: int
    is_cast: bool


@dataclass(frozen=True)
class _Plan:
    """What a gather of the group does; valid while slices and whole parameters are the same objects.

    Attributes:
        casts: (own row, slice) of those that are cast.
        targets: Views of whole parameters.
        sources: Of as many rows, as they lie in the segments.
        wholes: The parameters that are filled.
        flats: Their memory.
    """

    casts: tuple[list[torch.Tensor], list[torch.Tensor]]
    targets: list[torch.Tensor]
    sources: list[torch.Tensor]
    wholes: tuple[UnshardedParam, ...]
    flats: list[torch.Tensor]


class SharedSlices:
    """The slices of one group on a shared-memory axis.

    Args:
        params: In packing order; plain ones that no smaller mesh shards.
        axis: Over which they are sharded.
    """

    def __init__(self, params: Sequence[FSDPParam], axis: SharedMemoryAxis) -> None:
        self._params = tuple(params)
        self._axis = axis
        self._rows: tuple[_Row, ...] = ()
        self._segments: tuple[mmap.mmap, ...] = ()
        self._landed_by: list[Counters] = []
        self._landed = 0
        self._own_rows: list[torch.Tensor] = []
        self._plan: _Plan | None = None
        self._planned_for: tuple[object, ...] = ()
        self._what = ""
        self._number = 0
        self.place()

    def place(self) -> None:
        """Moves slices that do not lie in the segment into it; collective if their dtypes changed."""
        rows = self._layout()
        if rows != self._rows:
            self._rows = rows
            end = rows[-1].place + rows[-1].numel * rows[-1].dtype.itemsize
            self._segments = self._axis.peers.exchange(end)
            self._landed_by = [Counters(each, 0, _WORDS) for each in self._segments]
            self._landed = 0
            self._own_rows = [self._row(self._axis.rank, row) for row in rows]
        for param, row, own in zip(self._params, rows, self._own_rows, strict=True):
            if not row.is_cast and not param.is_meta and param.send_data is not own:
                self.await_copied()
                param.move_slice(own)

    def issue(self, what: str) -> None:
        """Announces that this rank's slices may be read.

        Args:
            what: Names the gather, alike on all ranks.
        """
        plan = self._current_plan()
        if plan.casts[0]:
            self.await_copied()
            torch_private.foreach_copy(*plan.casts)
        self._what = what
        self._number = self._axis.start(what)

    def land(self) -> None:
        """Waits for the others' slices and copies all into the whole parameters."""
        plan = self._plan_of_issue
        self._axis.await_started(self._number, self._what)
        try:
            for whole in plan.wholes:
                whole.allocate()
            with torch_private.preserve_version(plan.flats):
                torch_private.foreach_copy(plan.targets, plan.sources)
        finally:
            self._note_landed()

    def drop(self) -> None:
        """Ends a gather that nobody used."""
        self._axis.await_started(self._number, self._what)
        self._note_landed()

    def await_copied(self) -> None:
        """Waits until the others have copied what this rank has."""
        self._axis.wait_for_others(self._landed_by, self._landed, f"end of the {self._what}")

    @property
    def _plan_of_issue(self) -> _Plan:
        if self._plan is None:
            raise StateError(f"The {self._what} was not issued.")
        return self._plan

    def _note_landed(self) -> None:
        self._landed += 1
        self._landed_by[self._axis.rank].publish(0, self._landed)

    def _layout(self) -> tuple[_Row, ...]:
        rows, place = [], _ROWS_START
        for param in self._params:
            dtype = param.compute_dtype
            rows.append(_Row(dtype, param.slicing.row, place, dtype != param.orig_dtype))
            place += -(-param.slicing.row * dtype.itemsize // _ALIGNMENT) * _ALIGNMENT
        return tuple(rows)

    def _row(self, rank: int, row: _Row) -> torch.Tensor:
        return torch.frombuffer(
            self._segments[rank], dtype=row.dtype, count=row.numel, offset=row.place
        )

    def _current_plan(self) -> _Plan:
        if self._plan is None or any(map(operator.is_not, self._planned_for, self._parts())):
            self.place()
            # They were moved, perhaps, and refer to what is planned for.
            self._planned_for = self._parts()
            self._plan = self._new_plan()
        return self._plan

    def _parts(self) -> tuple[object, ...]:
        return tuple(
            part for param in self._params for part in (param.unsharded(), param.send_data)
        )

    def _new_plan(self) -> _Plan:
        wholes = tuple(cast("UnshardedParam", param.unsharded()) for param in self._params)
        for whole in wholes:
            whole.allocate()  # views of a tensor without memory cannot be made, but outlive it
        casts: tuple[list[torch.Tensor], list[torch.Tensor]] = ([], [])
        targets: list[torch.Tensor] = []
        sources: list[torch.Tensor] = []
        for index, (param, row) in enumerate(zip(self._params, self._rows, strict=True)):
            if row.is_cast:
                casts[0].append(self._own_rows[index])
                casts[1].append(param.send_data)
            rows = [self._row(rank, row) for rank in range(self._axis.size)]
            for target, source in param.pieces(rows):
                targets.append(target)
                sources.append(source)
        for whole in wholes:
            whole.free()
        return _Plan(casts, targets, sources, wholes, [whole.flat for whole in wholes])


class SharedGather:
    """A gather in flight; `land` fills the unsharded parameters from the others' memory."""

    def __init__(self, slices: SharedSlices, link: CommLink, axis_name: str, sequence: int) -> None:
        self._slices = slices
        self._link = link
        self._axis_name = axis_name
        self._sequence = sequence

    @classmethod
    @torch.no_grad()
    def issue(cls, slices: SharedSlices, link: CommLink, axis_name: str, *, label: str) -> Self:
        """Announces the slices.

        Args:
            slices: Of the group.
            link: Ledger, and the gathers that others have yet to copy.
            axis_name: Under which the gather is counted.
            label: Whose parameters they are; the same on all ranks.
        """
        slices.issue(f"all-gather of {label}")
        return cls(slices, link, axis_name, link.ledger.issue(axis_name))

    @torch.no_grad()
    def land(self) -> None:
        """Waits for all ranks' slices and makes the unsharded parameters of them."""
        self._slices.land()
        self._end()

    def drop(self) -> None:
        """Waits and forgets: the prefetch was a wrong guess."""
        self._slices.drop()
        self._end()

    def _end(self) -> None:
        self._link.ledger.complete(self._axis_name, self._sequence)
        self._link.uncopied.append(self._slices)
