"""Through the extension if there is one, else in the way of one axis."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from fsdp_core.errors import TensorKindError
from fsdp_core.fsdp1.one_axis import (
    _all_gather_dtensor,
    _create_chunk_dtensor,
    _create_chunk_sharded_tensor,
)
from fsdp_core.torch_private.sharded_tensor import Shard, ShardedTensor

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor

    from fsdp_core.fsdp1.base import FSDPExtensions


@dataclass
class _Default:
    """The extension of calls that name none."""

    extension: FSDPExtensions | None = None

    def unless(self, given: FSDPExtensions | None) -> FSDPExtensions | None:
        """The given extension, or else the default."""
        return self.extension if given is None else given


_default = _Default()


def _set_fsdp_extensions(flattener: FSDPExtensions | None) -> None:
    """Makes `flattener` the extension of all `_ext_` calls that name none; None takes it away."""
    _default.extension = flattener


def _ext_pre_flatten_transform(
    tensor: torch.Tensor, fsdp_extension: FSDPExtensions | None = None
) -> tuple[torch.Tensor, object | None]:
    """See `FSDPExtensions.pre_flatten_transform`; a tensor that it does not know stays as is."""
    if (extension := _default.unless(fsdp_extension)) is not None:
        plain, param_extension = extension.pre_flatten_transform(tensor)
        if param_extension is not None:
            return plain, param_extension
    return tensor, None


def _ext_post_unflatten_transform(
    tensor: torch.Tensor, param_extension: object, fsdp_extension: FSDPExtensions | None = None
) -> torch.Tensor:
    """See `FSDPExtensions.post_unflatten_transform`; without `param_extension` nothing is done."""
    extension = _default.unless(fsdp_extension)
    if extension is None or param_extension is None:
        return tensor
    return extension.post_unflatten_transform(tensor, param_extension)


def _ext_chunk_tensor(
    tensor: torch.Tensor,
    rank: int,
    world_size: int,
    num_devices_per_node: int,
    pg: dist.ProcessGroup,
    fsdp_extension: FSDPExtensions | None = None,
) -> torch.Tensor:
    """See `FSDPExtensions.chunk_tensor`."""
    extension = _default.unless(fsdp_extension)
    chunk = _create_chunk_sharded_tensor if extension is None else extension.chunk_tensor
    return chunk(tensor, rank, world_size, num_devices_per_node, pg)


def _ext_chunk_dtensor(
    tensor: torch.Tensor,
    rank: int,
    device_mesh: DeviceMesh,
    fsdp_extension: FSDPExtensions | None = None,
) -> torch.Tensor:
    """See `FSDPExtensions.chunk_dtensor`."""
    extension = _default.unless(fsdp_extension)
    chunk = _create_chunk_dtensor if extension is None else extension.chunk_dtensor
    return chunk(tensor, rank, device_mesh)


def _ext_pre_load_state_dict_transform(
    tensor: torch.Tensor, fsdp_extension: FSDPExtensions | None = None
) -> tuple[torch.Tensor, list[Shard]]:
    """See `FSDPExtensions.pre_load_state_dict_transform`.

    Raises:
        TensorKindError: There is no extension and the tensor is not exactly a ShardedTensor.
    """
    if (extension := _default.unless(fsdp_extension)) is not None:
        return extension.pre_load_state_dict_transform(tensor)
    if type(tensor) is not ShardedTensor:
        raise TensorKindError(
            f"Expected ShardedTensor, got {type(tensor)}. Save with a sharded state dict, or "
            "give the extension that knows this class."
        )
    return tensor, tensor.local_shards()


def _ext_all_gather_dtensor(
    tensor: DTensor,
    parent_mesh: DeviceMesh | None,
    fsdp_extension: FSDPExtensions | None = None,
) -> torch.Tensor:
    """See `FSDPExtensions.all_gather_dtensor`."""
    extension = _default.unless(fsdp_extension)
    gather = _all_gather_dtensor if extension is None else extension.all_gather_dtensor
    return gather(tensor, parent_mesh)
