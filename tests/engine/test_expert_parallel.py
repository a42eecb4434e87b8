"""Some parameters over another mesh than the rest of their unit: experts."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from fsdp_core.errors import EngineError
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

EXPERTS, WIDTH = 4, 6


class Experts(nn.Module):
    """Each rank of the axis `ep` holds and runs its own experts; outputs are summed over it."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(EXPERTS, WIDTH, 8))
        self.down = nn.Parameter(torch.randn(EXPERTS, 8, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        up, down = local_of(self.up), local_of(self.down)
        hidden = torch.einsum("bw,ewh->ebh", x, up).tanh()
        return torch.einsum("ebh,ehw->bw", hidden, down)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.experts = Experts()
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = x + self.out(self.experts(self.norm(x)))
        return result


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        result: torch.Tensor = self.head(x)
        return result.square().mean()


def local_of(param: torch.Tensor) -> torch.Tensor:
    return param.to_local() if isinstance(param, DTensor) else param


def net(*, seed: int = 13) -> Net:
    torch.manual_seed(seed)
    return Net()


@cache
def meshes(device_type: str) -> tuple[DeviceMesh, DeviceMesh]:
    """All ranks for the dense parameters; for experts, (shard, split) of the same ranks."""
    sparse = init_device_mesh(device_type, (2, 2), mesh_dim_names=("efsdp", "ep"))
    return init_device_mesh(device_type, (4,), mesh_dim_names=("fsdp",)), sparse


def placement_of(engine: Engine, model: nn.Module, dense: Any, sparse: Any) -> Callable[..., Any]:  # noqa: ANN401 - infos of either engine
    experts = {id(p) for m in model.modules() if isinstance(m, Experts) for p in m.parameters()}

    def choose(param: nn.Parameter) -> object:
        if id(param) in experts:
            return engine.placement_result(Shard(1), sparse)
        return engine.placement_result(Shard(0), dense)

    return choose


def sharded(
    ctx: RankContext, engine: Engine, *, split: bool, seed: int = 13, **options: object
) -> Net:
    dense, sparse = meshes(ctx.device.type)
    model = net(seed=seed).to(ctx.device)
    if split:
        for block in model.blocks:
            experts = block.get_submodule("experts")
            for name, param in list(experts.named_parameters()):
                spread = distribute_tensor(param, sparse["ep"], [Shard(0)])
                experts.register_parameter(name, nn.Parameter(spread))
    infos = [
        engine.fsdp_mesh_info(mesh=mesh, shard_mesh_dim=0) for mesh in (dense, sparse["efsdp"])
    ]
    choose = placement_of(engine, model, *infos)
    for unit in (*model.blocks, model):
        engine.shard(unit, mesh=dense, shard_placement_fn=choose, **options)
    return model


def test_experts_over_their_own_mesh_train_as_in_the_reference(gangs: Gangs) -> None:
    gangs(4).run(compare)


def compare(ctx: RankContext) -> None:
    for split in (False, True):
        for dtype in (None, torch.bfloat16):
            traces = []
            for engine in engines():
                policy = engine.precision(param_dtype=dtype, reduce_dtype=torch.float32)
                model = sharded(ctx, engine, split=split, mp_policy=policy)
                traces.append(
                    train(
                        model,
                        lambda m, step: m(ctx.batch(step, 3, WIDTH)),
                        steps=2,
                        microbatches=2,
                        before_backward=lambda m, micro: m.set_requires_gradient_sync(micro == 1),
                    )
                )
            assert_equal(*traces)


def test_a_unit_has_a_group_for_each_mesh(gangs: Gangs) -> None:
    gangs(4).run(check_groups)


def check_groups(ctx: RankContext) -> None:
    model = sharded(ctx, ours(), split=True)
    for block in model.blocks:
        groups = list(groups_of(block, recurse=False))
        assert len(groups) == 2
        sizes = sorted(group.info.shard.size for group in groups)
        assert sizes == [2, 4]
    (of_head,) = groups_of(model, recurse=False)
    assert of_head.info.shard.size == ctx.world
    up = model.blocks[0].get_parameter("experts.up")
    assert isinstance(up, DTensor)
    assert up.device_mesh.mesh_dim_names == ("efsdp", "ep")
    assert local(up).shape == (2, 3, 8)
    for name, whole in net().to(ctx.device).state_dict().items():
        assert torch.equal(full(model.state_dict()[name]), whole), name
    other = sharded(ctx, ours(), split=True, seed=1)
    other.load_state_dict(model.state_dict())
    x = ctx.batch(0, 3, WIDTH)
    assert torch.equal(model(x), other(x))


def test_meshes_without_split_experts_train_as_one_process(gangs: Gangs) -> None:
    gangs(4).run(compare_with_one_process)


def compare_with_one_process(ctx: RankContext) -> None:
    # Experts are cut over pairs, and a pair sees half of the batches: replicas of their own.
    dense, sparse = meshes(ctx.device.type)
    model, whole = net().to(ctx.device), net().to(ctx.device)
    engine = ours()
    infos = (
        engine.fsdp_mesh_info(mesh=dense, shard_mesh_dim=0),
        engine.hsdp_mesh_info(mesh=sparse, shard_mesh_dim=1, replicate_mesh_dim=0),
    )
    choose = placement_of(engine, model, *infos)
    for unit in (*model.blocks, model):
        engine.shard(unit, mesh=dense, shard_placement_fn=choose)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (model, whole)]
    for step in range(2):
        torch.autograd.backward(model(ctx.batch(step, 3, WIDTH)))
        for rank in range(ctx.world):
            x = RankContext(rank, ctx.world, ctx.device, ctx.mesh).batch(step, 3, WIDTH)
            torch.autograd.backward(whole(x) / ctx.world)
        assert_same_full(model, whole, rtol=1e-4, atol=1e-6)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


def test_infos_that_cannot_be_grouped_are_refused(gangs: Gangs) -> None:
    gangs(4).run(check_refusals)


def check_refusals(ctx: RankContext) -> None:
    dense, sparse = meshes(ctx.device.type)
    engine = ours()

    def fresh(_: nn.Parameter) -> object:
        return engine.placement_result(None, engine.fsdp_mesh_info(mesh=dense, shard_mesh_dim=0))

    with pytest.raises(ValueError, match="must use the same FSDPMeshInfo object") as caught:
        engine.shard(nn.Linear(4, 4), mesh=sparse, shard_placement_fn=fresh)
    assert isinstance(caught.value, EngineError)
    with pytest.raises(ValueError, match="Invalid shard_placement_fn result"):
        engine.shard(
            nn.Linear(4, 4),
            mesh=dense,
            shard_placement_fn=lambda _: engine.placement_result(Shard(0), dense),
        )
