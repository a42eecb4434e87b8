"""Slices of a group's parameters in memory that the ranks of one host share, and gathers from it.

Each rank has a segment for each group, which all ranks map. In it lie the rank's padded slices: those
that modules compute with as they are lie there for good, and are what the optimizer updates; of those
that are cast, a cast copy is made at each gather. A gather announces that the slices are ready, waits
for the others, and copies all rows straight into the whole parameters.

Where the policy shares storage, one more segment holds whole parameters, with which all ranks compute:
a rank's slice is its part of them, and nothing is copied.

Nobody may write a slice before all others have copied it, or have ended to compute with it. So each rank
counts in its segment the gathers of the group that it has landed, and those that it has released, and
whoever is about to write waits for the others' counts. A rank whose model is gone counts no more, and
nobody waits for it: garbage is collected at other times on other ranks.
"""

from __future__ import annotations

import os
import threading
import weakref
from dataclasses import dataclass
from functools import partial, wraps
from typing import TYPE_CHECKING, Final, Self, cast

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

from fsdp_core import torch_private
from fsdp_core.comm import Counters, elements_of
from fsdp_core.errors import StateError
from fsdp_core.layout import aligned
from fsdp_core.param.unsharded import WholeMemory

if TYPE_CHECKING:
    import mmap
    from collections.abc import Callable, Sequence

    from torch.utils.hooks import RemovableHandle

    from fsdp_core.comm import CommContext, SharedMemoryAxis
    from fsdp_core.param.fsdp_param import FSDPParam
    from fsdp_core.param.unsharded import UnshardedParam
    from fsdp_core.policy import SharedMemoryPolicy

_WORDS: Final = 16
_LANDED: Final = 0
_RELEASED: Final = 1
_ROWS_START: Final = 4096


@dataclass(frozen=True)
class _Row:
    """Where a parameter's slice lies in every rank's segment.

    Attributes:
        dtype: In which it lies there.
        numel: Padded.
        place: Byte of the segment.
        is_cast: Whether it is a copy of the slice in another dtype.
        whole_place: Where the segment of all ranks has the whole parameter; None if it has not.
    """

    dtype: torch.dtype
    numel: int
    place: int
    is_cast: bool
    whole_place: int | None


@dataclass(frozen=True)
class _Plan:
    """What a gather of the group does; valid while slices and whole parameters are the same objects.

    Attributes:
        casts: (own row, slice) of those that are cast.
        targets: Views of whole parameters.
        sources: Of as many rows, as they lie in the segments.
        memory: Of the parameters that are filled.
    """

    casts: tuple[list[torch.Tensor], list[torch.Tensor]]
    targets: list[torch.Tensor]
    sources: list[torch.Tensor]
    memory: WholeMemory


