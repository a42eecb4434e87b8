"""A group whose modules do not all run in the root's forward: the head runs per chunk, later."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from fsdp_core import MixedPrecisionPolicy, fully_shard
from tests.engine.gang import Gangs, RankContext
from tests.engine.sharded import states

pytestmark = pytest.mark.ranks

WIDTH, CLASSES, CHUNKS = 10, 5, 3


class Headless(nn.Module):
    """Runs body and norm; whoever computes the loss runs the head, chunk by chunk."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.norm(self.body(x).tanh())
        return result


@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=str)
def test_chunked_loss_trains_as_the_reference_does(gangs: Gangs, dtype: torch.dtype | None) -> None:
    gangs(2).run(check_chunked, dtype)


def check_chunked(ctx: RankContext, dtype: torch.dtype | None) -> None:
    from torch.distributed.fsdp import MixedPrecisionPolicy as TheirPolicy  # noqa: PLC0415 - only the oracle may load it
    from torch.distributed.fsdp import fully_shard as their_fully_shard  # noqa: PLC0415 - only the oracle may load it

    def ours(module: nn.Module | list[nn.Module]) -> object:
        policy = MixedPrecisionPolicy(dtype, torch.float32, output_dtype=dtype)
        return fully_shard(module, mesh=ctx.mesh, mp_policy=policy)

    def theirs(module: nn.Module | list[nn.Module]) -> object:
        policy = TheirPolicy(dtype, torch.float32, output_dtype=dtype)
        return their_fully_shard(module, mesh=ctx.mesh, mp_policy=policy)

    mine, reference = train(ctx, ours), train(ctx, theirs)
    assert len(mine) == len(reference)
    assert all(torch.equal(a, b) for a, b in zip(mine, reference, strict=True))


def train(
    ctx: RankContext, shard: Callable[[nn.Module | list[nn.Module]], object]
) -> list[torch.Tensor]:
    torch.manual_seed(3)
    model = cast("Any", Headless().to(ctx.device))
    shard([model.norm, model.head])
    shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    seen: list[torch.Tensor] = []
    for step in range(3):
        hidden = model(ctx.batch(step, 6, WIDTH))
        for chunk in hidden.detach().requires_grad_().chunk(CHUNKS):
            loss = model.head(chunk).float().square().mean()
            torch.autograd.backward(loss)
            seen.append(loss.detach())
        torch.autograd.backward(hidden.float().sum())
        for param in model.parameters():
            assert isinstance(param.grad, DTensor)
            seen.append(param.grad.to_local().clone())
        optimizer.step()
        optimizer.zero_grad()
    for found in states(model):
        assert not any(group.is_unsharded for group in found.groups)
    return seen
