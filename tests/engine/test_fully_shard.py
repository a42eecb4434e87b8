"""What `fully_shard` leaves behind, and what training does to it."""

from __future__ import annotations

import copy
from typing import cast

import pytest
import torch
from torch import nn
from torch.distributed._composable.contract import _get_registry
from torch.distributed.tensor import DTensor, Shard

from fsdp_core import (
    FSDPModule,
    FSDPState,
    ShardedState,
    TrainingState,
    fully_shard,
    register_fsdp_forward_method,
)
from fsdp_core.runtime import disable_fsdp_module_new_init, get_cls_to_fsdp_cls
from tests.engine.gang import Gangs, RankContext
from tests.engine.models import BLOCKS, WIDTH, Block, Decoder, decoder, loss_of, tokens_of
from tests.engine.sharded import (
    backward_once,
    held_unsharded_bytes,
    local,
    shard_decoder,
    state,
    states,
    unit,
)

pytestmark = pytest.mark.ranks


@pytest.mark.parametrize("world", [1, 3])
def test_parameters_are_dtensors_of_their_slices_at_return(gangs: Gangs, world: int) -> None:
    gangs(world).run(check_slices)


def check_slices(ctx: RankContext) -> None:
    whole = dict(decoder().named_parameters())
    model = shard_decoder(ctx)
    sharded = dict(model.named_parameters())
    assert sharded.keys() == whole.keys()
    for name, param in sharded.items():
        assert isinstance(param, nn.Parameter)
        assert isinstance(param, DTensor)
        assert param.placements == (Shard(0),)
        assert param.shape == whole[name].shape
        assert param.requires_grad == whole[name].requires_grad
        chunks = list(torch.chunk(whole[name].detach(), ctx.world))
        expected = chunks[ctx.rank] if ctx.rank < len(chunks) else whole[name].detach()[:0]
        assert torch.equal(local(param).cpu(), expected), name
        assert torch.equal(param.full_tensor().detach().cpu(), whole[name].detach()), name


def test_class_is_swapped_and_cannot_be_copied(gangs: Gangs) -> None:
    gangs(1).run(check_class)


def check_class(ctx: RankContext) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.ReLU())
    other = nn.Sequential(nn.Linear(2, 2))
    result = fully_shard(model, mesh=ctx.mesh)
    fully_shard(other, mesh=ctx.mesh)
    assert cast("object", result) is model
    assert isinstance(model, FSDPModule)
    assert type(model).__name__ == "FSDPSequential"
    assert type(model).__bases__ == (FSDPModule, nn.Sequential)
    assert type(other) is type(model) is get_cls_to_fsdp_cls()[nn.Sequential]
    assert type(model[:2]) is nn.Sequential
    with disable_fsdp_module_new_init():
        bare = type(model)(nn.ReLU())
    assert "_modules" not in bare.__dict__
    with pytest.raises(AssertionError, match="FSDP does not support deepcopy"):
        copy.deepcopy(model)


def test_what_other_libraries_look_for_is_there(gangs: Gangs) -> None:
    gangs(1).run(check_marks)


def check_marks(ctx: RankContext) -> None:
    model = shard_decoder(ctx)
    found = fully_shard.state(model)
    assert unit(model)._get_fsdp_state() is found
    assert isinstance(found, FSDPState)
    ignoring = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    fully_shard(ignoring, mesh=ctx.mesh, ignored_params=set(ignoring[1].parameters()))
    # Dynamo and DDP ask the modules themselves.
    for module in (*model.modules(), ignoring, ignoring[0]):
        assert vars(module)["_is_fsdp_managed_module"] is True
        assert vars(module)["_fsdp_use_orig_params"] is True
    assert not hasattr(ignoring[1], "_is_fsdp_managed_module")
    # Other composable functions refuse a module that this one has.
    assert "fully_shard" in (_get_registry(model) or {})
    assert not _get_registry(model.blocks)


def test_list_of_modules_is_one_group_of_its_roots(gangs: Gangs) -> None:
    gangs(2).run(check_list)


def check_list(ctx: RankContext) -> None:
    model = decoder()
    first, second, third = model.blocks
    result = fully_shard([first, second, cast("Block", first).norm], mesh=ctx.mesh)
    fully_shard(model, mesh=ctx.mesh)
    assert len(result) == 3
    assert state(first) is state(second)
    assert fully_shard.state(cast("Block", first).norm) is None
    assert fully_shard.state(third) is None
    assert len(state(first).groups) == 1
    assert len(state(first).params) == 2 * len(list(first.parameters()))
    backward_once(ctx, model)
    assert [s.fqn for s in states(model)] == ["", "blocks.0, blocks.1", "blocks.0, blocks.1"]


def test_tied_parameters_stay_one_object(gangs: Gangs) -> None:
    gangs(2).run(check_tied)


def check_tied(ctx: RankContext) -> None:
    model = shard_decoder(ctx)
    assert model.head.weight is model.embed.weight
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    backward_once(ctx, model)
    optimizer.step()
    assert model.head.weight is model.embed.weight
    unit(model).unshard()
    assert model.head.weight is model.embed.weight
    assert not isinstance(model.head.weight, DTensor)


