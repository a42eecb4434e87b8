"""The extension for tensor parallelism over DTensor."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from fsdp_core import torch_private
from fsdp_core.fsdp1.base import FSDPExtensions
from fsdp_core.fsdp1.flattening import DeviceHandle, _flatten_tensor, _unflatten_tensor
from fsdp_core.fsdp1.two_axes import (
    _all_gather_dtensor,
    _chunk_dtensor,
    _chunk_tensor,
    _pre_load_state_dict,
)

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor

    from fsdp_core.torch_private.sharded_tensor import Shard

# Read by FSDP1 on every tensor, under this name.
FLATTENED_MARK = "_fsdp_flattened"


def _set_fsdp_flattened(tensor: torch.Tensor) -> None:
    """Marks a tensor as one of a flat parameter's, which FSDP1 must not flatten again."""
    setattr(tensor, FLATTENED_MARK, True)


class DTensorExtensions(FSDPExtensions):
    """Lets FSDP1 shard parameters that tensor parallelism has made DTensors.

    Attributes:
        device_handle: Of the device that parameters are gathered on.
        compute_stream: Where gathered parameters are dressed as DTensors; FSDP1 sets it. None is
            the current stream.
    """

    def __init__(self, device_handle: DeviceHandle) -> None:
        super().__init__()
        self.compute_stream: object | None = None
        self.device_handle = device_handle

    def pre_flatten_transform(self, tensor: torch.Tensor) -> tuple[torch.Tensor, object | None]:
        """See `FSDPExtensions`; the extension of a DTensor is its spec."""
        return _flatten_tensor(tensor)

    @torch_private.opaque_to_dynamo
    def post_unflatten_transform(
        self, tensor: torch.Tensor, param_extension: object
    ) -> torch.Tensor:
        """See `FSDPExtensions`; differentiable, and on the compute stream.

        What it does may compute, in forward and backward, and FSDP1 calls it while its gathering
        stream is current.
        """
        spec = cast("torch_private.Spec", param_extension)
        stream = self.compute_stream or self.device_handle.current_stream()
        with self.device_handle.stream(stream):
            result = _unflatten_tensor(
                tensor,
                spec,
                device_handle=self.device_handle,
                compute_stream=self.compute_stream,
            )
            _set_fsdp_flattened(result)
            return result

    def chunk_tensor(
        self,
        tensor: torch.Tensor,
        rank: int,
        world_size: int,
        num_devices_per_node: int,
        pg: dist.ProcessGroup,
        device: torch.device | None = None,  # noqa: ARG002 - the reference ignores it too
    ) -> torch.Tensor:
        """See `FSDPExtensions`; `device` is that of `pg`, whatever is given."""
        return _chunk_tensor(tensor, rank, world_size, num_devices_per_node, pg)

    def chunk_dtensor(
        self, tensor: torch.Tensor, rank: int, device_mesh: DeviceMesh
    ) -> torch.Tensor:
        """See `FSDPExtensions`."""
        return _chunk_dtensor(tensor, rank, device_mesh)

    def pre_load_state_dict_transform(
        self, tensor: torch.Tensor
    ) -> tuple[torch.Tensor, list[Shard]]:
        """See `FSDPExtensions`."""
        return _pre_load_state_dict(tensor)

    def all_gather_dtensor(self, tensor: DTensor, parent_mesh: DeviceMesh | None) -> torch.Tensor:
        """See `FSDPExtensions`."""
        return _all_gather_dtensor(tensor, parent_mesh)
