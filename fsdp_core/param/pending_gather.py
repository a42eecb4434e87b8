"""An all-gather of a group's slices: pack, gather, unpack."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from fsdp_core import torch_private
from fsdp_core.comm import Lane, Ticket
from fsdp_core.layout import Packing

if TYPE_CHECKING:
    from fsdp_core.comm import CommLink, MeshRoles
    from fsdp_core.param.fsdp_param import FSDPParam


class PendingGather:
    """A gather in flight; `land` fills the unsharded parameters from it."""

    def __init__(
        self, ticket: Ticket, packing: Packing, params: Sequence[FSDPParam], *, as_bytes: bool
    ) -> None:
        self._ticket = ticket
        self._packing = packing
        self._params = params
        self._as_bytes = as_bytes

    @classmethod
    @torch.no_grad()
    def issue(cls, params: Sequence[FSDPParam], roles: MeshRoles, link: CommLink) -> PendingGather:
        """Packs the slices, cast to the dtype of computation, and starts the gather.

        The slices are cast on their way into this rank's row of the gather buffer. A group of
        several dtypes travels as bytes.
        """
        shard, lanes = roles.shard, link.lanes
        dtypes = {param.compute_dtype for param in params}
        as_bytes = len(dtypes) > 1
        with lanes.enter(Lane.PACK):
            sends = [param.send_data for param in params]
            if as_bytes:
                sends = [
                    send.to(param.compute_dtype).view(torch.uint8)
                    for param, send in zip(params, sends, strict=True)
                ]
            packing = Packing.of([send.numel() for send in sends], shard.size)
            dtype = torch.uint8 if as_bytes else next(iter(dtypes))
            buffer = torch.empty(packing.total, dtype=dtype, device=roles.device)
            own_row = buffer.narrow(0, packing.row * shard.rank, packing.row)
            torch_private.foreach_copy(list(torch.split(own_row, list(packing.sizes))), sends)
        lanes.follow(Lane.GATHER, Lane.PACK)
        with lanes.enter(Lane.GATHER):
            sequence = link.ledger.issue(shard.name)
            work = shard.all_gather(buffer, own_row)
        ticket = Ticket(
            work, buffer, on_complete=lambda: link.ledger.complete(shard.name, sequence)
        )
        return cls(ticket, packing, params, as_bytes=as_bytes)

    @torch.no_grad()
    def land(self, link: CommLink) -> None:
        """Waits, and copies the rows into the unsharded parameters, on the compute lane."""
        buffer = self._ticket.wait()
        outs = []
        for param, size in zip(self._params, self._packing.sizes, strict=True):
            unsharded = param.unsharded()
            unsharded.allocate()
            flat = unsharded.flat.view(torch.uint8) if self._as_bytes else unsharded.flat
            outs.append(flat.view(self._packing.parts, size))
        rows = buffer.view(self._packing.parts, self._packing.row)
        with torch_private.preserve_version(outs):
            torch.split_with_sizes_copy(rows, list(self._packing.sizes), dim=1, out=outs)
        self._release(link)

    def drop(self, link: CommLink) -> None:
        """Waits and forgets the result: the prefetch was a wrong guess."""
        self._ticket.wait()
        self._release(link)

    def _release(self, link: CommLink) -> None:
        # The buffer came from the PACK lane's pool: whatever that lane allocates next may be
        # this memory, so it must come after the copy out.
        mark = link.lanes.mark(Lane.COMPUTE)
        link.lanes.follow_mark(Lane.PACK, mark)
        link.lanes.follow_mark(Lane.GATHER, mark)
