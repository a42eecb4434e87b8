"""A tensor-parallel DTensor described in ShardedTensor's words.

Source: `torch/distributed/tensor/parallel/fsdp.py`. It names ranks by their number in the
tensor-parallel group, where ShardedTensor reads global numbers, and so fails on every row of a mesh
but the one of ranks 0, 1, ...; here they are global. On that row the words are the same.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, cast

import torch
import torch.distributed as dist

from fsdp_core import torch_private
from fsdp_core.fsdp1.boxes import _get_box_for, _get_local_box, one_axis_mesh, sharded_dim
from fsdp_core.torch_private.sharded_tensor import (
    ChunkShardingSpec,
    RemoteDevice,
    ShardedTensorMetadata,
    ShardingSpec,
    ShardMetadata,
    TensorProperties,
)

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


def _get_dt_pg(dt: DTensor) -> dist.ProcessGroup:
    """The process group of the DTensor's only mesh axis.

    Raises:
        MeshError: The mesh has several axes.
    """
    return one_axis_mesh(dt).get_group()


def _create_shard_md_from_dt(dt: DTensor, current_rank: int) -> ShardMetadata:
    """Describes this rank's chunk as one that rank `current_rank` holds.

    Raises:
        MeshError: The mesh has several axes.
    """
    offsets, sizes = _get_local_box(dt)
    return _described(dt, offsets, sizes, current_rank)


def _create_sharded_tensor_md_from_dt(
    dt: DTensor, dt_pg: dist.ProcessGroup
) -> ShardedTensorMetadata:
    """Describes all chunks so that this rank seems to hold exactly one.

    A ShardedTensor must cover the tensor, and a rank must bring as many shards as it is said to
    hold. But the chunk that is brought is sharded again over the data-parallel axis, which this
    description has no words for. So chunk 0 is said to be this rank's, whichever it has, and all
    others another's, which need not have them: the box of the true one stands beside the shard.

    Args:
        dt: On a mesh of one axis.
        dt_pg: The group of that axis.

    Raises:
        MeshError: The mesh has several axes.
    """
    my_rank = dist.get_rank()
    other_rank = next((r for r in dist.get_process_group_ranks(dt_pg) if r != my_rank), my_rank)
    chunks = 1 if sharded_dim(dt) is None else dt_pg.size()
    return ShardedTensorMetadata(
        shards_metadata=[
            _described(dt, *_get_box_for(dt, i), my_rank if i == 0 else other_rank)
            for i in range(chunks)
        ],
        size=dt.size(),
        tensor_properties=TensorProperties(
            dtype=dt.dtype, layout=dt.layout, requires_grad=dt.requires_grad
        ),
    )


def _rewrite_spec_if_needed(spec: ShardingSpec, tensor: torch.Tensor, rank: int) -> ShardingSpec:
    """`spec` with the placement of `rank` on the device of `tensor`.

    Optimizer state may be moved to the CPU after its spec was made, and ShardedTensor refuses a
    spec that names another device. A spec that is right, or that is no ChunkShardingSpec, is
    returned itself; otherwise a copy is.
    """
    if not isinstance(spec, ChunkShardingSpec):
        return spec
    wrong = [
        i
        for i, placement in enumerate(cast("list[RemoteDevice]", spec.placements))
        if placement.rank() == rank and placement.device() != tensor.device
    ]
    if not wrong:
        return spec
    rewritten = copy.deepcopy(spec)
    for i in wrong:
        rewritten.placements[i] = RemoteDevice(f"rank:{rank}/{tensor.device}")
    return rewritten


def _described(dt: DTensor, offsets: torch.Size, sizes: torch.Size, rank: int) -> ShardMetadata:
    device = torch_private.local_tensor(dt).device
    return ShardMetadata(
        shard_offsets=list(offsets), shard_sizes=list(sizes), placement=f"rank:{rank}/{device}"
    )
