"""Sharded training is the training of one process on the joined batch."""

from __future__ import annotations

import pytest
import torch

from fsdp_core import fully_shard
from tests.engine.gang import Gangs, RankContext
from tests.engine.models import decoder, loss_of, tokens_of

pytestmark = pytest.mark.ranks


def test_four_ranks_lose_what_one_process_loses(gangs: Gangs) -> None:
    sharded = gangs(4).run(losses_of_sharded, 10)
    joined = [sum(step) / 4 for step in zip(*sharded, strict=True)]
    alone = gangs(1).run(losses_of_one_process, 10, 4)[0]
    assert joined == pytest.approx(alone, abs=1e-5)
    assert alone[-1] < alone[0]


def losses_of_sharded(ctx: RankContext, steps: int) -> list[float]:
    model = decoder().to(ctx.device)
    for block in model.blocks:
        fully_shard(block, mesh=ctx.mesh)
    fully_shard(model, mesh=ctx.mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for step in range(steps):
        loss = loss_of(model, tokens_of(step, ctx.rank).to(ctx.device))
        torch.autograd.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def losses_of_one_process(ctx: RankContext, steps: int, ranks: int) -> list[float]:
    model = decoder().to(ctx.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for step in range(steps):
        tokens = torch.cat([tokens_of(step, rank) for rank in range(ranks)])
        loss = loss_of(model, tokens.to(ctx.device))
        torch.autograd.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses
