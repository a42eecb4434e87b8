"""What an extension of the 2D system does."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor

    from fsdp_core.torch_private.sharded_tensor import Shard


class FSDPExtensions(ABC):
    """How flat-parameter FSDP (FSDP1) handles parameters that are no plain tensors.

    FSDP1 flattens parameters into one vector and does not support tensor subclasses. An extension
    gives it a plain tensor to flatten, converts each view of the gathered vector back, and says how
    such tensors are chunked for, and gathered from, a sharded state dict. PyTorch's FSDP1 needs
    these six methods but no base class, so it accepts this class.
    """

    @abstractmethod
    def pre_flatten_transform(self, tensor: torch.Tensor) -> tuple[torch.Tensor, object | None]:
        """Converts a parameter to a plain tensor before it is flattened.

        Returns:
            The plain tensor to flatten, and what `post_unflatten_transform` needs to convert it
            back; None there if the parameter is not of this extension's kind.
        """

    @abstractmethod
    def post_unflatten_transform(
        self, tensor: torch.Tensor, param_extension: object
    ) -> torch.Tensor:
        """Converts a plain view of the gathered vector back to the parameter's class.

        Args:
            tensor: Of the shape that `pre_flatten_transform` gave.
            param_extension: What it gave with it.
        """

    @abstractmethod
    def chunk_tensor(
        self,
        tensor: torch.Tensor,
        rank: int,
        world_size: int,
        num_devices_per_node: int,
        pg: dist.ProcessGroup,
        device: torch.device | None = None,
    ) -> torch.Tensor:
        """Chunks a whole parameter along dim 0 into a ShardedTensor, this rank's chunk in it.

        Args:
            tensor: The parameter, gathered over `pg`.
            rank: This rank's number in `pg`.
            world_size: Of `pg`.
            num_devices_per_node: Accelerators of a node; 0 without any.
            pg: Ranks that share the chunks.
            device: Type of device that the chunks are said to lie on; default is that of `pg`.
        """

    @abstractmethod
    def chunk_dtensor(
        self, tensor: torch.Tensor, rank: int, device_mesh: DeviceMesh
    ) -> torch.Tensor:
        """Chunks a whole parameter along dim 0 into a DTensor on the root of `device_mesh`.

        Args:
            tensor: The parameter, gathered over the data-parallel axes.
            rank: This rank's number on the axis that shards.
            device_mesh: The data-parallel axes.
        """

    @abstractmethod
    def pre_load_state_dict_transform(
        self, tensor: torch.Tensor
    ) -> tuple[torch.Tensor, list[Shard]]:
        """Unwraps an entry of a sharded state dict.

        Returns:
            The ShardedTensor over the data-parallel ranks, and its shards on this rank.
        """

    @abstractmethod
    def all_gather_dtensor(self, tensor: DTensor, parent_mesh: DeviceMesh | None) -> torch.Tensor:
        """Gathers an entry of a sharded state dict over the data-parallel axes.

        Args:
            tensor: A DTensor on `parent_mesh`.
            parent_mesh: The root mesh.

        Returns:
            The plain tensor of this tensor-parallel rank.
        """
