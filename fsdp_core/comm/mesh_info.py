"""What each axis of a mesh is for.

A mesh of one axis shards parameters over it. A mesh of two replicates over the first and shards
over the second. In a full SPMD mesh the data-parallel axes are named by `DataParallelMeshDims`;
the others belong to the user.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard

from fsdp_core import torch_private
from fsdp_core.errors import ArgumentError, MeshError
from fsdp_core.policy import Owned

if TYPE_CHECKING:
    from fsdp_core.policy import DataParallelMeshDims

SHARD_AXIS = "dp_shard"
REPLICATE_AXIS = "dp_replicate"


@dataclass(frozen=True)
class Axis:
    """A mesh axis that communicates, or one rank alone.

    Attributes:
        name: Of the mesh axis; under it the collectives are counted.
        group: The process group; None exactly if the mesh has no such axis.
        size: Ranks along the axis.
        rank: This process's place among them.
    """

    name: str
    group: dist.ProcessGroup | None
    size: int
    rank: int

    @property
    def ranks(self) -> frozenset[int]:
        """Global ranks along the axis, this one included."""
        return frozenset(
            [dist.get_rank()] if self.group is None else dist.get_process_group_ranks(self.group)
        )

    @classmethod
    def alone(cls, name: str) -> Axis:
        """The axis that a mesh lacks: one rank, nothing to communicate."""
        return cls(name, None, 1, 0)

    @classmethod
    def of(cls, mesh: DeviceMesh, mesh_dim: int | None, default_name: str) -> Axis:
        """Axis number `mesh_dim` of the mesh, `alone` if None."""
        if mesh_dim is None:
            return cls.alone(default_name)
        group = mesh.get_group(mesh_dim)
        names = mesh.mesh_dim_names
        return cls(names[mesh_dim] if names else default_name, group, group.size(), group.rank())


@dataclass(eq=False)
class DataParallelMeshInfo:
    """A mesh whose axes have their roles; one of its three subclasses.

    Equal only to itself: parameters that share one are grouped together.

    Attributes:
        mesh: The data-parallel mesh.
        shard_mesh_dim: Which of its axes parameters are sharded over.
        replicate_mesh_dim: Which of its axes parameters are replicated over.
        dp_mesh_dims: The names of these axes in `spmd_mesh`, if parameters live on that.
        spmd_mesh: The full mesh, data-parallel axes included.
        shard: The axis of the all-gather and the reduce-scatter.
        replicate: The axis of the all-reduce.
        device: This rank's device, on which unsharded parameters live.

    Raises:
        MeshError: The roles need axes that are not given, or this rank is not in the mesh.
    """

    mesh: DeviceMesh
    shard_mesh_dim: int | None = None
    replicate_mesh_dim: int | None = None
    dp_mesh_dims: DataParallelMeshDims | None = None
    spmd_mesh: DeviceMesh | None = field(default=None, repr=False)
    shard: Axis = field(init=False, repr=False)
    replicate: Axis = field(init=False, repr=False)
    device: torch.device = field(init=False)

    def __post_init__(self) -> None:
        if self.shard_mesh_dim is None and self.replicate_mesh_dim is None:
            raise MeshError(
                "At least one of shard_mesh_dim and replicate_mesh_dim must not be None."
            )
        if self.mesh.get_coordinate() is None:
            raise MeshError(
                f"Rank {dist.get_rank()} is not part of {self.mesh}. Apply fully_shard on a mesh "
                "that contains the calling rank."
            )
        self.shard = Axis.of(self.mesh, self.shard_mesh_dim, SHARD_AXIS)
        self.replicate = Axis.of(self.mesh, self.replicate_mesh_dim, REPLICATE_AXIS)
        self.device = _device_of(self.mesh.device_type)

    @property
    def is_spmd(self) -> bool:
        """Whether parameters are DTensors on a mesh that holds the data-parallel axes too."""
        return self.dp_mesh_dims is not None

    @cached_property
    def shard_mesh(self) -> DeviceMesh:
        """The shard axis as a mesh of its own; tensor extensions get it.

        Without a shard axis it is the replicate axis, as in the reference.
        """
        if self.mesh.ndim == 1:
            return self.mesh
        mesh_dim = self.replicate_mesh_dim if self.shard_mesh_dim is None else self.shard_mesh_dim
        names = self.mesh.mesh_dim_names
        if names and mesh_dim is not None:
            return self.mesh[names[mesh_dim]]
        return DeviceMesh.from_group(self.mesh.get_group(mesh_dim), self.mesh.device_type)


@dataclass(eq=False)
class FSDPMeshInfo(DataParallelMeshInfo):
    """Parameters are sharded over `shard_mesh_dim`."""

    def __post_init__(self) -> None:
        if self.shard_mesh_dim is None:
            raise MeshError(f"{type(self).__name__} expects non-None shard_mesh_dim.")
        super().__post_init__()

    @property
    def shard_mesh_size(self) -> int:
        """Ranks along the shard axis."""
        return self.shard.size

    @property
    def shard_mesh_rank(self) -> int:
        """This rank's place on the shard axis."""
        return self.shard.rank

    @property
    def shard_process_group(self) -> dist.ProcessGroup:
        """The shard axis's group."""
        return self.mesh.get_group(self.shard_mesh_dim)


