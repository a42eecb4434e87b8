"""Gradients that travel as int8 blocks: precision, traffic, flags, and training."""

from __future__ import annotations

from typing import Literal

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from fsdp_core import fully_shard
from fsdp_core.comm import QuantizedReduceScatter
from fsdp_core.errors import UnsupportedError
from tests.engine.gang import Gangs, RankContext
from tests.engine.models import BLOCKS
from tests.engine.sharded import backward_once, local, shard_decoder, states
from tests.engine.test_low_precision import counted

pytestmark = pytest.mark.ranks

BLOCK = 8
Op = Literal["sum", "mean"]
OPS = {"sum": dist.ReduceOp.SUM, "mean": dist.ReduceOp.AVG}


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("op", OPS)
def test_each_element_is_within_the_stated_bound(gangs: Gangs, op: Op, world: int) -> None:
    gangs(world).run(check_bound, op)


def contribution_of(rank: int, ranks: int, numel: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(ranks * numel, generator=generator) * (1 + rank)


def check_bound(ctx: RankContext, op: Op) -> None:
    for numel, dtype in [(1, torch.float32), (8, torch.float32), (21, torch.float32)]:
        strategy = QuantizedReduceScatter(BLOCK)
        all_given = [contribution_of(rank, ctx.world, numel) for rank in range(ctx.world)]
        given = strategy.allocate((ctx.world * numel,), dtype=dtype, device=ctx.device)
        given.copy_(all_given[ctx.rank])
        result = strategy.allocate((numel,), dtype=dtype, device=ctx.device).fill_(-7.0)
        work = strategy(result, given, ctx.mesh.get_group(0), OPS[op], async_op=True)
        assert isinstance(work, dist.Work)
        work.wait()
        rows = [each.view(ctx.world, numel)[ctx.rank] for each in all_given]
        exact = torch.stack(rows).sum(0)
        others = [row for rank, row in enumerate(rows) if rank != ctx.rank]
        for start in range(0, numel, BLOCK):
            here = slice(start, start + BLOCK)
            bound = sum(float(row[here].abs().max()) / 254 for row in others) * 1.001
            error = (result.cpu()[here] * (ctx.world if op == "mean" else 1) - exact[here]).abs()
            assert error.max() <= bound
        waited = torch.empty_like(result)
        assert strategy(waited, given, ctx.mesh.get_group(0), OPS[op]) is None
        assert torch.equal(waited, result)


def test_any_floating_dtype_is_summed_in_single_precision(gangs: Gangs) -> None:
    gangs(2).run(check_dtypes)


def check_dtypes(ctx: RankContext) -> None:
    for dtype in (torch.bfloat16, torch.float16, torch.float64):
        given = torch.full((2 * ctx.world,), 1.0 + ctx.rank, dtype=dtype, device=ctx.device)
        result = torch.empty(2, dtype=dtype, device=ctx.device)
        QuantizedReduceScatter()(result, given, ctx.mesh.get_group(0), dist.ReduceOp.SUM)
        assert result.tolist() == pytest.approx([3.0, 3.0], rel=1e-6)


def test_what_is_not_finite_does_not_become_finite(gangs: Gangs) -> None:
    gangs(2).run(check_overflow)


def check_overflow(ctx: RankContext) -> None:
    for bad in (float("inf"), float("nan")):
        given = torch.ones(2 * ctx.world * BLOCK, device=ctx.device)
        if ctx.rank == 1:
            given[3] = bad  # of rank 0's row
        result = torch.empty(2 * BLOCK, device=ctx.device)
        strategy = QuantizedReduceScatter(BLOCK)
        strategy(result, given, ctx.mesh.get_group(0), dist.ReduceOp.SUM)
        assert bool(result[:BLOCK].isfinite().all()) is (ctx.rank == 1)
        assert result[BLOCK:].isfinite().all()


def test_other_operations_are_refused(gangs: Gangs) -> None:
    gangs(2).run(check_refusal)


def check_refusal(ctx: RankContext) -> None:
    given = torch.ones(2 * ctx.world, device=ctx.device)
    with pytest.raises(UnsupportedError, match="sums or averages"):
        QuantizedReduceScatter()(given[:2], given, ctx.mesh.get_group(0), dist.ReduceOp.MAX)


def test_a_reduction_moves_a_quarter_of_the_bytes(gangs: Gangs) -> None:
    gangs(2).run(check_traffic)


def check_traffic(ctx: RankContext) -> None:
    model = nn.Linear(256, 128, bias=False).to(ctx.device)
    fully_shard(model, mesh=ctx.mesh)
    quantize(model, QuantizedReduceScatter())
    numel = 256 * 128 // ctx.world
    with counted("all_to_all_single", 1) as sizes:
        torch.autograd.backward(model(ctx.batch(0, 2, 256)).sum())
    # Gradients, and a block for the flag.
    code_bytes = 4 * -(-(numel + 1) // 4)
    assert sizes == [ctx.world * (code_bytes + 4 * (numel // 256 + 1))]
    assert ctx.world * 4 * numel / sizes[0] > 3.9


def quantize(model: nn.Module, strategy: QuantizedReduceScatter) -> None:
    for found in states(model):
        for group in found.groups:
            group.options.reduce_scatter = strategy


@pytest.mark.parametrize("world", [2, 3])
def test_a_model_trains_to_nearly_the_same_loss(gangs: Gangs, world: int) -> None:
    for quantized, exact in gangs(world).run(losses_beside_exact):
        assert quantized == pytest.approx(exact, rel=0.02)
        assert quantized != exact
        assert quantized[-1] < quantized[0] - 0.1


def losses_beside_exact(ctx: RankContext) -> tuple[list[float], list[float]]:
    return losses(ctx, QuantizedReduceScatter(32)), losses(ctx, None)


def losses(ctx: RankContext, strategy: QuantizedReduceScatter | None) -> list[float]:
    model = shard_decoder(ctx)
    if strategy is not None:
        quantize(model, strategy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    found = []
    for step in range(8):
        found.append(backward_once(ctx, model, step).item())
        optimizer.step()
        optimizer.zero_grad()
    return found


def test_all_ranks_see_one_model(gangs: Gangs) -> None:
    first, *others = gangs(4).run(train_replicas)
    for other in others:
        assert other.keys() == first.keys()
        for name, values in first.items():
            assert torch.equal(other[name], values), name


def train_replicas(ctx: RankContext) -> dict[str, torch.Tensor]:
    mesh = init_device_mesh(ctx.device.type, (2, 2), mesh_dim_names=("replicas", "shards"))
    model = shard_decoder(RankContext(ctx.rank, ctx.world, ctx.device, mesh))
    quantize(model, QuantizedReduceScatter(BLOCK))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(2):
        backward_once(ctx, model, step)
        optimizer.step()
        optimizer.zero_grad()
    whole = {}
    for name, param in model.named_parameters():
        assert isinstance(param, DTensor)
        whole[name] = param.full_tensor().detach().cpu()
    return whole


@pytest.mark.parametrize("block_size", [1, 8, 256])
def test_flags_of_unused_parameters_outlive_large_gradients(gangs: Gangs, block_size: int) -> None:
    gangs(3).run(check_flags, block_size)


class Branches(nn.Module):
    """Each rank uses one of two branches; nobody uses the third."""

    def __init__(self) -> None:
        super().__init__()
        self.branches = nn.ParameterList(torch.ones(5) for _ in range(3))

    def forward(self, x: torch.Tensor, branch: int) -> torch.Tensor:
        result: torch.Tensor = (self.branches[branch] * x).sum()
        return result


def check_flags(ctx: RankContext, block_size: int) -> None:
    model = Branches().to(ctx.device)
    fully_shard(model, mesh=ctx.mesh)
    quantize(model, QuantizedReduceScatter(block_size))
    # As under loss scaling: a flag of 1 beside these would be rounded to 0.
    x = torch.full((5,), 65536.0 * ctx.world, device=ctx.device, requires_grad=True)
    torch.autograd.backward(model(x, int(ctx.rank == 0)))
    first, second, third = (param.grad for param in model.branches)
    assert first is not None
    assert second is not None
    assert third is None
    expected = 65536.0
    assert local(second).tolist() == pytest.approx([expected] * local(second).numel())
    assert local(first).tolist() == pytest.approx([2 * expected] * local(first).numel())


def test_decoder_keeps_its_unused_parameters_without_gradient(gangs: Gangs) -> None:
    gangs(2).run(check_unused)


def check_unused(ctx: RankContext) -> None:
    model = shard_decoder(ctx)
    quantize(model, QuantizedReduceScatter(BLOCK))
    backward_once(ctx, model)
    without = {name for name, param in model.named_parameters() if param.grad is None}
    never = {f"blocks.{index}.never" for index in range(BLOCKS)}
    assert without == never | {"norm.bias", "blocks.0.up.bias"}
