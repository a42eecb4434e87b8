"""A reduction of a group's gradients: pack, reduce-scatter, all-reduce, view out."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from itertools import groupby, islice
from typing import TYPE_CHECKING, Final

import torch

from fsdp_core import torch_private
from fsdp_core.comm import Reduction, Stream, Ticket, amount, in_step
from fsdp_core.layout import Packing, Slicing
from fsdp_core.param import slices
from fsdp_core.param.shared_reduce import SharedReduction

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from fsdp_core.comm import Collectives, CommContext
    from fsdp_core.options import GroupOptions
    from fsdp_core.param.grads import GradBatch, PartialReduce
    from fsdp_core.param.shared_reduce import SharedReducer


_ALIGNMENT: Final = 128
"""Bytes. Of rows that begin elsewhere an accelerator's backend reads a few bytes at a time."""


@dataclass(frozen=True)
class ReduceRoute:
    """Where a group's gradients go.

    Attributes:
        options: Of the group.
        shards: Axis of the reduce-scatter.
        replicas: Axis of the all-reduce; one rank where there is none.
        device: On which gradients arise.
        partial: Where sums wait that are not all-reduced yet.
        shared: Reduces over the shard axis through memory that its ranks share; None: by `shards`.
    """

    options: GroupOptions
    shards: Collectives
    replicas: Collectives
    device: torch.device
    partial: PartialReduce
    shared: SharedReducer | None
    _reductions: dict[torch.dtype, Reduction] = field(default_factory=dict, init=False)

    @property
    def granularity(self) -> int:
        """See `ReduceScatter.granularity`."""
        # A class written for the reference does not have it.
        return getattr(self.options.reduce_scatter, "granularity", 1)

    @property
    def has_user_buffers(self) -> bool:
        """Whether the user's strategy allocates the buffers, and may hand them out again."""
        return self.options.reduce_scatter is not None

    def reduction(self, dtype: torch.dtype) -> Reduction:
        """The operations in `dtype`."""
        if (known := self._reductions.get(dtype)) is None:
            known = self._reductions[dtype] = self._new_reduction(dtype)
        return known

    def _new_reduction(self, dtype: torch.dtype) -> Reduction:
        return Reduction.of(
            dtype,
            shards=self.shards.size,
            replicas=self.replicas.size,
            divide_factor=self.options.divide_factor,
            force_sum=self.options.force_sum,
            scales_sums=self.shards.scales_sums(self.device),
        )


