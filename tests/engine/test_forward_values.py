"""Whatever forward takes and returns, and however its activations are recomputed."""

from __future__ import annotations

import warnings
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, cast

import pytest
import torch
from torch import nn
from torch.distributed._composable.checkpoint_activation import (
    checkpoint as composable_checkpoint,
)
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    checkpoint_wrapper,
)
from torch.distributed.tensor import DTensor
from torch.nn.utils.rnn import PackedSequence, pack_sequence
from torch.utils.checkpoint import checkpoint

from fsdp_core import MixedPrecisionPolicy, fully_shard
from fsdp_core.runtime import FSDPState
from fsdp_core.runtime.tensor_tree import map_tensors
from tests.engine.gang import Gangs, RankContext
from tests.engine.sharded import held_unsharded_bytes, state, unit
from tests.engine.versus import assert_equal, engines, train

pytestmark = pytest.mark.ranks

WIDTH = 5


@dataclass(frozen=True)
class Frozen:
    x: torch.Tensor
    note: str = "kept"


@dataclass
class Nested:
    inner: Frozen
    others: list[torch.Tensor]


class Pair(NamedTuple):
    x: torch.Tensor
    number: int


def as_tensor(x: torch.Tensor) -> object:
    return x


def as_dataclass(x: torch.Tensor) -> object:
    return Nested(Frozen(x), [x.detach()])


def as_named_tuple(x: torch.Tensor) -> object:
    return Pair(x, 3)


def as_mappings(x: torch.Tensor) -> object:
    return OrderedDict(out={"deep": [(x, None)]}, flag=True)


CONTAINERS = {f.__name__: f for f in (as_tensor, as_dataclass, as_named_tuple, as_mappings)}


def tensor_in(value: object) -> torch.Tensor:
    """The tensor that the containers above were made of."""
    match value:
        case torch.Tensor():
            return value
        case Nested(inner=Frozen(x=x, note="kept")):
            return x
        case Pair(x=x, number=3):
            return x
        case OrderedDict():
            return cast("torch.Tensor", value["out"]["deep"][0][0])
        case _:
            raise AssertionError(value)


class Boxed(nn.Module):
    """A linear layer whose values travel in containers."""

    def __init__(self, wrap: Callable[[torch.Tensor], object]) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.wrap = wrap

    def forward(self, boxed: object, *, scale: object = 1.0) -> object:
        x = tensor_in(boxed)
        assert x.dtype == self.linear.weight.dtype
        return self.wrap(torch.tanh(self.linear(x)) * cast("float", scale))


