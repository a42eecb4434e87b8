"""Slices for a smaller mesh, kept between forward and backward."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.utils.checkpoint import checkpoint

from fsdp_core import ShardedState
from fsdp_core.errors import EngineError
from tests.engine.gang import Gangs, RankContext
from tests.engine.models import decoder, loss_of, tokens_of
from tests.engine.sharded import held_unsharded_bytes
from tests.engine.versus import (
    Engine,
    assert_close,
    assert_equal,
    assert_same_full,
    engines,
    groups_of,
    local,
    ours,
    train,
)

pytestmark = pytest.mark.ranks


class Even(nn.Module):
    """Sizes that the reference can cut: their number of elements is even over all ranks."""

    def __init__(self, *, recompute: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.recompute = recompute

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.recompute else layer(x)
            x = x.tanh()
        return x.square().mean()


def even(ctx: RankContext, engine: Engine, *, recompute: bool = False, **options: object) -> Even:
    torch.manual_seed(11)
    model = Even(recompute=recompute).to(ctx.device)
    for unit in (*model.layers, model):
        engine.shard(unit, mesh=ctx.mesh, reshard_after_forward=2, **options)
    return model


def test_integer_reshard_trains_as_in_the_reference(gangs: Gangs) -> None:
    gangs(4).run(compare)


def compare(ctx: RankContext) -> None:
    for recompute in (False, True):
        for dtype in (None, torch.bfloat16):
            traces = []
            for engine in engines():
                policy = engine.precision(param_dtype=dtype, reduce_dtype=torch.float32)
                model = even(ctx, engine, recompute=recompute, mp_policy=policy)
                traces.append(
                    train(
                        model,
                        lambda m, step: m(ctx.batch(step, 2, 8)),
                        microbatches=2,
                        before_backward=lambda m, micro: m.set_requires_gradient_sync(micro == 1),
                    )
                )
            assert_equal(*traces)


def test_ranks_with_different_numbers_of_groups_share_a_smaller_mesh(gangs: Gangs) -> None:
    """PyTorch names groups that their members alone make by how many groups a rank has."""
    gangs(4).run(compare_on_uneven_ranks)


def compare_on_uneven_ranks(ctx: RankContext) -> None:
    dist.new_group([0])
    # A mesh of its own, for which the groups of a smaller one are yet to be made.
    mesh = DeviceMesh.from_group(dist.new_group(range(4)), ctx.device.type)
    compare(replace(ctx, mesh=mesh))


def test_uneven_sizes_train_as_with_whole_gathers(gangs: Gangs) -> None:
    gangs(4).run(compare_uneven)


def compare_uneven(ctx: RankContext) -> None:
    traces = []
    for reshard in (2, True):
        model = decoder(recompute="block").to(ctx.device)
        for unit in (*model.blocks, model):
            ours().shard(
                unit,
                mesh=ctx.mesh,
                reshard_after_forward=reshard,
                shard_placement_fn=lambda p: Shard(p.ndim - 1),
            )
        traces.append(train(model, lambda m, s: loss_of(m, tokens_of(s, ctx.rank).to(ctx.device))))
    assert_close(*traces, rtol=0.0, atol=0.0)


def test_between_forward_and_backward_slices_of_the_smaller_mesh_hang(gangs: Gangs) -> None:
    gangs(4).run(check_slices)


def check_slices(ctx: RankContext) -> None:
    torch.manual_seed(12)
    plain = nn.Linear(3, 5).to(ctx.device)
    model = nn.Sequential(nn.Linear(3, 5)).to(ctx.device)
    model[0].load_state_dict(plain.state_dict())
    ours().shard(model[0], mesh=ctx.mesh, reshard_after_forward=2)
    ours().shard(model, mesh=ctx.mesh)
    loss = model(torch.ones(1, 3, device=ctx.device)).sum()
    assert held_states(model) == [ShardedState.SHARDED_POST_FORWARD]
    assert held_unsharded_bytes(model) == 0
    for name, param in model[0].named_parameters():
        whole = plain.get_parameter(name).detach()
        assert isinstance(param, DTensor)
        assert isinstance(param, nn.Parameter)
        assert param.placements == (Replicate(), Shard(0))
        assert param.device_mesh.shape == (2, 2)
        assert param.shape == whole.shape
        assert torch.equal(local(param), torch.chunk(whole, 2)[ctx.rank % 2])
        assert torch.equal(param.full_tensor().detach(), whole)
    saved = model.state_dict()  # hangs the training slices again
    assert held_states(model) == [ShardedState.SHARDED]
    assert saved["0.weight"].placements == (Shard(0),)
    torch.autograd.backward(loss)
    assert held_states(model) == [ShardedState.SHARDED]
    weight = model[0].weight
    assert isinstance(weight, DTensor)
    assert isinstance(weight.grad, DTensor)
    assert torch.equal(weight.grad.full_tensor(), torch.ones(5, 3, device=ctx.device))


def held_states(model: nn.Module) -> list[ShardedState]:
    return [group.sharded_state for group in groups_of(model)]


def test_evaluation_without_gradients_uses_the_updated_slices(gangs: Gangs) -> None:
    gangs(4).run(check_evaluation)


def check_evaluation(ctx: RankContext) -> None:
    model = even(ctx, ours())
    x = torch.ones(1, 8, device=ctx.device)
    with torch.no_grad():
        assert model(x) != 0
        model.reshard()  # type: ignore[operator]  # FSDPModule's
        for layer in model.layers:
            layer.reshard()  # type: ignore[operator]  # FSDPModule's
        for param in model.parameters():
            assert isinstance(param, DTensor)
            assert param.placements == (Shard(0),)
            param.zero_()
        assert model(x) == 0


def test_sizes_that_do_not_divide_are_refused(gangs: Gangs) -> None:
    gangs(4).run(check_refusals)


def check_refusals(ctx: RankContext) -> None:
    for size in (3, 0, -2, 8):
        for engine in engines():
            with pytest.raises(ValueError, match="factor of 4, not") as caught:
                engine.shard(nn.Linear(2, 2), mesh=ctx.mesh, reshard_after_forward=size)
            assert not engine.is_ours or isinstance(caught.value, EngineError)
    for wrong in (2.0, "2"):
        with pytest.raises(ValueError, match="reshard_after_forward should be a bool or an int"):
            ours().shard(nn.Linear(2, 2), mesh=ctx.mesh, reshard_after_forward=wrong)
    with pytest.warns(UserWarning, match="reshard_after_forward=1"):
        ours().shard(nn.Linear(2, 2), mesh=ctx.mesh, reshard_after_forward=1)


class Within(nn.Module):
    """Goes backward through its first layer while the two others, one unit, are in forward."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(13)
        self.first, self.second, self.third = (nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.second(self.first(x).tanh())
        torch.autograd.backward(self.first(x.detach()).square().mean())
        result: torch.Tensor = self.third(x.tanh()).square().mean()
        return result


def test_a_gather_of_slices_that_are_given_up_is_dropped(gangs: Gangs) -> None:
    gangs(4).run(check_given_up)


def check_given_up(ctx: RankContext) -> None:
    """The second forward gathers the two layers ahead, and then finds that it must do so again."""
    plain, model = (Within().to(ctx.device) for _ in range(2))
    for unit in (model.first, [model.second, model.third], model):
        ours().shard(unit, mesh=ctx.mesh, reshard_after_forward=2)
    x = torch.ones(2, 8, device=ctx.device)
    for _ in range(2):
        for each in (plain, model):
            torch.autograd.backward(each(x) + each(2 * x))
        assert_same_full(model, plain, rtol=1e-5, atol=1e-6)
    assert held_unsharded_bytes(model) == 0
