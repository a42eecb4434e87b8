"""Parameters that a single rank of the shard axis holds whole, and the row in which they travel."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import reduce
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate
from torch.optim.optimizer import register_optimizer_step_pre_hook

from fsdp_core import torch_private
from fsdp_core.errors import ArgumentTypeError, StateError, UnsupportedError
from fsdp_core.layout import OwnedPacking, Slicing
from fsdp_core.param import slices
from fsdp_core.param.fsdp_param import FSDPParam
from fsdp_core.param.grads import Contribution
from fsdp_core.param.registration import Attachment, attach, attached
from fsdp_core.param.sharding_spec import ShardingChoice
from fsdp_core.param.unsharded import Unsharded, allocate_as_saved, free_for_autograd

if TYPE_CHECKING:
    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh
    from torch.utils.hooks import RemovableHandle

    from fsdp_core.comm import CommContext, DataParallelMeshInfo, Stream


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

    def __init__(self, choice: ShardingChoice, owner: int) -> None:
        """Keeps the parameter on its owner and drops it elsewhere.

        Args:
            choice: Where it is registered, and its mesh.
            owner: Place on the shard axis.
        """
        self.owner = owner
        self._mesh = _owner_mesh(choice.info, owner)
        lies = torch_private.respec(choice.spec.sharded_spec, self._mesh, [Replicate()])
        super().__init__(replace(choice, spec=replace(choice.spec, sharded_spec=lies)))
        # What is sent is read from what is registered: a reference would keep the memory of one that was replaced.
        self._send_data = self._send_data.new_empty(0)
        self._note_owners()

    def _cut(self, whole: torch.Tensor, dim: int | None) -> tuple[Slicing, torch.Tensor]:
        slicing = Slicing.of(whole.shape, dim, 1)
        return slicing, slices.cut(whole, slicing, 0) if self.is_mine else whole.new_empty(0)

    def _seen(self, padded: torch.Tensor) -> torch.Tensor:
        return super()._seen(padded) if self.is_mine else padded

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
        self._give_up_whole()
        self._unsharded = unsharded

    def whole_from_flat(self, flat: torch.Tensor) -> torch.Tensor:
        """Elements in the order in which they travel, as the form of the original; no copy."""
        return self._whole_from_flat(flat)

    def held(self) -> torch.Tensor:
        """What this rank holds, 1D on the device, in the order in which it travels."""
        local = self._memory.to_device(self._local)
        return self._order.physical(local).reshape(-1) if self.is_mine else local

    def refresh(self) -> None:
        """Takes over what the user registered on the module.

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
        self._note_owners()
        self.slot.register(self.sharded_param)
        local = self._local
        kept = local if local.is_meta else self._memory.keep(local)
        if kept is not local:
            torch_private.replace_local(registered, kept)
        self._taken_over = kept

    def add_own_grad(self, own: torch.Tensor, comm: CommContext, stream: Stream) -> None:
        """As FSDPParam's with a 1D slice; elsewhere than on the owner it is empty."""
        if self.is_mine:
            super().add_own_grad(own.view(self.slicing.shape), comm, stream)
        else:
            # PyTorch makes what a rank outside a mesh holds on the host, on whatever device the others' lies.
            self._accumulate(own.to(self.sharded_param.device, self.orig_dtype), comm, stream)

    @property
    def _held_shapes(self) -> tuple[tuple[int, ...], ...]:
        shape = tuple(self.sharded_param.shape)
        if self.is_mine:
            return (shape,)
        # Of a scalar PyTorch makes a scalar on ranks outside its mesh, too.
        return ((0,),) if shape else ((0,), ())

    def _note_owners(self) -> None:
        attach(self.sharded_param, _OwnedOver(self._info.shard.group))
        if not _optimizer_hooks:
            _optimizer_hooks.append(register_optimizer_step_pre_hook(_before_step))


_optimizer_hooks: list[RemovableHandle] = []


