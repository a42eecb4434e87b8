"""Parameters that are DTensors on one mesh of all axes, data-parallel ones included."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, partial

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import (
    DTensor,
    Placement,
    Replicate,
    Shard,
    distribute_module,
    distribute_tensor,
)

from fsdp_core.errors import EngineError
from tests.engine.gang import Gangs, RankContext
from tests.engine.versus import (
    Engine,
    assert_close,
    assert_equal,
    engines,
    full,
    ours,
    train,
)

pytestmark = pytest.mark.ranks


class Net(nn.Module):
    """Up is cut by rows and down by columns over the axis of tensor parallelism."""

    def __init__(self, *, has_norm: bool = True) -> None:
        super().__init__()
        self.up = nn.Linear(6, 10)
        self.down = nn.Linear(10, 4)
        self.norm = nn.LayerNorm(4) if has_norm else nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.norm(self.down(self.up(x).tanh()))
        return result.square().mean()


@dataclass(frozen=True)
class Case:
    """A mesh, and which of its axes are data parallel."""

    axes: dict[str, int]
    shard: str | tuple[str, ...] | None = None
    replicate: str | tuple[str, ...] | None = None


# Names that no other test uses: DTensor remembers specs by equality, and would hand out a
# parameter on an equal mesh that was made earlier, which both engines refuse.
OF_TWO_AXES = [
    Case({"data": 2, "tp": 2}, "data"),
    Case({"tp": 2, "data": 2}, "data"),
    Case({"rep": 2, "tp": 2}, None, "rep"),
]
OF_MORE = [
    Case({"data": 2, "cp": 2, "tp": 1}, ("data", "cp")),
    Case({"rep": 2, "data": 2, "tp": 1}, "data", "rep"),
    Case({"rep": 2, "data": 1, "tp": 2}, "data", "rep"),
    Case({"rep": 1, "data": 2, "cp": 1, "tp": 2}, ("data", "cp"), "rep"),
]


def test_spmd_meshes_train_as_in_the_reference(gangs: Gangs) -> None:
    gangs(4).run(compare, OF_TWO_AXES)


@pytest.mark.system
def test_spmd_meshes_of_three_and_four_axes_train_as_in_the_reference(gangs: Gangs) -> None:
    gangs(4).run(compare, OF_MORE)


def mesh_of(ctx: RankContext, case: Case) -> DeviceMesh:
    return _mesh(ctx.device.type, tuple(case.axes.values()), tuple(case.axes))


@cache
def _mesh(device_type: str, sizes: tuple[int, ...], names: tuple[str, ...]) -> DeviceMesh:
    return init_device_mesh(device_type, sizes, mesh_dim_names=names)


def placements(mesh: DeviceMesh, dim: int | None) -> list[Placement]:
    names = mesh.mesh_dim_names
    assert names is not None
    return [Shard(dim) if name == "tp" and dim is not None else Replicate() for name in names]


def distributed(ctx: RankContext, mesh: DeviceMesh) -> Net:
    torch.manual_seed(8)
    # What DTensor works out for an operator grows with each axis: a norm on four takes it seconds.
    model = Net(has_norm=mesh.ndim < 4).to(ctx.device)
    cuts = {"up.weight": 0, "up.bias": 0, "down.weight": 1}

    def cut(prefix: str, module: nn.Module, mesh: DeviceMesh) -> None:
        for name, param in list(module.named_parameters(recurse=False)):
            spread = distribute_tensor(param, mesh, placements(mesh, cuts.get(f"{prefix}.{name}")))
            module.register_parameter(name, nn.Parameter(spread))

    distribute_module(model, mesh, cut)
    return model


def sharded(ctx: RankContext, engine: Engine, case: Case, mesh: DeviceMesh) -> Net:
    model = distributed(ctx, mesh)
    dims = engine.mesh_dims(shard=case.shard, replicate=case.replicate)
    for unit in (model.up, model):
        engine.shard(unit, mesh=mesh, dp_mesh_dims=dims)
    return model


def loss_on(
    ctx: RankContext, case: Case, mesh: DeviceMesh, model: nn.Module, s: int
) -> torch.Tensor:
    # A batch for each data-parallel rank, the same for those that share its parameters.
    place = mesh.get_coordinate()
    assert place is not None
    mine = [p for name, p in zip(case.axes, place, strict=True) if name != "tp"]
    seed = sum(p * 10**i for i, p in enumerate(mine))
    x = torch.randn(3, 6, generator=torch.Generator().manual_seed(100 * s + seed)).to(ctx.device)
    loss: torch.Tensor = model(DTensor.from_local(x, mesh, placements(mesh, None)))
    assert isinstance(loss, DTensor)
    return loss.full_tensor()


def compare(ctx: RankContext, cases: list[Case]) -> None:
    for case in cases:
        mesh = mesh_of(ctx, case)
        mine, reference = (
            train(
                sharded(ctx, engine, case, mesh),
                partial(loss_on, ctx, case, mesh),
                steps=2,
            )
            for engine in engines()
        )
        assert_equal(mine, reference)


def test_state_dicts_hold_the_whole_model(gangs: Gangs) -> None:
    gangs(4).run(check_state_dicts, OF_TWO_AXES)


@pytest.mark.system
def test_state_dicts_on_three_and_four_axes_hold_the_whole_model(gangs: Gangs) -> None:
    gangs(4).run(check_state_dicts, OF_MORE)


def check_state_dicts(ctx: RankContext, cases: list[Case]) -> None:
    torch.manual_seed(8)
    whole = Net().to(ctx.device).state_dict()
    for case in cases:
        mesh = mesh_of(ctx, case)
        model = sharded(ctx, ours(), case, mesh)
        saved = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        for name, tensor in saved.items():
            assert torch.equal(full(tensor), whole[name]), (case, name)
        before = loss_on(ctx, case, mesh, model, 0)
        with torch.no_grad():
            for param in model.parameters():
                param.zero_()
        model.load_state_dict(saved)
        assert torch.equal(loss_on(ctx, case, mesh, model, 0), before)


def test_sums_pending_over_data_parallel_axes_are_left_to_the_engine(gangs: Gangs) -> None:
    gangs(4).run(check_pending)


def check_pending(ctx: RankContext) -> None:
    case = OF_TWO_AXES[0]
    mesh = mesh_of(ctx, case)
    traces = []
    for engine in engines():
        model = sharded(ctx, engine, case, mesh)

        def loss_of_step(model: nn.Module, step: int) -> torch.Tensor:
            x = torch.randn(4, 6, generator=torch.Generator().manual_seed(step)).to(ctx.device)
            spread = distribute_tensor(x, mesh, [Shard(0), Replicate()])
            loss: torch.Tensor = model(spread)
            assert isinstance(loss, DTensor)
            return loss.full_tensor()

        traces.append(train(model, loss_of_step, steps=2, optimizer=torch.optim.SGD))
    assert_close(*traces)


def test_what_does_not_fit_the_mesh_is_refused(gangs: Gangs) -> None:
    gangs(4).run(check_refusals)


def check_refusals(ctx: RankContext) -> None:
    case = OF_TWO_AXES[0]
    mesh, dims = mesh_of(ctx, case), ours().mesh_dims(shard="data")
    other = init_device_mesh(ctx.device.type, (2, 2), mesh_dim_names=("data", "tp_too"))
    model = distributed(ctx, mesh)
    cut = distributed(ctx, mesh)
    cut.norm.weight = nn.Parameter(
        distribute_tensor(torch.ones(4, device=ctx.device), mesh, [Shard(0), Replicate()])
    )
    cases: list[tuple[type[Exception], str, nn.Module, dict[str, object]]] = [
        (ValueError, "must be DTensors on the full", Net(), {"dp_mesh_dims": dims}),
        (ValueError, "same mesh", model, {"mesh": other, "dp_mesh_dims": dims}),
        (ValueError, r"Expected Replicate\(\) on DP shard dim", cut, {"dp_mesh_dims": dims}),
        (
            NotImplementedError,
            "int is not yet supported with an SPMD mesh",
            model,
            {"dp_mesh_dims": dims, "reshard_after_forward": 1},
        ),
        (
            ValueError,
            "'nope' not found in mesh.mesh_dim_names",
            model,
            {"dp_mesh_dims": ours().mesh_dims(shard="nope")},
        ),
    ]
    for kind, message, module, options in cases:
        with pytest.raises(kind, match=message) as caught:
            ours().shard(module, **{"mesh": mesh, **options})
        assert isinstance(caught.value, EngineError)
    with pytest.raises(ValueError, match="At least one of shard or replicate must be set"):
        ours().mesh_dims()
    # A refusal leaves the module as it was.
    ours().shard(model, mesh=mesh, dp_mesh_dims=dims)
