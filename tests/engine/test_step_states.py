"""Steps that are not one forward, one backward: each trains as one process does."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from fsdp_core import TrainingState, fully_shard, register_fsdp_forward_method
from tests.engine.gang import Gangs, RankContext
from tests.engine.sharded import held_unsharded_bytes, states, unit

pytestmark = pytest.mark.ranks

WIDTH = 8


class Block(nn.Module):
    """Calls a method of its own in forward, and uses its parameters before and after that."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, WIDTH)
        self.down = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.down(self.rise(x)) @ self.up.weight
        return result

    def rise(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.up(x))

    def score(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self(x) @ self.down.weight
        return result


class Inside(nn.Module):
    """One of two parents of a block."""

    def __init__(self, block: Block) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.block = block

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.block(torch.tanh(self.linear(x)))
        return result


class Model(nn.Module):
    """Two units with a block in common, and one of its own."""

    def __init__(self) -> None:
        super().__init__()
        common = Block()
        self.left = Inside(common)
        self.right = Inside(common)
        self.last = Block()
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.head(self.last(self.right(self.left(x)))).square().mean()
        return result

    def scored(self, x: torch.Tensor) -> torch.Tensor:
        """A loss by way of a method that calls forward, of a unit below."""
        result: torch.Tensor = self.head(self.last.score(self.left(x))).square().mean()
        return result


Step = Callable[[Model, Sequence[torch.Tensor]], None]


def sharded(ctx: RankContext, model: Model) -> Model:
    for module in (model.left.block, model.left, model.right, model.last, model):
        fully_shard(module, mesh=ctx.mesh)
    for block in (model.left.block, model.last):
        register_fsdp_forward_method(block, "rise")
        register_fsdp_forward_method(block, "score")
    register_fsdp_forward_method(model, "scored")
    return model


def mean(losses: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.stack(list(losses)).mean()


def methods_within_forward(model: Model, xs: Sequence[torch.Tensor]) -> None:
    torch.autograd.backward(mean([model(x) for x in xs]))


def forward_within_methods(model: Model, xs: Sequence[torch.Tensor]) -> None:
    torch.autograd.backward(mean([model.scored(x) for x in xs]))


def two_losses_of_one_graph(model: Model, xs: Sequence[torch.Tensor]) -> None:
    loss = mean([model(x) for x in xs])
    torch.autograd.backward(loss.square(), retain_graph=True)
    torch.autograd.backward(loss)


def the_same_backward_twice(model: Model, xs: Sequence[torch.Tensor]) -> None:
    loss = mean([model(x) for x in xs])
    torch.autograd.backward(loss, retain_graph=True)
    torch.autograd.backward(loss)


def two_graphs_then_two_backwards(model: Model, xs: Sequence[torch.Tensor]) -> None:
    first, second = mean([model(x) for x in xs]), mean([model(2 * x) for x in xs])
    torch.autograd.backward(first)
    torch.autograd.backward(second)


def the_later_graph_first(model: Model, xs: Sequence[torch.Tensor]) -> None:
    first, second = mean([model(x) for x in xs]), mean([model(2 * x) for x in xs])
    torch.autograd.backward(second)
    torch.autograd.backward(first)


def gradients_of_inputs_alone(model: Model, xs: Sequence[torch.Tensor]) -> None:
    losses = []
    for x in xs:
        leaf = x.clone().requires_grad_()
        (grad,) = torch.autograd.grad(model(leaf), leaf)
        losses.append(model(x + grad.sign()))
    torch.autograd.backward(mean(losses))


def a_backward_that_stops_halfway(model: Model, xs: Sequence[torch.Tensor]) -> None:
    seen: list[torch.Tensor] = []
    watch = model.last.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    losses = []
    for x in xs:
        loss = model(x)
        (grad,) = torch.autograd.grad(loss, seen.pop(), retain_graph=True)
        losses.append(loss * grad.norm())
    watch.remove()
    torch.autograd.backward(mean(losses))


def a_forward_without_gradients_in_between(model: Model, xs: Sequence[torch.Tensor]) -> None:
    losses = []
    for x in xs:
        loss = model(x)
        with torch.no_grad():
            target = model(-x)
        losses.append(loss * target)
    torch.autograd.backward(mean(losses))


STEPS: dict[str, Step] = {
    step.__name__.replace("_", " "): step
    for step in (
        methods_within_forward,
        forward_within_methods,
        two_losses_of_one_graph,
        the_same_backward_twice,
        two_graphs_then_two_backwards,
        the_later_graph_first,
        gradients_of_inputs_alone,
        a_backward_that_stops_halfway,
        a_forward_without_gradients_in_between,
    )
}


@pytest.mark.parametrize("step", STEPS)
def test_an_unusual_step_trains_as_one_process_does(gangs: Gangs, step: str) -> None:
    gangs(2).run(compare, step)


def compare(ctx: RankContext, step: str) -> None:
    torch.manual_seed(0)
    alone = Model().to(ctx.device)
    torch.manual_seed(0)
    model = sharded(ctx, Model().to(ctx.device))
    for number in range(3):  # the first has nothing to prefetch by
        batches = [batch(ctx, number, rank) for rank in range(ctx.world)]
        STEPS[step](alone, batches)
        STEPS[step](model, batches[ctx.rank : ctx.rank + 1])
        assert held_unsharded_bytes(model) == 0
        assert all(each.training_state is TrainingState.IDLE for each in states(model))
        for (name, mine), theirs in zip(model.named_parameters(), alone.parameters(), strict=True):
            assert (mine.grad is None) == (theirs.grad is None), name
            if mine.grad is not None:
                assert isinstance(mine.grad, DTensor)
                torch.testing.assert_close(mine.grad.full_tensor(), theirs.grad, msg=name)
        for each in (alone, model):
            torch.optim.SGD(each.parameters(), lr=0.1).step()
            each.zero_grad()


def batch(ctx: RankContext, number: int, rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * number + rank)
    return torch.randn(4, WIDTH, generator=generator).to(ctx.device)


def test_evaluation_between_microbatches_changes_no_gradient(gangs: Gangs) -> None:
    gangs(2).run(check_evaluation_between)


def check_evaluation_between(ctx: RankContext) -> None:
    found = []
    for evaluates in (False, True):
        torch.manual_seed(0)
        model = sharded(ctx, Model().to(ctx.device))
        for number in range(3):
            unit(model).set_requires_gradient_sync(number == 2)
            torch.autograd.backward(model(batch(ctx, number, ctx.rank)))
            if evaluates:
                with torch.no_grad():
                    model(batch(ctx, 9, ctx.rank))
        unit(model).reshard()  # a forward without gradients leaves the root whole
        found.append([p.grad for p in model.parameters()])
    for without, with_evaluation in zip(*found, strict=True):
        assert isinstance(without, DTensor)
        assert isinstance(with_evaluation, DTensor)
        assert torch.equal(without.to_local(), with_evaluation.to_local())


class RaisesOnce(Block):
    """Falls back on another way if its method raises."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        try:
            x = self.rise(x)
        except ZeroDivisionError:
            x = 2 * x
        result: torch.Tensor = self.down(x)
        return result

    def rise(self, x: torch.Tensor) -> torch.Tensor:
        lowered: torch.Tensor = self.up(x) / (1 // 0)
        return lowered


def test_a_method_that_raises_within_forward_may_be_caught_there(gangs: Gangs) -> None:
    gangs(2).run(check_caught_method)


def check_caught_method(ctx: RankContext) -> None:
    torch.manual_seed(0)
    alone = RaisesOnce().to(ctx.device)
    torch.manual_seed(0)
    model = nn.Sequential(RaisesOnce()).to(ctx.device)
    fully_shard(model[0], mesh=ctx.mesh)
    fully_shard(model, mesh=ctx.mesh)
    register_fsdp_forward_method(model[0], "rise")
    x = torch.ones(2, WIDTH, device=ctx.device)
    torch.autograd.backward(alone(x).square().sum())
    torch.autograd.backward(model(x).square().sum())
    found = [p.grad for p in model.parameters()]
    assert held_unsharded_bytes(model) == 0
    assert [grad is None for grad in found] == [p.grad is None for p in alone.parameters()]
    assert isinstance(found[-1], DTensor)
    torch.testing.assert_close(found[-1].full_tensor(), alone.down.weight.grad)