def _before_step(optimizer: torch.optim.Optimizer, *_: object) -> None:
    """Refuses operators on lists of parameters: each runs on the mesh of the first alone.

    Ranks outside that mesh would update none of the others, and say nothing.
    """
    for group in optimizer.param_groups:
        if not (group.get("foreach") or group.get("fused")):
            continue
        owners = (owned_over(each) for each in group["params"] if each.grad is not None)
        if any(ranks is not None and ranks.size() > 1 for ranks in owners):
            raise UnsupportedError(
                f"{type(optimizer).__name__} would step owned parameters together with others, by "
                "one operator for all, which runs on the ranks of the first one only. Pass "
                "foreach=False and fused=False, the default, for groups with owned parameters."
            )


def owned_over(param: torch.Tensor) -> dist.ProcessGroup | None:
    """The ranks of which one owns this sharded parameter; None if it is not owned whole.

    What is summed over the parameters of a model, such as a norm, must be summed over them: the
    parameter's own mesh does not name them.
    """
    found = attached(param, _OwnedOver)
    return None if found is None else found.group


def _owner_mesh(info: DataParallelMeshInfo, owner: int) -> DeviceMesh:
    # Other ranks are not part of the mesh. PyTorch lets them hold an empty local tensor, on which
    # operations do nothing. Copies of an owned parameter never communicate, so no groups are made.
    ranks = torch_private.mesh_ranks(info.mesh)
    if info.shard_mesh_dim is not None:
        ranks = ranks.select(info.shard_mesh_dim, owner)
    return torch_private.mesh_without_groups(info.mesh.device_type, ranks.flatten().tolist())


class OwnedSection:
    """Towards gathers and reductions it plays the part of one parameter.

    The row of a rank holds what that rank owns, padded to the longest row. What arrives is the
    memory of the whole parameters itself.

    Args:
        members: At least one, of one dtype, in packing order.
        info: Over whose shard axis they are owned.
    """

    def __init__(self, members: Sequence[OwnedParam], info: DataParallelMeshInfo) -> None:
        self._members = tuple(members)
        self._info = info
        self._packing = _pack(members, info.shard.size)
        self._flat: torch.Tensor | None = None

    def all_gather_inputs(self) -> list[tuple[torch.Tensor, torch.dtype]]:
        """This rank's row, packed and cast."""
        dtype, packing = self._dtype(), self._packing
        row = torch.empty(packing.row, dtype=dtype, device=self._info.device)
        mine = [
            (row.narrow(0, start, size), member.held())
            for member, start, size in zip(
                self._members, packing.offsets, packing.sizes, strict=True
            )
            if member.is_mine
        ]
        if mine:
            torch_private.foreach_copy([to for to, _ in mine], [held for _, held in mine])
        return [(row, dtype)]

    def all_gather_outputs(self, dtypes: list[torch.dtype]) -> list[torch.Tensor]:
        """The memory of the whole parameters, (ranks, row)."""
        (dtype,) = dtypes
        if self._flat is None or self._flat.dtype != dtype:
            self._flat = self._make(dtype)
        allocate_as_saved(self._flat)
        return [self._flat.view(self._packing.parts, self._packing.row)]

    def finish_gather(self, arrived: list[torch.Tensor]) -> None:
        """Nothing is left to do."""

    def take_contribution(self, *, covers_unused: bool) -> Contribution | None:
        """Removes the gradients of this backward and packs each into its owner's row.

        Args:
            covers_unused: Whether members without a gradient take part with zeros.
        """
        taken = [(m, m.take_grad()) for m in self._members if m.may_have_grad]
        taken = [(m, grad) for m, grad in taken if covers_unused or grad is not None]
        if not taken:
            return None
        dtype = reduce(torch.promote_types, (m.kept_dtype for m, _ in taken))
        target = OwnedGrads(tuple(m for m, _ in taken), self._info.shard.size)
        packing = target.packing
        whole = torch.zeros(packing.total, dtype=dtype, device=self._info.device)
        rows = whole.view(packing.parts, packing.row)
        for (member, grad), start, size in zip(taken, packing.offsets, packing.sizes, strict=True):
            if grad is not None:
                rows[member.owner].narrow(0, start, size).copy_(grad.reshape(-1))
        return Contribution(target, whole, [grad is not None for _, grad in taken], dtype)

    def _make(self, dtype: torch.dtype) -> torch.Tensor:
        packing = self._packing
        with torch_private.outside_inference_mode(), torch.no_grad():
            flat = torch.empty(packing.total, dtype=dtype, device=self._info.device)
            rows = flat.view(packing.parts, packing.row)
            for member, start, size in zip(
                self._members, packing.offsets, packing.sizes, strict=True
            ):
                own = member.whole_from_flat(rows[member.owner].narrow(0, start, size))
                member.compute_with(_SharedWhole(nn.Parameter(own, requires_grad=False), flat))
        return flat

    def _dtype(self) -> torch.dtype:
        dtypes = {member.compute_dtype for member in self._members}
        if len(dtypes) > 1:
            raise StateError(
                f"The owned parameters {[member.fqn for member in self._members]} had one dtype "
                f"when they were sharded and now have {dtypes}. Convert all of them, or none."
            )
        return dtypes.pop()


