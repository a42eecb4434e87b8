"""Several roots on one device share streams, counts and window, and train as the reference's do."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from fsdp_core import FSDPModule, fully_shard, observe, share_comm_ctx
from fsdp_core.errors import StateError
from fsdp_core.runtime import NullObserver
from tests.engine.gang import Gangs, RankContext
from tests.engine.models import WIDTH, Block
from tests.engine.sharded import held_unsharded_bytes, local, state, unit
from tests.engine.versus import assert_same_tensor
from tests.engine.ways.run import Raising

pytestmark = pytest.mark.ranks

MICROBATCHES = 4

# One rank's part of a pipeline of two chunks: (chunk, forward or backward, microbatch).
SCHEDULE = [
    (0, "F", 0),
    (0, "F", 1),
    (1, "F", 0),
    (0, "F", 2),
    (1, "B", 0),
    (1, "F", 1),
    (0, "B", 0),
    (1, "B", 1),
    (0, "B", 1),
    (0, "F", 3),
    (1, "F", 2),
    (1, "B", 2),
    (1, "F", 3),
    (0, "B", 2),
    (1, "B", 3),
    (0, "B", 3),
]


class Chunk(nn.Module):
    def __init__(self, blocks: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x + 0


def test_what_is_no_root_is_refused_and_nothing_is_fine(gangs: Gangs) -> None:
    gangs(1).run(check_refusals)


def check_refusals(ctx: RankContext) -> None:
    model = nn.Linear(2, 2).to(ctx.device)
    share_comm_ctx([])
    fully_shard(model, mesh=ctx.mesh)
    share_comm_ctx([unit(model)])
    with pytest.raises(ValueError, match="Expects list of FSDPModules but got Linear"):
        share_comm_ctx([unit(model), cast("FSDPModule", nn.Linear(2, 2))])


@pytest.mark.parametrize("when", ["before", "after"])
def test_roots_have_one_link_and_one_window(gangs: Gangs, when: str) -> None:
    gangs(2).run(check_sharing, when)


class Sequences(NullObserver):
    def __init__(self) -> None:
        self.issued: list[int] = []

    def on_issue(self, group: str, sequence: int) -> None:
        super().on_issue(group, sequence)
        self.issued.append(sequence)


def check_sharing(ctx: RankContext, when: str) -> None:
    chunks = [sharded_chunk(ctx, index, fully_shard) for index in range(2)]
    x = torch.ones(1, WIDTH, device=ctx.device)
    if when == "after":
        for chunk in chunks:
            torch.autograd.backward(chunk(x).sum())
    share_comm_ctx(chunks)
    for chunk in chunks:
        torch.autograd.backward(chunk(x).sum())
    first, second = (state(chunk).context for chunk in chunks)
    assert first is not second
    assert first.comm is second.comm
    assert first.reduces is second.reduces
    watch = Sequences()
    for chunk in chunks:
        observe(chunk, watch)
    for chunk in chunks:
        torch.autograd.backward(chunk(x).sum())
    # One count goes on over both, and an observer of both is told once.
    assert watch.issued == list(range(watch.issued[0], watch.issued[0] + len(watch.issued)))
    assert held_unsharded_bytes(chunks[0]) + held_unsharded_bytes(chunks[1]) == 0


@pytest.mark.parametrize("through_both", [False, True], ids=["the other", "both"])
def test_a_root_whose_backward_raised_leaves_nothing_to_the_others(
    gangs: Gangs, *, through_both: bool
) -> None:
    gangs(2).run(check_failed_root, through_both)


def check_failed_root(ctx: RankContext, through_both: bool) -> None:  # noqa: FBT001 - shipped positionally
    expected, found = (
        grads_beside(ctx, through_both=through_both, fails=fails) for fails in (False, True)
    )
    assert expected.keys() == found.keys()
    for name, grad in found.items():
        assert_same_tensor(name, grad, expected[name], 0.0, 0.0)


def grads_beside(
    ctx: RankContext, *, through_both: bool, fails: bool
) -> dict[str, torch.Tensor | None]:
    """Of two roots, after a backward of the first alone that raised, if it `fails`."""
    chunks = [sharded_chunk(ctx, index, fully_shard) for index in range(2)]
    share_comm_ctx(chunks)
    first, second = chunks
    fault = first.blocks[0].register_forward_hook(lambda _, __, out: Raising.of(out))
    failing = first(ctx.batch(0, 3, WIDTH))
    fault.remove()
    hidden = first(ctx.batch(1, 3, WIDTH))
    loss = second(hidden if through_both else hidden.detach()).square().sum()
    if fails:
        with pytest.raises(ZeroDivisionError):
            torch.autograd.backward(failing.square().sum())
        first.zero_grad()
    torch.autograd.backward(loss)
    return {
        f"{index} {name}": None if param.grad is None else local(param.grad)
        for index, chunk in enumerate(chunks)
        for name, param in chunk.named_parameters()
    }


class Meanwhile(torch.autograd.Function):
    """The identity; calls a function in backward."""

    @classmethod
    def of(cls, tensor: torch.Tensor, function: Callable[[], None]) -> torch.Tensor:
        return cast("Callable[..., torch.Tensor]", cls.apply)(tensor, function)

    @staticmethod
    def forward(
        ctx: torch.autograd.function.FunctionCtx, x: torch.Tensor, function: Callable[[], None]
    ) -> torch.Tensor:
        ctx.function = function  # type: ignore[attr-defined]  # how a Function keeps values
        return x.clone()

    @staticmethod
    def backward(
        ctx: torch.autograd.function.FunctionCtx, grad: torch.Tensor
    ) -> tuple[torch.Tensor, None]:
        ctx.function()  # type: ignore[attr-defined]  # set above
        return grad, None


@pytest.mark.parametrize("goes_on", [False, True], ids=["is given up", "goes on"])
@pytest.mark.parametrize("block", [0, 1], ids=["late", "at once"])
@pytest.mark.parametrize("in_hook", [False, True], ids=["in the graph", "in a parameter's hook"])
def test_a_root_whose_backward_raised_within_that_of_another_takes_and_leaves_nothing(
    gangs: Gangs, block: int, *, goes_on: bool, in_hook: bool
) -> None:
    gangs(2).run(check_failed_within, block, goes_on, in_hook)


def check_failed_within(ctx: RankContext, block: int, goes_on: bool, in_hook: bool) -> None:  # noqa: FBT001 - shipped positionally
    expected, found = (
        grads_around(ctx, block if fails else None, goes_on=goes_on, in_hook=in_hook)
        for fails in (False, True)
    )
    assert expected.keys() == found.keys()
    for name, grad in found.items():
        assert_same_tensor(name, grad, expected[name], 0.0, 0.0)


def grads_around(
    ctx: RankContext, fails_at: int | None, *, goes_on: bool, in_hook: bool
) -> dict[str, torch.Tensor | None]:
    """Of two roots, after a backward of the second during which one of the first may have raised."""
    chunks = [sharded_chunk(ctx, index, fully_shard) for index in range(2)]
    share_comm_ctx(chunks)
    first, second = chunks

    @torch.enable_grad()
    def go_through_first() -> None:
        if fails_at is not None:
            failing_block = first.blocks[fails_at]
            fault = failing_block.register_forward_hook(lambda _, __, out: Raising.of(out))
            failing = first(ctx.batch(0, 3, WIDTH)).square().sum()
            fault.remove()
            with pytest.raises(ZeroDivisionError):
                torch.autograd.backward(failing)
            first.zero_grad()
        if goes_on:
            torch.autograd.backward(first(ctx.batch(1, 3, WIDTH)).square().sum())

    if in_hook:
        param = next(second.blocks[1].parameters())
        param.register_post_accumulate_grad_hook(lambda _: go_through_first())
    else:
        block = second.blocks[0]
        block.register_forward_hook(lambda _, __, out: Meanwhile.of(out, go_through_first))
    torch.autograd.backward(second(ctx.batch(2, 3, WIDTH).requires_grad_()).square().sum())
    return {
        f"{index} {name}": None if param.grad is None else local(param.grad)
        for index, chunk in enumerate(chunks)
        for name, param in chunk.named_parameters()
    }


@pytest.mark.parametrize("fails", [False, True], ids=["all is well", "the one within raises"])
def test_a_backward_within_that_of_another_root_within_one_of_its_own_keeps_its_gradients(
    gangs: Gangs, *, fails: bool
) -> None:
    gangs(2).run(check_twice_within, fails)


def check_twice_within(ctx: RankContext, fails: bool) -> None:  # noqa: FBT001 - shipped positionally
    expected, found = (
        grads_twice_within(ctx, shares=shares, fails=fails) for shares in (False, True)
    )
    assert expected.keys() == found.keys()
    for name, grad in found.items():
        assert_same_tensor(name, grad, expected[name], 0.0, 0.0)


def grads_twice_within(
    ctx: RankContext, *, shares: bool, fails: bool
) -> dict[str, torch.Tensor | None]:
    """Of two roots, after the first went backward again within the second's, within its own."""
    chunks = [sharded_chunk(ctx, index, fully_shard) for index in range(2)]
    if shares:
        share_comm_ctx(chunks)
    first, second = chunks

    def go_through(chunk: nn.Module, seed: int) -> None:
        with torch.enable_grad():
            x = ctx.batch(seed, 3, WIDTH).requires_grad_()
            torch.autograd.backward(chunk(x).square().sum())

    def go_through_second() -> None:
        faults = [
            second.blocks[0].register_forward_hook(
                lambda _, __, out: Raising.of(out) if fails else out
            ),
            second.blocks[0].register_forward_hook(
                lambda _, __, out: Meanwhile.of(out, lambda: go_through(first, 1))
            ),
        ]
        if fails:
            with pytest.raises(ZeroDivisionError):
                go_through(second, 2)
            second.zero_grad()
        else:
            go_through(second, 2)
        for fault in faults:
            fault.remove()

    within = first.blocks[0].register_forward_hook(
        lambda _, __, out: Meanwhile.of(out, go_through_second)
    )
    x = ctx.batch(0, 3, WIDTH).requires_grad_()
    loss = first(x).square().sum()
    within.remove()
    torch.autograd.backward(loss)
    return {
        f"{index} {name}": None if param.grad is None else local(param.grad)
        for index, chunk in enumerate(chunks)
        for name, param in chunk.named_parameters()
    }


