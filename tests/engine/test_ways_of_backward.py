"""In whatever way backward reaches a unit, its gradients are there when backward returns.

After each backward they are those of the reference, bit for bit. Where the reference loses some,
or refuses, they are those of plain modules, averaged over ranks.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._dynamo import compiled_autograd
from torch.autograd import backward

from fsdp_core import Owned
from fsdp_core.errors import StateError
from tests.engine.gang import Gangs, RankContext
from tests.engine.versus import Engine, assert_same_tensor, full, ours, theirs
from tests.engine.ways import BEYOND, WAYS
from tests.engine.ways.run import WIDTH, Grads, Opaque, Raising, Run, Way

pytestmark = pytest.mark.ranks


def go(ctx: RankContext, function: Way, shard: Callable[..., object] | None) -> list[Grads]:
    run = Run(ctx, shard)
    function(run)
    return run.grads


@pytest.mark.parametrize("name", [*WAYS, *BEYOND])
def test_gradients_are_there_when_backward_returns(gangs: Gangs, name: str) -> None:
    gangs(2).run(compare, name)


def compare(ctx: RankContext, name: str) -> None:
    if name in WAYS:
        mine, reference = (go(ctx, WAYS[name], engine.shard) for engine in (ours(), theirs()))
        assert_same(mine, reference, rtol=0.0, atol=0.0)
    else:
        mine, plain = (go(ctx, BEYOND[name], shard) for shard in (ours().shard, None))
        assert_same(mine, plain, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("owns", [False, True], ids=["offloaded", "owned and offloaded"])
def test_gradients_of_offloaded_and_owned_parameters_are_there_in_all_ways(
    gangs: Gangs, *, owns: bool
) -> None:
    gangs(2).run(compare_with_options, owns)


def compare_with_options(ctx: RankContext, owns: bool) -> None:  # noqa: FBT001 - shipped positionally
    def with_options(engine: Engine) -> Callable[..., object]:
        chosen: dict[str, object] = {"offload_policy": engine.offload(pin_memory=False)}
        if owns and engine.is_ours:
            chosen["shard_placement_fn"] = lambda param: Owned() if param.ndim == 2 else None
        return lambda module, **options: engine.shard(module, **(chosen | options))

    mine, reference = with_options(ours()), with_options(theirs())
    for name, function in WAYS.items():
        found = go(ctx, function, mine), go(ctx, function, reference)
        assert_same(*found, rtol=0.0, atol=0.0, of=name)
    for name, function in BEYOND.items():
        found = go(ctx, function, mine), go(ctx, function, None)
        assert_same(*found, rtol=1e-5, atol=1e-5, of=name)


def assert_same(
    mine: list[Grads], other: list[Grads], *, rtol: float, atol: float, of: str = "all"
) -> None:
    assert len(mine) == len(other) > 0
    for number, (one, two) in enumerate(zip(mine, other, strict=True)):
        assert one.keys() == two.keys()
        for name, grad in one.items():
            assert_same_tensor(f"{of}: backward {number}: {name}", grad, two[name], rtol, atol)


class Keeping(nn.Module):
    """Its output leaves by return, and what it is computed from by an attribute."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(29)
        self.first = nn.Linear(WIDTH, WIDTH)
        self.second = nn.Linear(WIDTH, WIDTH)
        self.hidden = torch.empty(0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.hidden = self.first(x)
        return cast("torch.Tensor", self.second(self.hidden.tanh()))


def test_each_backward_rounds_once_wherever_it_began(gangs: Gangs) -> None:
    gangs(2).run(check_rounding)


def check_rounding(ctx: RankContext) -> None:
    """Ours adds up all backwards in the reduce dtype, the reference some in the compute dtype."""
    x = ctx.batch(0, 4, WIDTH)
    plain = Keeping().to(ctx.device, torch.bfloat16)
    output, weight = plain(x.bfloat16()), plain.first.weight
    losses = [loss.float().square().sum() for loss in (plain.hidden, output)]
    inner, outer = (
        torch.autograd.grad(loss, weight, retain_graph=True)[0].float() for loss in losses
    )
    in_one_dtype = (inner + outer) + outer
    in_two = (inner + outer).bfloat16().float() + outer
    for engine, local in ((ours(), in_one_dtype), (theirs(), in_two)):
        dist.all_reduce(local)
        assert torch.equal(low_precision_grad(ctx, engine, x), local / ctx.world)
    assert not torch.equal(in_one_dtype, in_two)


def low_precision_grad(ctx: RankContext, engine: Engine, x: torch.Tensor) -> torch.Tensor:
    """Of two microbatches; the first goes backward from within before it does from its output."""
    model: Any = Keeping().to(ctx.device)
    engine.shard(model, mesh=ctx.mesh, mp_policy=engine.precision(torch.bfloat16, torch.float32))
    for is_last in (False, True):
        model.set_requires_gradient_sync(is_last)
        output = model(x)
        if not is_last:
            backward(model.hidden.float().square().sum(), retain_graph=True)
        backward(output.float().square().sum())
    return full(model.first.weight.grad)


def test_a_backward_that_would_read_freed_parameters_is_refused(gangs: Gangs) -> None:
    gangs(2).run(check_freed)


def check_freed(ctx: RankContext) -> None:
    refused = pytest.raises(RuntimeError, match="modified by an inplace operation")
    x = ctx.batch(0, 4, WIDTH).requires_grad_()

    second_derivative = Run(ctx, ours().shard).net()
    (slope,) = torch.autograd.grad(second_derivative(x).square().sum(), x, create_graph=True)
    with refused:
        backward(slope.square().sum())

    hides_beside_its_output: Any = Run(ctx, ours().shard).net("first second")
    hides_beside_its_output.set_reshard_after_forward(True)
    hidden = []
    hides_beside_its_output.norm.register_forward_pre_hook(lambda _, args: hidden.append(args[0]))
    hides_beside_its_output(x)
    with refused:
        backward(hidden[0].sum())


def test_a_failed_backward_does_not_mix_with_one_that_comes_unannounced(gangs: Gangs) -> None:
    gangs(2).run(check_unannounced)


def check_unannounced(ctx: RankContext) -> None:
    run = Run(ctx, ours().shard)
    model = run.net("")
    fault = model.second.register_forward_hook(lambda _, __, out: Raising.of(out))
    failing = model(run.x())
    fault.remove()
    model.returns = Opaque
    hidden = model(run.x()).tensor
    with pytest.raises(ZeroDivisionError):
        backward(failing.sum())
    with pytest.raises(StateError, match="An earlier backward raised"):
        backward(hidden.sum())
    model.reset_iter_state()
    run.backward(model(run.x()).tensor)
    assert all(grad is not None for grad in run.grads[-1].values())


def test_a_backward_in_a_hook_where_that_of_the_same_model_ends_is_refused(gangs: Gangs) -> None:
    gangs(2).run(check_backward_while_ending)


def check_backward_while_ending(ctx: RankContext) -> None:
    run = Run(ctx, ours().shard)
    model = run.net("")

    @torch.enable_grad()
    def go_again(_: torch.Tensor) -> None:
        backward(model(run.x()).sum())

    hook = next(model.first.parameters()).register_post_accumulate_grad_hook(go_again)
    with pytest.raises(StateError, match="A hook of a parameter"):
        backward(model(run.x()).sum())
    hook.remove()
    model.zero_grad()
    run.backward(model(run.x()))
    assert all(grad is not None for grad in run.grads[-1].values())


def test_a_backward_by_compiled_autograd_is_refused(gangs: Gangs) -> None:
    gangs(2).run(go_backward_compiled)


def go_backward_compiled(ctx: RankContext) -> None:
    model = Run(ctx, ours().shard).net("")
    loss = model(ctx.batch(0, 4, WIDTH)).square().sum()
    with (
        warnings.catch_warnings(action="ignore"),  # of PyTorch's own, of a grad that it reads
        compiled_autograd._enable(lambda graph: graph),
        pytest.raises(StateError, match="Compiled autograd"),
    ):
        loss.backward()
    model.reset_iter_state()
