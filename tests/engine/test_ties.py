"""Parameters that several units share have one owner, and train as in one process."""

from __future__ import annotations

from typing import Literal

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fsdp_core import SharedMemoryPolicy, fully_shard
from tests.engine.gang import Gangs, RankContext
from tests.engine.models import VOCAB, WIDTH, Decoder, decoder, loss_of, tokens_of
from tests.engine.sharded import held_unsharded_bytes, local, state, unit

pytestmark = pytest.mark.ranks

Units = Literal["embed", "head", "both"]
STEPS = 4


@pytest.mark.parametrize("reshard", [None, True, False])
@pytest.mark.parametrize("units", ["embed", "head", "both"])
@pytest.mark.parametrize("world", [2, 3])
def test_a_tie_across_units_trains_as_in_one_process(
    gangs: Gangs, world: int, units: Units, *, reshard: bool | None
) -> None:
    gangs(world).run(compare_with_one_process, units, reshard=reshard)


def compare_with_one_process(ctx: RankContext, units: Units, *, reshard: bool | None) -> None:
    alone, expected = train_alone(ctx)
    model = decoder().to(ctx.device)
    if units in ("embed", "both"):
        fully_shard(model.embed, mesh=ctx.mesh, reshard_after_forward=reshard)
    for block in model.blocks:
        fully_shard(block, mesh=ctx.mesh, reshard_after_forward=reshard)
    if units in ("head", "both"):
        fully_shard(model.head, mesh=ctx.mesh, reshard_after_forward=reshard)
    fully_shard(model, mesh=ctx.mesh, reshard_after_forward=reshard)
    assert model.head.weight is model.embed.weight
    assert len(list(model.parameters())) == len(list(alone.parameters()))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(STEPS):
        for micro in range(2):
            unit(model).set_requires_gradient_sync(micro == 1)  # reduces what both gave
            loss = loss_of(model, tokens_of(2 * step + micro, ctx.rank).to(ctx.device))
            torch.autograd.backward(loss)
            assert abs(loss.item() - expected[2 * step + micro][ctx.rank]) < 1e-5
        assert held_unsharded_bytes(model) == 0
        optimizer.step()
        optimizer.zero_grad()
    assert model.state_dict().keys() == alone.state_dict().keys()
    for (name, ours), theirs in zip(model.named_parameters(), alone.parameters(), strict=True):
        assert torch.allclose(ours.full_tensor(), theirs, atol=1e-6), name  # type: ignore[attr-defined]  # a DTensor
    assert model.head.weight is model.embed.weight


def train_alone(ctx: RankContext) -> tuple[Decoder, list[list[float]]]:
    model = decoder().to(ctx.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for step in range(STEPS):
        for micro in range(2):
            of_ranks = [
                loss_of(model, tokens_of(2 * step + micro, rank).to(ctx.device))
                for rank in range(ctx.world)
            ]
            torch.autograd.backward(torch.stack(of_ranks).mean())
            losses.append([loss.item() for loss in of_ranks])
        optimizer.step()
        optimizer.zero_grad()
    return model, losses


def test_a_tie_survives_meta_init_and_loading(gangs: Gangs) -> None:
    gangs(2).run(check_meta)


def check_meta(ctx: RankContext) -> None:
    full = decoder().to(ctx.device).state_dict()
    with torch.device("meta"):
        model = Decoder()
    fully_shard(model.embed, mesh=ctx.mesh)
    fully_shard(model, mesh=ctx.mesh)
    model.to_empty(device=ctx.device)
    assert model.head.weight is model.embed.weight
    with torch.no_grad():
        for name, param in model.named_parameters():
            local(param).copy_(scattered(ctx, full[name], param))
    reference = decoder().to(ctx.device)
    tokens = tokens_of(0, 0).to(ctx.device)
    assert torch.equal(model(tokens), reference(tokens))


def scattered(ctx: RankContext, whole: torch.Tensor, param: nn.Parameter) -> torch.Tensor:
    rows = local(param).size(0)
    width = -(-whole.size(0) // ctx.world)
    return whole.narrow(0, min(width * ctx.rank, whole.size(0)), rows)


def test_a_sharded_parameter_that_is_tied_again_keeps_its_owner(gangs: Gangs) -> None:
    gangs(2).run(check_tied_again)


def check_tied_again(ctx: RankContext) -> None:
    model = nn.Sequential(nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB, bias=False))
    fully_shard(model[0], mesh=ctx.mesh)
    model[1].weight = model[0].weight
    fully_shard(model, mesh=ctx.mesh)
    assert state(model).params == []
    logits = model(torch.arange(4, device=ctx.device))
    torch.autograd.backward(logits.sum())
    weight = model[0].weight
    assert isinstance(weight, nn.Parameter)
    assert weight.grad is not None
    assert len(list(model.parameters())) == 1


@pytest.mark.parametrize(
    "shared", [None, SharedMemoryPolicy(), SharedMemoryPolicy(share_storage=True)]
)
@pytest.mark.parametrize("vocabulary", [10, 11])
@pytest.mark.parametrize("units", [1, 2])
def test_a_tie_made_after_sharding_trains_as_in_one_process(
    gangs: Gangs, units: int, vocabulary: int, shared: SharedMemoryPolicy | None
) -> None:
    gangs(2).run(check_late_tie, units, vocabulary, shared)


def check_late_tie(
    ctx: RankContext, units: int, vocabulary: int, shared: SharedMemoryPolicy | None
) -> None:
    """Both places keep a slice to send; the optimizer updates only one parameter."""
    alone, model = (
        nn.Sequential(nn.Embedding(vocabulary, 4), nn.Linear(4, vocabulary, bias=False)).to(
            ctx.device
        )
        for _ in range(2)
    )
    model.load_state_dict(alone.state_dict())
    if units == 2:
        fully_shard(model[1], mesh=ctx.mesh, shared_memory=shared)
    fully_shard(model, mesh=ctx.mesh, shared_memory=shared)
    for each in (alone, model):
        each[1].weight = each[0].weight
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.5) for each in (alone, model)]
    tokens = torch.arange(vocabulary, device=ctx.device)
    dist.barrier()
    for _ in range(4):
        losses = [nn.functional.cross_entropy(each(tokens), tokens) for each in (alone, model)]
        torch.testing.assert_close(losses[1], losses[0])
        for loss, optimizer in zip(losses, optimizers, strict=True):
            torch.autograd.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
    assert model[0].weight is model[1].weight
