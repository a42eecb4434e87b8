"""After an exception anywhere in a step the model trains on as if the step had never been."""

from __future__ import annotations

import resource
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Protocol, cast

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor

from fsdp_core import ShardedState, TrainingState, fully_shard, register_fsdp_forward_method
from fsdp_core.errors import TensorKindError
from tests.engine.gang import Gangs, RankContext
from tests.engine.models import WIDTH, Block, Decoder, Recompute, decoder, loss_of, tokens_of
from tests.engine.sharded import (
    backward_once,
    held_unsharded_bytes,
    shard_decoder,
    state,
    states,
    unit,
)

pytestmark = pytest.mark.ranks


class InjectedError(Exception):
    """The fault under test."""


class _Fault(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
        del ctx
        return x.clone()

    @staticmethod
    def backward(ctx: object, *grads: torch.Tensor) -> torch.Tensor:
        del ctx, grads
        raise InjectedError


def fail(*_: object) -> None:
    raise InjectedError


def fault_in_forward(*_: object) -> object:
    raise InjectedError


def fault_in_backward(_: nn.Module, __: object, output: torch.Tensor) -> torch.Tensor:
    return cast("Callable[[torch.Tensor], torch.Tensor]", _Fault.apply)(output)


def fail_in_recomputation(*_: object) -> None:
    if torch._C._current_graph_task_id() != -1:
        raise InjectedError


Handle = torch.utils.hooks.RemovableHandle


class Removable(Protocol):
    """What was hung on a model and can be taken off."""

    def remove(self) -> None:
        """Take it off."""
        ...


# Each hangs a fault on the model, before or after it is sharded.
INJECTIONS: dict[str, Callable[[Decoder], Handle]] = {
    "forward of an inner module": lambda m: inner(m).up.register_forward_pre_hook(fail),
    "pre-hook of a unit": lambda m: inner(m).register_forward_pre_hook(fail, prepend=True),
    "hook of a unit": lambda m: inner(m).register_forward_hook(fail),
    "forward of the root": lambda m: m.norm.register_forward_hook(fail),
    "hook of the root": lambda m: m.register_forward_hook(fail),
    "backward of an inner module": lambda m: inner(m).up.register_forward_hook(fault_in_backward),
    "backward of a unit's output": lambda m: inner(m).register_forward_hook(fault_in_backward),
    "backward of the embedding": lambda m: m.embed.register_forward_hook(fault_in_backward),
    "backward of the head": lambda m: m.head.register_forward_hook(fault_in_backward),
    "optimizer in backward": lambda m: cast(
        "Handle",
        m.norm.weight.register_post_accumulate_grad_hook(fail),  # type: ignore[no-untyped-call]  # PyTorch's
    ),
}


def inner(model: Decoder) -> Block:
    return cast("Block", model.blocks[1])


@pytest.mark.parametrize("reset", [False, True], ids=["by itself", "reset_iter_state"])
@pytest.mark.parametrize("where", INJECTIONS)
def test_training_goes_on_as_if_the_failed_step_had_not_been(
    gangs: Gangs, where: str, *, reset: bool
) -> None:
    gangs(2).run(check_injection, where, reset)


def check_injection(ctx: RankContext, where: str, reset: bool) -> None:  # noqa: FBT001 - shipped positionally
    expect_same_training(ctx, INJECTIONS[where], reset=reset)


@pytest.mark.parametrize("recompute", ["block", "all"])
def test_a_fault_in_recomputation_is_survived(gangs: Gangs, recompute: Recompute) -> None:
    gangs(2).run(check_recomputation, recompute)


def check_recomputation(ctx: RankContext, recompute: Recompute) -> None:
    expect_same_training(
        ctx,
        lambda m: inner(m).down.register_forward_hook(fail_in_recomputation),
        reset=False,
        recompute=recompute,
    )


def test_a_fault_in_the_loss_is_survived(gangs: Gangs) -> None:
    gangs(2).run(check_loss)


def check_loss(ctx: RankContext) -> None:
    expected = losses(ctx, shard_decoder(ctx), range(4))
    model = shard_decoder(ctx)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    result = losses(ctx, model, range(2), optimizer)
    loss_of(model, tokens_of(99, ctx.rank).to(ctx.device))  # and then the user's code raises
    unit(model).reset_iter_state()
    assert_nothing_is_left(model)
    assert result + losses(ctx, model, range(2, 4), optimizer) == expected


@pytest.mark.parametrize("compiles", ["forward", "call"])
def test_endless_recursion_in_a_compiled_unit_is_an_error_that_training_survives(
    gangs: Gangs, compiles: str
) -> None:
    gangs(2).run(check_recursion, compiles)


def check_recursion(ctx: RankContext, compiles: str) -> None:
    with warnings.catch_warnings():
        # PyTorch's, of its own looks at gradients and of hooks that the same error reaches.
        warnings.simplefilter("ignore", UserWarning)
        expect_same_training(
            ctx, lambda model: _Recursion(inner(model), compiles), reset=False, error=RecursionError
        )
    torch.compiler.reset()


class _Recursion:
    """A compiled unit whose forward calls the unit itself, until ``remove``."""

    def __init__(self, block: Block, compiles: str) -> None:
        self._block = block
        forward = block.forward
        plain = torch.compile(forward, backend="eager") if compiles == "forward" else forward

        def again(x: torch.Tensor) -> torch.Tensor:
            answer: torch.Tensor = block(plain(x))
            return answer

        object.__setattr__(block, "forward", again)
        if compiles == "call":
            block.compile(backend="eager")

    def remove(self) -> None:
        """Let it be as it was."""
        object.__delattr__(self._block, "forward")
        self._block._compiled_call_impl = None


def expect_same_training(
    ctx: RankContext,
    inject: Callable[[Decoder], Removable],
    *,
    reset: bool,
    recompute: Recompute = "no",
    error: type[Exception] = InjectedError,
) -> None:
    def model_of_rank() -> Decoder:
        return shard_decoder(ctx, decoder(recompute=recompute).to(ctx.device))

    expected = losses(ctx, model_of_rank(), range(4))
    model = model_of_rank()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    result = losses(ctx, model, range(2), optimizer)
    fault = inject(model)
    for seed in (98, 99):  # twice: what the first leaves must not hide the second
        with pytest.raises(error):
            backward_once(ctx, model, seed)
        if reset:
            unit(model).reset_iter_state()
            assert_nothing_is_left(model)
    fault.remove()
    optimizer.zero_grad()
    result += losses(ctx, model, range(2, 4), optimizer)
    assert result == expected
    assert_nothing_is_left(model)


def losses(
    ctx: RankContext,
    model: Decoder,
    steps: range,
    optimizer: torch.optim.Optimizer | None = None,
) -> list[float]:
    optimizer = optimizer or torch.optim.AdamW(model.parameters(), lr=1e-2)
    found = []
    for step in steps:
        found.append(backward_once(ctx, model, step).item())
        optimizer.step()
        optimizer.zero_grad()
    return found


def assert_nothing_is_left(model: Decoder) -> None:
    assert held_unsharded_bytes(model) == 0
    assert len(state(model).context.reduces) == 0
    for each in states(model):
        assert each.training_state is TrainingState.IDLE
        assert all(group.sharded_state is ShardedState.SHARDED for group in each.groups)
        assert not any(group.is_gathering for group in each.groups)
        assert all(param.take_grad() is None for param in each.params)


def test_a_forward_that_raised_leaves_slices_at_once(gangs: Gangs) -> None:
    gangs(2).run(check_forward_at_once)


def check_forward_at_once(ctx: RankContext) -> None:
    model = shard_decoder(ctx)
    backward_once(ctx, model)  # so that prefetching is at work
    fault = inner(model).up.register_forward_hook(fail)
    with pytest.raises(InjectedError):
        backward_once(ctx, model)
    assert_nothing_is_left(model)
    fault.remove()


def test_a_forward_that_an_exception_stops_gives_what_whole_units_returned(gangs: Gangs) -> None:
    gangs(2).run(check_stopped)


def check_stopped(ctx: RankContext) -> None:
    """As where features are taken: a hook keeps an output, and may leave the rest of the forward out."""
    expected, found = (grads_of_kept(ctx, inner, error) for error in (None, InjectedError))
    assert len(expected) == len(found) > 0
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))
    # From within a unit, whose parameters are freed by then.
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        grads_of_kept(ctx, lambda model: inner(model).down, InjectedError)


