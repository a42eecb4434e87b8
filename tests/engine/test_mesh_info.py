"""Which axis of a mesh does what; the reference's mesh infos are the oracle."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard

from fsdp_core.comm.mesh_info import (
    Axis,
    DataParallelMeshInfo,
    DDPMeshInfo,
    FSDPMeshInfo,
    HSDPMeshInfo,
    ShardPlacementResult,
    mesh_info_of,
    post_forward_mesh_info,
    resolve_placement,
)
from fsdp_core.errors import ArgumentError, MeshError
from fsdp_core.policy import DataParallelMeshDims
from tests.engine.gang import Gangs, RankContext

pytestmark = pytest.mark.ranks

HSDP = ("dp_replicate", "dp_shard")


def test_one_axis_shards_and_two_replicate_and_shard(gangs: Gangs) -> None:
    gangs(4).run(read_roles_by_number_of_axes)


def read_roles_by_number_of_axes(ctx: RankContext) -> None:
    line = mesh_info_of(ctx.mesh)
    assert type(line) is FSDPMeshInfo
    assert (line.shard.name, line.shard.size, line.shard.rank) == ("dp_shard", 4, ctx.rank)
    assert line.replicate == Axis.alone("dp_replicate")
    assert line.shard_mesh is ctx.mesh
    assert line.device == ctx.device
    assert not line.is_spmd

    mesh = init_device_mesh(ctx.device.type, (2, 2), mesh_dim_names=("outer", "inner"))
    grid = mesh_info_of(mesh)
    assert type(grid) is HSDPMeshInfo
    assert (grid.shard.name, grid.replicate.name) == ("inner", "outer")
    assert (grid.replicate.rank, grid.shard.rank) == divmod(ctx.rank, 2)
    assert grid.shard_mesh is grid.shard_mesh
    assert_same_axes(grid, their_info(mesh))


def test_meshes_from_process_groups_are_as_good(gangs: Gangs) -> None:
    gangs(4).run(read_roles_of_groups)


def read_roles_of_groups(ctx: RankContext) -> None:
    ranks = torch.arange(4).view(2, 2)
    mine = (ranks == ctx.rank).nonzero()[0].tolist()
    rows = [dist.new_group(row.tolist()) for row in ranks]
    columns = [dist.new_group(column.tolist()) for column in ranks.T]
    row, column = rows[mine[0]], columns[mine[1]]
    assert row is not None
    assert column is not None

    line = mesh_info_of(DeviceMesh.from_group(row, ctx.device.type))
    grid = mesh_info_of(
        DeviceMesh.from_group([column, row], ctx.device.type, ranks, mesh_dim_names=HSDP)
    )
    assert line.shard.group is row
    assert_same_axes(line, their_info(line.mesh))
    assert grid.shard.group is row
    assert grid.replicate.group is column
    assert grid.shard_mesh.get_group() is row
    assert_same_axes(grid, their_info(grid.mesh))


def test_named_axes_of_an_spmd_mesh_take_their_roles(gangs: Gangs) -> None:
    gangs(4).run(read_roles_by_names)


def read_roles_by_names(ctx: RankContext) -> None:
    mesh = init_device_mesh(ctx.device.type, (2, 2, 1), mesh_dim_names=("a", "b", "tp"))
    choices: list[tuple[DataParallelMeshDims, type, int, int]] = [
        (DataParallelMeshDims(shard="a"), FSDPMeshInfo, 2, 1),
        (DataParallelMeshDims(shard=("a", "b")), FSDPMeshInfo, 4, 1),
        (DataParallelMeshDims(replicate="a"), DDPMeshInfo, 1, 2),
        (DataParallelMeshDims(replicate=("a", "b")), DDPMeshInfo, 1, 4),
        (DataParallelMeshDims(shard="b", replicate="a"), HSDPMeshInfo, 2, 2),
        (DataParallelMeshDims(shard=("b", "tp"), replicate="a"), HSDPMeshInfo, 2, 2),
    ]
    for dims, kind, shard, replicate in choices:
        info = mesh_info_of(mesh, dims)
        assert type(info) is kind
        assert (info.shard.size, info.replicate.size) == (shard, replicate)
        assert info.is_spmd
        assert info.spmd_mesh is mesh
        assert_same_axes(info, their_info(mesh, dims))
    again = mesh_info_of(mesh, DataParallelMeshDims(shard=("a", "b")))
    before = mesh_info_of(mesh, DataParallelMeshDims(shard=("a", "b")))
    assert again.shard.group is before.shard.group, "one group for one flattened axis"
    assert again != before, "a mesh info is equal only to itself"


def test_a_mesh_that_does_not_fit_is_refused_as_in_the_reference(gangs: Gangs) -> None:
    gangs(2).run(refuse_meshes)


def refuse_meshes(ctx: RankContext) -> None:
    device = ctx.device.type
    deep = init_device_mesh(device, (1, 1, 2), mesh_dim_names=("a", "b", "c"))
    unnamed = init_device_mesh(device, (1, 2))
    by_c = DataParallelMeshDims(shard="c")
    assert_both_refuse("expects a 1D or 2D DeviceMesh but got", ValueError, deep)
    assert_both_refuse("Please init the 2D mesh for HSDP with mesh_dim", AssertionError, unnamed)
    assert_both_refuse("must have mesh_dim_names", ValueError, unnamed, by_c)
    absent = DataParallelMeshDims(shard="c", replicate="z")
    assert_both_refuse("Mesh dim name 'z' not found", ValueError, deep, absent)
    with pytest.raises(ArgumentError, match="twice"):
        mesh_info_of(deep, DataParallelMeshDims(shard="c", replicate=("a", "c")))
    with pytest.raises(MeshError, match="At least one of shard_mesh_dim and replicate"):
        DataParallelMeshInfo(ctx.mesh)
    with pytest.raises(MeshError, match="FSDPMeshInfo expects non-None shard_mesh_dim"):
        FSDPMeshInfo(ctx.mesh, replicate_mesh_dim=0)
    with pytest.raises(MeshError, match="HSDPMeshInfo expects non-None replicate_mesh_dim"):
        HSDPMeshInfo(ctx.mesh, shard_mesh_dim=0)


def test_a_rank_outside_the_mesh_is_told_so(gangs: Gangs) -> None:
    gangs(2).run(refuse_outsiders)


def refuse_outsiders(ctx: RankContext) -> None:
    mesh = DeviceMesh(ctx.device.type, [0])
    if ctx.rank == 0:
        info = mesh_info_of(mesh)
        assert info.shard.size == 1
        assert info.shard.group is not None, "an axis of one rank is still an axis"
    else:
        with pytest.raises(MeshError, match="Rank 1 is not part of"):
            mesh_info_of(mesh)


def test_an_integer_reshard_shards_over_short_rows(gangs: Gangs) -> None:
    gangs(4).run(reshard_to_rows)


def reshard_to_rows(ctx: RankContext) -> None:
    from torch.distributed.fsdp._fully_shard._fsdp_init import (  # noqa: PLC0415 - only the oracle may load it
        _get_post_forward_mesh_info,
    )

    info = mesh_info_of(ctx.mesh)
    assert isinstance(info, FSDPMeshInfo)
    rows = post_forward_mesh_info(info, 2)
    theirs = _get_post_forward_mesh_info(2, their_info(ctx.mesh))
    assert theirs is not None
    assert torch.equal(rows.mesh.mesh, theirs.mesh.mesh)
    for mine, other in (
        (rows.shard_process_group, theirs.shard_process_group),
        (rows.replicate_process_group, theirs.replicate_process_group),  # type: ignore[attr-defined]  # it has two axes
    ):
        assert dist.get_process_group_ranks(mine) == dist.get_process_group_ranks(other)
    assert sum_over(rows.shard, ctx) == sum({ctx.rank, ctx.rank ^ 1})
    assert sum_over(rows.replicate, ctx) == ctx.rank + (ctx.rank + 2) % 4
    assert rows.shard_mesh.size() == 2
    again = mesh_info_of(init_device_mesh(ctx.device.type, (4,)))
    assert isinstance(again, FSDPMeshInfo)
    assert post_forward_mesh_info(again, 2) is rows, "every unit would make groups of its own"
    with pytest.raises(ArgumentError, match="should be a factor of 4, not 3"):
        post_forward_mesh_info(info, 3)


def test_an_integer_reshard_of_two_axes_flattens_the_replicas(gangs: Gangs) -> None:
    gangs(4).run(reshard_two_axes)


def reshard_two_axes(ctx: RankContext) -> None:
    mesh = init_device_mesh(ctx.device.type, (1, 4), mesh_dim_names=HSDP)
    info = mesh_info_of(mesh)
    assert isinstance(info, HSDPMeshInfo)
    rows = post_forward_mesh_info(info, 2)
    assert rows.mesh.mesh.tolist() == [[0, 1], [2, 3]]
    assert (rows.replicate_mesh_rank, rows.shard_mesh_rank) == divmod(ctx.rank, 2)
    assert (rows.replicate_mesh_size, rows.shard_mesh_size) == (2, 2)


def test_a_placement_function_may_return_three_things(gangs: Gangs) -> None:
    gangs(2).run(resolve_placements)


def resolve_placements(ctx: RankContext) -> None:
    default, other = mesh_info_of(ctx.mesh), mesh_info_of(ctx.mesh)
    assert resolve_placement(None, default) == ShardPlacementResult(None, default)
    assert resolve_placement(Shard(-1), default) == ShardPlacementResult(Shard(-1), default)
    given = ShardPlacementResult(Shard(1), other)
    assert resolve_placement(given, default) is given
    wrong_inside: Any = Replicate()
    for wrong in (0, Replicate(), (Shard(0), default), ShardPlacementResult(wrong_inside, other)):
        with pytest.raises(ArgumentError, match="Invalid shard_placement_fn result"):
            resolve_placement(wrong, default)


def test_mesh_dims_name_at_least_one_axis() -> None:
    for nothing in (dict[str, Any](), {"shard": ()}, {"shard": None, "replicate": ""}):
        with pytest.raises(ValueError, match="At least one of shard or replicate must be set"):
            DataParallelMeshDims(**nothing)
    dims = DataParallelMeshDims(shard=("a", "b"), replicate="c")
    assert (dims.shard_names, dims.replicate_names) == (("a", "b"), ("c",))
    assert DataParallelMeshDims(replicate="c").shard_names == ()


def their_info(mesh: DeviceMesh, dims: DataParallelMeshDims | None = None) -> Any:  # noqa: ANN401 - the oracle's
    from torch.distributed.fsdp._fully_shard import _fsdp_init  # noqa: PLC0415 - only the oracle may load it
    from torch.distributed.fsdp._fully_shard._fsdp_api import (  # noqa: PLC0415 - only the oracle may load it
        DataParallelMeshDims as TheirDims,
    )

    theirs = TheirDims(dims.shard, dims.replicate) if dims else None
    _fsdp_init._validate_mesh(mesh, theirs)
    return _fsdp_init._get_mesh_info(mesh, theirs)


def assert_same_axes(ours: DataParallelMeshInfo, theirs: Any) -> None:  # noqa: ANN401 - the oracle's
    assert type(ours).__name__ == type(theirs).__name__
    assert ours.mesh == theirs.mesh
    names = ["mesh_dim"]
    names += ["mesh_size", "mesh_rank", "process_group"] if isinstance(ours, FSDPMeshInfo) else []
    for name in names:
        assert getattr(ours, f"shard_{name}") == getattr(theirs, f"shard_{name}")
    names = ["mesh_dim"]
    names += ["mesh_size", "mesh_rank", "process_group"] if isinstance(ours, DDPMeshInfo) else []
    for name in names:
        assert getattr(ours, f"replicate_{name}") == getattr(theirs, f"replicate_{name}")


def assert_both_refuse(
    message: str, kind: type[Exception], mesh: DeviceMesh, dims: DataParallelMeshDims | None = None
) -> None:
    engines: tuple[Callable[..., object], ...] = (mesh_info_of, their_info)
    for engine in engines:
        with pytest.raises(kind, match=message):
            engine(mesh, dims)


def sum_over(axis: Axis, ctx: RankContext) -> int:
    total = torch.tensor(ctx.rank, device=ctx.device)
    dist.all_reduce(total, group=axis.group)
    return int(total)