@dataclass(frozen=True)
class OwnedGrads:
    """Which gradients lie where in the rows of one reduction, and where they go.

    Attributes:
        members: In packing order.
        ranks: Rows.
    """

    members: tuple[OwnedParam, ...]
    ranks: int

    @property
    def packing(self) -> OwnedPacking:
        """How they lie."""
        return _pack(self.members, self.ranks)

    @property
    def slicing(self) -> Slicing:
        """The rows end to end, one to each rank."""
        return Slicing.of((self.packing.total,), 0, self.ranks)

    @property
    def fqn(self) -> str:
        """Names of all, for messages."""
        return ", ".join(member.fqn for member in self.members)

    @property
    def orig_dtype(self) -> torch.dtype:
        """Of the gradients; where part of the members was converted, one that holds them all."""
        return reduce(torch.promote_types, (member.orig_dtype for member in self.members))

    def add_sharded_grads(
        self, row: torch.Tensor, present: Sequence[bool], comm: CommContext, stream: Stream
    ) -> None:
        """Gives each member that has a gradient its own: whole on the owner, empty elsewhere."""
        packing = self.packing
        for member, has_grad, start, size in zip(
            self.members, present, packing.offsets, packing.sizes, strict=True
        ):
            if has_grad:
                own = row.narrow(0, start, size) if member.is_mine else row.new_empty(0)
                member.add_own_grad(own, comm, stream)


class _SharedWhole:
    """A whole parameter within the memory of its section."""

    def __init__(self, parameter: nn.Parameter, flat: torch.Tensor) -> None:
        self._parameter = parameter
        self._flat = flat

    @property
    def parameter(self) -> nn.Parameter:
        """A view of the section's memory."""
        return self._parameter

    @property
    def held_bytes(self) -> int:
        """Its own elements, if the section has memory."""
        is_held = self._flat.untyped_storage().size() > 0
        return self._parameter.numel() * self._parameter.itemsize if is_held else 0

    def free(self) -> None:
        """Gives the section's memory back: its parameters are resharded together."""
        free_for_autograd(self._flat)


def _pack(members: Sequence[OwnedParam], ranks: int) -> OwnedPacking:
    return OwnedPacking(
        tuple(member.slicing.total for member in members),
        tuple(member.owner for member in members),
        ranks,
    )


def sections_of(params: Sequence[OwnedParam], info: DataParallelMeshInfo) -> list[OwnedSection]:
    """One section for each dtype."""
    by_dtype: dict[torch.dtype, list[OwnedParam]] = {}
    for param in params:
        by_dtype.setdefault(param.orig_dtype, []).append(param)
    return [OwnedSection(members, info) for members in by_dtype.values()]
