"""Transforms of `torch.func` and of `torch.compile` over sharded modules."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters
from torch.autograd import forward_ad
from torch.distributed.tensor import DTensor

from fsdp_core import fully_shard
from tests.engine.gang import Gangs, RankContext
from tests.engine.models import Decoder, decoder, loss_of, tokens_of
from tests.engine.sharded import held_unsharded_bytes

pytestmark = pytest.mark.ranks

WIDTH = 6


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = x + torch.tanh(self.linear(self.norm(x)))
        return result


def plain_and_sharded(ctx: RankContext) -> tuple[nn.Module, nn.Module]:
    models = []
    for _ in range(2):
        torch.manual_seed(5)
        models.append(nn.Sequential(*(Layer() for _ in range(3))).to(ctx.device))
    plain, model = models
    for layer in model:
        fully_shard(layer, mesh=ctx.mesh)
    fully_shard(model, mesh=ctx.mesh)
    return plain, model


def vmapped(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = torch.func.vmap(model)(x).square().mean()
    return result


def pushed(model: nn.Module, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and its derivative along ones."""
    primal, tangent, *_ = torch.func.jvp(model, (x,), (torch.ones_like(x),))
    return primal, tangent


def with_tangents(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    primal, tangent = pushed(model, x)
    return primal.square().mean() + tangent.square().mean()


def tangents_alone(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    _, tangent = pushed(model, x)
    return tangent.square().mean()


def vmapped_tangents(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    def push(row: torch.Tensor) -> torch.Tensor:
        _, tangent = pushed(model, row)
        return tangent

    result: torch.Tensor = torch.func.vmap(push)(x).square().mean()
    return result


TRANSFORMS = {f.__name__: f for f in (vmapped, with_tangents, tangents_alone, vmapped_tangents)}


def test_the_gradient_of_an_input_is_that_of_the_plain_model(gangs: Gangs) -> None:
    """Its backward, with the reductions, runs within the transform."""
    gangs(2).run(check_input_grad)


def check_input_grad(ctx: RankContext) -> None:
    plain, model = plain_and_sharded(ctx)
    x = torch.ones(4, WIDTH, device=ctx.device)
    for _ in range(2):
        grads = [torch.func.grad(lambda x, m=m: m(x).square().mean())(x) for m in (plain, model)]
        torch.testing.assert_close(grads[1], grads[0])
        assert [param.grad for param in model.parameters()] == [None] * 12


def test_forward_differentiation_needs_no_transform(gangs: Gangs) -> None:
    gangs(2).run(check_dual)


def check_dual(ctx: RankContext) -> None:
    with warnings.catch_warnings():
        # PyTorch's own, when it first loads what forward differentiation needs.
        warnings.filterwarnings("ignore", "`torch.jit.script", DeprecationWarning)
        pushed(nn.Identity(), torch.ones(1))
    x = torch.ones(4, WIDTH, device=ctx.device)
    tangents = []
    for each in plain_and_sharded(ctx):
        with forward_ad.dual_level():
            out = each(forward_ad.make_dual(x, torch.ones_like(x)))  # type: ignore[no-untyped-call]  # PyTorch's
            tangents.append(forward_ad.unpack_dual(out).tangent)  # type: ignore[no-untyped-call]  # PyTorch's
            torch.autograd.backward(out.square().mean())
    torch.testing.assert_close(*tangents)


@pytest.mark.parametrize("needs_input_grad", [False, True], ids=["leaf", "input with gradient"])
@pytest.mark.parametrize("transform", TRANSFORMS)
def test_a_transformed_model_trains_as_the_plain_one(
    gangs: Gangs, transform: str, *, needs_input_grad: bool
) -> None:
    gangs(2).run(check_transform, transform, needs_input_grad)


def check_transform(ctx: RankContext, transform: str, needs_input_grad: bool) -> None:  # noqa: FBT001 - shipped positionally
    with warnings.catch_warnings():
        # PyTorch's own, when it first loads what forward differentiation needs.
        warnings.filterwarnings("ignore", "`torch.jit.script", DeprecationWarning)
        pushed(nn.Identity(), torch.ones(1))
    plain, model = plain_and_sharded(ctx)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (plain, model)]
    for step in range(3):
        generator = torch.Generator().manual_seed(step)  # the same on all ranks
        x = torch.randn(4, WIDTH, generator=generator).to(ctx.device)
        losses = []
        for each in (plain, model):
            own = x.clone().requires_grad_(needs_input_grad)
            loss = TRANSFORMS[transform](each, own)
            torch.autograd.backward(loss)
            losses.append(loss.detach())
            if needs_input_grad:
                losses.append(own.grad.clone() if own.grad is not None else own)
        half = len(losses) // 2
        torch.testing.assert_close(losses[:half], losses[half:])
        expect_equal_gradients(plain, model)
        assert held_unsharded_bytes(model) == 0
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


def expect_equal_gradients(plain: nn.Module, model: nn.Module) -> None:
    for (name, mine), theirs in zip(model.named_parameters(), plain.parameters(), strict=True):
        if theirs.grad is None:
            assert mine.grad is None, name
        else:
            assert isinstance(mine.grad, DTensor), name
            torch.testing.assert_close(mine.grad.full_tensor(), theirs.grad)


def norm_of_slope(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    slope = torch.func.grad(lambda row: model(row).square().sum())
    result: torch.Tensor = slope(x).square().sum()
    return result


def slope_of_slope(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = torch.func.grad(lambda row: norm_of_slope(model, row))(x)
    return result


def slopes_of_rows(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = torch.func.vmap(lambda row: slope_of_slope(model, row))(x)
    return result


def jacobian_of_jacobian(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    inner = torch.func.jacrev(lambda row: model(row).square().sum())
    result: torch.Tensor = torch.func.jacrev(inner)(x[0])
    return result


@pytest.mark.parametrize("twice", [slope_of_slope, slopes_of_rows, jacobian_of_jacobian])
def test_a_gradient_of_a_gradient_is_that_of_the_plain_model(
    gangs: Gangs, twice: Callable[[nn.Module, torch.Tensor], torch.Tensor]
) -> None:
    gangs(2).run(check_twice, twice)


def check_twice(ctx: RankContext, twice: Callable[[nn.Module, torch.Tensor], torch.Tensor]) -> None:
    """Its parameters are read after the inner backward; the next forward has the updated ones."""
    plain, model = plain_and_sharded(ctx)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.01) for m in (plain, model)]
    x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(3)).to(ctx.device)
    for _ in range(3):
        second = [twice(each, x) for each in (plain, model)]
        torch.testing.assert_close(second[1], second[0])
        for each, found in zip((plain, model), second, strict=True):
            torch.autograd.backward(found.square().mean())
            torch.autograd.backward(each(x).square().mean())
        expect_equal_gradients(plain, model)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        assert held_unsharded_bytes(model) == 0


@pytest.mark.parametrize("compiled", ["block", "model"])
def test_a_compiled_model_trains_as_the_eager_one(gangs: Gangs, compiled: str) -> None:
    gangs(2).run(check_compile, compiled)


def check_compile(ctx: RankContext, compiled: str) -> None:
    eager = train(ctx, lambda _: None)

    def compile_blocks(model: Decoder) -> None:
        for block in model.blocks:
            block.compile(backend="aot_eager")

    def compile_all(model: Decoder) -> None:
        model.compile(backend="aot_eager")

    with dynamo_of_its_own():
        result = train(ctx, compile_blocks if compiled == "block" else compile_all)
        assert counters["stats"]["unique_graphs"] > 0
    assert result == pytest.approx(eager, abs=1e-6)
    assert eager[-1] < eager[0]


def train(ctx: RankContext, prepare: Callable[[Decoder], None]) -> list[float]:
    model = decoder().to(ctx.device)
    prepare(model)
    for block in model.blocks:
        fully_shard(block, mesh=ctx.mesh)
    fully_shard(model, mesh=ctx.mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    losses = []
    for step in range(4):
        loss = loss_of(model, tokens_of(step % 2, ctx.rank).to(ctx.device))
        torch.autograd.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert held_unsharded_bytes(model) == 0
    return losses


@contextmanager
def dynamo_of_its_own() -> Iterator[None]:
    torch.compiler.reset()
    counters.clear()
    with warnings.catch_warnings():
        # Dynamo looks at the attributes of every tensor that it meets.
        warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that", UserWarning)
        yield
    torch.compiler.reset()
