"""Tensor parallelism under our sharding equals tensor parallelism under the reference's."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from fsdp_core import clip_grad_norm_
from tests.ecosystem.engines import OURS, Engine, Trace, compare
from tests.engine.gang import Gangs, RankContext

pytestmark = pytest.mark.ranks

WIDTH, HIDDEN = 8, 12


class FeedForward(nn.Module):
    """Shape (batch, length, WIDTH) to the same."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, HIDDEN)
        self.down = nn.Linear(HIDDEN, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = x + self.down(torch.tanh(self.up(self.norm(x))))
        return y


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([FeedForward(), FeedForward()])
        self.out = nn.Linear(WIDTH, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        y: torch.Tensor = self.out(x)
        return y.clone()  # the local part of a DTensor is a view


MEGATRON = {"up": ColwiseParallel(), "down": RowwiseParallel()}
SEQUENCE = {
    "norm": SequenceParallel(),
    "up": ColwiseParallel(input_layouts=Shard(1)),
    "down": RowwiseParallel(output_layouts=Shard(1)),
}
PLANS = {"megatron": MEGATRON, "sequence": SEQUENCE}
OUTPUTS = {
    "megatron": ColwiseParallel(output_layouts=Replicate()),
    "sequence": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
}


@pytest.mark.parametrize("plan", PLANS)
def test_two_by_two_ranks_train_as_under_the_reference(gangs: Gangs, plan: str) -> None:
    gangs(4).run(train_parallel, plan)


def test_gradients_in_two_dimensions_are_clipped_as_those_of_the_whole_model(
    gangs: Gangs,
) -> None:
    totals = gangs(4).run(clip_parallel)
    assert all(each == totals[0] for each in totals)


def train_parallel(ctx: RankContext, plan: str) -> None:
    mesh = init_device_mesh(ctx.device.type, (2, 2), mesh_dim_names=("dp_shard", "tp"))

    def train(engine: Engine) -> Trace:
        model = build(ctx, engine, plan)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        trace = Trace()
        for step in range(3):
            x = batch(ctx, step, mesh["dp_shard"].get_local_rank())
            if plan == "sequence":
                # Between the blocks each rank holds its part of the sequence.
                x = x.chunk(2, dim=1)[mesh["tp"].get_local_rank()]
            trace.note(backward(model, x))
            trace.note_all(f"step {step}", model)
            optimizer.step()
            optimizer.zero_grad()
        for name, param in model.named_parameters():
            assert isinstance(param, DTensor)
            trace.tensors[f"whole {name}"] = param.full_tensor().detach()
        return trace

    assert len(set(compare(train).losses)) == 3


def build(ctx: RankContext, engine: Engine, plan: str) -> nn.Module:
    mesh = init_device_mesh(ctx.device.type, (2, 2), mesh_dim_names=("dp_shard", "tp"))
    torch.manual_seed(1)
    model = Net().to(ctx.device)
    for block in model.blocks:
        parallelize_module(block, mesh["tp"], PLANS[plan])
        engine.fully_shard(block, mesh=mesh["dp_shard"])
    parallelize_module(model.out, mesh["tp"], OUTPUTS[plan])
    engine.fully_shard(model, mesh=mesh["dp_shard"])
    return model


def batch(ctx: RankContext, step: int, replica: int) -> torch.Tensor:
    """The same on the ranks of one tensor-parallel group."""
    generator = torch.Generator().manual_seed(10 * step + replica)
    return torch.randn(3, 4, WIDTH, generator=generator).to(ctx.device)


def backward(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = model(x).square().mean()
    torch.autograd.backward(loss)
    return loss.detach()


def clip_parallel(ctx: RankContext) -> float:
    torch.manual_seed(1)
    whole = Net().to(ctx.device)
    for replica in range(2):
        torch.autograd.backward(whole(batch(ctx, 0, replica)).square().mean() / 2)
    expected = torch.nn.utils.clip_grad_norm_(whole.parameters(), 0.01)

    model = build(ctx, OURS, "megatron")
    mesh = init_device_mesh(ctx.device.type, (2, 2), mesh_dim_names=("dp_shard", "tp"))
    backward(model, batch(ctx, 0, mesh["dp_shard"].get_local_rank()))
    total = clip_grad_norm_(model.parameters(), 0.01)
    torch.testing.assert_close(total, expected, rtol=1e-5, atol=0.0)
    others = dict(whole.named_parameters())
    for name, param in model.named_parameters():
        assert isinstance(param.grad, DTensor)
        torch.testing.assert_close(param.grad.full_tensor(), others[name].grad)
    return total.item()