@dataclass(eq=False)
class DDPMeshInfo(DataParallelMeshInfo):
    """Parameters are replicated over `replicate_mesh_dim`."""

    def __post_init__(self) -> None:
        if self.replicate_mesh_dim is None:
            raise MeshError(f"{type(self).__name__} expects non-None replicate_mesh_dim.")
        super().__post_init__()

    @property
    def replicate_mesh_size(self) -> int:
        """Ranks along the replicate axis."""
        return self.replicate.size

    @property
    def replicate_mesh_rank(self) -> int:
        """This rank's place on the replicate axis."""
        return self.replicate.rank

    @property
    def replicate_process_group(self) -> dist.ProcessGroup:
        """The replicate axis's group."""
        return self.mesh.get_group(self.replicate_mesh_dim)


@dataclass(eq=False)
class HSDPMeshInfo(FSDPMeshInfo, DDPMeshInfo):
    """Parameters are sharded over one axis and replicated over another."""


@dataclass(frozen=True)
class ShardPlacementResult:
    """What `shard_placement_fn` decides for one parameter.

    Attributes:
        placement: The tensor dim to shard, which may be negative; None means dim 0. `Owned`: one
            rank holds the whole.
        mesh_info: The mesh to shard over.
    """

    placement: Shard | Owned | None
    mesh_info: DataParallelMeshInfo


def mesh_info_of(
    mesh: DeviceMesh, dp_mesh_dims: DataParallelMeshDims | None = None
) -> DataParallelMeshInfo:
    """Reads the roles from the number of axes, or from their names in a full SPMD mesh.

    With several names for one role, a process group is made at the first call for a mesh: every
    rank of the mesh must make the call.

    Args:
        mesh: One axis (shard), two named axes (replicate, shard), or with `dp_mesh_dims` any
            number of named axes.
        dp_mesh_dims: The data-parallel axes of `mesh`.

    Raises:
        ArgumentError: Another number of axes, or names that the mesh does not have.
        MeshError: Two axes without names.
    """
    if dp_mesh_dims is not None:
        return _mesh_info_by_names(mesh, dp_mesh_dims)
    if mesh.ndim == 1:
        return FSDPMeshInfo(mesh, shard_mesh_dim=0)
    if mesh.ndim != 2:  # noqa: PLR2004 - a mesh of two axes replicates and shards
        raise ArgumentError(
            f"fully_shard expects a 1D or 2D DeviceMesh but got {mesh}. Slice the data-parallel "
            "axes out of it by name, or name them in dp_mesh_dims."
        )
    if mesh.mesh_dim_names is None:
        raise MeshError(
            "Please init the 2D mesh for HSDP with mesh_dim_names specified, for example "
            "('dp_replicate', 'dp_shard')."
        )
    return HSDPMeshInfo(mesh, shard_mesh_dim=1, replicate_mesh_dim=0)


def resolve_placement(result: object, default: DataParallelMeshInfo) -> ShardPlacementResult:
    """Completes what `shard_placement_fn` returned by the mesh of the call.

    Raises:
        ArgumentError: It is neither None, nor a `Shard`, an `Owned`, or a `ShardPlacementResult`.
    """
    if result is None or isinstance(result, Shard | Owned):
        return ShardPlacementResult(result, default)
    if isinstance(result, ShardPlacementResult) and _is_sound(result.placement, result.mesh_info):
        return result
    raise ArgumentError(
        f"Invalid shard_placement_fn result: {result}. Return None, a Shard, an Owned, "
        "or a ShardPlacementResult of one of these and a mesh info."
    )


