"""An all-gather of a group's slices: pack, gather, unpack."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch

from fsdp_core import torch_private
from fsdp_core.comm import Stream, Ticket, amount, in_step
from fsdp_core.layout import Packing

if TYPE_CHECKING:
    from collections.abc import Callable

    from fsdp_core.comm import Collectives, CommContext


# What every backend gathers. The 16-bit integers and the one-byte floating-point numbers, for
# example, are unknown to gloo.
COMMON_DTYPES = frozenset(
    {
        torch.float64,
        torch.float32,
        torch.float16,
        torch.bfloat16,
        torch.int64,
        torch.int32,
        torch.int8,
        torch.uint8,
    }
)


class PlainSlices(Protocol):
    """What plain parameters of one dtype send."""

    @property
    def dtype(self) -> torch.dtype:
        """In which they travel."""

    @property
    def packing(self) -> Packing:
        """How they lie in a row."""

    def pack(self, row: torch.Tensor) -> None:
        """Copies the slices into this rank's row."""


class PlainGroup(Protocol):
    """Plain parameters whose gather was worked out once."""

    @property
    def slices(self) -> PlainSlices | None:
        """What a gather sends; None if each parameter has to be asked."""

    @property
    def is_current(self) -> bool:
        """Whether what was worked out still holds."""

    def fill(self, rows: torch.Tensor) -> None:
        """Makes the parameters whole from (ranks, elements)."""


class WholeGroup(PlainGroup, Protocol):
    """The same of one rank, whose slices are the parameters."""

    def fill_alone(self) -> None:
        """Makes the parameters whole."""


class Gathered(Protocol):
    """What takes part in a gather: a parameter, or several that travel as one."""

    def all_gather_inputs(self) -> list[tuple[torch.Tensor, torch.dtype]]:
        """What this rank sends, each 1D on the device, and the dtype it travels in."""

    def all_gather_outputs(self, dtypes: list[torch.dtype]) -> list[torch.Tensor]:
        """Memory for what arrives: for each input, (parts, elements)."""

    def finish_gather(self, arrived: list[torch.Tensor]) -> None:
        """Makes whole parameters from what `all_gather_outputs` returned, now filled."""


@dataclass(frozen=True)
class _Inputs:
    """What one parameter sends, and the dtype that each of it travels in."""

    param: Gathered
    tensors: tuple[torch.Tensor, ...]
    dtypes: tuple[torch.dtype, ...]