@pytest.mark.parametrize("precision", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("container", CONTAINERS)
def test_tensors_are_found_in_containers(
    gangs: Gangs, container: str, precision: torch.dtype
) -> None:
    gangs(2).run(check_container, container, precision)


def check_container(ctx: RankContext, container: str, precision: torch.dtype) -> None:
    wrap = CONTAINERS[container]
    torch.manual_seed(1)
    model = nn.ModuleList(Boxed(wrap) for _ in range(2)).to(ctx.device)
    torch.manual_seed(1)
    plain = nn.ModuleList(Boxed(wrap) for _ in range(2)).to(ctx.device, precision)
    policy = MixedPrecisionPolicy(None if precision == torch.float32 else precision)
    for layer in model:
        fully_shard(layer, mesh=ctx.mesh, reshard_after_forward=True, mp_policy=policy)
    x = torch.ones(2, WIDTH, device=ctx.device)
    results = []
    for each, dtype in ((plain, precision), (model, torch.float32)):
        value = wrap(x.to(dtype).requires_grad_())
        for layer in each:
            value = layer(value, scale=2.0)
        out = tensor_in(value)
        assert out.dtype == precision
        torch.autograd.backward(out.float().square().sum())
        results.append(out.detach())
    assert torch.equal(*results)
    for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert isinstance(mine.grad, DTensor)
        assert theirs.grad is not None
        torch.testing.assert_close(mine.grad.full_tensor(), theirs.grad.float())
    assert held_unsharded_bytes(model) == 0


def test_packed_sequences_are_cast_without_their_lengths(gangs: Gangs) -> None:
    gangs(1).run(check_packed)


class Packed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.GRU(WIDTH, WIDTH)

    def forward(self, x: PackedSequence) -> PackedSequence:
        assert x.data.dtype == torch.bfloat16
        assert x.batch_sizes.device.type == "cpu"
        out, _ = self.rnn(x)
        return cast("PackedSequence", out)


def check_packed(ctx: RankContext) -> None:
    model = Packed().to(ctx.device)
    fully_shard(model, mesh=ctx.mesh, mp_policy=MixedPrecisionPolicy(torch.bfloat16))
    rows = [torch.ones(n, WIDTH, device=ctx.device) for n in (3, 2)]
    out = model(pack_sequence(rows))
    torch.autograd.backward(out.data.float().sum())
    assert all(p.grad is not None for p in model.parameters())


def test_lengths_of_packed_sequences_stay_on_the_host() -> None:
    packed = pack_sequence([torch.ones(n, WIDTH) for n in (2, 3)], enforce_sorted=False)
    moved = map_tensors(lambda tensor: tensor.to("meta"), packed)
    assert isinstance(moved, PackedSequence)
    assert moved.batch_sizes is packed.batch_sizes
    assert moved.data.is_meta
    assert moved.sorted_indices is not None
    assert moved.sorted_indices.is_meta


def test_a_traced_module_trains_as_over_the_reference(gangs: Gangs) -> None:
    gangs(2).run(check_traced)


def check_traced(ctx: RankContext) -> None:
    traces = []
    for engine in engines():
        torch.manual_seed(5)
        layer = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())
        with warnings.catch_warnings(action="ignore", category=DeprecationWarning):
            traced = torch.jit.trace(layer, torch.ones(2, WIDTH))  # type: ignore[no-untyped-call]  # PyTorch's
        model = nn.Sequential(nn.Linear(WIDTH, WIDTH), traced).to(ctx.device)
        engine.shard(model, mesh=ctx.mesh)
        traces.append(train(model, lambda m, step: m(ctx.batch(step, 2, WIDTH)).square().sum()))
    assert_equal(*traces)


def test_unused_outputs_and_values_that_are_no_tensors(gangs: Gangs) -> None:
    gangs(2).run(check_unused_outputs)


class TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.second = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor | None, note: str) -> tuple[object, ...]:
        if x is None:
            return note, None
        return self.first(x), self.second(x), note