class SharedSlices:
    """The slices of one group on a shared-memory axis.

    Args:
        params: In packing order; plain ones that no smaller mesh shards.
        axis: Over which they are sharded.
        policy: Whether parameters are one copy for all ranks.
        end_use: Drops a gather in flight, and ends the use of parameters that all ranks share.
    """

    def __init__(
        self,
        params: Sequence[FSDPParam],
        axis: SharedMemoryAxis,
        policy: SharedMemoryPolicy,
        end_use: Callable[[], None],
    ) -> None:
        self._params = tuple(params)
        self._axis = axis
        self._policy = policy
        self._end_use = weakref.WeakMethod(end_use)
        self._rows: tuple[_Row, ...] = ()
        self._segments: tuple[mmap.mmap, ...] = ()
        self._counters: list[Counters] = []
        self._departure = self._departs()
        self._landed = 0
        self._released = 0
        self._are_copied = True
        self._is_used = False
        self._own_rows: list[torch.Tensor] = []
        self._plan: _Plan | None = None
        self._planned_for: list[int] = []
        self._what = ""
        self._number = 0
        self.place()

    def place(self) -> None:
        """Moves slices that do not lie in the segment into it; collective if their dtypes changed."""
        rows = self._layout()
        if rows != self._rows:
            # A forward for inference may be the first to see a new dtype; training writes to these rows.
            with torch_private.outside_inference_mode(), torch.no_grad():
                self._lay_out(rows)
        for param, row, own in zip(self._params, rows, self._own_rows, strict=True):
            if not row.is_cast and not param.is_meta and param.send_data is not own:
                self.await_copied()
                self.await_released()
                param.move_slice(own)

    def _lay_out(self, rows: tuple[_Row, ...]) -> None:
        self._departure()  # nobody waits for words that this rank writes no more
        self._rows = rows
        self._segments = self._axis.peers.exchange(_end(rows))
        self._counters = [Counters(each, 0, _WORDS) for each in self._segments]
        self._departure = self._departs()
        self._landed = self._released = 0
        self._are_copied = not all(map(_is_one_copy, rows))
        rank = self._axis.rank
        whole_bytes = sum(_padded_bytes(row, self._axis.size) for row in rows if _is_one_copy(row))
        common = self._axis.peers.share(whole_bytes) if whole_bytes else None
        self._own_rows = []
        for param, row in zip(self._params, rows, strict=True):
            if common is None or row.whole_place is None:
                param.share_whole(None)
                self._own_rows.append(self._row(rank, row))
                continue
            numel = row.numel * self._axis.size
            param.share_whole(elements_of(common, row.whole_place, numel, row.dtype))
            # A storage of its own, so that whoever saves the slice saves nothing else.
            own_place = row.whole_place + rank * row.numel * row.dtype.itemsize
            self._own_rows.append(elements_of(common, own_place, row.numel, row.dtype))
        _guard_optimizers(self)

    def _departs(self) -> weakref.finalize[[list[Counters], int], SharedSlices]:
        own = self._counters[self._axis.rank : self._axis.rank + 1]
        departure = weakref.finalize(self, _leave, own, os.getpid())
        departure.atexit = False  # a process that ends is noticed as such
        return departure

    def issue(self, what: str) -> None:
        """Announces that this rank's slices may be read.

        Args:
            what: Names the gather, alike on all ranks.
        """
        plan = self._current_plan()
        if plan.casts[0]:
            self.await_copied()
            with torch.no_grad():
                torch_private.foreach_copy(*plan.casts)
        self._what = what
        self._is_used = True
        self._number = self._axis.start(what)

    def land(self) -> None:
        """Waits for the others' slices and copies all into the whole parameters."""
        plan = self._plan_of_issue
        self._axis.await_started(self._number, self._what)
        try:
            if plan.targets:
                with torch.no_grad():
                    copy = partial(torch_private.foreach_copy, plan.targets, plan.sources)
                    plan.memory.fill(copy)
        finally:
            self._note_landed()

    @property
    def are_copied(self) -> bool:
        """Whether others copy this rank's slices; of what is one copy nothing is."""
        return self._are_copied

    def drop(self) -> None:
        """Ends a gather that nobody used; there is nothing to wait for."""
        self._is_used = False
        self._note_landed()

    def await_copied(self) -> None:
        """Waits until the others have copied what this rank has."""
        if self._landed:
            self._axis.wait_for_others(self._counters, _LANDED, self._landed, self._what)

    def release(self) -> None:
        """This rank has ended to compute with the parameters."""
        self._is_used = False
        if self._policy.share_storage:
            self._released += 1
            self._counters[self._axis.rank].publish(_RELEASED, self._released)

    def await_released(self) -> None:
        """Waits until no rank computes with parameters that all share."""
        if self._released:
            what = f"computation after the {self._what}"
            self._axis.wait_for_others(self._counters, _RELEASED, self._released, what)

    def end_use(self) -> None:
        """Ends this rank's use of the parameters, unless a backward goes on."""
        end_use = self._end_use()
        if end_use is not None and not torch_private.in_backward():
            end_use()

    @property
    def is_in_use(self) -> bool:
        """Whether this rank uses others' slices, or others have yet to end a use that it has ended."""
        counts = ((_LANDED, self._landed), (_RELEASED, self._released))
        return self._is_used or not all(
            words.has_reached(*count)
            for rank, words in enumerate(self._counters)
            for count in counts
            if rank != self._axis.rank
        )

    @property
    def group_name(self) -> str:
        """Of the ranks that share them."""
        return self._axis.peers.name

    @property
    def storages(self) -> list[int]:
        """Where the storages of this rank's slices begin that others read."""
        return [each.untyped_storage().data_ptr() for each in self._own_rows]

    @property
    def _plan_of_issue(self) -> _Plan:
        if self._plan is None:
            raise StateError(f"The {self._what} was not issued.")
        return self._plan

    def _note_landed(self) -> None:
        if not self._are_copied:
            return
        self._landed += 1
        self._counters[self._axis.rank].publish(_LANDED, self._landed)

    def _layout(self) -> tuple[_Row, ...]:
        rows, place, whole_place = [], _ROWS_START, 0
        for param in self._params:
            dtype, numel = param.compute_dtype, param.slicing.row
            is_cast = dtype != param.orig_dtype
            one_copy = self._policy.share_storage and param.slicing.leads and not is_cast
            row = _Row(dtype, numel, place, is_cast, whole_place if one_copy else None)
            rows.append(row)
            if one_copy:
                whole_place += _padded_bytes(row, self._axis.size)
            else:
                place += _padded_bytes(row, 1)
        return tuple(rows)

    def _row(self, rank: int, row: _Row) -> torch.Tensor:
        return elements_of(self._segments[rank], row.place, row.numel, row.dtype)

    def _current_plan(self) -> _Plan:
        # What the user replaces, in another dtype for example, is taken over into another tensor. And a slice
        # that was no plain one for a while has another whole parameter since.
        if self._plan is None or self._planned_for != [param.changes for param in self._params]:
            with torch_private.outside_inference_mode(), torch.no_grad():
                self.place()
                self._plan = self._new_plan()
                self._planned_for = [param.changes for param in self._params]
        return self._plan

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
            if _is_one_copy(row):
                continue
            rows = [self._row(rank, row) for rank in range(self._axis.size)]
            for target, source in param.pieces(rows):
                targets.append(target)
                sources.append(source)
        for whole in wholes:
            whole.free()
        return _Plan(casts, targets, sources, WholeMemory(wholes))


