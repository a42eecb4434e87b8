"""Replicated only: every rank holds whole parameters, and gradients are averaged."""

from __future__ import annotations

from functools import cache
from typing import cast

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, distribute_module

from fsdp_core import FSDPModule, ShardedState
from fsdp_core.comm import DDPMeshInfo
from tests.engine.gang import Gangs, RankContext
from tests.engine.versus import (
    Engine,
    assert_equal,
    assert_same_full,
    engines,
    full,
    groups_of,
    local,
    ours,
    train,
)

pytestmark = pytest.mark.ranks


class Net(nn.Module):
    """Two layers, one parameter frozen, one that only every second batch uses."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(5, 7)
        self.down = nn.Linear(7, 3)
        self.frozen = nn.Parameter(torch.randn(7), requires_grad=False)
        self.sometimes = nn.Parameter(torch.randn(3, 1))

    def forward(self, x: torch.Tensor, *, use_all: bool = True) -> torch.Tensor:
        hidden = self.down(self.up(x).tanh() + self.frozen)
        result: torch.Tensor = hidden @ self.sometimes if use_all else hidden
        return result.square().mean()


@cache
def all_ranks(device_type: str, world: int) -> DeviceMesh:
    # One for all tests: DTensor remembers specs by equality, and an equal mesh is refused.
    return init_device_mesh(device_type, (world,), mesh_dim_names=("copies",))


def replicated(
    ctx: RankContext, engine: Engine, mesh: DeviceMesh, *, seed: int = 6, **options: object
) -> Net:
    torch.manual_seed(seed)
    model = Net().to(ctx.device)
    distribute_module(model, mesh)
    dims = engine.mesh_dims(replicate=mesh.mesh_dim_names)
    for unit in (model.up, model):
        engine.shard(unit, mesh=mesh, dp_mesh_dims=dims, **options)
    return model


def loss_on(ctx: RankContext, model: nn.Module, step: int, *, use_all: bool = True) -> torch.Tensor:
    # Each rank's own batch, as if it were everybody's: the engine averages, not DTensor.
    mesh = cast("DTensor", next(model.parameters())).device_mesh
    x = DTensor.from_local(ctx.batch(step, 4, 5), mesh, [Replicate()] * mesh.ndim)
    loss = model(x, use_all=use_all)
    assert isinstance(loss, DTensor)
    return loss.to_local()


@pytest.mark.parametrize("world", [1, 2, 4])
def test_replicas_train_as_in_the_reference(gangs: Gangs, world: int) -> None:
    gangs(world).run(compare)


def compare(ctx: RankContext) -> None:
    mesh = all_ranks(ctx.device.type, ctx.world)
    for dtypes in ((None, None), (torch.bfloat16, torch.float32)):
        traces = [
            train(
                replicated(ctx, engine, mesh, mp_policy=engine.precision(*dtypes)),
                lambda model, step: loss_on(ctx, model, step),
                steps=2,
                microbatches=2,
                before_backward=lambda model, micro: model.set_requires_gradient_sync(micro == 1),
            )
            for engine in engines()
        ]
        assert_equal(*traces)


def test_replicas_train_as_one_process_does(gangs: Gangs) -> None:
    gangs(2).run(check_one_process)


def check_one_process(ctx: RankContext) -> None:
    mesh = all_ranks(ctx.device.type, ctx.world)
    model = replicated(ctx, ours(), mesh)
    torch.manual_seed(6)
    plain = Net().to(ctx.device)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (model, plain)]
    for step in range(3):
        for optimizer in optimizers:
            optimizer.zero_grad()
        # Only rank 0 uses all, and in the last step nobody does.
        torch.autograd.backward(loss_on(ctx, model, step, use_all=ctx.rank == 0 and step < 2))
        for rank in range(ctx.world):
            x = RankContext(rank, ctx.world, ctx.device, ctx.mesh).batch(step, 4, 5)
            loss = plain(x, use_all=rank == 0 and step < 2) / ctx.world
            torch.autograd.backward(loss)
        assert (model.sometimes.grad is None) == (step == 2)
        assert_same_full(model, plain, rtol=1e-4, atol=1e-6)
        for optimizer in optimizers:
            optimizer.step()


def test_every_rank_holds_whole_parameters(gangs: Gangs) -> None:
    gangs(2).run(check_held)


def check_held(ctx: RankContext) -> None:
    mesh = all_ranks(ctx.device.type, ctx.world)
    model = replicated(ctx, ours(), mesh, reshard_after_forward=True)
    for group in groups_of(model):
        assert isinstance(group.info, DDPMeshInfo)
    loss = loss_on(ctx, model, 0)
    assert all(group.sharded_state is ShardedState.SHARDED for group in groups_of(model))
    torch.autograd.backward(loss)
    saved = model.state_dict()
    for name, tensor in saved.items():
        assert isinstance(tensor, DTensor)
        assert tensor.placements == (Replicate(),)
        assert local(tensor).shape == tensor.shape, name
    other = replicated(ctx, ours(), mesh, seed=7)
    assert not torch.equal(full(other.up.weight), full(saved["up.weight"]))
    other.load_state_dict(saved)
    assert torch.equal(loss_on(ctx, other, 1), loss_on(ctx, model, 1))
    assert isinstance(other, FSDPModule)