class PendingReduce:
    """A reduction in flight; `land` makes its result the gradients of the slices."""

    def __init__(
        self,
        ticket: Ticket | SharedReduction,
        packing: Packing,
        batch: GradBatch,
        route: ReduceRoute,
    ) -> None:
        self._ticket = ticket
        self._packing = packing
        self._batch = batch
        self._route = route
        self._reduction = route.reduction(batch.reduce_dtype)

    @classmethod
    @torch.no_grad()
    def issue(cls, batch: GradBatch, route: ReduceRoute, comm: CommContext) -> PendingReduce:
        """Packs whole gradients, cast to the reduce dtype, and starts the reduce-scatter.

        Args:
            batch: Its gradients are let go once they are packed.
            route: Axes and options.
            comm: Streams and counts.
        """
        if route.shared is not None:
            return cls._issue_shared(batch, route, route.shared, comm)
        shards, streams, dtype = route.shards, comm.streams, batch.reduce_dtype
        packing, contribution = _pack(batch, route, aligns_rows=streams.run_apart)
        reduction = route.reduction(dtype)
        streams.wait_stream(Stream.REDUCE, Stream.COMPUTE)
        what = f"reduce-scatter of {batch.label} ({amount(packing.total, dtype)})"
        with in_step(shards.group, route.device, what), streams.enter(Stream.REDUCE):
            result = shards.reduce_buffer(packing.row, dtype, route.device)
            if reduction.pre_divide != 1:
                contribution.div_(reduction.pre_divide)
            sequence = comm.counts.issue(shards.name)
            work = shards.reduce_scatter(
                result, contribution, reduction.scatter_op, on_stream=streams.run_apart
            )
        waited_on = None if work is None else Stream.REDUCE
        ticket = Ticket(
            work,
            result,
            inputs=(contribution,),
            group=shards.group,
            on_complete=comm.completion(shards.name, sequence, Stream.REDUCE, waited_on),
        )
        return cls(ticket, packing, batch, route)

    @classmethod
    def _issue_shared(
        cls, batch: GradBatch, route: ReduceRoute, shared: SharedReducer, comm: CommContext
    ) -> PendingReduce:
        wholes = list(batch.grads)
        batch.grads.clear()
        if batch.is_agreed:
            # Plain gradients have one dtype, in which flags travel best.
            dtype = wholes[0].dtype if batch.plain is not None else batch.reduce_dtype
            wholes.append(_flags(batch.present, dtype, route.device))
        sequence = comm.counts.issue(route.shards.name)
        started = shared.start(
            wholes,
            _slicings(batch, route.shards.size),
            route.reduction(batch.reduce_dtype),
            lambda packing: (
                f"reduce-scatter of {batch.label} ({amount(packing.total, batch.reduce_dtype)})"
            ),
            dtype=batch.reduce_dtype,
            on_complete=partial(comm.counts.complete, route.shards.name, sequence),
        )
        return cls(started, started.packing, batch, route)

    @torch.no_grad()
    def land(self, comm: CommContext) -> None:
        """Waits, averages over replicas, and adds views of the result to the slices' gradients.

        The result lives in the reduce stream's memory pool and must not be read on another stream
        before that one follows; the end of backward sees to it.
        """
        comm.land_averages()
        if isinstance(self._ticket, SharedReduction) and self._needs_no_row:
            self._land_slices(self._ticket, comm)
            return
        streams = comm.streams
        with streams.enter(Stream.REDUCE):
            result = self._ticket.wait()
            if self._route.has_user_buffers:
                # Gradients are views of the result, and outlive the loan.
                result = result.clone()
            arrived = streams.record_event(Stream.REDUCE)
            is_complete = self._route.options.all_reduce_grads or self._route.replicas.size == 1
            if is_complete:
                self._route.partial.add_to(result, self._batch)
            else:
                self._route.partial.keep(result, self._batch)
        # The contribution came from the compute stream's pool, and the ticket let it go.
        streams.wait_event(Stream.COMPUTE, arrived)
        if is_complete:
            self._finish(result, comm)

    def drop(self, comm: CommContext) -> None:
        """Forgets the result, once it is there: the iteration it belongs to failed."""
        if isinstance(self._ticket, SharedReduction):
            self._ticket.drop()
            return
        with comm.streams.enter(Stream.REDUCE):
            self._ticket.wait()
        comm.streams.wait_stream(Stream.COMPUTE, Stream.REDUCE)

    @property
    def _needs_no_row(self) -> bool:
        """Whether nothing else is done with the result than to give each parameter its slice."""
        route = self._route
        return self._batch.plain is not None and (
            route.replicas.size == 1 and route.options.all_reduce_hook is None
        )

    def _land_slices(self, reduction: SharedReduction, comm: CommContext) -> None:
        own = reduction.wait_for_slices()
        if self._reduction.post_divide != 1:
            torch_private.foreach_div(own, self._reduction.post_divide)
        with_grad = self._with_grad(own.pop() if self._batch.is_agreed else own[0])
        self._give_slices(own, with_grad, comm, Stream.REDUCE)
        comm.note_results(Stream.REDUCE)

    def _give_slices(
        self,
        own: Sequence[torch.Tensor],
        with_grad: Sequence[bool],
        comm: CommContext,
        stream: Stream,
    ) -> None:
        params = self._batch.plain.params if self._batch.plain is not None else ()
        for param, each, has_grad in zip(params, own, with_grad, strict=True):
            if has_grad:
                param.add_own_grad(each, comm, stream)

    def _finish(self, result: torch.Tensor, comm: CommContext) -> None:
        if self._route.replicas.size == 1:
            self.give(result, comm, Stream.REDUCE)
            return
        stream = Stream.ALL_REDUCE
        comm.streams.wait_stream(stream, Stream.REDUCE)
        what = f"all-reduce of {self._batch.label} ({amount(result.numel(), result.dtype)})"
        with comm.streams.enter(stream):
            with in_step(self._route.replicas.group, result.device, what):
                ticket = self._all_reduce(result, comm)
            if comm.streams.run_apart:
                ticket.wait()
        if comm.streams.run_apart:
            self.give(result, comm, stream)
        else:
            # The host would wait: meanwhile it can go backward through the next unit.
            comm.average_later(_PendingAverage(self, ticket))

    def give(self, result: torch.Tensor, comm: CommContext, stream: Stream) -> None:
        """Makes a row that nothing more is added to the gradients of the slices.

        Args:
            result: This rank's padded row.
            comm: Streams and counts.
            stream: Where the row was made.
        """
        if (hook := self._route.options.all_reduce_hook) is not None:
            comm.streams.wait_stream(Stream.ALL_REDUCE, stream)
            stream = Stream.ALL_REDUCE
            self._run_hook(hook, result, comm)
        with comm.streams.enter(stream):
            if self._reduction.post_divide != 1:
                result.div_(self._reduction.post_divide)
            self._decide(result, comm, stream)
        self._note_end(result, comm, stream)

    @staticmethod
    def _note_end(result: torch.Tensor, comm: CommContext, stream: Stream) -> None:
        comm.note_results(stream)
        if stream is not Stream.REDUCE:
            # It came from the reduce stream's pool, which could give it to the next reduction.
            comm.hold_until_passed(result, comm.streams.record_event(stream))

    def _all_reduce(self, result: torch.Tensor, comm: CommContext) -> Ticket:
        replicas = self._route.replicas
        sequence = comm.counts.issue(replicas.name)
        work = replicas.all_reduce(
            result, self._reduction.replica_op, on_stream=comm.streams.run_apart
        )
        waited_on = None if work is None else Stream.ALL_REDUCE
        ended = comm.completion(replicas.name, sequence, Stream.ALL_REDUCE, waited_on)
        return Ticket(work, result, group=replicas.group, on_complete=ended)

    def _run_hook(
        self, hook: Callable[[torch.Tensor], None], result: torch.Tensor, comm: CommContext
    ) -> None:
        grads = result[: sum(self._sizes)]
        stream = self._route.options.all_reduce_hook_stream
        if stream is None:
            with comm.streams.enter(Stream.ALL_REDUCE):
                hook(grads)
            return
        with comm.streams.enter_users(stream, Stream.ALL_REDUCE):
            hook(grads)

    @property
    def _sizes(self) -> list[int]:
        return list(self._packing.sizes[: len(self._batch.params)])

    def _decide(self, result: torch.Tensor, comm: CommContext, stream: Stream) -> None:
        """Gives gradients, now or, where the host must first learn who has one, at the end of backward."""
        if self._knows_flags and not comm.is_undecided(self._route):
            self._view_out(result, [True] * len(self._batch.present), comm, stream)
            return
        flags = result[len(result) - len(self._batch.present) :]
        if not comm.streams.run_apart:
            self._view_out(result, self._with_grad(flags), comm, stream)
            return
        told = torch.empty_like(flags, device="cpu", pin_memory=flags.device.type != "cpu")
        told.copy_(flags, non_blocking=True)

        def decide() -> None:
            with comm.streams.enter(stream):
                self._view_out(result, self._with_grad(told), comm, stream)
            self._note_end(result, comm, stream)

        comm.decide_later(self._route, comm.streams.record_event(stream), decide)

    @property
    def _knows_flags(self) -> bool:
        # What this rank has, some rank has: nothing needs to be read from the device.
        return not self._batch.is_agreed or all(self._batch.present)

    def _view_out(
        self, result: torch.Tensor, with_grad: list[bool], comm: CommContext, stream: Stream
    ) -> None:
        params = self._batch.params
        wanted = {param.orig_dtype for param in params}
        if self._batch.plain is not None:
            row = result.to(wanted.pop()) if len(wanted) == 1 else result
            start = row.storage_offset()
            own = [
                row.as_strided(shape, strides, start + offset)
                for shape, strides, offset in self._batch.plain.views
            ]
            self._give_slices(own, with_grad, comm, stream)
            return
        rows: Sequence[torch.Tensor] = torch.split(
            # One cast for all, if one does.
            (result.to(wanted.pop()) if len(wanted) == 1 else result)[: sum(self._sizes)],
            self._sizes,
        )
        flags = iter(with_grad)
        for param, row, flag_count in zip(params, rows, self._batch.flag_counts, strict=True):
            present = list(islice(flags, flag_count))
            if any(present):
                param.add_sharded_grads(row.to(param.orig_dtype), present, comm, stream)

    def _with_grad(self, flags: torch.Tensor) -> list[bool]:
        if self._knows_flags:
            return [True] * len(self._batch.present)
        return [bool(flag) for flag in (flags != 0).tolist()]


