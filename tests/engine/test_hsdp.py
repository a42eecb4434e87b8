"""Sharded over one axis, replicated over another."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from fsdp_core import observe
from fsdp_core.runtime import NullObserver
from tests.engine.gang import Gangs, RankContext
from tests.engine.models import Decoder, Recompute, decoder, loss_of, tokens_of
from tests.engine.versus import (
    Engine,
    Trace,
    assert_equal,
    assert_same_full,
    assert_same_tensor,
    engines,
    groups_of,
    ours,
    train,
)
from tests.engine.ways.groups import head_alone_after_a_backward_without_reduction
from tests.engine.ways.run import Run

pytestmark = pytest.mark.ranks


def grid(ctx: RankContext, *sizes: int) -> DeviceMesh:
    return init_device_mesh(ctx.device.type, sizes, mesh_dim_names=("dp_replicate", "dp_shard"))


def sharded(
    ctx: RankContext,
    engine: Engine,
    mesh: DeviceMesh,
    *,
    recompute: Recompute = "no",
    **options: object,
) -> Decoder:
    model = decoder(recompute=recompute).to(ctx.device)
    for unit in (*model.blocks, model):
        engine.shard(unit, mesh=mesh, **options)
    return model


def on_own_tokens(ctx: RankContext) -> Any:  # noqa: ANN401 - a function of two
    return lambda model, step: loss_of(model, tokens_of(step, ctx.rank).to(ctx.device))


def test_a_grid_trains_as_in_the_reference(gangs: Gangs) -> None:
    gangs(4).run(compare_grids)


def compare_grids(ctx: RankContext) -> None:
    for sizes in ((2, 2), (4, 1), (1, 4)):
        mesh = grid(ctx, *sizes)
        assert_equal(
            *(train(sharded(ctx, e, mesh), on_own_tokens(ctx), steps=2) for e in engines())
        )


def test_a_grid_in_mixed_precision_trains_as_in_the_reference(gangs: Gangs) -> None:
    gangs(4).run(compare_precision)


def compare_precision(ctx: RankContext) -> None:
    mesh = grid(ctx, 2, 2)
    for dtypes in ((torch.bfloat16, torch.float32), (torch.bfloat16, None), (None, torch.float16)):
        traces = []
        for engine in engines():
            policy = engine.precision(*dtypes)
            model = sharded(ctx, engine, mesh, recompute="block", mp_policy=policy)
            traces.append(train(model, on_own_tokens(ctx), steps=2))
        assert_equal(*traces)


def test_partial_sums_wait_for_the_all_reduce_as_in_the_reference(gangs: Gangs) -> None:
    gangs(4).run(compare_partial)


def set_all_reduce(engine: Engine, model: Any, *, on: bool) -> None:  # noqa: ANN401 - a class of either engine
    if engine.is_ours:
        for group in groups_of(model):
            group.options.all_reduce_grads = on
    else:
        model.set_requires_all_reduce(on)


def compare_partial(ctx: RankContext) -> None:
    mesh = grid(ctx, 2, 2)
    for dtypes in ((None, None), (torch.bfloat16, torch.float32)):
        traces: list[Trace] = []
        for engine in engines():
            model = sharded(ctx, engine, mesh, mp_policy=engine.precision(*dtypes))

            def before(model: Any, micro: int, engine: Engine = engine) -> None:  # noqa: ANN401 - a class of either engine
                set_all_reduce(engine, model, on=micro == 3)
                # Whole gradients first, then partial sums, then the replicas' mean.
                model.set_requires_gradient_sync(micro > 0)
                set_all_reduce(engine, model, on=micro == 3)
                model.set_is_last_backward(micro == 3)

            traces.append(
                train(model, on_own_tokens(ctx), steps=2, microbatches=4, before_backward=before)
            )
        assert_equal(*traces)
        assert any(grad is not None for grad in traces[0].grads[0].values())


def test_no_gradient_is_seen_before_the_replicas_agree(gangs: Gangs) -> None:
    gangs(4).run(check_no_gradient_yet)


def check_no_gradient_yet(ctx: RankContext) -> None:
    model = sharded(ctx, ours(), grid(ctx, 2, 2))
    set_all_reduce(ours(), model, on=False)
    torch.autograd.backward(on_own_tokens(ctx)(model, 0))
    assert all(param.grad is None for param in model.parameters())
    set_all_reduce(ours(), model, on=True)
    torch.autograd.backward(on_own_tokens(ctx)(model, 1))
    plain = decoder().to(ctx.device)
    for step in (0, 1):
        tokens = [tokens_of(step, rank).to(ctx.device) for rank in range(ctx.world)]
        losses = [loss_of(plain, each) for each in tokens]
        torch.autograd.backward(torch.stack(losses).mean())
    assert_same_full(model, plain, rtol=1e-4, atol=1e-6)


class Branches(nn.Module):
    """Two dtypes, and a layer for even and one for odd ranks, within one unit."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(5, 5) for _ in range(3))
        self.low = nn.Linear(5, 3).to(torch.bfloat16)

    def forward(self, x: torch.Tensor, chosen: int) -> torch.Tensor:
        hidden = self.layers[chosen](x).tanh()
        result: torch.Tensor = self.low(hidden.to(torch.bfloat16)).float().square().mean()
        return result


