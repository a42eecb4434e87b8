"""Slices, gradients and optimizer state on the host."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fsdp_core import CPUOffloadPolicy
from fsdp_core.errors import OffloadError
from tests.engine.gang import Gangs, RankContext
from tests.engine.models import Decoder, decoder, loss_of, tokens_of
from tests.engine.versus import (
    Engine,
    assert_equal,
    engines,
    local,
    ours,
    theirs,
    train,
)

pytestmark = pytest.mark.ranks


def sharded(
    ctx: RankContext, engine: Engine, *, pin_memory: bool = False, **options: object
) -> Decoder:
    model = decoder()
    for unit in (*model.blocks, model):
        engine.shard(
            unit, mesh=ctx.mesh, offload_policy=engine.offload(pin_memory=pin_memory), **options
        )
    return model


def loss_on(ctx: RankContext, model: nn.Module, step: int) -> torch.Tensor:
    return loss_of(model, tokens_of(step, ctx.rank).to(ctx.device))


def test_offloaded_slices_train_as_in_the_reference(gangs: Gangs) -> None:
    gangs(2).run(compare)


def compare(ctx: RankContext) -> None:
    for dtype in (None, torch.bfloat16):
        for sync in (True, False):
            traces = []
            for engine in engines():
                policy = engine.precision(param_dtype=dtype, reduce_dtype=torch.float32)
                model = sharded(ctx, engine, mp_policy=policy)
                traces.append(
                    train(
                        model,
                        lambda m, step: loss_on(ctx, m, step),
                        steps=2,
                        microbatches=2,
                        before_backward=lambda m, micro, s=sync: m.set_requires_gradient_sync(
                            s or micro == 1
                        ),
                    )
                )
            assert_equal(*traces)
            for param in model.parameters():
                assert local(param).device.type == "cpu"


def test_the_default_policy_serves_a_machine_without_an_accelerator(gangs: Gangs) -> None:
    gangs(2).run(check_default)


def check_default(ctx: RankContext) -> None:
    assert CPUOffloadPolicy().pin_memory
    mine = train(
        sharded(ctx, ours(agree=False), pin_memory=True), lambda m, s: loss_on(ctx, m, s), steps=2
    )
    reference = train(sharded(ctx, theirs()), lambda m, s: loss_on(ctx, m, s), steps=2)
    assert_equal(mine, reference)


def test_the_optimizer_may_step_in_backward(gangs: Gangs) -> None:
    gangs(2).run(check_in_backward)


def check_in_backward(ctx: RankContext) -> None:
    values = []
    for in_backward in (True, False):
        model = sharded(ctx, ours(), pin_memory=True)
        params = [p for p in model.parameters() if p.requires_grad]
        optimizers = {p: torch.optim.AdamW([p], lr=1e-2) for p in params}

        def update(
            param: torch.Tensor, optimizers: dict[nn.Parameter, torch.optim.AdamW] = optimizers
        ) -> None:
            assert isinstance(param, nn.Parameter)
            optimizers[param].step()
            optimizers[param].zero_grad()

        if in_backward:
            for param in params:
                param.register_post_accumulate_grad_hook(update)  # type: ignore[no-untyped-call]  # PyTorch's
        for step in range(2):
            torch.autograd.backward(loss_on(ctx, model, step))
            if not in_backward:
                for param in params:
                    update(param)
            assert all(param.grad is None for param in model.parameters())
        values.append({n: local(t).clone() for n, t in model.state_dict().items()})
    for name, value in values[0].items():
        assert torch.equal(value, values[1][name]), name


def test_offloaded_state_round_trips(gangs: Gangs) -> None:
    gangs(2).run(check_state)


def check_state(ctx: RankContext) -> None:
    source = sharded(ctx, ours())
    saved = {name: tensor.clone() for name, tensor in source.state_dict().items()}
    expected = loss_on(ctx, source, 0)
    for assign in (False, True):
        torch.manual_seed(1)
        model = Decoder()
        with torch.device("meta" if assign else "cpu"):
            model = Decoder()
        for unit in (*model.blocks, model):
            ours().shard(unit, mesh=ctx.mesh, offload_policy=CPUOffloadPolicy())
        if assign:
            model.to_empty(device="cpu")
        model.load_state_dict(saved, assign=assign)
        assert torch.equal(loss_on(ctx, model, 0), expected)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    torch.autograd.backward(loss_on(ctx, model, 1))
    optimizer.step()
    for state in optimizer.state.values():
        assert local(state["exp_avg"]).device.type == "cpu"


def test_slices_that_left_the_host_are_named(gangs: Gangs) -> None:
    gangs(2).run(check_misplaced)


def check_misplaced(ctx: RankContext) -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(3, 3))
    ours().shard(model, mesh=ctx.mesh, offload_policy=CPUOffloadPolicy())
    with pytest.raises(RuntimeError, match=r"on meta device: \['0.weight', '0.bias'\]"):
        model(torch.ones(1, 3))
    assert issubclass(OffloadError, RuntimeError)
