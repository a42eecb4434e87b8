# ruff: noqa: SLF001 - private names are what this module is for
"""The door to PyTorch's ShardedTensor, which only checkpoints of FSDP1 still speak.

It is no part of the package's names, because loading ShardedTensor registers a table of operators that
nobody needs who does not use `fsdp1`. All of it is private to PyTorch: the class carries on
only for old checkpoints, and DTensor cannot describe a shard that is itself sharded.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch.distributed import remote_device
from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed._shard.sharded_tensor.metadata import (
    ShardedTensorMetadata,
    TensorProperties,
)
from torch.distributed._shard.sharded_tensor.shard import Shard
from torch.distributed._shard.sharding_spec import ChunkShardingSpec
from torch.distributed._shard.sharding_spec.api import ShardingSpec

if TYPE_CHECKING:
    import torch.distributed as dist

RemoteDevice = remote_device._remote_device

__all__ = [
    "ChunkShardingSpec",
    "RemoteDevice",
    "Shard",
    "ShardMetadata",
    "ShardedTensor",
    "ShardedTensorMetadata",
    "ShardingSpec",
    "TensorProperties",
    "group_of",
    "sharded_tensor",
]


def sharded_tensor(
    shards: Sequence[Shard], metadata: ShardedTensorMetadata, group: dist.ProcessGroup | None
) -> ShardedTensor:
    """A ShardedTensor of this rank's shards, without communication.

    Args:
        shards: This rank's, none or one here.
        metadata: Of all shards; must agree with `shards` about what this rank holds.
        group: Ranks that `metadata` may name, by their global numbers.

    Raises:
        ValueError, RuntimeError: PyTorch finds gaps, overlaps or a disagreement.
    """
    return ShardedTensor._init_from_local_shards_and_global_metadata(
        list(shards), sharded_tensor_metadata=metadata, process_group=group, init_rrefs=False
    )


def group_of(tensor: ShardedTensor) -> dist.ProcessGroup | None:
    """The process group that the ShardedTensor was made with."""
    return tensor._process_group