class LocalReduce:
    """A reduction of one rank, which has all there is: whole gradients are those of the slices.

    Args:
        batch: For which `suits` holds.
        route: Options and counts.
        comm: Counts.
    """

    def __init__(self, batch: GradBatch, route: ReduceRoute, comm: CommContext) -> None:
        self._batch = batch
        self._axis_name = route.shards.name
        self._sequence = comm.counts.issue(self._axis_name)

    @staticmethod
    def suits(batch: GradBatch, route: ReduceRoute) -> bool:
        """Whether nothing else is to be done than to give each parameter its gradient."""
        options, reduction = route.options, route.reduction(batch.reduce_dtype)
        return (
            batch.plain is not None
            and not batch.is_agreed
            and route.shards.group is None
            and route.replicas.size == 1
            and options.all_reduce_grads
            and options.all_reduce_hook is None
            and reduction.pre_divide == reduction.post_divide == 1
            and route.partial.is_empty
            # Who goes backward through a gradient keeps it; nobody else may add to it then.
            and not any(grad.requires_grad for grad in batch.grads)
            and all(each.leads and each.parts == 1 for each in batch.plain.slicings)
        )

    @torch.no_grad()
    def land(self, comm: CommContext) -> None:
        """Gives the gradients, on the compute stream, where they were made."""
        comm.land_averages()
        self.drop(comm)
        params = self._batch.plain.params if self._batch.plain is not None else ()
        for param, grad in zip(params, self._batch.grads, strict=True):
            param.add_own_grad(grad.to(self._batch.reduce_dtype), comm, Stream.COMPUTE)
        self._batch.grads.clear()

    def drop(self, comm: CommContext) -> None:
        """Forgets it."""
        comm.counts.complete(self._axis_name, self._sequence)


