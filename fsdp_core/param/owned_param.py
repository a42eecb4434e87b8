"""One parameter that a single rank of the shard axis holds whole."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate

from fsdp_core import torch_private
from fsdp_core.errors import ArgumentTypeError, StateError, UnsupportedError
from fsdp_core.layout import Slicing
from fsdp_core.param import slices
from fsdp_core.param.attachment import Attachment, attach, attached
from fsdp_core.param.fsdp_param import FSDPParam
from fsdp_core.param.memory_order import MemoryOrder
from fsdp_core.param.offload import HostMemory
from fsdp_core.param.placing import place, whole_local
from fsdp_core.param.tensor_extension import is_extended
from fsdp_core.param.unreduced_grad import UnreducedGrad
from fsdp_core.param.unsharded_param import Unsharded

if TYPE_CHECKING:
    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh

    from fsdp_core.comm import CommLink, DataParallelMeshInfo, Lane
    from fsdp_core.param.param_options import ParamOptions
    from fsdp_core.param.slot import ParamSlot


@dataclass(frozen=True)
class _OwnedOver(Attachment):
    """The ranks of which one owns a parameter; None where there is but one."""

    group: dist.ProcessGroup | None


class OwnedParam(FSDPParam):
    """Its slice is everything on the owner and nothing elsewhere; an `OwnedSection` moves it.

    The sharded parameter is a DTensor, replicated over a mesh of the owner and its replicas
    alone. On every other rank it has an empty local tensor, and so has its gradient: optimizers
    step everywhere alike, and do nothing there.

    Attributes:
        owner: Place on the shard axis.
    """

    def __init__(  # as FSDPParam's, but nothing is cut
        self,
        param: nn.Parameter,
        slot: ParamSlot,
        info: DataParallelMeshInfo,
        owner: int,
        options: ParamOptions,
    ) -> None:
        """Keeps `param` on its owner and drops it elsewhere.

        Raises:
            UnsupportedError: It is a DTensor already, decides itself what is gathered, or is to
                be resharded to a smaller mesh.
        """
        check_ownable(param, slot.fqn, options)
        self.fqn = slot.fqn
        self.slot = slot
        self.owner = owner
        self._unreduced = UnreducedGrad()
        self.awaits_reduce = False
        self.changes = 0
        self._info = info
        self._policy = options.policy
        self._memory = HostMemory.of(options.offload, info.device)
        self._unsharded = None
        self._smaller = None
        self._is_extended = False

        placing = place(param, slot.fqn, info, None)
        self._mesh = _owner_mesh(info, owner)
        spec = torch_private.respec(placing.sharded_spec, self._mesh, [Replicate()])
        self._placing = replace(placing, sharded_spec=spec)
        whole = whole_local(param).detach()
        self._order = MemoryOrder.of(whole)
        physical = self._order.physical(whole)
        self.slicing = Slicing.of(physical.shape, None, 1)
        held = slices.cut(physical, self.slicing, 0) if self.is_mine else whole.new_empty(0)
        held = self._memory.take(held)
        self.sharded_param = nn.Parameter(
            self._placing.sharded(self._order.seen(held) if self.is_mine else held),
            requires_grad=param.requires_grad,
        )
        self._register()

    @property
    def is_mine(self) -> bool:
        """Whether this rank is the owner, or its replica."""
        return self._info.shard.rank == self.owner

    def unsharded(self) -> Unsharded:
        """The whole parameter; its memory is the section's.

        Raises:
            StateError: The parameter is in no section.
        """
        if self._unsharded is None:
            raise StateError(f"Parameter {self.fqn!r} was never gathered.")
        return self._unsharded

    def compute_with(self, unsharded: Unsharded) -> None:
        """Sets what is whole while modules compute."""
        self._unsharded = unsharded

    def whole_from_flat(self, flat: torch.Tensor) -> torch.Tensor:
        """Elements in the order in which they travel, as the form of the original; no copy."""
        return self._whole_from_flat(flat)

    def held(self) -> torch.Tensor:
        """What this rank holds, 1D on the device, in the order in which it travels."""
        local = self._memory.to_device(self._local)
        return self._order.physical(local).reshape(-1) if self.is_mine else local

    def refresh(self) -> None:
        """Takes over what the user hung on the module.

        Raises:
            ArgumentTypeError: It is no DTensor on the mesh of the owner.
            ArgumentError: It has another shape.
        """
        registered = self.slot.registered()
        if not isinstance(registered, DTensor) or registered.device_mesh != self._mesh:
            raise ArgumentTypeError(
                f"Parameter {self.fqn!r} is owned by rank {self.owner} of its shard axis, and was "
                "replaced by something that is not. Copy values into it, or assign a DTensor on "
                "its own device_mesh."
            )
        self._take_over(registered)
        self._register()
        local = self._local
        kept = local if local.is_meta else self._memory.keep(local)
        if kept is not local:
            torch_private.replace_local(registered, kept)

    def add_sharded_grad(self, row: torch.Tensor, link: CommLink, lane: Lane) -> None:
        """As FSDPParam's; elsewhere than on the owner `row` is empty."""
        if self.is_mine:
            super().add_sharded_grad(row, link, lane)
        else:
            self._add_local_grad(row, link, lane)

    @property
    def _held_shapes(self) -> tuple[tuple[int, ...], ...]:
        return (tuple(self.sharded_param.shape) if self.is_mine else (0,),)

    def _register(self) -> None:
        attach(self.sharded_param, _OwnedOver(self._info.shard.group))
        self.slot.register(self.sharded_param)


def owned_over(param: torch.Tensor) -> dist.ProcessGroup | None:
    """The ranks of which one owns this sharded parameter; None if it is not owned whole.

    What is summed over the parameters of a model, such as a norm, must be summed over them: the
    parameter's own mesh does not name them.
    """
    found = attached(param, _OwnedOver)
    return None if found is None else found.group


def check_ownable(param: nn.Parameter, fqn: str, options: ParamOptions) -> None:
    """Checks that one rank can own a parameter.

    Raises:
        UnsupportedError: It cannot.
    """
    reason = None
    if isinstance(param, DTensor):
        reason = "is a DTensor"
    elif is_extended(param, fqn):
        reason = f"is a {type(param).__name__}, which decides itself what is gathered"
    elif options.post_forward is not None:
        reason = "would be resharded to a smaller mesh"
    if reason is not None:
        raise UnsupportedError(
            f"Parameter {fqn!r} {reason}, so it cannot be owned by one rank. Return a Shard from "
            "shard_placement_fn, or pass reshard_after_forward=True."
        )


def _owner_mesh(info: DataParallelMeshInfo, owner: int) -> DeviceMesh:
    # Other ranks are not part of the mesh. PyTorch lets them hold an empty local tensor, on which
    # operations do nothing. Copies of an owned parameter never communicate, so no groups are made.
    ranks = torch_private.mesh_ranks(info.mesh)
    if info.shard_mesh_dim is not None:
        ranks = ranks.select(info.shard_mesh_dim, owner)
    return torch_private.mesh_without_groups(info.mesh.device_type, ranks.flatten().tolist())
