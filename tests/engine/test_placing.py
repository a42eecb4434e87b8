"""How parameters of every kind lie on the meshes; the reference's FSDPParam is the oracle."""

from __future__ import annotations

import gc
from dataclasses import dataclass
from functools import lru_cache
from typing import Any
from weakref import ref

import pytest
import torch
from torch import nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor, all_reduce
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Placement,
    Replicate,
    Shard,
    distribute_tensor,
)

from fsdp_core import torch_private
from fsdp_core.comm.mesh_info import DataParallelMeshInfo, DDPMeshInfo, mesh_info_of
from fsdp_core.errors import (
    ArgumentTypeError,
    MeshError,
    MeshJoinError,
    StateError,
    UnsupportedError,
)
from fsdp_core.param.sharding_spec import place, whole_local
from fsdp_core.policy import DataParallelMeshDims
from tests.engine.gang import Gangs, RankContext
from tests.engine.test_mesh_info import their_info

pytestmark = pytest.mark.ranks


@dataclass(frozen=True)
class Case:
    """A mesh with named axes, which of them are the parameter's own, and where it is cut."""

    mesh: dict[str, int]
    shape: tuple[int, ...] = (8, 6)
    dim: int = 0
    own: dict[str, Placement] | None = None
    spmd: DataParallelMeshDims | None = None
    ddp: bool = False


S0, S1, R = Shard(0), Shard(1), Replicate()
LINE, GRID = {"dp": 4}, {"dp_replicate": 2, "dp_shard": 2}
TP = {"dp": 2, "tp": 2}
PLAIN = [
    Case(LINE),
    Case(LINE, (5, 3)),
    Case(LINE, (2, 3, 2)),
    Case(LINE, (3, 8), dim=1),
    Case(GRID, (5, 3)),
    Case(GRID, (3, 4), dim=1),
    Case(GRID, (1,)),
    Case(LINE, ddp=True),
]
OWN_AXES = [
    Case(TP, own={"tp": S0}),
    Case(TP, (7, 6), own={"tp": S0}),
    Case(TP, (1, 6), own={"tp": S0}),
    Case(TP, own={"tp": S1}),
    Case(TP, (7, 5), own={"tp": S1}),
    Case(TP, (6, 8), dim=1, own={"tp": S1}),
    Case(TP, (6, 4), dim=1, own={"tp": S0}),
    Case(TP, (5,), own={"tp": R}),
    Case(TP, own={"tp": S0}, ddp=True),
    Case({"dp_replicate": 2, "dp_shard": 1, "tp": 2}, own={"tp": S0}),
    Case({"dp_replicate": 1, "dp_shard": 2, "tp": 2}, (7, 3), own={"tp": S0}),
    Case({"dp": 2, "ep": 2, "tp": 1}, (4, 6, 2), own={"ep": S0, "tp": S1}),
    Case({"dp": 1, "ep": 2, "tp": 2}, own={"ep": S0, "tp": S0}),
    Case({"a": 1, "dp": 2, "ep": 2, "tp": 1}, own={"ep": S0, "tp": S1}),
]
# Other names than above: DTensor remembers specs by equality, and an SPMD mesh is known by identity.
FLAT = {"fsdp": 2, "tp": 2}
BY_NAME = DataParallelMeshDims(shard="fsdp")
SPMD = [
    Case(FLAT, spmd=BY_NAME, own={"fsdp": R, "tp": S0}),
    Case(FLAT, (7, 5), spmd=BY_NAME, own={"fsdp": R, "tp": S1}),
    Case({"tp": 2, "fsdp": 2}, spmd=BY_NAME, own={"tp": S0, "fsdp": R}),
    Case(FLAT, spmd=DataParallelMeshDims(replicate="fsdp"), own={"fsdp": R, "tp": S0}),
    Case(
        {"fsdp": 2, "cp": 1, "tp": 2},
        spmd=DataParallelMeshDims(shard=("fsdp", "cp")),
        own={"fsdp": R, "cp": R, "tp": S0},
    ),
    Case(
        {"fsdp": 2, "cp": 2},
        (7, 3),
        spmd=DataParallelMeshDims(shard=("fsdp", "cp")),
        own={"fsdp": R, "cp": R},
    ),
    Case(
        {"rep": 2, "fsdp": 1, "tp": 2},
        spmd=DataParallelMeshDims(shard="fsdp", replicate="rep"),
        own={"rep": R, "fsdp": R, "tp": S0},
    ),
    Case(
        {"rep": 1, "fsdp": 2, "cp": 1, "tp": 2},
        spmd=DataParallelMeshDims(shard=("fsdp", "cp"), replicate="rep"),
        own={"rep": R, "fsdp": R, "cp": R, "tp": S0},
    ),
]


