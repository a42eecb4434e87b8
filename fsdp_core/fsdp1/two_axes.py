"""Chunking and gathering of tensor-parallel parameters over the data-parallel axes.

Source: `torch/distributed/tensor/parallel/fsdp.py`. Data-parallel axes come first in a mesh, the
tensor-parallel one last.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor import Shard as ShardPlacement

from fsdp_core import torch_private
from fsdp_core.errors import ParentMeshError, TensorKindError
from fsdp_core.fsdp1.one_axis import _create_chunk_sharded_tensor, check_mesh
from fsdp_core.fsdp1.sharded_metadata import (
    _create_shard_md_from_dt,
    _create_sharded_tensor_md_from_dt,
    _get_dt_pg,
)
from fsdp_core.torch_private.sharded_tensor import Shard, ShardedTensor, group_of, sharded_tensor

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor.placement_types import Placement

DP_AND_TP = 2


def _chunk_tensor(
    tensor: torch.Tensor,
    rank: int,
    world_size: int,
    num_devices_per_node: int,
    pg: dist.ProcessGroup,
) -> ShardedTensor:
    """A ShardedTensor whose only shard on this rank is chunked again over `pg`.

    Args:
        tensor: A DTensor on a mesh of one axis or a ShardedTensor with one shard here, which
            become a ShardedTensor in a ShardedTensor; any other becomes a plain one over `pg`.
        rank: This rank's number in `pg`.
        world_size: Of `pg`.
        num_devices_per_node: Accelerators of a node; 0 without any.
        pg: The data-parallel ranks.

    Raises:
        TensorKindError: A ShardedTensor has no or several shards on this rank.
        MeshError: A DTensor's mesh has several axes.
    """

    def chunked(inner: torch.Tensor) -> ShardedTensor:
        return _create_chunk_sharded_tensor(inner, rank, world_size, num_devices_per_node, pg)

    if type(tensor) is ShardedTensor:
        shards = tensor.local_shards()
        if len(shards) != 1:
            raise TensorKindError(
                f"Expected one shard on this rank, got {len(shards)}. Give the tensor as its "
                "tensor-parallel group shards it."
            )
        box = copy.deepcopy(shards[0].metadata)
        shard = Shard(chunked(tensor.local_tensor()), box)
        metadata, group = copy.deepcopy(tensor.metadata()), group_of(tensor)
    elif type(tensor) is DTensor:
        group = _get_dt_pg(tensor)
        box = _create_shard_md_from_dt(tensor, dist.get_rank())
        shard = Shard(chunked(torch_private.local_tensor(tensor)), box)
        metadata = _create_sharded_tensor_md_from_dt(tensor, group)
    else:
        return chunked(tensor)
    metadata.tensor_properties.requires_grad = False
    return sharded_tensor([shard], metadata, group)


def _chunk_dtensor(tensor: torch.Tensor, rank: int, device_mesh: DeviceMesh | None) -> DTensor:  # noqa: ARG001 - the reference's signature
    """See `FSDPExtensions.chunk_dtensor`; the result is detached and shares no memory.

    Args:
        tensor: Plain, the same on all ranks: it is sharded on dim 0 over the first axis of the
            root mesh and replicated on the others. Or a DTensor on the tensor-parallel axis: it
            is sharded on dim 0 over the last but one, and stays as it lies on the last.
        rank: Not used: the mesh knows it.
        device_mesh: Data-parallel axes, cut from a mesh of at least two.

    Raises:
        ParentMeshError: It was not cut from such a mesh.
    """
    mesh = _parent_of(device_mesh)
    whole: list[Placement] = [Replicate()] * mesh.ndim
    sharded = list(whole)
    if isinstance(tensor, DTensor):
        local = torch_private.local_tensor(tensor).detach().clone()
        # Its own shape and strides: an uneven chunk does not tell those of the whole.
        shape, stride = tensor.shape, tensor.stride()
        whole[-1] = sharded[-1] = tensor.placements[0]
        sharded[-2] = ShardPlacement(0)
    else:
        local = tensor.detach().clone()
        shape, stride = local.shape, local.stride()
        sharded[0] = ShardPlacement(0)
    # Axes are read from left to right: a dim that both shard is cut by the data-parallel one
    # first, so DTensor moves data between tensor-parallel ranks here, and back on gathering.
    return DTensor.from_local(
        local, mesh, whole, run_check=False, shape=shape, stride=stride
    ).redistribute(placements=sharded)


def _pre_load_state_dict(tensor: torch.Tensor) -> tuple[torch.Tensor, list[Shard]]:
    """See `FSDPExtensions.pre_load_state_dict_transform`; inverse of `_chunk_tensor`.

    Raises:
        TensorKindError: The tensor is no ShardedTensor.
    """
    if not isinstance(tensor, ShardedTensor):
        raise TensorKindError(
            f"Expected ShardedTensor, got {type(tensor)}. Save with a sharded state dict."
        )
    shards = tensor.local_shards()
    if len(shards) == 1 and type(inner := shards[0].tensor) is ShardedTensor:
        return inner, inner.local_shards()
    return tensor, shards


def _all_gather_dtensor(tensor: DTensor, parent_mesh: DeviceMesh | None) -> torch.Tensor:
    """See `FSDPExtensions.all_gather_dtensor`; inverse of `_chunk_dtensor`.

    Raises:
        MeshError: The tensor lies on another mesh.
    """
    check_mesh(tensor, parent_mesh)
    whole: list[Placement] = [Replicate()] * (tensor.device_mesh.ndim - 1)
    return tensor.redistribute(placements=[*whole, tensor.placements[-1]]).to_local()


def _parent_of(device_mesh: DeviceMesh | None) -> DeviceMesh:
    if device_mesh is None:
        raise ParentMeshError(
            "No parent device_mesh is found for FSDP device_mesh. Pass the data-parallel slice "
            "of a mesh, for example mesh['dp']."
        )
    mesh = torch_private.root_mesh(device_mesh)
    if mesh.ndim < DP_AND_TP:
        raise ParentMeshError(
            f"Found parent device_mesh of ndim={mesh.ndim}, but meshes must be at least 2D. "
            "Make one mesh of the data-parallel and tensor-parallel axes and pass a slice of it."
        )
    return mesh
