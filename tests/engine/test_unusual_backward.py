"""Modules that call themselves, threads within backward, and gradients of slices."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from fsdp_core import clip_grad_norm_
from tests.engine.gang import Gangs, RankContext
from tests.engine.versus import assert_same_full, assert_same_tensor, full, ours, theirs

pytestmark = pytest.mark.ranks

WIDTH = 5


class Recursive(nn.Module):
    """Calls itself before its own layer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(31)
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.full((WIDTH,), 0.7))

    def forward(self, x: torch.Tensor, depth: int = 2) -> torch.Tensor:
        if depth > 0:
            x = self(x, depth - 1)
        result: torch.Tensor = self.layer(x).tanh() * self.scale
        return result


def test_a_root_may_call_itself(gangs: Gangs) -> None:
    gangs(2).run(check_recursion)


def check_recursion(ctx: RankContext) -> None:
    """The reference frees the parameters when an inner call returns, and an outer one needs them."""
    plain = Recursive().to(ctx.device)
    for rank in range(ctx.world):
        other = RankContext(rank, ctx.world, ctx.device, ctx.mesh)
        for micro in range(2):
            loss = plain(other.batch(micro, 3, WIDTH)).square().sum()
            torch.autograd.backward(loss / ctx.world)
    for reshard in (False, True):
        model: Any = Recursive().to(ctx.device)
        ours().shard(model.layer, mesh=ctx.mesh)
        ours().shard(model, mesh=ctx.mesh, reshard_after_forward=reshard)
        for micro in range(2):
            model.set_requires_gradient_sync(micro == 1)
            torch.autograd.backward(model(ctx.batch(micro, 3, WIDTH)).square().sum())
        assert_same_full(model, plain, rtol=1e-5, atol=1e-6)


def in_a_thread(function: Callable[[], torch.Tensor]) -> torch.Tensor:
    """The result of `function`, which runs in a thread of its own with this one's grad mode."""
    results: list[torch.Tensor] = []
    grad = torch.is_grad_enabled()

    def run() -> None:
        with torch.set_grad_enabled(grad):
            results.append(function())

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return results[0]