class PendingGather:
    """A gather in flight; `land` fills the unsharded parameters from it."""

    def __init__(
        self,
        ticket: Ticket,
        packing: Packing,
        inputs: Iterable[_Inputs],
        comm: CommContext,
        *,
        plan: PlainGroup | None,
        as_bytes: bool,
    ) -> None:
        self._ticket = ticket
        self._packing = packing
        self._inputs = inputs  # of a plan made only if they are asked for
        self._comm = comm
        self._placed = comm.streams.record_event(Stream.GATHER)
        self._plan = plan
        self._as_bytes = as_bytes
        # Other parameters may keep memory of the PACK stream themselves.
        self._may_overlap = plan is not None and comm.streams.run_apart

    @classmethod
    @torch.no_grad()
    def issue(
        cls,
        params: Sequence[Gathered],
        axis: Collectives,
        device: torch.device,
        comm: CommContext,
        *,
        label: str,
        plan: PlainGroup | None,
    ) -> PendingGather:
        """Packs the slices, cast to the dtype of computation, and starts the gather.

        The slices are cast on their way into this rank's row of the gather buffer. A group of
        several dtypes, or of one that some backend does not know, travels as bytes.

        Args:
            params: In packing order.
            axis: Over which they are sharded.
            device: On which modules compute.
            comm: Streams and counts.
            label: Whose parameters they are; the same on all ranks.
            plan: Of the parameters, if they are all plain.
        """
        streams = comm.streams
        as_bytes = False
        if plan is not None and (known := plan.slices) is not None:
            inputs: Iterable[_Inputs] = (_Inputs(param, (), (known.dtype,)) for param in params)
            with streams.enter(Stream.PACK):
                packing, dtype = known.packing, known.dtype
                buffer = axis.gather_buffer(packing.total, dtype, device)
                own_row = buffer.narrow(0, packing.row * axis.rank, packing.row)
                known.pack(own_row)
        else:
            plan = None
            with streams.enter(Stream.PACK):
                inputs = [_inputs_of(param) for param in params]
                dtypes = {dtype for each in inputs for dtype in each.dtypes}
                as_bytes = len(dtypes) > 1 or not dtypes <= COMMON_DTYPES
                sends = [
                    tensor.to(dtype).view(torch.uint8) if as_bytes else tensor
                    for each in inputs
                    for tensor, dtype in zip(each.tensors, each.dtypes, strict=True)
                ]
                packing = Packing.of([send.numel() for send in sends], axis.size)
                dtype = torch.uint8 if as_bytes else next(iter(dtypes))
                buffer = axis.gather_buffer(packing.total, dtype, device)
                own_row = buffer.narrow(0, packing.row * axis.rank, packing.row)
                torch_private.foreach_copy(list(torch.split(own_row, list(packing.sizes))), sends)
        streams.wait_stream(Stream.GATHER, Stream.PACK)
        what = f"all-gather of {label} ({amount(packing.total, dtype)})"
        with in_step(axis.group, device, what), streams.enter(Stream.GATHER):
            sequence = comm.counts.issue(axis.name)
            work = axis.all_gather(buffer, own_row, on_stream=streams.run_apart)
        waited_on = None if work is None else Stream.COMPUTE
        ended = comm.completion(axis.name, sequence, Stream.GATHER, waited_on)
        ticket = Ticket(work, buffer, group=axis.group, on_complete=ended)
        return cls(ticket, packing, inputs, comm, plan=plan, as_bytes=as_bytes)

    @torch.no_grad()
    def land(self) -> None:
        """Waits, and makes the unsharded parameters from the rows, on the compute stream."""
        buffer = self._arrive()
        try:
            self._copy_out(buffer)
        finally:
            # In backward, where memory is scarcest, there is no buffer to spare.
            is_kept = self._may_overlap and not torch_private.in_backward()
            self._release(buffer, is_kept=is_kept)

    def _copy_out(self, buffer: torch.Tensor) -> None:
        rows = buffer.view(self._packing.parts, self._packing.row)
        if self._plan is not None and self._plan.is_current:
            self._plan.fill(rows)
            return
        inputs = list(self._inputs)
        arrived = [each.param.all_gather_outputs(list(each.dtypes)) for each in inputs]
        outs = [out for of_param in arrived for out in of_param]
        if self._as_bytes:
            outs = [out.view(torch.uint8) for out in outs]
        with torch_private.preserve_version(outs):
            torch.split_with_sizes_copy(rows, list(self._packing.sizes), dim=1, out=outs)
        for each, of_param in zip(inputs, arrived, strict=True):
            each.param.finish_gather(of_param)

    def drop(self) -> None:
        """Waits and forgets the result: the prefetch was a wrong guess."""
        self._release(self._arrive(), is_kept=False)

    def _arrive(self) -> torch.Tensor:
        # A collective that left no work object to wait for ran on the GATHER stream itself.
        self._comm.streams.wait_event(Stream.COMPUTE, self._placed)
        return self._ticket.wait()

    def _release(self, buffer: torch.Tensor, *, is_kept: bool) -> None:
        # The buffer came from the PACK stream's pool, and so may what a tensor subclass has passed
        # on to itself: whatever that stream allocates next may be this memory, so it must come
        # after the copy out. Kept until the next gather was issued, it lets that overlap the copy.
        self._comm.hold_gathered(buffer, self._comm.streams.record_event(Stream.COMPUTE))
        if not is_kept:
            self._comm.let_go_gathered()


class LocalGather:
    """A gather of one rank, which has all there is: it copies once, where it lands.

    Args:
        plan: Of the parameters.
        comm: Counts.
        axis_name: Under which it is counted.
        regather: Starts a gather that asks each parameter, if the plan does not hold by then.
    """

    def __init__(
        self,
        plan: WholeGroup,
        comm: CommContext,
        axis_name: str,
        regather: Callable[[], PendingGather],
    ) -> None:
        self._plan = plan
        self._comm = comm
        self._axis_name = axis_name
        self._regather = regather
        self._sequence = comm.counts.issue(axis_name)

    @torch.no_grad()
    def land(self) -> None:
        """Fills the unsharded parameters, on the compute stream."""
        self.drop()
        if self._plan.is_current:
            self._plan.fill_alone()
        else:
            self._regather().land()

    def drop(self) -> None:
        """Forgets it: the prefetch was a wrong guess."""
        self._comm.counts.complete(self._axis_name, self._sequence)


def _inputs_of(param: Gathered) -> _Inputs:
    sent = param.all_gather_inputs()
    return _Inputs(param, tuple(tensor for tensor, _ in sent), tuple(dtype for _, dtype in sent))
