"""Parameters of several dtypes in one unit."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from tests.engine.gang import Gangs, RankContext
from tests.engine.versus import (
    assert_equal,
    engines,
    full,
    groups_of,
    local,
    ours,
    train,
)

pytestmark = pytest.mark.ranks


class Several(nn.Module):
    """fp32 and bf16 layers; frozen weights of 8 bits, and of half precision."""

    def __init__(self) -> None:
        super().__init__()
        self.low = torch.bfloat16
        self.wide = nn.Linear(5, 7)
        self.narrow = nn.Linear(7, 3).to(torch.bfloat16)
        self.precise = nn.Parameter(torch.randn(3, dtype=torch.float64))
        frozen = torch.randint(-128, 127, (7, 3), dtype=torch.int8)
        self.codes = nn.Parameter(frozen, requires_grad=False)
        fp8 = torch.randn(7, 3).to(torch.float8_e4m3fn)
        self.eighths = nn.Parameter(fp8, requires_grad=False)
        self.factor = nn.Parameter(torch.randn(7).half(), requires_grad=False)
        self.flags = nn.Parameter(torch.tensor([True, False, True]), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.wide(x).tanh() * self.factor.float()
        fixed = hidden @ (self.codes.float() / 128 + self.eighths.float())
        learned = self.narrow(hidden.to(self.low)).float()
        scaled: torch.Tensor = (learned + fixed * self.flags) * self.precise.float()
        return scaled.square().mean()


def several() -> Several:
    torch.manual_seed(17)
    return Several()


def test_one_unit_trains_as_a_unit_for_each_dtype_does(gangs: Gangs) -> None:
    gangs(2).run(compare_units)


def compare_units(ctx: RankContext) -> None:
    # At two ranks a sum does not depend on how gradients are packed.
    traces = []
    for apart in (False, True):
        model = several().to(ctx.device)
        units = [model.narrow, model.wide, model] if apart else [model]
        for unit in units:
            ours().shard(unit, mesh=ctx.mesh)
        assert len(list(groups_of(model))) == len(units)
        traces.append(
            train(
                model,
                lambda m, step: m(ctx.batch(step, 4, 5)),
                microbatches=2,
                before_backward=lambda m, micro: m.set_requires_gradient_sync(micro == 1),
            )
        )
    assert_equal(*traces)
    assert {g.dtype for g in traces[0].grads[0].values() if g is not None} == {
        torch.float32,
        torch.bfloat16,
        torch.float64,
    }


@pytest.mark.parametrize("world", [1, 3])
def test_one_unit_trains_as_one_process_does(gangs: Gangs, world: int) -> None:
    gangs(world).run(compare_with_one_process)


def compare_with_one_process(ctx: RankContext) -> None:
    model, plain = several().to(ctx.device), several().to(ctx.device)
    ours().shard(model, mesh=ctx.mesh)
    x = torch.randn(4, 5, generator=torch.Generator().manual_seed(1)).to(ctx.device)
    for each in (model, plain):
        torch.autograd.backward(each(x))
    for (name, mine), whole in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert mine.dtype == whole.dtype
        assert local(mine).dtype == whole.dtype
        if whole.grad is None:
            assert mine.grad is None
            continue
        assert isinstance(mine.grad, DTensor)
        assert mine.grad.dtype == whole.dtype
        torch.testing.assert_close(full(mine.grad), whole.grad, rtol=2e-2, atol=1e-3, msg=name)
    for name, tensor in model.state_dict().items():
        whole_bytes = plain.state_dict()[name].cpu().flatten().view(torch.uint8)
        assert torch.equal(gathered(tensor, ctx), whole_bytes), name


def gathered(tensor: torch.Tensor, ctx: RankContext) -> torch.Tensor:
    """As bytes: the backend's collectives do not know every dtype."""
    pieces: list[object] = [None] * ctx.world
    mine = local(tensor).contiguous().flatten().view(torch.uint8).tolist()
    torch.distributed.all_gather_object(pieces, mine)
    flat = [byte for piece in pieces if isinstance(piece, list) for byte in piece]
    return torch.tensor(flat, dtype=torch.uint8)


def test_mixed_precision_brings_several_dtypes_to_one(gangs: Gangs) -> None:
    gangs(2).run(compare_precision)


def compare_precision(ctx: RankContext) -> None:
    traces = []
    for apart in (False, True):
        model = several().to(ctx.device)
        model.low = torch.float32
        policy = ours().precision(torch.float32, torch.float64)
        for unit in [model.narrow, model.wide, model] if apart else [model]:
            ours().shard(unit, mesh=ctx.mesh, mp_policy=policy)
        traces.append(train(model, lambda m, step: m(ctx.batch(step, 4, 5)), steps=2))
    assert_equal(*traces)


class Frozen(nn.Module):
    """What the reference supports: frozen parameters of other dtypes."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 6)
        self.codes = nn.Parameter(
            torch.randint(-128, 127, (6, 3), dtype=torch.int8), requires_grad=False
        )
        self.low = nn.Parameter(torch.randn(6).to(torch.bfloat16), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.linear(x) * self.low.float()
        seen: torch.Tensor = hidden @ (self.codes.float() / 128)
        return seen.square().mean()


def loss_on(ctx: RankContext, dtype: torch.dtype, model: nn.Module, step: int) -> torch.Tensor:
    loss: torch.Tensor = model(ctx.batch(step, 4, 5).to(dtype))
    return loss


@pytest.mark.parametrize("world", [2, 3])
def test_frozen_parameters_of_other_dtypes_train_as_in_the_reference(
    gangs: Gangs, world: int
) -> None:
    gangs(world).run(compare_frozen)


def compare_frozen(ctx: RankContext) -> None:
    for dtype in (None, torch.bfloat16):
        traces = []
        for engine in engines():
            torch.manual_seed(18)
            model = Frozen().to(ctx.device)
            policy = engine.precision(
                param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=dtype is None
            )
            engine.shard(model, mesh=ctx.mesh, mp_policy=policy)
            traces.append(train(model, partial(loss_on, ctx, dtype or torch.float32)))
        assert_equal(*traces)