def _leave(counters: list[Counters], process: int) -> None:
    # A child that was forked frees its copy of a model with which this rank goes on to compute.
    if os.getpid() == process:
        for each in counters:
            each.leave()


_guarded: weakref.WeakSet[SharedSlices] = weakref.WeakSet()
_guarded_lock = threading.RLock()  # one thread may shard a model while another steps


def _guard_optimizers(slices: SharedSlices) -> None:
    """Has every optimizer wait, before it steps, until no rank reads `slices` or computes with them.

    The hook stays when the last slices are gone: it could only be removed while an optimizer goes
    through all such hooks, which raises where another one, of the user or of `owned`, comes after it.
    """
    if not _optimizer_hooks:
        _optimizer_hooks.append(register_optimizer_step_pre_hook(_before_step))
    with _guarded_lock:
        _guarded.add(slices)


_optimizer_hooks: list[RemovableHandle] = []


def _before_step(
    optimizer: torch.optim.Optimizer, args: tuple[object, ...], kwargs: dict[str, object]
) -> tuple[tuple[object, ...], dict[str, object]]:
    """Waits now, and after each call of a closure, which computes with what is written next."""
    _await_readers(optimizer)
    if callable(closure := kwargs.get("closure")):
        return args, {**kwargs, "closure": _then_await(closure, optimizer)}
    # The optimizer itself comes first. Not every optimizer's first argument is a closure.
    if len(args) > 1 and callable(closure := args[1]) and not isinstance(closure, nn.Module):
        return (args[0], _then_await(closure, optimizer), *args[2:]), kwargs
    return args, kwargs


def _then_await(
    closure: Callable[..., object], optimizer: torch.optim.Optimizer
) -> Callable[..., object]:
    @wraps(closure)
    def evaluate(*args: object, **kwargs: object) -> object:
        result = closure(*args, **kwargs)
        _await_readers(optimizer)
        return result

    return evaluate


def _await_readers(optimizer: torch.optim.Optimizer) -> None:
    with _guarded_lock:
        guarded = list(_guarded)
    written = _written_by(optimizer, guarded)
    # First all uses end: the order of a set is another on each rank, and two ranks that began with
    # different groups would wait for each other.
    for slices in written:
        slices.end_use()
    for slices in written:
        slices.await_copied()
        slices.await_released()


def _written_by(
    optimizer: torch.optim.Optimizer, guarded: Sequence[SharedSlices]
) -> list[SharedSlices]:
    """Those which the optimizer may update.

    It may have copies of slices in another dtype, sharded alike, which it then writes back. What is
    sharded over other ranks, or not at all, is stepped by those ranks alone, and waits for nobody.
    """
    used = [slices for slices in guarded if slices.is_in_use]
    if not used:
        return []
    owners: dict[int | None, SharedSlices] = {}
    for slices in used:
        owners.update(dict.fromkeys(slices.storages, slices))
    written: dict[SharedSlices, None] = {}
    groups: set[str] = set()
    for param in (param for group in optimizer.param_groups for param in group["params"]):
        local = param.to_local() if isinstance(param, DTensor) else param
        if (owner := owners.get(torch_private.storage_start(local))) is not None:
            written[owner] = None
        elif isinstance(param, DTensor):
            groups.update(each.group_name for each in torch_private.groups_of(param.device_mesh))
    return [slices for slices in used if slices in written or slices.group_name in groups]


def _is_one_copy(row: _Row) -> bool:
    return row.whole_place is not None


def _padded_bytes(row: _Row, parts: int) -> int:
    return aligned(row.numel * parts * row.dtype.itemsize)


def _end(rows: Sequence[_Row]) -> int:
    own = [row for row in rows if not _is_one_copy(row)]
    return max((row.place + _padded_bytes(row, 1) for row in own), default=_ROWS_START)


class SharedGather:
    """A gather in flight; `land` fills the unsharded parameters from the others' memory."""

    def __init__(
        self, slices: SharedSlices, comm: CommContext, axis_name: str, sequence: int
    ) -> None:
        self._slices = slices
        self._comm = comm
        self._axis_name = axis_name
        self._sequence = sequence

    @classmethod
    def issue(cls, slices: SharedSlices, comm: CommContext, axis_name: str, *, label: str) -> Self:
        """Announces the slices.

        Args:
            slices: Of the group.
            comm: Ledger, and the gathers that others have yet to copy.
            axis_name: Under which the gather is counted.
            label: Whose parameters they are; the same on all ranks.
        """
        slices.issue(f"all-gather of {label}")
        return cls(slices, comm, axis_name, comm.counts.issue(axis_name))

    def land(self) -> None:
        """Waits for all ranks' slices and makes the unsharded parameters of them."""
        self._slices.land()
        self._end()

    def drop(self) -> None:
        """Forgets it: the prefetch was a wrong guess."""
        self._slices.drop()
        self._end()

    def _end(self) -> None:
        self._comm.counts.complete(self._axis_name, self._sequence)
        if self._slices.are_copied:
            self._comm.uncopied.append(self._slices)
