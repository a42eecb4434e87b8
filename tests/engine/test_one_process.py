"""Sharded training is the training of one process on the joined batch."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
import torch.distributed as dist

from fsdp_core import fully_shard
from fsdp_core.comm import collectives
from tests.engine.gang import Gangs, RankContext
from tests.engine.models import decoder, loss_of, tokens_of

pytestmark = pytest.mark.ranks


def test_four_ranks_lose_what_one_process_loses(gangs: Gangs) -> None:
    sharded = gangs(4).run(losses_of_sharded, 10)
    joined = [sum(step) / 4 for step in zip(*sharded, strict=True)]
    alone = gangs(1).run(losses_of_one_process, 10, 4)[0]
    assert joined == pytest.approx(alone, abs=1e-5)
    assert alone[-1] < alone[0]


def test_one_rank_trains_alike_by_its_process_group(
    gangs: Gangs,
) -> None:
    gangs(1).run(check_group_of_one)


def check_group_of_one(ctx: RankContext) -> None:
    with mock.patch.object(collectives, "by_group_on_one_rank", new=False):
        alone = losses_of_sharded(ctx, 3)
    with (
        mock.patch.object(collectives, "by_group_on_one_rank", new=True),
        mock.patch.object(dist, "all_gather_single", wraps=dist.all_gather_single) as gather,
        mock.patch.object(
            dist, "reduce_scatter_single", wraps=dist.reduce_scatter_single
        ) as reduce,
    ):
        by_group = losses_of_sharded(ctx, 3)
    assert gather.called
    assert reduce.called
    assert by_group == alone


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