class Branches(nn.Module):
    """Two layers side by side, each in a thread, before a last one."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(37)
        self.left = nn.Linear(WIDTH, WIDTH)
        self.right = nn.Linear(WIDTH, WIDTH)
        self.last = nn.Linear(WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.full((WIDTH,), 0.7))
        self.looks = False

    def both(self, x: torch.Tensor) -> torch.Tensor:
        return in_a_thread(lambda: self.left(x)).tanh() + in_a_thread(lambda: self.right(x))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.looks:
            hidden = self.both(x)
            hidden.register_hook(self.look)  # type: ignore[no-untyped-call]  # PyTorch's
        else:
            hidden = checkpoint(self.both, x, use_reentrant=True)
        result: torch.Tensor = self.last(hidden) * self.scale
        return result

    @torch.no_grad()
    def look(self, grad: torch.Tensor) -> None:
        in_a_thread(lambda: self.right(grad))


@pytest.mark.parametrize("forward_in_a_thread", [False, True])
@pytest.mark.parametrize("looks", [False, True], ids=["recomputation", "evaluation"])
def test_units_run_in_threads_while_backward_goes_on(
    gangs: Gangs, *, looks: bool, forward_in_a_thread: bool
) -> None:
    gangs(2).run(check_threads, looks, forward_in_a_thread)


def check_threads(ctx: RankContext, looks: bool, forward_in_a_thread: bool) -> None:  # noqa: FBT001 - shipped positionally
    models: list[Any] = []
    for engine in (ours(), theirs()):
        model: Any = Branches().to(ctx.device)
        model.looks = looks
        for layer in (model.left, model.right, model.last):
            engine.shard(layer, mesh=ctx.mesh)
        engine.shard(model, mesh=ctx.mesh)
        for micro in range(2):
            model.set_requires_gradient_sync(micro == 1)
            x = ctx.batch(micro, 3, WIDTH).requires_grad_()
            run: Callable[[], torch.Tensor] = partial(model, x)
            output = in_a_thread(run) if forward_in_a_thread else run()
            torch.autograd.backward(output.square().sum())
        models.append(model)
    assert_same_full(*models, rtol=0.0, atol=0.0)


def test_slices_are_no_part_of_the_graph_as_in_the_reference(gangs: Gangs) -> None:
    gangs(2).run(check_slices)


def check_slices(ctx: RankContext) -> None:
    unused = pytest.raises(RuntimeError, match="appears to not have been used in the graph")
    x = ctx.batch(0, 3, WIDTH)
    for reshard in (False, True):
        found: list[list[torch.Tensor | None]] = []
        for engine in (ours(), theirs()):
            torch.manual_seed(41)
            model = nn.Linear(WIDTH, WIDTH).to(ctx.device)
            engine.shard(model, mesh=ctx.mesh, reshard_after_forward=reshard)
            slices = list(model.parameters())
            with unused:
                torch.autograd.grad(model(x).sum(), slices)
            nothing = torch.autograd.grad(model(x).sum(), slices, allow_unused=True)
            assert all(grad is None for grad in nothing)
            torch.autograd.backward(model(x).sum(), inputs=slices)
            assert [param.grad for param in slices] == [None, None]
            loss = model(x).sum()
            if reshard:
                with unused:
                    torch.autograd.grad(loss, list(model.parameters()))
                found.append([])
            else:
                # Of this rank alone: nothing is reduced.
                found.append(list(torch.autograd.grad(loss, list(model.parameters()))))
                assert [param.grad for param in slices] == [None, None]
        for mine, reference in zip(*found, strict=True):
            assert mine is not None
            assert_same_tensor("gradient", full(mine), reference, 0.0, 0.0)


def test_zero_grad_of_a_unit_that_stayed_unsharded_is_the_optimizers_to_call(gangs: Gangs) -> None:
    gangs(2).run(check_zero_grad)


def check_zero_grad(ctx: RankContext) -> None:
    for engine in (ours(), theirs()):
        model: Any = nn.Linear(WIDTH, WIDTH).to(ctx.device)
        engine.shard(model, mesh=ctx.mesh)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        slices = list(model.parameters())
        torch.autograd.backward(model(ctx.batch(0, 3, WIDTH)).sum())
        with torch.no_grad():
            model(ctx.batch(1, 3, WIDTH))
        model.zero_grad()
        model.requires_grad_(requires_grad=False)
        assert all(param.grad is not None and param.requires_grad for param in slices)
        for clip in (clip_grad_norm_, nn.utils.clip_grad_norm_):
            assert clip(model.parameters(), 1.0) == 0.0
        optimizer.zero_grad()
        assert all(param.grad is None for param in slices)
        model.reshard()
        model.requires_grad_(requires_grad=False)
        assert not any(param.requires_grad for param in slices)


@dataclass
class Notes:
    """What layers hand on."""

    hidden: torch.Tensor
    losses: list[torch.Tensor]
    named: dict[str, torch.Tensor]
    total: torch.Tensor | float = 0.0


class Noting(nn.Module):
    """Leaves losses in what it is given, some of which backward reaches before its output."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.gate = nn.Linear(WIDTH, 2)

    def forward(
        self, notes: Notes, losses: list[torch.Tensor], extra: dict[str, Any]
    ) -> torch.Tensor:
        hidden = notes.hidden
        notes.hidden = self.layer(hidden).tanh()
        notes.total = notes.total + self.gate(hidden).exp().sum()
        notes.losses.append(notes.hidden.square().sum())
        notes.named["last"] = self.gate(notes.hidden).square().sum()
        losses.insert(0, self.gate(hidden).sin().sum())
        extra["count"] = extra.get("count", 0) + 1
        extra.pop("first", None)
        return notes.hidden


class Noted(nn.Module):
    """Adds up what two such layers left."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(43)
        self.embed = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList([Noting(), Noting()])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        notes, losses, extra = Notes(x, [x.sum()], {"x": x.sum()}), [x.mean()], {"x": x, "first": x}
        for layer in self.layers:
            layer(notes, losses, extra)
        assert len(losses) == len(notes.losses) == 3
        assert extra == {"x": x, "count": 2}
        assert extra["x"] is x
        left = [*losses, *notes.losses, *notes.named.values(), notes.hidden.sum()]
        return torch.stack(left).sum() + notes.total


@pytest.mark.parametrize("recompute", [False, True])
def test_what_a_unit_writes_into_its_inputs_reaches_its_caller(
    gangs: Gangs, *, recompute: bool
) -> None:
    gangs(2).run(check_written, recompute)


def check_written(ctx: RankContext, recompute: bool) -> None:  # noqa: FBT001 - shipped positionally
    """The reference loses it, because it copies lists, dicts and dataclasses with tensors in them."""
    plain, model = Noted().to(ctx.device), Noted().to(ctx.device)
    for layer in model.layers:
        ours().shard(layer, mesh=ctx.mesh)
    ours().shard(model, mesh=ctx.mesh, reshard_after_forward=True)
    for rank in range(ctx.world):
        other = RankContext(rank, ctx.world, ctx.device, ctx.mesh)
        torch.autograd.backward(plain(other.batch(0, 3, WIDTH)) / ctx.world)
    x = ctx.batch(0, 3, WIDTH).requires_grad_()
    output = checkpoint(model, x, use_reentrant=False) if recompute else model(x)
    assert isinstance(output, torch.Tensor)
    torch.autograd.backward(output)
    assert_same_full(model, plain, rtol=1e-5, atol=1e-6)
