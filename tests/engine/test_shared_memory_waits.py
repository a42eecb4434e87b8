"""Ranks that share memory wait for each other only where all of them come, whatever lives on each."""

from __future__ import annotations

import gc
from typing import cast

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fsdp_core import FSDPModule, SharedMemoryPolicy, fully_shard
from fsdp_core.comm.shared_memory import axis
from tests.engine.gang import Gangs, RankContext
from tests.engine.test_shared_memory import ONE_COPY, POLICIES, local_values, sharded, train
from tests.engine.test_ways_of_backward import Raising

pytestmark = pytest.mark.ranks

UNITS = 12


@pytest.fixture(autouse=True)
def _on_the_host(device: str) -> None:
    if device != "cpu":
        pytest.skip("memory of the host is shared by CPU ranks")


def test_ranks_end_their_uses_in_any_order(gangs: Gangs) -> None:
    """Before an update a rank ends all its uses, and only then waits for those of others."""
    gangs(2).run(check_many_uses)


def check_many_uses(ctx: RankContext) -> None:
    traces = []
    for policy in (None, ONE_COPY):
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(5, 5) for _ in range(UNITS)))
        # Objects lie elsewhere on each rank, and sets of them have another order.
        kept = [nn.Linear(5, 5) for _ in range(100 * ctx.rank)]
        for unit in (*model, model):
            fully_shard(unit, mesh=ctx.mesh, shared_memory=policy)
            kept.extend(nn.Linear(5, 5) for _ in range(7 * ctx.rank))
        model.set_reshard_after_backward(False)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(3):
            torch.autograd.backward(model(ctx.batch(step, 3, 5)).square().mean())
            optimizer.step()
            optimizer.zero_grad()
            for unit in (*model, model):
                cast("FSDPModule", unit).reshard()  # or a copy of what was updated would stay
        traces.append(local_values(model))
    assert all(map(torch.equal, *traces))


@POLICIES
def test_nobody_waits_for_a_rank_whose_model_is_gone(
    gangs: Gangs, policy: SharedMemoryPolicy
) -> None:
    """Ranks collect garbage at different times: one may hold a model that the other has let go."""
    gangs(2).run(check_gone, policy)


def check_gone(ctx: RankContext, policy: SharedMemoryPolicy) -> None:
    earlier = sharded(ctx, policy)
    with torch.no_grad():
        earlier(ctx.batch(0, 3, 7))  # after which the root stays unsharded, and in use
    if ctx.rank == 0:
        del earlier
        gc.collect()
    dist.barrier()
    train(ctx, sharded(ctx, policy))


@POLICIES
def test_an_optimizer_of_one_rank_alone_waits_for_nobody(
    gangs: Gangs, policy: SharedMemoryPolicy
) -> None:
    gangs(2).run(check_local_optimizer, policy)


def check_local_optimizer(ctx: RankContext, policy: SharedMemoryPolicy) -> None:
    model, plain = sharded(ctx, policy), sharded(ctx, None)
    for each in (model, plain):
        with torch.no_grad():
            each(ctx.batch(0, 3, 7))  # after which the root stays unsharded
    if ctx.rank == 0:
        probe = nn.Linear(3, 3)
        optimizer = torch.optim.SGD(probe.parameters(), lr=0.1)
        torch.autograd.backward(probe(torch.ones(1, 3)).sum())
        optimizer.step()
    assert all(map(torch.equal, train(ctx, model), train(ctx, plain)))


@POLICIES
def test_a_gather_of_a_model_that_is_gone_is_not_in_flight(
    gangs: Gangs, policy: SharedMemoryPolicy
) -> None:
    gangs(2).run(check_lost_gather, policy)


def check_lost_gather(ctx: RankContext, policy: SharedMemoryPolicy) -> None:
    lost = sharded(ctx, policy)
    unit = lost[0]
    assert isinstance(unit, FSDPModule)
    unit.unshard(async_op=True)
    del lost, unit
    gc.collect()
    model = sharded(ctx, policy)
    unit = model[0]
    assert isinstance(unit, FSDPModule)
    for _ in range(axis._ENTRIES):
        unit.unshard()
        unit.reshard()
    assert all(map(torch.equal, train(ctx, model), train(ctx, sharded(ctx, None))))


@POLICIES
def test_reductions_of_a_model_that_is_gone_have_ended(
    gangs: Gangs, policy: SharedMemoryPolicy
) -> None:
    """One rank lets a model go whose backward raised, the other goes on with it."""
    gangs(2).run(check_lost_reductions, policy)


def check_lost_reductions(ctx: RankContext, policy: SharedMemoryPolicy) -> None:
    for _ in range(5):
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(7, 7) for _ in range(6)))
        for unit in (*model, model):
            fully_shard(unit, mesh=ctx.mesh, shared_memory=policy)
        model.set_reduce_scatter_max_input_buffers(4)
        x = Raising.of(ctx.batch(0, 3, 7).requires_grad_())
        with pytest.raises(ZeroDivisionError):
            torch.autograd.backward(model(x).sum())
        if ctx.rank == 1:
            model.reset_iter_state()
        del model, x
        gc.collect()
    dist.barrier()
    assert all(map(torch.equal, train(ctx, sharded(ctx, policy)), train(ctx, sharded(ctx, None))))