@pytest.mark.parametrize("cases", [PLAIN, OWN_AXES, SPMD], ids=["plain", "own axes", "spmd"])
def test_parameters_lie_as_in_the_reference(gangs: Gangs, cases: list[Case]) -> None:
    gangs(4).run(compare_with_reference, cases)


def compare_with_reference(ctx: RankContext, cases: list[Case]) -> None:
    for case in cases:
        whole, param, info, mesh = build(ctx, case)
        placing = place(param, "weight", info, case.dim)
        ours = placing.sharded(slice_of(whole_local(param), info, case.dim))
        oracle = their_param(case, info, mesh)
        theirs = oracle.sharded_param
        assert ours.device_mesh == theirs.device_mesh, case
        assert ours.placements == theirs.placements, case
        assert (ours.shape, ours.stride()) == (theirs.shape, theirs.stride()), case
        assert torch.equal(ours.to_local(), theirs.to_local()), case
        assert torch.equal(ours.full_tensor(), whole), case

        again = placing.unsharded(whole_local(param).detach())
        assert isinstance(again, DTensor) == placing.is_dtensor == isinstance(param, DTensor)
        assert torch.equal(full(again), whole), case
        low = placing.unsharded(whole_local(param).detach().bfloat16())
        assert low.dtype == full(low).dtype == torch.bfloat16
        for grad in grads_of(param, whole):
            expected = oracle._get_grad_inner_tensor(grad)
            assert torch.equal(placing.local_grad(grad), expected), (case, grad)


def grads_of(param: nn.Parameter, whole: torch.Tensor) -> list[torch.Tensor]:
    """As the parameter lies, and as sums not yet made on one or all of its axes."""
    if not isinstance(param, DTensor):
        return [whole * 2]
    mesh = param.device_mesh
    grads: list[torch.Tensor] = [param.detach() * 2]
    pending: list[list[Placement]] = [[Partial()] * mesh.ndim]
    for axis in range(mesh.ndim):
        pending.append([*param.placements])
        pending[-1][axis] = Partial()
    for placements in pending:
        spread = distribute_tensor(whole, mesh, [r if r.is_shard() else R for r in placements])
        grads.append(
            DTensor.from_local(
                spread.to_local(), mesh, placements, shape=whole.shape, stride=whole.stride()
            )
        )
    return grads


def test_dp_axes_that_are_apart_in_the_mesh_are_cut_as_one(gangs: Gangs) -> None:
    gangs(4).run(cut_axes_apart)


def cut_axes_apart(ctx: RankContext) -> None:
    for sizes in ((2, 1, 2), (2, 2, 1)):
        mesh = dict(zip(("dp", "tp", "cp"), sizes, strict=True))
        own = {"dp": R, "tp": S0, "cp": R}
        spmd = DataParallelMeshDims(shard=("dp", "cp"))
        whole, param, info, _ = build(ctx, Case(mesh, (7, 3), own=own, spmd=spmd))
        placing = place(param, "weight", info, 0)
        sharded = placing.sharded(slice_of(whole_local(param), info, 0))
        assert sharded.device_mesh.mesh_dim_names == ("dp_cp", "tp")
        assert torch.equal(sharded.full_tensor(), whole)


