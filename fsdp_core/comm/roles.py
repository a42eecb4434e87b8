"""What each axis of the mesh is for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch.distributed.tensor import Shard

from fsdp_core.comm.collectives import Collectives, GroupCollectives, LoopbackCollectives
from fsdp_core.errors import ArgumentError, UnsupportedError

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor.placement_types import Placement

SHARD_AXIS = "dp_shard"


@dataclass(frozen=True)
class MeshRoles:
    """A mesh whose axes have their roles.

    Attributes:
        mesh: As given; sharded parameters are DTensors on it.
        shard: Collectives of the axis that parameters are sharded over.
        device: This rank's device, on which unsharded parameters live.
    """

    mesh: DeviceMesh
    shard: Collectives
    device: torch.device

    @classmethod
    def of(cls, mesh: DeviceMesh) -> MeshRoles:
        """Reads the roles from the number of axes: one axis shards.

        Raises:
            UnsupportedError: Two axes (replicate, shard), which comes later.
            ArgumentError: Any other number of axes.
        """
        if mesh.ndim == 2:  # noqa: PLR2004 - the reference's meaning of a mesh of two axes
            raise UnsupportedError(
                f"Replication over a second mesh axis (HSDP) is not supported yet, got {mesh}. "
                "Pass a mesh of one axis, for example mesh['dp_shard']."
            )
        if mesh.ndim != 1:
            raise ArgumentError(f"fully_shard expects a 1D or 2D DeviceMesh but got {mesh}")
        names = mesh.mesh_dim_names
        name = names[0] if names else SHARD_AXIS
        group = mesh.get_group(0)
        shard: Collectives = (
            LoopbackCollectives(name) if group.size() == 1 else GroupCollectives(name, group)
        )
        return cls(mesh, shard, _device_of(mesh.device_type))

    def placements(self, dim: int) -> tuple[Placement, ...]:
        """Placements, one per mesh axis, of a parameter sharded on tensor dim `dim`."""
        return (Shard(dim),)


def _device_of(device_type: str) -> torch.device:
    if device_type == "cpu":
        return torch.device("cpu")
    return torch.device(device_type, torch.accelerator.current_device_index())