def _is_sound(placement: object, mesh_info: object) -> bool:
    # A user's function need not keep to the declared types.
    known = placement is None or isinstance(placement, Shard | Owned)
    return known and isinstance(mesh_info, DataParallelMeshInfo)


# By the shard group, so that no entry outlives it; then by the mesh's ranks and the size.
_post_forward: WeakKeyDictionary[
    dist.ProcessGroup, dict[tuple[tuple[int, ...], int], HSDPMeshInfo]
] = WeakKeyDictionary()


def post_forward_mesh_info(info: FSDPMeshInfo, size: int) -> HSDPMeshInfo:
    """The mesh to which parameters are resharded after forward: rows of `size` ranks.

    Makes two process groups at the first call for a mesh and size, in which all ranks of
    `info.mesh` must take part.

    Args:
        info: What the parameters are sharded over otherwise.
        size: A proper divisor of its shard axis's size; ranks over which each row still shards.

    Raises:
        ArgumentError: `size` is no divisor.
    """
    if size < 1 or info.shard.size % size != 0:
        raise ArgumentError(
            "If passing reshard_after_forward as an int, it should be a factor of "
            f"{info.shard.size}, not {size}."
        )
    ranks = info.mesh.mesh.flatten()
    known = _post_forward.setdefault(info.shard_process_group, {})
    key = (tuple(ranks.tolist()), size)
    if key not in known:
        known[key] = _rows_of(info.mesh.device_type, ranks.view(-1, size))
    return known[key]


def _rows_of(device_type: str, ranks: torch.Tensor) -> HSDPMeshInfo:
    # Only the members make each group. DeviceMesh's own constructor asks all ranks of the world
    # for the same ranks, which differ where this mesh is one of several beside each other.
    row, column = (ranks == dist.get_rank()).nonzero()[0].tolist()
    groups = [
        torch_private.group_of_members(sorted(members.tolist()), f"fsdp_after_forward_{axis}")
        for axis, members in ((REPLICATE_AXIS, ranks[:, column]), (SHARD_AXIS, ranks[row]))
    ]
    mesh = DeviceMesh.from_group(
        groups, device_type, ranks, mesh_dim_names=(REPLICATE_AXIS, SHARD_AXIS)
    )
    return HSDPMeshInfo(mesh, shard_mesh_dim=1, replicate_mesh_dim=0)


def _mesh_info_by_names(
    mesh: DeviceMesh, dp_mesh_dims: DataParallelMeshDims
) -> DataParallelMeshInfo:
    shard_names, replicate_names = dp_mesh_dims.shard_names, dp_mesh_dims.replicate_names
    _check_names(mesh, shard_names + replicate_names)
    if not shard_names:
        return DDPMeshInfo(
            _one_axis(mesh, replicate_names),
            replicate_mesh_dim=0,
            dp_mesh_dims=dp_mesh_dims,
            spmd_mesh=mesh,
        )
    shard_mesh = _one_axis(mesh, shard_names)
    if not replicate_names:
        return FSDPMeshInfo(shard_mesh, shard_mesh_dim=0, dp_mesh_dims=dp_mesh_dims, spmd_mesh=mesh)
    return HSDPMeshInfo(
        torch_private.joined_mesh([_one_axis(mesh, replicate_names), shard_mesh]),
        shard_mesh_dim=1,
        replicate_mesh_dim=0,
        dp_mesh_dims=dp_mesh_dims,
        spmd_mesh=mesh,
    )


def _check_names(mesh: DeviceMesh, names: tuple[str, ...]) -> None:
    if mesh.mesh_dim_names is None:
        raise ArgumentError("mesh must have mesh_dim_names when dp_mesh_dims is provided.")
    for name in names:
        if name not in mesh.mesh_dim_names:
            raise ArgumentError(
                f"Mesh dim name '{name}' not found in mesh.mesh_dim_names {mesh.mesh_dim_names}"
            )
    if len(set(names)) < len(names):
        raise ArgumentError(f"dp_mesh_dims names a mesh axis twice: {names}")


def _one_axis(mesh: DeviceMesh, names: tuple[str, ...]) -> DeviceMesh:
    if len(names) == 1:
        return mesh[names[0]]
    return torch_private.flattened_mesh(mesh[names], "_".join(names))


def _device_of(device_type: str) -> torch.device:
    if device_type == "cpu":
        return torch.device("cpu")
    return torch.device(device_type, torch.accelerator.current_device_index())