def branches(ctx: RankContext) -> Branches:
    torch.manual_seed(4)
    return Branches().to(ctx.device)


def test_replicas_that_use_different_parameters_of_two_dtypes_agree(gangs: Gangs) -> None:
    gangs(4).run(check_branches)


def check_branches(ctx: RankContext) -> None:
    for on_at in ((True, True), (False, True)):
        model, plain = branches(ctx), branches(ctx)
        ours().shard(model, mesh=grid(ctx, 2, 2))
        for param in model.parameters():
            assert isinstance(param, DTensor)
            assert param.placements == (Replicate(), Shard(0))
        # Replica 0 runs layer 0, replica 1 layer 1; nobody runs layer 2.
        for step, on in enumerate(on_at):
            set_all_reduce(ours(), model, on=on)
            torch.autograd.backward(model(ctx.batch(step, 2, 5), ctx.rank // 2))
            for rank in range(ctx.world):
                other = RankContext(rank, ctx.world, ctx.device, ctx.mesh)
                loss = plain(other.batch(step, 2, 5), rank // 2) / ctx.world
                torch.autograd.backward(loss)
        assert model.layers[2].weight.grad is None
        assert_same_full(model, plain, rtol=2e-2, atol=2e-3)


class Tied(nn.Module):
    """The head has the embedding's weight, and is a unit of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(8, 6)
        self.head = nn.Linear(6, 8, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor, *, with_head: bool) -> torch.Tensor:
        x = self.embedding(tokens)
        result: torch.Tensor = self.head(x) if with_head else x
        return result.square().sum()


@pytest.mark.parametrize("owner", ["embedding", "head"])
def test_sums_of_a_parameter_that_units_share_wait_for_the_all_reduce(
    gangs: Gangs, owner: str
) -> None:
    gangs(2).run(check_tied, owner)


def check_tied(ctx: RankContext, owner: str) -> None:
    torch.manual_seed(3)
    model, plain = Tied().to(ctx.device), Tied().to(ctx.device)
    plain.load_state_dict(model.state_dict())
    mesh = grid(ctx, 2, 1)
    borrower = "head" if owner == "embedding" else "embedding"
    for unit in (model.get_submodule(owner), model.get_submodule(borrower), model):
        ours().shard(unit, mesh=mesh)
    for micro in range(3):
        set_all_reduce(ours(), model, on=micro == 2)
        with_head = micro < 2  # so the last backward does not reach one of the units
        tokens = torch.arange(4, device=ctx.device) + micro
        torch.autograd.backward(model(tokens + ctx.rank, with_head=with_head))
        for rank in range(2):
            torch.autograd.backward(plain(tokens + rank, with_head=with_head) / 2)
    assert_same_full(model, plain, rtol=1e-4, atol=1e-5)


def test_sums_that_wait_are_averaged_though_the_last_backward_skips_their_unit(
    gangs: Gangs,
) -> None:
    gangs(2).run(check_skipped_at_last)


class TwoLayers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, names: tuple[str, ...]) -> torch.Tensor:
        return torch.stack([self.get_submodule(name)(x).square().sum() for name in names]).sum()


def test_sums_that_wait_are_averaged_though_the_last_backward_is_of_the_head_alone(
    gangs: Gangs,
) -> None:
    gangs(2).run(check_head_alone_at_last)


def check_head_alone_at_last(ctx: RankContext) -> None:
    mesh = grid(ctx, 2, 1)
    found = Run(ctx, lambda module, **_: ours().shard(module, mesh=mesh)), Run(ctx, None)
    for run in found:
        head_alone_after_a_backward_without_reduction(run, "set_requires_all_reduce")
    for mine, plain in zip(*(run.grads for run in found), strict=True):
        for name, grad in mine.items():
            assert_same_tensor(name, grad, plain[name], 1e-5, 1e-5)


def check_skipped_at_last(ctx: RankContext) -> None:
    torch.manual_seed(3)
    model, plain = TwoLayers().to(ctx.device), TwoLayers().to(ctx.device)
    plain.load_state_dict(model.state_dict())
    mesh = grid(ctx, 2, 1)
    for unit in (model.first, model.second, model):
        ours().shard(unit, mesh=mesh)
    for micro, names in enumerate([("first", "second"), ("first",)]):
        set_all_reduce(ours(), model, on=micro == 1)
        torch.autograd.backward(model(ctx.batch(micro, 2, 4), names))
        for rank in range(2):
            other = RankContext(rank, 2, ctx.device, ctx.mesh)
            torch.autograd.backward(plain(other.batch(micro, 2, 4), names) / 2)
    assert_same_full(model, plain, rtol=1e-4, atol=1e-5)


def test_integer_reshard_within_a_grid_trains_as_in_the_reference(gangs: Gangs) -> None:
    gangs(4).run(compare_integer_reshard)


def compare_integer_reshard(ctx: RankContext) -> None:
    mesh = grid(ctx, 1, 4)
    traces = []
    for engine in engines():
        model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(3))).to(ctx.device)
        torch.manual_seed(1)
        for param in model.parameters():
            nn.init.normal_(param)
        for unit in (*model, model):
            engine.shard(unit, mesh=mesh, reshard_after_forward=2)
        traces.append(train(model, lambda m, s: m(ctx.batch(s, 2, 8)).square().mean(), steps=2))
    assert_equal(*traces)


class Board(NullObserver):
    def __init__(self) -> None:
        self.events: list[tuple[str, str]] = []

    def on_issue(self, group: str, sequence: int) -> None:
        del sequence
        self.events.append(("issue", group))

    def on_complete(self, group: str, sequence: int) -> None:
        del sequence
        self.events.append(("complete", group))


def test_backward_goes_on_while_replicas_average(cpu_gangs: Gangs) -> None:
    """Elsewhere all collectives are in the device's queues, and end when it says so."""
    cpu_gangs(4).run(check_overlap)


def check_overlap(ctx: RankContext) -> None:
    board = Board()
    model = sharded(ctx, ours(), grid(ctx, 2, 2))
    observe(model, board)
    for step in range(2):
        board.events.clear()
        torch.autograd.backward(on_own_tokens(ctx)(model, step))
    averages = [place for place, each in enumerate(board.events) if each[1] == "dp_replicate"]
    issues, ends = averages[::2], averages[1::2]
    assert [board.events[place][0] for place in issues] == ["issue"] * len(issues)
    assert len(issues) == len(ends) == len(model.blocks) + 1
    # Between the two of all but the last, collectives of the next units are started.
    for began, ended in list(zip(issues, ends, strict=True))[:-1]:
        assert ("issue", "dp_shard") in board.events[began:ended]
