"""Where the chunks of a tensor-parallel DTensor lie in the whole tensor.

Source: `torch/distributed/tensor/parallel/fsdp.py`. There the chunks are taken to be of one size,
and a dim that the axis does not divide ends in PyTorch's refusal of overlapping shards. Here
chunks are those of `torch.chunk`, as DTensor cuts them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.distributed.tensor import Shard

from fsdp_core import torch_private
from fsdp_core.errors import MeshError
from fsdp_core.layout import Chunking

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor


def _get_box(tensor: DTensor) -> tuple[torch.Size, torch.Size]:
    """(distance between neighbouring chunks per dim, size of this rank's chunk).

    The distance is 0 on dims that are not sharded, and everywhere on a replicated axis.

    Raises:
        MeshError: The mesh has several axes.
    """
    mesh = one_axis_mesh(tensor)
    distances = [0] * tensor.dim()
    if (dim := sharded_dim(tensor)) is not None:
        distances[dim] = Chunking(tensor.size(dim), mesh.size(0)).width
    return torch.Size(distances), torch_private.local_tensor(tensor).size()


def _get_box_for(tensor: DTensor, idx: int) -> tuple[torch.Size, torch.Size]:
    """(offsets, size) of chunk `idx`.

    Raises:
        MeshError: The mesh has several axes.
    """
    mesh = one_axis_mesh(tensor)
    offsets, size = [0] * tensor.dim(), list(tensor.size())
    if (dim := sharded_dim(tensor)) is not None:
        chunks = Chunking(tensor.size(dim), mesh.size(0))
        offsets[dim], size[dim] = chunks.start(idx), chunks.size(idx)
    return torch.Size(offsets), torch.Size(size)


def _get_local_box(tensor: DTensor) -> tuple[torch.Size, torch.Size]:
    """(offsets, size) of this rank's chunk.

    Raises:
        MeshError: The mesh has several axes, or this rank is not in it.
    """
    coordinate = one_axis_mesh(tensor).get_coordinate()
    if coordinate is None:
        raise MeshError(f"This rank is not in {tensor.device_mesh}, so it has no chunk.")
    return _get_box_for(tensor, coordinate[0])


def one_axis_mesh(tensor: DTensor) -> DeviceMesh:
    """The tensor's mesh. Raises MeshError if it has several axes."""
    mesh = tensor.device_mesh
    if mesh.ndim != 1:
        raise MeshError(
            f"Only 1D DeviceMeshes currently handled, got {mesh}. Give the DTensor on its "
            "tensor-parallel axis alone, for example on mesh['tp']."
        )
    return mesh


def sharded_dim(tensor: DTensor) -> int | None:
    """The dim that the first mesh axis shards; None if it replicates."""
    placement = tensor.placements[0]
    return placement.dim if isinstance(placement, Shard) else None