def test_what_the_reference_refuses_lies_right_too(gangs: Gangs) -> None:
    gangs(4).run(place_odd_parameters)


def place_odd_parameters(ctx: RankContext) -> None:
    for case in (
        Case(LINE, (3, 6), dim=1),
        Case(GRID, (3, 5), dim=1),
        Case(TP, (3, 5), dim=1, own={"tp": S0}),
        Case(TP, (3, 7), dim=1, own={"tp": S1}),
    ):
        whole, param, info, _ = build(ctx, case)
        placing = place(param, "weight", info, case.dim)
        sharded = placing.sharded(slice_of(whole_local(param), info, case.dim))
        assert torch.equal(sharded.full_tensor(), whole), case
    for case in (Case(LINE, ()), Case(GRID, ()), Case(TP, (), own={"tp": R})):
        whole, param, info, _ = build(ctx, case)
        placing = place(param, "scale", info, None)
        sharded = placing.sharded(whole_local(param).detach())
        assert all(placement == R for placement in sharded.placements)
        assert torch.equal(sharded.full_tensor(), whole)


def test_strides_of_a_dense_parameter_are_kept(gangs: Gangs) -> None:
    gangs(2).run(keep_strides)


def keep_strides(ctx: RankContext) -> None:
    info = mesh_info_of(ctx.mesh)
    images = torch.randn(4, 3, 2, 2).to(memory_format=torch.channels_last)
    for dense in (images, torch.randn(6, 4).t()):
        param = nn.Parameter(dense.to(ctx.device))
        placing = place(param, "weight", info, 0)
        local = slice_of(whole_local(param), info, 0)
        assert placing.sharded(local).stride() == dense.stride()
    gappy = nn.Parameter(torch.randn(4, 9, device=ctx.device)[:, :5])
    assert place(gappy, "weight", info, 0).sharded_spec.stride == (5, 1)


def test_a_slice_is_taken_over_without_a_copy(gangs: Gangs) -> None:
    gangs(2).run(take_over)


def take_over(ctx: RankContext) -> None:
    param = nn.Parameter(torch.randn(4, 3, device=ctx.device))
    placing = place(param, "weight", mesh_info_of(ctx.mesh), 0)
    assert whole_local(param) is param
    local = torch.zeros(2, 3, device=ctx.device)
    assert torch_private.local_tensor(placing.sharded(local)) is local
    assert placing.unsharded(local) is local
    assert placing.sharded(local.bfloat16()).dtype == torch.bfloat16


def test_another_dtensor_on_the_module_changes_how_slices_lie(gangs: Gangs) -> None:
    gangs(2).run(rebase)


def rebase(ctx: RankContext) -> None:
    placing = place(nn.Parameter(torch.randn(4, 3)), "weight", mesh_info_of(ctx.mesh), 0)
    wider = distribute_tensor(torch.randn(6, 3, dtype=torch.float64), ctx.mesh, [Shard(0)])
    rebased = placing.rebased(torch_private.spec_of(wider))
    gradient = rebased.sharded(torch.ones(3, 3, dtype=torch.float64))
    assert (gradient.shape, gradient.dtype) == (wider.shape, wider.dtype)
    assert not rebased.is_dtensor


def test_a_placing_has_no_hold_on_the_original(gangs: Gangs) -> None:
    gangs(2).run(let_originals_be)


def let_originals_be(ctx: RankContext) -> None:
    info = mesh_info_of(ctx.mesh)
    param = nn.Parameter(torch.zeros(4, 3))
    placing = place(param, "weight", info, 0)
    # Refused of a tensor with weak references, as by Module.to in the mode that swaps.
    torch_private.swap(param, nn.Parameter(torch.ones(4, 3)))
    assert torch.equal(param, torch.ones(4, 3))
    gone = ref(param)
    del param
    gc.collect()
    assert gone() is None
    assert placing.sharded_spec.shape == (4, 3)


def test_a_promised_gradient_is_waited_for(gangs: Gangs) -> None:
    gangs(4).run(wait_for_gradient)


