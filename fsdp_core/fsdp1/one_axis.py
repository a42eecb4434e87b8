"""Chunking and gathering over data-parallel axes alone: what is done without an extension.

Sources: `torch/distributed/fsdp/_shard_utils.py`, whose names, placements and metadata these
functions share, so that a state dict of either can be loaded by the other.
"""

from __future__ import annotations

from itertools import accumulate
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor import Shard as ShardPlacement

from fsdp_core import torch_private
from fsdp_core.errors import MeshError
from fsdp_core.torch_private.sharded_tensor import (
    Shard,
    ShardedTensor,
    ShardedTensorMetadata,
    ShardMetadata,
    TensorProperties,
    sharded_tensor,
)

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor.placement_types import Placement


def _create_chunk_sharded_tensor(
    tensor: torch.Tensor,
    rank: int,
    world_size: int,
    num_devices_per_node: int,
    pg: dist.ProcessGroup,
    device: torch.device | None = None,
) -> ShardedTensor:
    """A ShardedTensor of the chunks of `tensor` along dim 0, without communication.

    Args:
        tensor: The whole tensor, of at least one dim; this rank's chunk is copied out of it.
        rank: This rank's number in `pg`. Past the last chunk it holds no shard.
        world_size: Of `pg`.
        num_devices_per_node: Accelerators of a node, to number the other ranks' devices.
        pg: Ranks that share the chunks.
        device: Its type is what the other ranks' chunks are said to lie on; default is the
            type that `pg` communicates on, the CPU if that is one of several.
    """
    chunks = tensor.chunk(world_size, dim=0)
    starts = [0, *accumulate(chunk.size(0) for chunk in chunks)]
    device_type = _device_type_of(pg) if device is None else device.type
    rest = [0] * (tensor.dim() - 1)
    described = [
        ShardMetadata(
            [start, *rest],
            list(chunk.size()),
            _placement_word(dist.get_global_rank(pg, peer), device_type, num_devices_per_node),
        )
        for peer, (chunk, start) in enumerate(zip(chunks, starts[:-1], strict=True))
    ]
    mine = [
        Shard.from_tensor_and_offsets(chunk.clone(), [start, *rest], rank)
        for peer, (chunk, start) in enumerate(zip(chunks, starts[:-1], strict=True))
        if peer == rank
    ]
    metadata = ShardedTensorMetadata(
        shards_metadata=described,
        size=tensor.size(),
        tensor_properties=TensorProperties(
            dtype=tensor.dtype,
            layout=tensor.layout,
            requires_grad=False,
            memory_format=torch.contiguous_format,
            pin_memory=tensor.is_pinned(),
        ),
    )
    return sharded_tensor(mine, metadata, pg)


def _create_chunk_dtensor(tensor: torch.Tensor, rank: int, device_mesh: DeviceMesh) -> DTensor:  # noqa: ARG001 - the reference's signature
    """A DTensor of the chunks of `tensor` along dim 0 over the last axis, without communication.

    Args:
        tensor: The whole tensor, the same on all ranks; it is copied.
        rank: Not used: the mesh knows it.
        device_mesh: One axis (sharded), or more (replicated but for the last).
    """
    whole: list[Placement] = [Replicate()] * device_mesh.ndim
    replicated = DTensor.from_local(tensor.detach().clone(), device_mesh, whole, run_check=False)
    return replicated.redistribute(placements=[*whole[:-1], ShardPlacement(0)])


def _all_gather_dtensor(tensor: DTensor, root_mesh: DeviceMesh | None) -> torch.Tensor:
    """The plain tensor of a DTensor, gathered over the last axis.

    Args:
        tensor: On `root_mesh`.
        root_mesh: One axis (sharded), or more (replicated but for the last).

    Raises:
        MeshError: The tensor lies on another mesh.
    """
    check_mesh(tensor, root_mesh)
    return tensor.redistribute(placements=[*tensor.placements[:-1], Replicate()]).to_local()


def check_mesh(tensor: DTensor, root_mesh: DeviceMesh | None) -> None:
    """Raises MeshError unless the DTensor lies on `root_mesh`."""
    if root_mesh != tensor.device_mesh:
        raise MeshError(
            "The device mesh of a tensor should be a root mesh: it lies on "
            f"{tensor.device_mesh}, not on {root_mesh}. Gather it with the mesh it was saved on."
        )


def _device_type_of(group: dist.ProcessGroup) -> str:
    types = torch_private.group_device_types(group)
    return "cpu" if "cpu" in types or not types else types[0]


def _placement_word(rank: int, device_type: str, num_devices_per_node: int) -> str:
    index = "" if device_type == "cpu" else f":{rank % num_devices_per_node}"
    return f"rank:{rank}/{device_type}{index}"
