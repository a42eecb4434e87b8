"""A reduction of a group's gradients: pack, reduce-scatter, view out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from fsdp_core import torch_private
from fsdp_core.comm import Lane, Reduction, Ticket
from fsdp_core.errors import MixedDtypeError
from fsdp_core.layout import Packing

if TYPE_CHECKING:
    from fsdp_core.comm import CommLink, MeshRoles
    from fsdp_core.param.fsdp_param import FSDPParam


class PendingReduce:
    """A reduction in flight; `land` makes its result the gradients of the slices."""

    def __init__(
        self, ticket: Ticket, packing: Packing, params: Sequence[FSDPParam], reduction: Reduction
    ) -> None:
        self._ticket = ticket
        self._packing = packing
        self._params = params
        self._reduction = reduction

    @classmethod
    @torch.no_grad()
    def issue(
        cls,
        params: Sequence[FSDPParam],
        grads: list[torch.Tensor],
        roles: MeshRoles,
        link: CommLink,
        reduce_dtype: torch.dtype | None,
    ) -> PendingReduce:
        """Packs whole gradients, cast to the reduce dtype, and starts the reduce-scatter.

        Args:
            params: Parameters that have a gradient.
            grads: Theirs, in order; emptied, so that their memory is free once they are packed.
            roles: Mesh of the group.
            link: Lanes and ledger.
            reduce_dtype: None for the dtype of the gradients.

        Raises:
            MixedDtypeError: The gradients have several dtypes.
        """
        shard, lanes = roles.shard, link.lanes
        dtypes = {grad.dtype for grad in grads}
        if len(dtypes) != 1:
            raise MixedDtypeError(
                f"FSDP reduce-scatter expects uniform gradient dtype but got {dtypes} "
                f"(parameters {[param.fqn for param in params]})"
            )
        dtype = reduce_dtype or dtypes.pop()
        packing = Packing.of([param.padded_row for param in params], shard.size)
        contribution = torch.empty(packing.total, dtype=dtype, device=roles.device)
        torch_private.chunk_cat(grads, shard.size, contribution.view(shard.size, packing.row))
        grads.clear()

        reduction = Reduction.mean(dtype, shard.size)
        lanes.follow(Lane.REDUCE, Lane.COMPUTE)
        with lanes.enter(Lane.REDUCE):
            result = torch.empty(packing.row, dtype=dtype, device=roles.device)
            if reduction.pre_divide != 1:
                contribution.div_(reduction.pre_divide)
            sequence = link.ledger.issue(shard.name)
            work = shard.reduce_scatter(result, contribution, reduction.op)
        ticket = Ticket(
            work,
            result,
            inputs=(contribution,),
            on_complete=lambda: link.ledger.complete(shard.name, sequence),
        )
        return cls(ticket, packing, params, reduction)

    @torch.no_grad()
    def land(self, link: CommLink) -> None:
        """Waits, and adds views of the result to the slices' gradients, on the reduce lane.

        The result lives in that lane's memory pool and must not be read on another lane before
        that one follows; the end of backward sees to it.
        """
        lanes = link.lanes
        with lanes.enter(Lane.REDUCE):
            result = self._ticket.wait()
            arrived = lanes.mark(Lane.REDUCE)
            if self._reduction.post_divide != 1:
                result.div_(self._reduction.post_divide)
            result = result.to(self._params[0].orig_dtype)
            for param, row in zip(
                self._params, torch.split(result, list(self._packing.sizes)), strict=True
            ):
                param.add_sharded_grad(row)
        # The contribution came from the compute lane's pool, and the ticket let it go.
        lanes.follow_mark(Lane.COMPUTE, arrived)

    def drop(self, link: CommLink) -> None:
        """Waits and forgets the result: the iteration is lost."""
        self._ticket.wait()
        link.lanes.follow(Lane.COMPUTE, Lane.REDUCE)
