"""The parameters of a unit, which communicate together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from fsdp_core.comm import Lane
from fsdp_core.errors import MetaParameterError, MixedDtypeError
from fsdp_core.param.group_options import GroupOptions
from fsdp_core.param.pending_gather import PendingGather
from fsdp_core.param.pending_reduce import PendingReduce
from fsdp_core.states import ShardedState

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist

    from fsdp_core.comm import CommLink, MeshRoles
    from fsdp_core.param.fsdp_param import FSDPParam
    from fsdp_core.policy import MixedPrecisionPolicy


class FSDPParamGroup:
    """Owns the `ShardedState` of its parameters and the gather that is in flight for them.

    One gather makes all of them whole, and one reduction averages all their gradients.

    Attributes:
        params: In the order in which they are packed; not empty.
        options: What the setters write.
    """

    def __init__(
        self, params: Sequence[FSDPParam], roles: MeshRoles, policy: MixedPrecisionPolicy
    ) -> None:
        self.params = tuple(params)
        self.options = GroupOptions()
        self._roles = roles
        self._policy = policy
        self._sharded_state = ShardedState.SHARDED
        self._gather: PendingGather | None = None

    @property
    def sharded_state(self) -> ShardedState:
        """Which parameters are registered on the modules."""
        return self._sharded_state

    @property
    def is_unsharded(self) -> bool:
        """Whether the whole parameters are registered and filled."""
        return self._sharded_state is ShardedState.UNSHARDED

    @property
    def shard_group(self) -> dist.ProcessGroup | None:
        """Ranks that hold the slices; None if parameters are only replicated."""
        return self._roles.mesh.get_group(0)

    @property
    def replicates(self) -> bool:
        """Whether a second mesh axis averages gradients over replicas (HSDP)."""
        return False

    @property
    def is_gathering(self) -> bool:
        """Whether a gather is in flight."""
        return self._gather is not None

    def issue_unshard(self, link: CommLink, *, after_compute: bool) -> None:
        """Starts a gather, unless the parameters are whole or on their way.

        Args:
            link: Lanes and ledger.
            after_compute: Whether the slices may still be in use by work on the compute lane;
                at a root's forward and in backward they are known not to be.
        """
        if self.is_unsharded or self.is_gathering:
            return
        if after_compute:
            link.lanes.follow(Lane.PACK, Lane.COMPUTE)
            link.lanes.follow(Lane.GATHER, Lane.COMPUTE)
        self._gather = PendingGather.issue(self.params, self._roles, link)

    def finish_unshard(self, link: CommLink) -> None:
        """Lands the gather in flight, if any, and registers the whole parameters."""
        if self._gather is None:
            return
        gather, self._gather = self._gather, None
        gather.land(link)
        for param in self.params:
            param.register_unsharded()
        self._sharded_state = ShardedState.UNSHARDED

    def drop_gather(self, link: CommLink) -> None:
        """Ends a gather that nobody used; its values would be stale after an update."""
        if self._gather is not None:
            gather, self._gather = self._gather, None
            gather.drop(link)

    def reshard(self) -> None:
        """Registers the slices and frees the whole parameters."""
        if self._sharded_state is not ShardedState.SHARDED:
            for param in self.params:
                param.register_sharded()
            self._sharded_state = ShardedState.SHARDED

    def reshard_after_forward(self) -> None:
        """Reshards where forward ends."""
        self.reshard()

    def reset(self, link: CommLink) -> None:
        """Ends a gather in flight, drops whole gradients and registers the slices."""
        self.drop_gather(link)
        for param in self.params:
            param.take_grad()
        self.reshard()

    def refresh(self) -> None:
        """Takes over what the user did to the slices; see `FSDPParam.refresh`."""
        self.reshard()
        for param in self.params:
            param.refresh()

    def settle(self) -> None:
        """Takes over what the user did since sharding, and checks that training can start.

        Parameters that are whole or on their way were settled when they were gathered.

        Raises:
            MetaParameterError: Parameters have no values yet.
            MixedDtypeError: Trainable parameters have several original dtypes.
        """
        if self._sharded_state is ShardedState.SHARDED and not self.is_gathering:
            self.refresh()
        self._check_values()
        self._check_dtypes()

    def keep_grads(self) -> None:
        """Keeps the gradients whole, for a later backward that reduces them."""
        for param in self.params:
            param.keep_grad()

    def take_grads(self) -> tuple[list[FSDPParam], list[torch.Tensor]]:
        """Removes the whole gradients; returns the parameters that have one, and theirs."""
        params, grads = [], []
        for param in self.params:
            if (grad := param.take_grad()) is not None:
                params.append(param)
                grads.append(grad)
        return params, grads

    def issue_reduce(
        self, params: list[FSDPParam], grads: list[torch.Tensor], link: CommLink
    ) -> PendingReduce:
        """Starts the reduction of what `take_grads` returned; empties `grads`."""
        return PendingReduce.issue(params, grads, self._roles, link, self._policy.reduce_dtype)

    def _check_values(self) -> None:
        if on_meta := [param.fqn for param in self.params if param.is_meta]:
            raise MetaParameterError(
                "FSDP parameters should be materialized from meta device before training, "
                f"but the following were still on meta device: {on_meta}\n"
                "Call module.to_empty(device=...) and initialize the values, or "
                "load_state_dict(..., assign=True)."
            )

    def _check_dtypes(self) -> None:
        dtypes = {param.orig_dtype for param in self.params if param.sharded_param.requires_grad}
        if len(dtypes) > 1:
            raise MixedDtypeError(
                f"FSDP expects uniform original parameter dtype but got {dtypes} in the group of "
                f"{[param.fqn for param in self.params]}. Shard modules of different dtypes by "
                "separate fully_shard calls."
            )
