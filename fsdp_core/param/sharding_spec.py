"""How one parameter lies on the meshes, before and after it is sharded.

A plain parameter is the same on all ranks. One that is a DTensor already lies on axes of its own
(tensor or expert parallel) or on a full SPMD mesh; then only what this rank holds of it is cut
further, and the joint mesh says so: the data-parallel axes in front of the parameter's own, or
in their place within the SPMD mesh.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod
from typing import TYPE_CHECKING

import torch
from torch.distributed.tensor import DTensor, Replicate, Shard

from fsdp_core import torch_private
from fsdp_core.errors import (
    ArgumentError,
    ArgumentTypeError,
    MeshError,
    MeshJoinError,
    StateError,
    UnsupportedError,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from torch import nn
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor.placement_types import Placement

    from fsdp_core.comm import DataParallelMeshInfo, FSDPMeshInfo
    from fsdp_core.options import ShardingOptions
    from fsdp_core.param.registration import ParamSlot
    from fsdp_core.policy import DataParallelMeshDims, Owned

MAX_OWN_AXES = 2
"""Axes that a parameter may bring along: tensor and expert parallel."""


@dataclass(frozen=True, eq=False)
class ShardingSpec:
    """Converts between local tensors and what users see of them; see `place`.

    Attributes:
        fqn: The parameter's name, for errors.
        sharded_spec: Of the sharded parameter and its gradient.
        unsharded_spec: Of the whole parameter; None if that is a plain tensor.
        dp_axes: Axes of `unsharded_spec` whose gradients the engine itself reduces.
    """

    fqn: str
    sharded_spec: torch_private.Spec
    unsharded_spec: torch_private.Spec | None
    dp_axes: frozenset[int]

    @property
    def is_dtensor(self) -> bool:
        """Whether the module computes with a DTensor."""
        return self.unsharded_spec is not None

    def sharded(self, local: torch.Tensor) -> DTensor:
        """This rank's slice, or its gradient's, as a DTensor of the global shape.

        Args:
            local: The slice without padding; becomes the local tensor itself.
        """
        return torch_private.dtensor_of(local, self.sharded_spec)

    def unsharded(self, local: torch.Tensor) -> torch.Tensor:
        """What the module computes with.

        Args:
            local: Of the shape that `whole_local` had, in any dtype; becomes the local tensor
                itself.
        """
        if self.unsharded_spec is None:
            return local
        return torch_private.dtensor_of(local, self.unsharded_spec)

    def local_grad(self, grad: torch.Tensor) -> torch.Tensor:
        """The gradient of `unsharded` as a local tensor whose values are there.

        A DTensor gradient is first brought to the parameter's placements, which may communicate
        over the parameter's own axes. Sums pending over data-parallel axes stay pending.

        Raises:
            StateError: The gradient is not on the parameter's axes.
        """
        grad = torch_private.waited(grad)
        if self.unsharded_spec is None:
            return grad
        wanted = self.unsharded_spec.placements
        if not isinstance(grad, DTensor) or len(grad.placements) != len(wanted):
            raise StateError(
                f"Parameter {self.fqn!r} has placements {wanted}, but its gradient is {grad!r}."
            )
        placements = tuple(
            have if axis in self.dp_axes and _is_whole(have) else want
            for axis, (have, want) in enumerate(zip(grad.placements, wanted, strict=True))
        )
        if placements != grad.placements:
            with torch.no_grad():
                grad = grad.redistribute(placements=placements)
        return torch_private.waited(torch_private.local_tensor(grad))

    def rebased(self, spec: torch_private.Spec) -> ShardingSpec:
        """After the user registered another DTensor on the module: slices lie as that one does."""
        return replace(self, sharded_spec=spec)


@dataclass(frozen=True, eq=False)
class ShardingChoice:
    """Where and how one parameter is to be sharded; everything that could be refused was checked.

    Attributes:
        original: On the device of `info`, or meta.
        slot: Where it is registered.
        info: Mesh and roles of its axes.
        owned: How one rank is to own it whole; None: it is sharded.
        dim: Tensor dim to shard on; None: every rank holds the whole.
        spec: How it lies on the meshes once it is sharded.
        post_forward: The smaller mesh that slices are kept for between forward and backward.
        options: Of the call.
    """

    original: nn.Parameter
    slot: ParamSlot
    info: DataParallelMeshInfo
    owned: Owned | None
    dim: int | None
    spec: ShardingSpec
    post_forward: FSDPMeshInfo | None
    options: ShardingOptions


def whole_local(param: nn.Parameter) -> torch.Tensor:
    """What this rank holds of a parameter before it is sharded: itself, or its local tensor."""
    return torch_private.local_tensor(param) if isinstance(param, DTensor) else param


def place(
    param: nn.Parameter, fqn: str, info: DataParallelMeshInfo, dim: int | None
) -> ShardingSpec:
    """Decides how a parameter lies on the meshes once it is sharded.

    Communicates nothing.

    Args:
        param: The original parameter.
        fqn: Its name, for errors.
        info: The data-parallel mesh.
        dim: Tensor dim, at least 0, that is cut over `info.shard`; None if the parameter is
            replicated there, which a mesh without a shard axis implies.

    Raises:
        ArgumentError: A parameter does not fit the SPMD mesh: a plain tensor, one on another
            mesh, or one that is not replicated over the data-parallel axes.
        UnsupportedError: The parameter brings more than two axes of its own.
        MeshError: The joint mesh would have other than two to four axes.
        MeshJoinError: The parameter's mesh and `info.mesh` are not parts of one mesh.
        ArgumentTypeError: One of them has no axis names.
    """
    if info.shard_mesh_dim is None:
        dim = None
    if not isinstance(param, DTensor):
        if info.is_spmd:
            raise ArgumentError(
                "When dp_mesh_dims is provided, all parameters must be DTensors on the full "
                f"SPMD mesh, but {fqn!r} is a plain tensor. Distribute it over the mesh first, "
                "for example by distribute_module."
            )
        spec = torch_private.new_spec(
            info.mesh, _dp_placements(info, dim, own=1), param, _dense_stride(param)
        )
        return ShardingSpec(fqn, spec, None, frozenset())
    own = torch_private.spec_of(param)
    if info.dp_mesh_dims is None:
        return ShardingSpec(fqn, _joined_spec(own, fqn, info, dim), own, frozenset())
    _check_replicated(own, fqn, info, info.dp_mesh_dims)
    dp_names = info.dp_mesh_dims.shard_names + info.dp_mesh_dims.replicate_names
    dp_axes = frozenset(_axes(own.mesh, dp_names))
    spec = _spmd_spec(own, info, info.dp_mesh_dims, dim)
    return ShardingSpec(fqn, spec, own, dp_axes)


def _dp_placements(info: DataParallelMeshInfo, dim: int | None, own: int) -> list[Placement]:
    # own: into how many parts axes further right cut the same dim
    placements: list[Placement] = [Replicate() for _ in range(info.mesh.ndim)]
    if dim is not None and info.shard_mesh_dim is not None:
        placements[info.shard_mesh_dim] = _shard(dim, own)
    return placements


def _shard(dim: int, split_factor: int) -> Placement:
    return torch_private.strided_shard(dim, split_factor) if split_factor > 1 else Shard(dim)


def _joined_spec(
    own: torch_private.Spec, fqn: str, info: DataParallelMeshInfo, dim: int | None
) -> torch_private.Spec:
    if len(own.placements) > MAX_OWN_AXES:
        raise UnsupportedError(
            f"FSDP only supports 1D TP/EP or 2D EP+TP, not {own.placements} of parameter {fqn!r}."
        )
    if info.mesh.mesh_dim_names is None or own.mesh.mesh_dim_names is None:
        raise ArgumentTypeError(
            f"Parameter {fqn!r} is a DTensor; its mesh {own.mesh} and the data-parallel mesh "
            f"{info.mesh} must both have mesh_dim_names to be joined."
        )
    try:
        mesh = torch_private.joined_mesh([info.mesh, own.mesh])
    except RuntimeError as error:
        raise MeshJoinError(
            f"Parameter {fqn!r} is a DTensor on {own.mesh}, which cannot be joined with the "
            f"data-parallel mesh {info.mesh}: {error} Slice both out of one mesh."
        ) from error
    if not 2 <= mesh.ndim <= 4:  # noqa: PLR2004 - one or two axes of each side
        raise MeshError(
            f"Parameter {fqn!r}: data-parallel and own axes must together be 2 to 4, got {mesh}."
        )
    cuts = _cuts(own, dim, range(own.mesh.ndim))
    return torch_private.respec(own, mesh, [*_dp_placements(info, dim, cuts), *own.placements])


def _spmd_spec(
    own: torch_private.Spec, info: DataParallelMeshInfo, dims: DataParallelMeshDims, dim: int | None
) -> torch_private.Spec:
    shard_axes = _axes(own.mesh, dims.shard_names)
    if not shard_axes:
        return own
    first = min(shard_axes)
    cuts = _cuts(own, dim, range(first + 1, own.mesh.ndim))
    if len(shard_axes) == 1:
        placements = list(own.placements)
        if dim is not None:
            placements[first] = _shard(dim, cuts)
        return torch_private.respec(own, own.mesh, placements)
    # Several shard axes become one, joined with the replicate axes, in the place of the first.
    names = own.mesh.mesh_dim_names or ()
    replaced = {*shard_axes, *_axes(own.mesh, dims.replicate_names)}
    meshes: list[DeviceMesh] = []
    spread: list[Placement] = []
    for axis, name in enumerate(names):
        if axis == first:
            meshes.append(info.mesh)
            spread.extend(_dp_placements(info, dim, cuts))
        elif axis not in replaced:
            meshes.append(own.mesh[name])
            spread.append(own.placements[axis])
    return torch_private.respec(own, torch_private.joined_mesh(meshes), spread)


def _check_replicated(
    own: torch_private.Spec, fqn: str, info: DataParallelMeshInfo, dims: DataParallelMeshDims
) -> None:
    if info.spmd_mesh is not None and own.mesh is not info.spmd_mesh:
        raise ArgumentError(
            f"Parameter {fqn!r} must be on the same mesh object that was passed to fully_shard, "
            f"but it is on {own.mesh} and the call got {info.spmd_mesh}. An equal mesh that was "
            "made a second time does not count: make the mesh once."
        )
    for role, names in (("shard", dims.shard_names), ("replicate", dims.replicate_names)):
        for name, axis in zip(names, _axes(own.mesh, names), strict=True):
            if not own.placements[axis].is_replicate():
                raise ArgumentError(
                    f"Expected Replicate() on DP {role} dim '{name}' (index {axis}) but got "
                    f"{own.placements[axis]} for parameter {fqn!r}. fully_shard shards it there."
                )


def _axes(mesh: DeviceMesh, names: Sequence[str]) -> list[int]:
    known = mesh.mesh_dim_names or ()
    return [known.index(name) for name in names]


def _cuts(own: torch_private.Spec, dim: int | None, axes: Iterable[int]) -> int:
    if dim is None:
        return 1
    return prod(
        own.mesh.size(axis) for axis in axes if torch_private.shards_dim(own.placements[axis], dim)
    )


def _is_whole(placement: Placement) -> bool:
    return placement.is_partial() or placement.is_replicate()


def _dense_stride(param: torch.Tensor) -> tuple[int, ...]:
    # Of a parameter with gaps between its elements, slices keep the order of dims alone.
    return torch.empty_like(param, device="meta").stride()