class _PendingAverage:
    """An all-reduce over replicas in flight, which the host has to wait for."""

    def __init__(self, reduce: PendingReduce, ticket: Ticket) -> None:
        self._reduce = reduce
        self._ticket = ticket

    @torch.no_grad()
    def land(self, comm: CommContext) -> None:
        """Waits, and gives the gradients."""
        self._reduce.give(self._ticket.wait(), comm, Stream.ALL_REDUCE)

    def drop(self, comm: CommContext) -> None:
        """Waits, and forgets the result: the iteration it belongs to failed."""
        del comm
        self._ticket.wait()


def _pack(
    batch: GradBatch, route: ReduceRoute, *, aligns_rows: bool
) -> tuple[Packing, torch.Tensor]:
    shards, dtype = route.shards, batch.reduce_dtype
    grads = [
        slices.stack(grad, param.slicing)
        for param, grad in zip(batch.params, batch.grads, strict=True)
    ]
    batch.grads.clear()
    sizes = [param.slicing.row for param in batch.params]
    if batch.is_agreed:
        # In the gradients' own dtype, or all of them would be cast, each into memory of its own.
        own = {grad.dtype for grad in grads}
        flag_dtype = own.pop() if len(own) == 1 else dtype
        # Flags that share a block with gradients could be rounded to zero.
        padding = -sum(sizes) % route.granularity
        if aligns_rows and route.granularity == 1:
            padding = -(sum(sizes) + len(batch.present)) % (_ALIGNMENT // dtype.itemsize)
        flags = _flags(batch.present, flag_dtype, route.device)
        if padding:
            flags = torch.nn.functional.pad(flags, (padding, 0))
        grads.append(flags.expand(shards.size, -1))
        sizes.append(len(flags))
    if len({grad.dtype for grad in grads}) > 1:
        grads = [grad.to(dtype) for grad in grads]
    packing = Packing.of(sizes, shards.size)
    contribution = shards.reduce_buffer(packing.total, dtype, route.device)
    # A parameter without elements takes part with a row of none, which the operator refuses.
    grads = [grad for grad in grads if grad.numel() > 0]
    if grads:
        torch_private.chunk_cat(grads, shards.size, contribution.view(shards.size, packing.row))
    return packing, contribution


def _slicings(batch: GradBatch, parts: int) -> tuple[Slicing, ...]:
    """Of a batch's gradients, and of the flags that travel with them."""
    if batch.plain is not None:
        return batch.plain.flagged if batch.is_agreed else batch.plain.slicings
    slicings = [param.slicing for param in batch.params]
    if batch.is_agreed:
        slicings.append(Slicing.of((len(batch.present),), None, parts))
    return tuple(slicings)


def _flags(present: list[bool], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    if all(present):
        return torch.ones(len(present), dtype=dtype, device=device)
    # Made on the device, run by run: a copy from the host would wait for it.
    runs = [(flag, len(list(run))) for flag, run in groupby(present)]
    filled = [torch.full((n,), float(flag), dtype=dtype, device=device) for flag, n in runs]
    return torch.cat(filled)