def wait_for_gradient(ctx: RankContext) -> None:
    whole, param, info, mesh = build(ctx, Case(TP, own={"tp": R}))
    promised = all_reduce(whole.clone(), "sum", mesh["tp"])
    assert isinstance(promised, AsyncCollectiveTensor)
    inner = place(param, "weight", info, 0).local_grad(
        DTensor.from_local(promised, mesh["tp"], [R])
    )
    assert type(inner) is torch.Tensor
    assert torch.equal(inner, whole * 2)

    pending = DTensor.from_local(whole.clone(), mesh["tp"], [Partial()])
    assert type(place(param, "weight", info, 0).local_grad(pending)) is torch.Tensor

    plain = nn.Parameter(whole.clone())
    placing = place(plain, "weight", mesh_info_of(ctx.mesh), 0)
    assert type(placing.local_grad(all_reduce(whole.clone(), "sum", mesh["tp"]))) is torch.Tensor


def test_a_gradient_cut_over_a_dp_axis_is_made_whole(gangs: Gangs) -> None:
    gangs(4).run(make_gradient_whole)


def make_gradient_whole(ctx: RankContext) -> None:
    case = Case(FLAT, (6, 5), spmd=BY_NAME, own={"fsdp": R, "tp": S0})
    whole, param, info, mesh = build(ctx, case)
    placing = place(param, "weight", info, 0)
    cut = distribute_tensor(whole, mesh, [S1, S1])
    assert torch.equal(placing.local_grad(cut), whole.chunk(2)[mesh.get_local_rank("tp")])


def test_a_parameter_that_does_not_fit_is_refused_by_name(gangs: Gangs) -> None:
    gangs(4).run(refuse_parameters)


def refuse_parameters(ctx: RankContext) -> None:
    device = ctx.device.type
    tensor = torch.randn(4, 4, device=ctx.device)
    mesh = init_device_mesh(device, (2, 2), mesh_dim_names=("dp", "tp"))
    spmd = mesh_info_of(mesh, DataParallelMeshDims(shard="dp"))
    plain = nn.Parameter(tensor)
    with pytest.raises(ValueError, match=r"must be DTensors.*'w' is a plain tensor"):
        place(plain, "w", spmd, 0)
    twin = init_device_mesh(device, (2, 2), mesh_dim_names=("dp", "tp"))
    with pytest.raises(ValueError, match=r"'w' must be on the same mesh"):
        place(nn.Parameter(distribute_tensor(tensor, twin, [R, S0])), "w", spmd, 0)
    cut = nn.Parameter(distribute_tensor(tensor, mesh, [S0, R]))
    with pytest.raises(ValueError, match=r"Expected Replicate\(\) on DP shard dim 'dp'"):
        place(cut, "w", spmd, 0)
    both = mesh_info_of(mesh, DataParallelMeshDims(shard="tp", replicate="dp"))
    with pytest.raises(ValueError, match=r"Expected Replicate\(\) on DP replicate dim 'dp'"):
        place(cut, "w", both, 0)

    deep = init_device_mesh(device, (1, 2, 2, 1), mesh_dim_names=("dp", "a", "b", "c"))
    wide = nn.Parameter(distribute_tensor(tensor, deep["a", "b", "c"], [R, R, R]))
    with pytest.raises(UnsupportedError, match="only supports 1D TP/EP or 2D EP"):
        place(wide, "w", mesh_info_of(deep["dp"]), 0)
    on_dp = nn.Parameter(distribute_tensor(tensor, mesh["dp"], [R]))
    with pytest.raises(MeshJoinError, match=r"'w'.*cannot be joined"):
        place(on_dp, "w", mesh_info_of(mesh["dp"]), 0)
    unnamed = nn.Parameter(distribute_tensor(tensor, ctx.mesh, [R]))
    with pytest.raises(ArgumentTypeError, match="must both have mesh_dim_names"):
        place(unnamed, "w", mesh_info_of(mesh["dp"]), 0)
    five = init_device_mesh(device, (1, 1, 1, 2, 2), mesh_dim_names=("a", "b", "c", "d", "e"))
    info = DDPMeshInfo(five["a", "b", "c"], replicate_mesh_dim=0)
    two = nn.Parameter(distribute_tensor(tensor, five["d", "e"], [R, R]))
    with pytest.raises(MeshError, match="must together be 2 to 4"):
        place(two, "w", info, 0)