class Asks(nn.Module):
    """Calls its unit for a note first, then for tensors, of which it uses one."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = TwoHeads()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        note, nothing = self.heads(None, "a")
        assert (note, nothing) == ("a", None)
        used, _, note = self.heads(x, "b")
        assert note == "b"
        return cast("torch.Tensor", used) * 2


def check_unused_outputs(ctx: RankContext) -> None:
    torch.manual_seed(2)
    model = Asks().to(ctx.device)
    fully_shard(model.heads, mesh=ctx.mesh)
    fully_shard(model, mesh=ctx.mesh)
    for step in range(2):
        torch.autograd.backward(model(ctx.batch(step, 2, WIDTH)).sum())
        assert held_unsharded_bytes(model) == 0
    assert model.heads.first.weight.grad is not None
    assert model.heads.second.weight.grad is None
    assert isinstance(state(model.heads), FSDPState)
    assert unit(model.heads)._get_fsdp_state() is state(model.heads)


def test_evaluation_leaves_nothing_for_a_backward_that_never_comes(gangs: Gangs) -> None:
    gangs(1).run(check_evaluation)


def check_evaluation(ctx: RankContext) -> None:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)).to(ctx.device)
    for layer in model:
        fully_shard(layer, mesh=ctx.mesh)
    fully_shard(model, mesh=ctx.mesh)
    x = torch.ones(1, WIDTH, device=ctx.device)
    for _ in range(3):
        with torch.no_grad():
            model(x)
    order = state(model).context.backward_order
    assert len(order) == 0
    loss = model(x).sum()
    assert len(order) == 2  # the root has no parameters
    torch.autograd.backward(loss)
    assert len(order) == 0


def test_parameters_may_freeze_and_thaw_between_iterations(gangs: Gangs) -> None:
    gangs(2).run(check_freezing)


def check_freezing(ctx: RankContext) -> None:
    torch.manual_seed(3)
    plain = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(3))).to(ctx.device)
    torch.manual_seed(3)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(3))).to(ctx.device)
    for layer in model:
        fully_shard(layer, mesh=ctx.mesh)
    fully_shard(model, mesh=ctx.mesh)
    x = torch.ones(2, WIDTH, device=ctx.device)
    for frozen in (set[str](), {"1.weight"}, {"0.weight", "0.bias", "2.bias"}, set[str]()):
        for each in (plain, model):
            each.zero_grad()
            for name, param in each.named_parameters():
                param.requires_grad_(name not in frozen)
            torch.autograd.backward(each(x).square().sum())
        for (name, mine), theirs in zip(model.named_parameters(), plain.parameters(), strict=True):
            assert (mine.grad is None) == (name in frozen), name
            if isinstance(mine.grad, DTensor):
                torch.testing.assert_close(mine.grad.full_tensor(), theirs.grad)
        assert held_unsharded_bytes(model) == 0


class Layer(nn.Module):
    def __init__(self, recompute: str) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)
        self.recompute = recompute

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.recompute == "within":
            return cast("torch.Tensor", checkpoint(self._compute, x, use_reentrant=False))
        return self._compute(x)

    def _compute(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = x + self.down(torch.tanh(self.up(x)))
        return result


class Stack(nn.Module):
    def __init__(self, recompute: str) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(recompute) for _ in range(3))
        self.recompute = recompute

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            if self.recompute in {"reentrant", "non-reentrant"}:
                reentrant = self.recompute == "reentrant"
                x = cast("torch.Tensor", checkpoint(layer, x, use_reentrant=reentrant))
            else:
                x = layer(x)
        return x * 1


FORMS = [
    "reentrant",
    "non-reentrant",
    "within",
    "wrapper outside",
    "wrapper inside",
    "wrapper, reentrant",
    "composable",
    "composable after",
]


@pytest.mark.parametrize("forwards", [1, 2])
@pytest.mark.parametrize("form", FORMS)
def test_recomputation_changes_no_gradient(gangs: Gangs, form: str, forwards: int) -> None:
    gangs(2).run(check_recomputation, form, forwards)


def check_recomputation(ctx: RankContext, form: str, forwards: int) -> None:
    plain, model = (recomputing_stack(ctx, each) for each in ("no", form))
    for step in range(2):
        losses = []
        for each in (plain, model):
            each.zero_grad()
            outputs = [
                each(ctx.batch(10 * step + n, 2, WIDTH).requires_grad_()) for n in range(forwards)
            ]
            loss = torch.stack(outputs).square().sum()
            torch.autograd.backward(loss)
            losses.append(loss.detach())
        assert torch.equal(*losses)
        for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            assert isinstance(mine.grad, DTensor)
            assert isinstance(theirs.grad, DTensor)
            # Of two forwards, reentrant backwards are reduced one by one: another order of sums.
            rounding = 0.0 if forwards == 1 else 1e-6
            torch.testing.assert_close(
                mine.grad.to_local(), theirs.grad.to_local(), rtol=rounding, atol=rounding
            )
        assert held_unsharded_bytes(model) == 0


def recomputing_stack(ctx: RankContext, form: str) -> Stack:
    torch.manual_seed(4)
    model = Stack(form).to(ctx.device)
    for index, layer in enumerate(model.layers):
        if form == "composable":
            composable_checkpoint(layer)
        if form.startswith("wrapper"):
            impl = CheckpointImpl.REENTRANT if "reentrant" in form else CheckpointImpl.NO_REENTRANT
            if form == "wrapper inside":
                wrapped = checkpoint_wrapper(layer, checkpoint_impl=impl)
                fully_shard(wrapped, mesh=ctx.mesh)
            else:
                fully_shard(layer, mesh=ctx.mesh)
                wrapped = checkpoint_wrapper(layer, checkpoint_impl=impl)
            model.layers[index] = wrapped
        else:
            fully_shard(layer, mesh=ctx.mesh)
        if form == "composable after":
            composable_checkpoint(layer)
    fully_shard(model, mesh=ctx.mesh)
    return model
