"""Optimizers and the gradient scaler work on our slices as on the reference's."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from tests.ecosystem.engines import OURS, Engine, Trace, backward, compare, sharded_decoder, steps
from tests.engine.gang import Gangs, RankContext
from tests.engine.models import loss_of, tokens_of
from tests.engine.sharded import local

pytestmark = pytest.mark.ranks

# PyTorch has no sharding strategy for the fused SGD kernel, whoever made the DTensors.
KINDS: dict[str, dict[str, Any]] = {
    "AdamW foreach": {"lr": 1e-2, "weight_decay": 0.1, "foreach": True},
    "AdamW fused": {"lr": 1e-2, "weight_decay": 0.1, "fused": True},
    "Adam fused": {"lr": 1e-2, "amsgrad": True, "fused": True},
    "SGD foreach": {"lr": 1e-1, "momentum": 0.9, "foreach": True},
}


@pytest.mark.parametrize("kind", KINDS)
def test_an_optimizer_steps_as_over_the_reference(gangs: Gangs, kind: str) -> None:
    gangs(2).run(train_with, kind)


def test_the_gradient_scaler_scales_as_over_the_reference(gangs: Gangs) -> None:
    gangs(2).run(train_scaled)


def test_infinity_found_on_one_rank_skips_the_step_on_all(gangs: Gangs) -> None:
    assert gangs(2).run(overflow_on_rank_0) == [512.0, 512.0]


def train_with(ctx: RankContext, kind: str) -> None:
    optimizer_class = getattr(torch.optim, kind.split(maxsplit=1)[0])

    def train(engine: Engine) -> Trace:
        model = sharded_decoder(ctx, engine)
        optimizer = optimizer_class(model.parameters(), **KINDS[kind])
        return steps(ctx, model, optimizer, range(3))

    trace = compare(train)
    assert trace.losses[-1] != trace.losses[0]


def train_scaled(ctx: RankContext) -> None:
    def train(engine: Engine) -> Trace:
        model = sharded_decoder(ctx, engine)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler(ctx.device.type, init_scale=2.0**10, growth_interval=2)
        trace = Trace()
        for step in range(3):
            loss = backward_scaled(ctx, model, scaler, step)
            scaler.unscale_(optimizer)
            trace.note_all(f"unscaled {step}", model)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            trace.note(loss)
            trace.losses.append(scaler.get_scale())
        return trace

    assert compare(train).losses[-1] == 2.0**11


def backward_scaled(
    ctx: RankContext, model: torch.nn.Module, scaler: torch.amp.GradScaler, step: int
) -> torch.Tensor:
    loss = loss_of(model, tokens_of(step, ctx.rank).to(ctx.device))
    torch.autograd.backward(scaler.scale(loss))
    return loss.detach()


def overflow_on_rank_0(ctx: RankContext) -> float:
    model = sharded_decoder(ctx, OURS)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler(ctx.device.type, init_scale=1024.0)
    scaler.scale(torch.ones((), device=ctx.device))  # the scaler starts at its first use
    backward(ctx, model)
    if ctx.rank == 0:
        local(model.blocks[0].up.weight.grad)[0] = math.inf
    before = [local(param).clone() for param in model.parameters()]
    scaler.step(optimizer)
    scaler.update()
    for param, old in zip(model.parameters(), before, strict=True):
        assert torch.equal(local(param), old)
    return scaler.get_scale()