def test_frozen_and_unused_parameters_have_no_gradient(gangs: Gangs) -> None:
    gangs(2).run(check_without_gradient)


def check_without_gradient(ctx: RankContext) -> None:
    model = shard_decoder(ctx)
    backward_once(ctx, model)
    without = {name for name, param in model.named_parameters() if param.grad is None}
    never = {f"blocks.{i}.never" for i in range(BLOCKS)}
    assert without == never | {"norm.bias", "blocks.0.up.bias"}
    # A parameter may thaw between iterations.
    model.norm.bias.requires_grad = True
    backward_once(ctx, model)
    assert model.norm.bias.grad is not None


def test_module_that_did_not_run_is_left_alone(gangs: Gangs) -> None:
    gangs(2).run(check_unused_module)


def check_unused_module(ctx: RankContext) -> None:
    model = nn.ModuleDict({"used": nn.Linear(3, 3), "unused": nn.Linear(3, 3)})

    class Root(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = model

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            result: torch.Tensor = self.parts["used"](x)
            return result

    root = Root()
    for part in root.parts.values():
        fully_shard(part, mesh=ctx.mesh)
    fully_shard(root, mesh=ctx.mesh)
    for step in range(2):
        torch.autograd.backward(root(ctx.batch(step, 2, 3)).sum())
    assert model["used"].weight.grad is not None
    assert model["unused"].weight.grad is None


@pytest.mark.parametrize("reshard", [None, True, False])
def test_forward_ends_resharded_as_asked(gangs: Gangs, *, reshard: bool | None) -> None:
    gangs(2).run(check_reshard, reshard)


def check_reshard(ctx: RankContext, reshard: bool | None) -> None:  # noqa: FBT001 - shipped positionally
    model = shard_decoder(ctx, reshard=reshard)
    loss = loss_of(model, tokens_of(0, ctx.rank).to(ctx.device))
    root, *blocks = states(model)
    kept = [
        group.sharded_state is ShardedState.UNSHARDED for s in [root, *blocks] for group in s.groups
    ]
    assert kept == [reshard is not True] + [reshard is False] * BLOCKS
    torch.autograd.backward(loss)
    assert all(g.sharded_state is ShardedState.SHARDED for s in states(model) for g in s.groups)
    assert all(s.training_state is TrainingState.IDLE for s in states(model))


def test_nothing_whole_is_held_after_backward(gangs: Gangs) -> None:
    gangs(2).run(check_nothing_held)


def check_nothing_held(ctx: RankContext) -> None:
    model = shard_decoder(ctx)
    for step in range(3):
        torch.autograd.backward(loss_of(model, tokens_of(step, ctx.rank).to(ctx.device)))
        assert held_unsharded_bytes(model) == 0
        context = state(model).context
        assert len(context.reduces) == 0
        assert not any(g.is_gathering for s in states(model) for g in s.groups)
    with torch.no_grad():
        model(tokens_of(9, ctx.rank).to(ctx.device))
    unit(model).reshard()
    assert held_unsharded_bytes(model) == 0


def test_forward_before_and_after_inference_mode(gangs: Gangs) -> None:
    gangs(2).run(check_inference_mode)


def check_inference_mode(ctx: RankContext) -> None:
    model, plain = shard_decoder(ctx), decoder().to(ctx.device)
    tokens = tokens_of(0, 0).to(ctx.device)
    with torch.inference_mode():
        assert torch.equal(model(tokens), plain(tokens))
    backward_once(ctx, model)
    assert model.embed.weight.grad is not None


def test_unshard_makes_whole_and_reshard_slices(gangs: Gangs) -> None:
    gangs(2).run(check_unshard)


def check_unshard(ctx: RankContext) -> None:
    plain = decoder().to(ctx.device)
    model = shard_decoder(ctx)
    block = unit(model.blocks[1])
    handle = block.unshard(async_op=True)  # before any forward, on a unit that is no root
    assert handle is not None
    handle.wait()
    handle.wait()
    assert torch.equal(
        cast("torch.Tensor", model.blocks[1].get_parameter("up.weight")),
        plain.blocks[1].get_parameter("up.weight"),
    )
    block.reshard()
    assert isinstance(model.blocks[1].get_parameter("up.weight"), DTensor)
    assert unit(model).unshard() is None
    assert model.embed.weight.shape == plain.embed.weight.shape
    backward_once(ctx, model)  # the root is still found afterwards
    assert state(model).index == 0
    assert [s.fqn for s in states(model)] == ["", *(f"blocks.{i}" for i in range(BLOCKS))]


def test_optimizer_in_backward_by_post_accumulate_hooks(gangs: Gangs) -> None:
    gangs(2).run(check_post_accumulate)


def check_post_accumulate(ctx: RankContext) -> None:
    model = shard_decoder(ctx)
    called: list[torch.Tensor] = []
    model.embed.weight.register_post_accumulate_grad_hook(called.append)  # type: ignore[no-untyped-call]  # PyTorch's
    backward_once(ctx, model)
    assert len(called) == 1
    assert called[0] is model.embed.weight


def test_no_second_gather_of_a_wrong_guess_survives_the_forward(gangs: Gangs) -> None:
    gangs(2).run(check_changing_path)


class Switch(nn.Module):
    """Runs its layers in an order that the caller chooses."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: torch.Tensor, order: list[int]) -> torch.Tensor:
        for index in order:
            x = self.layers[index](x)
        return x


def check_changing_path(ctx: RankContext) -> None:
    torch.manual_seed(1)
    plain = Switch().to(ctx.device)
    torch.manual_seed(1)
    model = Switch().to(ctx.device)
    for layer in model.layers:
        fully_shard(layer, mesh=ctx.mesh)
    fully_shard(model, mesh=ctx.mesh)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (plain, model)]
    for step, order in enumerate([[0, 1, 2, 3], [0, 2], [3, 1, 1], [0, 1, 2, 3], [2]]):
        x = torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(step)).to(ctx.device)
        for each in (plain, model):
            torch.autograd.backward(each(x, order).square().mean())
        assert not any(g.is_gathering for s in states(model) for g in s.groups)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert isinstance(mine, DTensor)
        torch.testing.assert_close(mine.full_tensor(), theirs)


def test_a_wrong_guess_is_not_used_after_an_update(gangs: Gangs) -> None:
    gangs(2).run(check_stale_guess)


@torch.no_grad()
def check_stale_guess(ctx: RankContext) -> None:
    model = Switch().to(ctx.device)
    for layer in model.layers:
        fully_shard(layer, mesh=ctx.mesh)
    fully_shard(model, mesh=ctx.mesh)
    x = torch.ones(1, WIDTH, device=ctx.device)
    model(x, [0, 1])
    model(x, [0])  # predicts 1, which does not run
    for param in model.parameters():
        param.zero_()
    assert not model(x, [0, 1]).any()


def test_reshard_drops_what_was_gathered_before_an_update(gangs: Gangs) -> None:
    gangs(2).run(check_gathered_before_update)


@torch.no_grad()
def check_gathered_before_update(ctx: RankContext) -> None:
    model = nn.Linear(WIDTH, WIDTH).to(ctx.device)
    fully_shard(model, mesh=ctx.mesh)
    unit(model).unshard(async_op=True)
    unit(model).reshard()
    for param in model.parameters():
        param.zero_()
    assert not model(torch.ones(1, WIDTH, device=ctx.device)).any()


def test_module_runs_twice_before_backward(gangs: Gangs) -> None:
    gangs(2).run(check_two_forwards)


def check_two_forwards(ctx: RankContext) -> None:
    model, plain = shard_decoder(ctx), decoder().to(ctx.device)
    first, second = (tokens_of(step, 0).to(ctx.device) for step in range(2))
    for each in (model, plain):
        torch.autograd.backward(loss_of(each, first) + loss_of(each, second))
    for (name, mine), theirs in zip(model.named_parameters(), plain.parameters(), strict=True):
        if theirs.grad is not None:
            assert isinstance(mine.grad, DTensor), name
            torch.testing.assert_close(mine.grad.full_tensor(), theirs.grad)
    assert held_unsharded_bytes(model) == 0


def test_ignored_parameters_are_left_alone(gangs: Gangs) -> None:
    gangs(2).run(check_ignored)


def check_ignored(ctx: RankContext) -> None:
    model = Decoder().to(ctx.device)  # what is ignored is not moved either
    ignored = {model.get_parameter("embed.weight")}
    fully_shard(model, mesh=ctx.mesh, ignored_params=ignored)
    assert not isinstance(model.embed.weight, DTensor)
    assert isinstance(model.norm.weight, DTensor)
    backward_once(ctx, model)
    assert isinstance(model.embed.weight.grad, torch.Tensor)


class Scorer(nn.Linear):
    """Computes with its parameters in another method than forward."""

    def score(self, x: torch.Tensor, *, scale: float) -> torch.Tensor:
        return scale * nn.functional.linear(x, self.weight, self.bias).square()


def test_a_registered_method_trains_as_forward_does(gangs: Gangs) -> None:
    gangs(2).run(check_registered_method)


def check_registered_method(ctx: RankContext) -> None:
    torch.manual_seed(2)
    plain = Scorer(3, 5).to(ctx.device)
    torch.manual_seed(2)
    model = Scorer(3, 5).to(ctx.device)
    register_fsdp_forward_method(plain, "score")  # not sharded: left as it is
    fully_shard(model, mesh=ctx.mesh)
    register_fsdp_forward_method(model, "score")
    x = torch.ones(2, 3, device=ctx.device)
    for each in (plain, model):
        torch.autograd.backward(each.score(x, scale=2.0).sum())
    assert plain.weight.grad is not None
    assert isinstance(model.weight.grad, DTensor)
    torch.testing.assert_close(model.weight.grad.full_tensor(), plain.weight.grad)
    assert held_unsharded_bytes(model) == 0