def grads_of_kept(
    ctx: RankContext,
    module_of: Callable[[Decoder], nn.Module],
    error: type[InjectedError] | None,
) -> list[torch.Tensor]:
    """Gradients of a backward from what a module returned, where a hook may have raised at once."""
    model = shard_decoder(ctx)
    kept: list[torch.Tensor] = []

    def keep(_: nn.Module, __: object, output: torch.Tensor) -> None:
        kept.append(output)
        if error is not None:
            raise error

    module_of(model).register_forward_hook(keep)
    with nullcontext() if error is None else pytest.raises(error):
        model(tokens_of(0, ctx.rank).to(ctx.device))
    torch.autograd.backward(kept[0].square().sum())
    return grads_of(model.parameters())


def test_a_caught_fault_within_forward_leaves_the_pass_intact(gangs: Gangs) -> None:
    gangs(2).run(check_caught_within)


class Fallback(nn.Module):
    """Goes on without its first layer if that raises."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.second = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        try:
            x = self.first(x)
        except InjectedError:
            x = 2 * x
        result: torch.Tensor = self.second(x)
        return result


def check_caught_within(ctx: RankContext) -> None:
    torch.manual_seed(3)
    plain = Fallback().to(ctx.device)
    torch.manual_seed(3)
    model = Fallback().to(ctx.device)
    for layer in (model.first, model.second):
        fully_shard(layer, mesh=ctx.mesh)
    fully_shard(model, mesh=ctx.mesh)
    for each in (plain, model):
        each.first.register_forward_hook(fail)
    x = torch.ones(2, WIDTH, device=ctx.device)
    for each in (plain, model):
        torch.autograd.backward(each(x).square().sum())
    assert isinstance(model.second.weight.grad, DTensor)
    torch.testing.assert_close(model.second.weight.grad.full_tensor(), plain.second.weight.grad)
    assert model.first.weight.grad is None
    assert held_unsharded_bytes(model) == 0


def test_an_interrupt_that_runs_no_hooks_is_survived(gangs: Gangs) -> None:
    gangs(2).run(check_interrupt)


def check_interrupt(ctx: RankContext) -> None:
    expected = losses(ctx, shard_decoder(ctx), range(3))
    model = shard_decoder(ctx)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    result = losses(ctx, model, range(1), optimizer)

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    fault = inner(model).register_forward_pre_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        backward_once(ctx, model)
    fault.remove()
    result += losses(ctx, model, range(1, 3), optimizer)
    assert result == expected
    assert_nothing_is_left(model)


@pytest.mark.parametrize("where", ["within", "at its end"])
def test_a_second_graph_may_go_backward_after_the_first_failed(gangs: Gangs, where: str) -> None:
    gangs(2).run(check_second_graph, where)


def check_second_graph(ctx: RankContext, where: str) -> None:
    model, alone = shard_decoder(ctx), shard_decoder(ctx)
    if where == "within":
        fault: Removable = inner(model).register_forward_hook(fault_in_backward)
    else:
        slice_of_root = next(iter(model.parameters()))
        fault = slice_of_root.register_post_accumulate_grad_hook(fail)  # type: ignore[no-untyped-call]  # PyTorch's
    failing = loss_of(model, tokens_of(0, ctx.rank).to(ctx.device))
    if where == "within":
        fault.remove()
    loss = loss_of(model, tokens_of(1, ctx.rank).to(ctx.device))
    with pytest.raises(InjectedError) as kept:
        torch.autograd.backward(failing)
    fault.remove()
    model.zero_grad()
    torch.autograd.backward(loss)
    assert kept.tb is not None  # and with it all that its frames refer to
    torch.autograd.backward(loss_of(alone, tokens_of(1, ctx.rank).to(ctx.device)))
    for mine, theirs in zip(model.parameters(), alone.parameters(), strict=True):
        assert (mine.grad is None) == (theirs.grad is None)
        if mine.grad is not None and theirs.grad is not None:
            assert torch.equal(mine.grad, theirs.grad)
    assert_nothing_is_left(model)


@pytest.mark.parametrize("reset", [False, True], ids=["by itself", "reset_iter_state"])
def test_without_zero_grad_the_next_backward_adds_to_what_the_failed_one_left(
    gangs: Gangs, *, reset: bool
) -> None:
    gangs(2).run(check_without_zeroing, reset)


def check_without_zeroing(ctx: RankContext, reset: bool) -> None:  # noqa: FBT001 - shipped positionally
    model, alone = shard_decoder(ctx), shard_decoder(ctx)
    slices = list(model.parameters())  # as an optimizer has them
    backward_once(ctx, model, 0)
    earlier = grads_of(slices)
    fault = inner(model).register_forward_hook(fault_in_backward)
    with pytest.raises(InjectedError):
        backward_once(ctx, model, 1)
    fault.remove()
    if reset:
        unit(model).reset_iter_state()
    left = grads_of(slices)
    assert any(torch.equal(one, other) for one, other in zip(left, earlier, strict=True))
    backward_once(ctx, model, 2)
    backward_once(ctx, alone, 2)
    for mine, kept, added in zip(grads_of(slices), left, grads_of(alone.parameters()), strict=True):
        assert torch.equal(mine, kept + added)
    assert_nothing_is_left(model)


def grads_of(parameters: Iterable[nn.Parameter]) -> list[torch.Tensor]:
    grads = [p.grad for p in parameters if p.grad is not None]
    return [cast("DTensor", grad).full_tensor() for grad in grads]


def test_reset_drops_what_was_accumulated_without_a_reduction(gangs: Gangs) -> None:
    gangs(2).run(check_accumulation)


def check_accumulation(ctx: RankContext) -> None:
    model, alone = shard_decoder(ctx), shard_decoder(ctx)
    with unit(model).no_sync():
        backward_once(ctx, model, 0)
    assert any(p.unsharded().parameter.grad is not None for s in states(model) for p in s.params)
    unit(model).reset_iter_state()
    assert_nothing_is_left(model)
    backward_once(ctx, model, 1)
    backward_once(ctx, alone, 1)
    assert isinstance(model.embed.weight.grad, DTensor)
    assert torch.equal(model.embed.weight.grad, cast("torch.Tensor", alone.embed.weight.grad))


def test_reset_is_for_the_root(gangs: Gangs) -> None:
    gangs(1).run(check_reset_of_root)


def check_reset_of_root(ctx: RankContext) -> None:
    model = shard_decoder(ctx)
    unit(model).reset_iter_state()  # before any forward: nothing to forget
    backward_once(ctx, model)
    with pytest.raises(RuntimeError, match="reset_iter_state must be called on the root FSDP mod"):
        unit(model.blocks[0]).reset_iter_state()


def test_a_registered_method_that_raised_leaves_slices(gangs: Gangs) -> None:
    gangs(2).run(check_method)


class Scorer(nn.Linear):
    def score(self, x: torch.Tensor, *, broken: bool) -> torch.Tensor:
        if broken:
            raise InjectedError
        result: torch.Tensor = self(x)
        return result


def check_method(ctx: RankContext) -> None:
    model = Scorer(3, 5).to(ctx.device)
    fully_shard(model, mesh=ctx.mesh)
    register_fsdp_forward_method(model, "score")
    x = torch.ones(2, 3, device=ctx.device)
    with pytest.raises(InjectedError):
        model.score(x, broken=True)
    assert held_unsharded_bytes(model) == 0
    torch.autograd.backward(model.score(x, broken=False).sum())
    assert isinstance(model.weight.grad, DTensor)
    assert held_unsharded_bytes(model) == 0


def test_a_copy_out_without_memory_leaves_slices(gangs: Gangs, device: str) -> None:
    if device != "cpu":
        pytest.skip("the limit is on the host's memory")
    gangs(1).run(check_out_of_memory)  # a backend would let go of memory of its own meanwhile


def check_out_of_memory(ctx: RankContext) -> None:
    torch.manual_seed(5)
    model = nn.Sequential(nn.Linear(4, 3000), nn.Linear(3000, 4000))  # 48 MB
    fully_shard(model, mesh=ctx.mesh)
    x = torch.ones(2, 4)
    expected = model(x).detach()
    for _ in range(2):
        unit(model).reshard()
        unit(model).unshard(async_op=True)
        with little_memory(slack=8 << 20), pytest.raises(RuntimeError, match="allocate memory"):
            model(x)
        assert held_unsharded_bytes(model) == 0
        assert state(model).groups[0].sharded_state is ShardedState.SHARDED
        assert all(isinstance(param, DTensor) for param in model.parameters())
        assert torch.equal(model(x), expected)
    torch.autograd.backward(model(x).sum())
    assert all(isinstance(param.grad, DTensor) for param in model.parameters())


@contextmanager
def little_memory(slack: int) -> Iterator[None]:
    """Lets this process map no more than `slack` bytes besides what it has."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limits = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + slack, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)


@pytest.mark.parametrize("kind", ["plain", "whole"])
def test_a_gradient_of_another_kind_is_not_replaced(gangs: Gangs, kind: str) -> None:
    gangs(2).run(check_foreign_gradient, kind)


def check_foreign_gradient(ctx: RankContext, kind: str) -> None:
    model = nn.Linear(3, 4).to(ctx.device)
    fully_shard(model, mesh=ctx.mesh)
    foreign = torch.ones(4, 3, device=ctx.device)
    if kind == "whole":
        foreign = distribute_tensor(foreign, ctx.mesh, [Replicate()])
    model.weight.grad = foreign
    loss = model(torch.ones(2, 3, device=ctx.device)).sum()
    with pytest.raises(TensorKindError, match="gradient of parameter 'weight' was set to a "):
        torch.autograd.backward(loss)
    model.weight.grad = None
    torch.autograd.backward(model(torch.ones(2, 3, device=ctx.device)).sum())
    assert isinstance(model.weight.grad, DTensor)
    assert held_unsharded_bytes(model) == 0
