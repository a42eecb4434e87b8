# ruff: noqa: SLF001 - private names are what this package is for
"""Meshes that are joined, flattened, or never communicate."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh


def joined_mesh(meshes: Sequence[DeviceMesh]) -> DeviceMesh:
    """One mesh with the axes and groups of several parts of one mesh; no new group is made.

    Publicly a mesh can only be cut, not joined.
    """
    return DeviceMesh._concatenate(list(meshes))


def flattened_mesh(mesh: DeviceMesh, name: str) -> DeviceMesh:
    """Several axes as one named axis.

    Makes a group, so every rank of the root mesh must call it; the root mesh remembers it under
    its name, so only once.
    """
    return mesh._flatten(name)


def root_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """The mesh that `mesh` was cut from; itself if from none.

    A slice knows its root, but publicly does not tell it.
    """
    return mesh._get_root_mesh()


def mesh_ranks(mesh: DeviceMesh) -> torch.Tensor:
    """The mesh's global ranks, of its shape."""
    return mesh.mesh


def mesh_without_groups(device_type: str, ranks: list[int]) -> DeviceMesh:
    """A mesh of one axis that never communicates, so that no process group need be made for it.

    Publicly a mesh makes its groups, in which all ranks of the world must take part.
    """
    return DeviceMesh(device_type, ranks, _init_backend=False)


def groups_of(mesh: DeviceMesh) -> list[dist.ProcessGroup]:
    """The process groups of the mesh's axes; none where it was made without.

    Publicly a mesh raises then, and does not tell beforehand.
    """
    return mesh.get_all_groups() if hasattr(mesh, "_dim_group_names") else []
