# ruff: noqa: SLF001 - private names are what this package is for
"""DTensors and how they lie."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, TypeAlias, cast

import torch
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import _StridedShard

if TYPE_CHECKING:
    from torch.distributed.tensor.placement_types import Placement


# A C function that the type checker reads with the wrong signature.
_new = cast("Callable[..., DTensor]", DTensor.__new__)

Spec: TypeAlias = DTensorSpec
"""How a DTensor lies on its mesh, with its global shape, strides and dtype."""


def new_dtensor(
    local: torch.Tensor,
    mesh: DeviceMesh,
    placements: Sequence[Placement],
    *,
    shape: Sequence[int],
    stride: Sequence[int] | None = None,
) -> DTensor:
    """A DTensor of global `shape` whose local tensor is `local` itself, not a view of it.

    `DTensor.from_local` returns a view under autograd's eyes; a parameter must own its slice.
    """
    strides = tuple(stride or torch.empty(tuple(shape), device="meta").stride())
    spec = DTensorSpec(
        mesh,
        tuple(placements),
        tensor_meta=TensorMeta(torch.Size(shape), strides, local.dtype),
    )
    return _dtensor(local, spec)


def _dtensor(local: torch.Tensor, spec: DTensorSpec) -> DTensor:
    # Past DTensor.__init__, which does nothing, hidden from Dynamo, in three microseconds.
    return _new(DTensor, local, spec, requires_grad=False)


def local_tensor(tensor: DTensor) -> torch.Tensor:
    """The local tensor itself; `to_local` returns a differentiable view."""
    return tensor._local_tensor


def replace_local(tensor: DTensor, local: torch.Tensor) -> None:
    """Puts another local tensor of the same shape under a DTensor that others hold."""
    tensor._local_tensor = local


def local_box(tensor: DTensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(offsets, shape) of this rank's elements in the global tensor, padding excluded."""
    if tensor.device_mesh.get_coordinate() is None:
        return (0,) * tensor.ndim, (0,) * tensor.ndim
    shape, offsets = compute_local_shape_and_global_offset(
        tensor.shape, tensor.device_mesh, tensor.placements
    )
    return tuple(offsets), tuple(shape)


def new_spec(
    mesh: DeviceMesh, placements: Sequence[Placement], tensor: torch.Tensor, stride: Sequence[int]
) -> Spec:
    """The spec of a DTensor with `tensor`'s shape and dtype, and global strides `stride`."""
    meta = TensorMeta(tensor.shape, tuple(stride), tensor.dtype)
    return DTensorSpec(mesh, tuple(placements), tensor_meta=meta)


def spec_of(tensor: DTensor) -> Spec:
    """The spec itself; rebuilding it from public attributes costs tens of microseconds."""
    return tensor._spec


def respec(spec: Spec, mesh: DeviceMesh, placements: Sequence[Placement]) -> Spec:
    """The spec of the same global tensor on another mesh."""
    return DTensorSpec(mesh, tuple(placements), tensor_meta=spec.tensor_meta)


def dtensor_of(local: torch.Tensor, spec: Spec) -> DTensor:
    """A DTensor whose local tensor is `local` itself; its dtype is that of `local`."""
    meta = spec.tensor_meta
    if meta is not None and meta.dtype != local.dtype:
        spec = replace(spec, tensor_meta=meta._replace(dtype=local.dtype))
    return _dtensor(local, spec)


def strided_shard(dim: int, split_factor: int) -> Placement:
    """Sharded on `dim` after axes further right cut the same dim into `split_factor` parts.

    Placements are otherwise read from left to right; no public one says this.
    """
    return _StridedShard(dim, split_factor=split_factor)


def shards_dim(placement: Placement, dim: int) -> bool:
    """Whether the placement cuts tensor dim `dim`; a strided one may be no `Shard`."""
    return isinstance(placement, (Shard, _StridedShard)) and placement.dim == dim


def waited(tensor: torch.Tensor) -> torch.Tensor:
    """The values themselves where a functional collective left a promise of them.

    Dispatched operators wait by themselves; a collective or a raw view of the storage does not.
    """
    return tensor.wait() if isinstance(tensor, AsyncCollectiveTensor) else tensor