@pytest.mark.parametrize("replicas", [1, 2])
def test_a_backward_in_a_parameters_hook_is_not_lost_with_another_roots_that_raised(
    gangs: Gangs, replicas: int
) -> None:
    gangs(2).run(check_arrival_within, replicas)


def check_arrival_within(ctx: RankContext, replicas: int) -> None:
    expected, found = (grads_of_two(ctx, replicas, within=within) for within in (False, True))
    assert expected.keys() == found.keys()
    for name, grad in found.items():
        assert_same_tensor(name, grad, expected[name], 0.0, 0.0)


def grads_of_two(
    ctx: RankContext, replicas: int, *, within: bool
) -> dict[str, torch.Tensor | None]:
    """Of two backwards of one root: one after the other, or one in a hook of a parameter.

    The hook runs within a backward of another root, which raises, within the first.
    """
    device, sizes = ctx.device.type, (replicas, ctx.world // replicas)
    mesh = init_device_mesh(device, sizes, mesh_dim_names=("replicate", "shard"))
    here = replace(ctx, mesh=mesh if replicas > 1 else ctx.mesh)
    chunks = [sharded_chunk(here, index, fully_shard) for index in range(2)]
    share_comm_ctx(chunks)
    first, second = chunks
    for chunk in chunks:
        chunk.set_reduce_scatter_max_input_buffers(2)

    @torch.enable_grad()
    def go_through(chunk: nn.Module, seed: int) -> None:
        x = ctx.batch(seed, 3, WIDTH).requires_grad_()
        torch.autograd.backward(chunk(x).square().sum())

    def fail_in_second() -> None:
        second.blocks[0].register_forward_hook(lambda _, __, out: Raising.of(out))
        with pytest.raises(ZeroDivisionError):
            go_through(second, 2)
        second.zero_grad()

    def once(_: torch.Tensor) -> None:
        hook.remove()
        go_through(first, 1)

    if within:
        hook = next(first.blocks[1].parameters()).register_post_accumulate_grad_hook(once)
    block = first.blocks[0].register_forward_hook(
        lambda _, __, out: Meanwhile.of(out, fail_in_second) if within else out
    )
    x = ctx.batch(0, 3, WIDTH).requires_grad_()
    loss = first(x).square().sum()
    block.remove()
    torch.autograd.backward(loss)
    if not within:
        go_through(first, 1)
    return {
        name: None if param.grad is None else local(param.grad)
        for name, param in first.named_parameters()
    }


@pytest.mark.parametrize(
    ("inner", "reduces"),
    [(0, True), (1, True), (1, False)],
    ids=["the same root", "another root", "another root's end"],
)
def test_a_backward_whose_gradients_a_hook_kept_from_arriving_within_another_one_raises(
    gangs: Gangs, inner: int, *, reduces: bool
) -> None:
    gangs(2).run(check_kept_from_arriving, inner, reduces)


def check_kept_from_arriving(ctx: RankContext, inner: int, reduces: bool) -> None:  # noqa: FBT001 - shipped positionally
    expected = sharded_chunk(ctx, 0, fully_shard)
    chunks = [sharded_chunk(ctx, index, fully_shard) for index in range(2)]
    share_comm_ctx(chunks)
    first = chunks[0]
    chunks[1].set_requires_gradient_sync(reduces)

    def once(_: torch.Tensor) -> None:
        hook.remove()
        raise ZeroDivisionError

    @torch.enable_grad()
    def go_within() -> None:
        with pytest.raises(ZeroDivisionError):
            torch.autograd.backward(chunks[inner](ctx.batch(0, 3, WIDTH)).square().sum())

    hook = next(first.blocks[1].parameters()).register_post_accumulate_grad_hook(once)
    block = first.blocks[0].register_forward_hook(lambda _, __, out: Meanwhile.of(out, go_within))
    loss = first(ctx.batch(1, 3, WIDTH).requires_grad_()).square().sum()
    block.remove()
    with pytest.raises(StateError, match="as gradients of this one arrived: they are lost"):
        torch.autograd.backward(loss)
    first.zero_grad()
    for chunk in (first, expected):
        torch.autograd.backward(chunk(ctx.batch(2, 3, WIDTH)).square().sum())
    for (name, param), other in zip(first.named_parameters(), expected.parameters(), strict=True):
        found, wanted = (None if p.grad is None else local(p.grad) for p in (param, other))
        assert_same_tensor(name, found, wanted, 0.0, 0.0)


@pytest.mark.parametrize("calls_end", [False, True], ids=["autograd's", "a pipeline's"])
def test_an_end_whose_gradients_a_hook_kept_from_arriving_within_another_roots_backward_raises(
    gangs: Gangs, *, calls_end: bool
) -> None:
    gangs(2).run(check_kept_from_arriving_at_the_end, calls_end)


def check_kept_from_arriving_at_the_end(ctx: RankContext, calls_end: bool) -> None:  # noqa: FBT001 - shipped positionally
    chunks = [sharded_chunk(ctx, index, fully_shard, blocks=3) for index in range(2)]
    share_comm_ctx(chunks)
    first, second = chunks
    first.set_reduce_scatter_max_input_buffers(2)
    arrived: list[int] = []

    @torch.enable_grad()
    def note(index: int) -> None:
        arrived.append(index)
        if len(arrived) == 1:
            with pytest.raises(ZeroDivisionError):
                torch.autograd.backward(second(ctx.batch(0, 3, WIDTH)).square().sum())
        elif len(arrived) == 2:
            raise ZeroDivisionError

    for index, block in enumerate(first.blocks):
        param = next(block.parameters())
        param.register_post_accumulate_grad_hook(lambda _, index=index: note(index))
    first.set_requires_gradient_sync(not calls_end)
    # An input without a gradient: the first block's backward ends where all ends.
    loss = first(ctx.batch(1, 3, WIDTH)).square().sum()

    def end() -> None:
        torch.autograd.backward(loss)
        if calls_end:
            first.set_requires_gradient_sync(True)
            state(first).context.end_backward()

    with pytest.raises(StateError, match="as gradients of this one arrived: they are lost"):
        end()
    assert len(arrived) == 3


@pytest.mark.parametrize("sync", ["every", "last"])
def test_interleaved_chunks_train_as_the_reference_does(gangs: Gangs, sync: str) -> None:
    gangs(2).run(compare_with_reference, sync)


def compare_with_reference(ctx: RankContext, sync: str) -> None:
    from torch.distributed.fsdp import fully_shard as their_fully_shard  # noqa: PLC0415 - only the oracle may load it

    ours = train(ctx, sync, fully_shard, share_comm_ctx)
    # Not shared: the first root that ends its last backward would clear the prefetch order of
    # both, and the reference then fails with an IndexError.
    theirs = train(ctx, sync, their_fully_shard, lambda _: None)
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        assert torch.equal(tensor, theirs[name]), name


def train(
    ctx: RankContext,
    sync: str,
    shard: Callable[..., object],
    share: Callable[[list[Any]], None],
) -> dict[str, torch.Tensor]:
    chunks = [sharded_chunk(ctx, index, shard) for index in range(2)]
    share(chunks)
    optimizers = [torch.optim.AdamW(chunk.parameters(), lr=1e-2) for chunk in chunks]
    found: dict[str, torch.Tensor] = {}
    for step in range(2):
        one_step(ctx, sync, chunks, step, found)
        for index, (chunk, optimizer) in enumerate(zip(chunks, optimizers, strict=True)):
            for name, param in chunk.named_parameters():
                if param.grad is not None:
                    found[f"{step} {index} {name}"] = local(param.grad).clone()
            optimizer.step()
            optimizer.zero_grad()
    return found


def one_step(
    ctx: RankContext, sync: str, chunks: list[Any], step: int, found: dict[str, torch.Tensor]
) -> None:
    inputs: dict[tuple[int, int], torch.Tensor] = {}
    outputs: dict[tuple[int, int], torch.Tensor] = {}
    for index, direction, micro in SCHEDULE:
        chunk = chunks[index]
        here = (index, micro)
        if direction == "F":
            earlier = outputs.get((0, micro)) if index == 1 else None
            x = ctx.batch(10 * step + micro, 3, WIDTH) if earlier is None else earlier.detach()
            inputs[here] = x.requires_grad_()
            outputs[here] = chunk(x)
            continue
        last = micro == MICROBATCHES - 1
        chunk.set_is_last_backward(last)
        chunk.set_requires_gradient_sync(last or sync == "every")
        if index == 1:
            loss = outputs[here].square().mean()
            found[f"{step} loss {micro}"] = loss.detach().clone()
            torch.autograd.backward(loss)
        else:
            torch.autograd.backward(outputs[here], inputs[1, micro].grad)


def sharded_chunk(
    ctx: RankContext, index: int, shard: Callable[..., object], blocks: int = 2
) -> Any:  # noqa: ANN401 - a class of either engine
    torch.manual_seed(20 + index)
    chunk = Chunk(blocks).to(ctx.device)
    for block in chunk.blocks:
        shard(block, mesh=ctx.mesh)
    shard(chunk, mesh=ctx.mesh)
    return chunk