def test_a_gradient_that_does_not_fit_is_refused_by_name(gangs: Gangs) -> None:
    gangs(4).run(refuse_gradients)


def refuse_gradients(ctx: RankContext) -> None:
    whole, param, info, mesh = build(ctx, Case(TP, own={"tp": R}))
    placing = place(param, "blocks.1.weight", info, 0)
    for wrong in (whole, distribute_tensor(whole, mesh, [R, R])):
        with pytest.raises(StateError, match=r"blocks\.1\.weight"):
            placing.local_grad(wrong)


def build(
    ctx: RankContext, case: Case
) -> tuple[torch.Tensor, nn.Parameter, DataParallelMeshInfo, DeviceMesh]:
    """The whole tensor, the same on all ranks, and as a parameter on its own axes."""
    mesh = mesh_of(ctx.device.type, tuple(case.mesh.items()))
    whole = torch.randn(case.shape, generator=torch.Generator().manual_seed(7)).to(ctx.device)
    tensor = whole.clone()
    if case.own is not None:
        own_mesh = mesh[tuple(case.own)]
        tensor = distribute_tensor(tensor, own_mesh, list(case.own.values()))
    param = nn.Parameter(tensor)
    if case.spmd is not None:
        return whole, param, mesh_info_of(mesh, case.spmd), mesh
    dp_mesh = mesh[tuple(name for name in case.mesh if name not in (case.own or {}))]
    info = DDPMeshInfo(dp_mesh, replicate_mesh_dim=0) if case.ddp else mesh_info_of(dp_mesh)
    return whole, param, info, mesh


@lru_cache
def mesh_of(device_type: str, axes: tuple[tuple[str, int], ...]) -> DeviceMesh:
    names, sizes = zip(*axes, strict=True)
    return init_device_mesh(device_type, sizes, mesh_dim_names=names)


def slice_of(local: torch.Tensor, info: DataParallelMeshInfo, dim: int) -> torch.Tensor:
    local = local.detach()
    chunks = local.chunk(info.shard.size, dim)
    if info.shard.rank < len(chunks):
        return chunks[info.shard.rank].clone()
    return local.narrow(dim, 0, 0).clone()


def full(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def their_param(case: Case, info: DataParallelMeshInfo, mesh: DeviceMesh) -> Any:  # noqa: ANN401 - the oracle's
    from torch.distributed.fsdp import (  # noqa: PLC0415 - only the oracle may load it
        MixedPrecisionPolicy,
        OffloadPolicy,
    )
    from torch.distributed.fsdp._fully_shard import _fsdp_common  # noqa: PLC0415 - only the oracle may load it
    from torch.distributed.fsdp._fully_shard._fsdp_param import (  # noqa: PLC0415 - only the oracle may load it
        FSDPParam,
        ParamModuleInfo,
    )

    tensor = torch.randn(case.shape, generator=torch.Generator().manual_seed(7)).to(info.device)
    if case.own is not None:
        own_mesh = mesh[tuple(case.own)]
        tensor = distribute_tensor(tensor, own_mesh, list(case.own.values()))
    module = nn.Module()
    module.weight = nn.Parameter(tensor)
    theirs: Any = (
        _fsdp_common.DDPMeshInfo(info.mesh, replicate_mesh_dim=0)
        if case.ddp
        else their_info(mesh if case.spmd else info.mesh, case.spmd)
    )
    return FSDPParam(
        module.weight,
        ParamModuleInfo(module, "weight"),
        theirs,
        None,
        info.device,
        lambda _: Shard(case.dim) if not case.ddp else None,
        MixedPrecisionPolicy(),
        OffloadPolicy(),
    )
