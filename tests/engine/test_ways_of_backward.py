"""In whatever way backward reaches a unit, its gradients are there when backward returns.

After each backward they are those of the reference, bit for bit. Where the reference loses some,
or refuses, they are those of plain modules, averaged over ranks.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._dynamo import compiled_autograd
from torch.autograd import backward
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from fsdp_core import FSDPModule, Owned, share_comm_ctx
from fsdp_core.errors import StateError
from fsdp_core.param import owned_over
from tests.engine.gang import Gangs, RankContext
from tests.engine.versus import Engine, assert_same_tensor, full, ours, theirs

pytestmark = pytest.mark.ranks

WIDTH, CLASSES, CHUNKS = 6, 5, 2

Grads = dict[str, torch.Tensor | None]


class Net(nn.Module):
    """Two layers, a norm and a head; one weight of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.second = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, CLASSES)
        self.scale = nn.Parameter(torch.full((WIDTH,), 0.7))
        self.with_head = True
        self.recompute: dict[str, bool] = {}
        self.returns: Callable[[torch.Tensor], object] = lambda output: output

    def forward(self, x: torch.Tensor) -> object:
        for name in ("first", "second"):
            x = self._run(name, x).tanh()
        x = self._run("norm", x * self.scale)
        if self.with_head:
            x = self._run("head", x)
        return self.returns(x)

    def _run(self, name: str, x: torch.Tensor) -> torch.Tensor:
        layer = self.get_submodule(name)
        if name not in self.recompute:
            return cast("torch.Tensor", layer(x))
        return cast("torch.Tensor", checkpoint(layer, x, use_reentrant=self.recompute[name]))


@dataclass
class Run:
    """One way of going backward, on one engine or on plain modules.

    Attributes:
        grads: After each backward, averaged over ranks; None where there is none.
    """

    ctx: RankContext
    shard: Callable[..., object] | None
    grads: list[Grads] = field(default_factory=list)
    models: list[Net] = field(default_factory=list)
    params: dict[str, nn.Parameter] = field(default_factory=dict)

    def net(
        self, units: str = "first second norm,head", *, tied: bool = False, **options: object
    ) -> Any:  # noqa: ANN401 - a class of either engine
        """A model with one unit for each word of `units`, and the root."""
        torch.manual_seed(3 + len(self.models))
        model = Net().to(self.ctx.device)
        if tied:
            model.second.weight = model.first.weight
        if self.shard is not None:
            for word in units.split():
                members = [model.get_submodule(name) for name in word.split(",")]
                self.shard(members if len(members) > 1 else members[0], **options)
            self.shard(model, mesh=self.ctx.mesh)
        index = len(self.models)
        self.params |= {f"{index}.{name}": param for name, param in model.named_parameters()}
        self.models.append(model)
        return model

    def x(self, step: int = 0, *, grad: bool = False) -> torch.Tensor:
        """Input of a step, different on each rank."""
        return self.ctx.batch(step, 4, WIDTH).requires_grad_(grad)

    def note(self) -> None:
        """Notes all gradients."""
        found: Grads = {}
        for name, param in self.params.items():
            grad = None if param.grad is None else full(param.grad).clone()
            if self.shard is None and grad is not None:
                dist.all_reduce(grad, dist.ReduceOp.AVG)
            if owned_over(param) is not None:
                grad = _of_its_owner(grad)
            found[name] = grad
        self.grads.append(found)

    def backward(self, *losses: torch.Tensor, **options: bool) -> None:
        """Goes backward from the sum of squares of each, and notes the gradients."""
        backward([loss.square().sum() for loss in losses], **options)  # type: ignore[arg-type]  # PyTorch's
        self.note()

    def step(self) -> None:
        """An update."""
        if self.shard is None:
            for name, grad in self.grads[-1].items():
                self.params[name].grad = grad
        optimizer = torch.optim.SGD(self.params.values(), lr=0.1)
        optimizer.step()
        optimizer.zero_grad()


def _of_its_owner(grad: torch.Tensor | None) -> torch.Tensor | None:
    """The gradient that one rank has, on all of them."""
    found: list[torch.Tensor | None] = [None] * dist.get_world_size()
    dist.all_gather_object(found, grad)
    return next((each for each in found if each is not None and each.numel()), None)


def chunks_of(hidden: torch.Tensor, *, grad: bool = True) -> Iterator[torch.Tensor]:
    for chunk in hidden.detach().chunk(CHUNKS):
        yield chunk.clone().requires_grad_(grad)


Way = Callable[..., None]

WAYS: dict[str, Way] = {}
# Where the reference has no gradients, wrong ones, or refuses.
BEYOND: dict[str, Way] = {}


def way(function: Way) -> Way:
    WAYS[function.__name__] = function
    return function


def way_beyond_the_reference(function: Way) -> Way:
    BEYOND[function.__name__] = function
    return function


@way
def head_per_chunk(run: Run, *, grad: bool = True, steps: int = 2) -> None:
    model = run.net()
    model.with_head = False
    for step in range(steps):
        with torch.no_grad():
            hidden = model(run.x(step))
        for chunk in chunks_of(hidden, grad=grad):
            run.backward(model.head(chunk))
        run.step()


@way_beyond_the_reference
def head_of_frozen_body(run: Run) -> None:
    head_per_chunk(run, grad=False)


@way
def head_then_body(run: Run) -> None:
    model = run.net()
    model.with_head = False
    for step in range(2):
        hidden = model(run.x(step))
        for chunk in chunks_of(hidden):
            run.backward(model.head(chunk))
        run.backward(hidden)
        run.step()


@way
def head_without_a_group(run: Run) -> None:
    model = run.net("first second head")
    model.with_head = False
    hidden = model(run.x())
    for chunk in chunks_of(hidden):
        run.backward(model.head(chunk))
    run.backward(hidden)


@way
def head_twice_then_one_backward(run: Run) -> None:
    model = run.net()
    model.with_head = False
    hidden = model(run.x())
    run.backward(*[model.head(chunk) for chunk in chunks_of(hidden)])
    run.backward(hidden)


@way_beyond_the_reference
def heads_then_backward_of_each(run: Run) -> None:
    model = run.net()
    model.with_head = False
    hidden = model(run.x())
    for output in [model.head(chunk) for chunk in chunks_of(hidden)]:
        run.backward(output)


@way_beyond_the_reference
def head_evaluated_before(run: Run) -> None:
    model = run.net()
    model.with_head = False
    for step in range(2):
        hidden = model(run.x(step))
        with torch.no_grad():
            model.head(hidden)
        for chunk in chunks_of(hidden):
            run.backward(model.head(chunk))
        run.backward(hidden)
        run.step()


@way
def head_evaluated_between_steps(run: Run) -> None:
    model = run.net()
    for step in range(2):
        run.backward(model(run.x(step)))
        run.step()
        with torch.no_grad():
            model.head(run.x(9))


@way_beyond_the_reference
def head_evaluated_then_updated(run: Run) -> None:
    model = run.net()
    run.backward(model(run.x()))
    with torch.no_grad():
        model.head(run.x(9))
    run.step()
    run.backward(model(run.x(1)))


@way
def head_without_reduction(run: Run) -> None:
    model = run.net()
    model.with_head = False
    hidden = model(run.x())
    for number, chunk in enumerate(chunks_of(hidden)):
        if run.shard is not None:
            model.set_requires_gradient_sync(number == CHUNKS - 1)
        output = model.head(chunk)
        backward(output.square().sum())
    run.note()


@way
def frozen_head(run: Run) -> None:
    model = run.net()
    model.head.requires_grad_(requires_grad=False)
    model.with_head = False
    hidden = model(run.x())
    for chunk in chunks_of(hidden):
        run.backward(model.head(chunk))
    run.backward(hidden)


@way
def head_recomputed(run: Run, *, reentrant: bool = False) -> None:
    model = run.net()
    model.with_head = False
    hidden = model(run.x())
    for chunk in chunks_of(hidden):
        run.backward(checkpoint(model.head, chunk, use_reentrant=reentrant))
    run.backward(hidden)


@way_beyond_the_reference
def head_recomputed_reentrantly(run: Run) -> None:
    head_recomputed(run, reentrant=True)


@way_beyond_the_reference
def head_backward_twice(run: Run) -> None:
    model = run.net()
    model.with_head = False
    hidden = model(run.x())
    output = model.head(hidden.detach().requires_grad_())
    run.backward(output, retain_graph=True)
    run.backward(output)


@way_beyond_the_reference
def head_that_raised(run: Run) -> None:
    model = run.net()
    model.with_head = False
    first, second = chunks_of(model(run.x()))
    loss = Raising.of(model.head(first)).sum()
    with pytest.raises(ZeroDivisionError):
        backward(loss)
    go_on_with_head(run, model, first, second)


@way
def head_that_raised_after_its_reduction_began(run: Run) -> None:
    model = run.net()
    model.with_head = False
    first, second = chunks_of(model(run.x()))
    fault = first.register_hook(lambda _: 1 / 0)  # type: ignore[no-untyped-call]  # PyTorch's
    loss = model.head(first).square().sum()
    with pytest.raises(ZeroDivisionError):
        backward(loss)
    fault.remove()
    go_on_with_head(run, model, first, second)


def go_on_with_head(run: Run, model: Any, *chunks: torch.Tensor) -> None:  # noqa: ANN401 - a class of either engine
    for param in run.params.values():
        param.grad = None
    for chunk in chunks:
        run.backward(model.head(chunk))
    run.backward(model(run.x()))


class Raising(torch.autograd.Function):
    @classmethod
    def of(cls, tensor: torch.Tensor) -> torch.Tensor:
        return cast("Callable[[torch.Tensor], torch.Tensor]", cls.apply)(tensor)

    @staticmethod
    def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
        del ctx
        return x.clone()

    @staticmethod
    def backward(ctx: object, *grads: torch.Tensor) -> torch.Tensor:
        del ctx, grads
        raise ZeroDivisionError


@way_beyond_the_reference
def body_that_raised(run: Run) -> None:
    model = run.net()
    fault = model.second.register_forward_hook(lambda _, __, out: Raising.of(out))
    with pytest.raises(ZeroDivisionError):
        backward(model(run.x()).square().sum())
    fault.remove()
    for param in run.params.values():
        param.grad = None
    run.backward(model(run.x()))


@way
def norm_alone(run: Run) -> None:
    model = run.net()
    model.with_head = False
    for step in range(2):
        run.backward(model(run.x(step)))


@way
def group_in_two_calls(run: Run) -> None:
    model = run.net()
    model.with_head = False
    for step in range(2):
        run.backward(model.head(model(run.x(step))))


class Opaque:
    """What no engine looks into."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


@way
def root_hides_its_output(run: Run, *, units: str = "first second norm,head") -> None:
    model = run.net(units)
    model.returns = Opaque
    for step in range(2):
        run.backward(model(run.x(step)).tensor)


@way_beyond_the_reference
def one_unit_hides_its_output(run: Run) -> None:
    root_hides_its_output(run, units="")


@way_beyond_the_reference
def hidden_output_without_reduction(run: Run) -> None:
    model = run.net("")
    model.returns = Opaque
    for step in range(2):
        if run.shard is not None:
            model.set_requires_gradient_sync(step == 1)
        backward(model(run.x(step)).tensor.square().sum())
    run.note()


@way
def one_unit_with_inputs_that_need_gradients_hides_its_output(run: Run) -> None:
    model = run.net("")
    model.returns = Opaque
    for step in range(2):
        run.backward(model(run.x(step, grad=True)).tensor)


@way
def unit_hides_its_output(run: Run) -> None:
    model = run.net(reshard_after_forward=False)
    kept = []
    model.second.register_forward_hook(lambda _, __, out: kept.append(out.square().sum()))
    model(run.x())
    run.backward(*kept)


@way_beyond_the_reference
def units_that_reshard_hide_their_outputs(run: Run) -> None:
    model = run.net()
    if run.shard is not None:
        model.set_reshard_after_forward(True)
    model.returns = Opaque
    for step in range(3):
        run.backward(model(run.x(step)).tensor)
        run.step()


@way_beyond_the_reference
def two_hidden_outputs_and_a_backward_of_each(run: Run) -> None:
    model = run.net("")
    model.returns = Opaque
    for step in range(2):
        outputs = [model(run.x(10 * step + micro)).tensor for micro in range(2)]
        for output in outputs:
            run.backward(output)
        run.step()


@way_beyond_the_reference
def layer_of_the_root_per_chunk(run: Run) -> None:
    model = run.net("first second")
    model.with_head = False
    for step in range(2):
        hidden = model(run.x(step))
        for chunk in chunks_of(hidden):
            run.backward(model.head(chunk))
        run.backward(hidden)
        run.step()


@way_beyond_the_reference
def layer_of_the_root_whose_other_backward_never_comes(run: Run) -> None:
    model = run.net("first second")
    model.with_head = False
    for step in range(2):
        for chunk in chunks_of(model(run.x(step))):
            run.backward(model.head(chunk))
        run.step()
    run.backward(model(run.x(2)))


@way_beyond_the_reference
def head_left_alone_before_a_forward_that_evaluates_its_group(run: Run) -> None:
    model = run.net()
    if run.shard is not None:
        model.set_reshard_after_forward(True)

    def evaluate(_: nn.Module, args: tuple[torch.Tensor]) -> None:
        with torch.no_grad():
            model.norm(args[0])

    run.backward(model(run.x()))
    model.second.register_forward_pre_hook(evaluate)
    model.head(run.x())
    for step in range(2):
        run.backward(model(run.x(step)))


@way_beyond_the_reference
def loss_of_an_attribute(run: Run) -> None:
    model = run.net("")
    model.register_forward_pre_hook(lambda m, _: setattr(m, "aux", m.scale.sum()))
    for step in range(2):
        output = model(run.x(step))
        run.backward(model.aux, output if step else output.detach().requires_grad_())


@way_beyond_the_reference
def backward_within_forward(run: Run) -> None:
    model = run.net()

    def loss_per_chunk(hidden: torch.Tensor) -> torch.Tensor:
        leaf = hidden.detach().requires_grad_()
        for chunk in leaf.chunk(CHUNKS):
            backward(model.head(chunk).square().sum())
        assert leaf.grad is not None
        return (hidden * leaf.grad).sum()

    model.with_head, model.returns = False, loss_per_chunk
    for step in range(2):
        backward(model(run.x(step)))
        run.note()


@way_beyond_the_reference
def backward_within_forward_that_hides_its_output(run: Run) -> None:
    model = run.net("first second head")
    model.with_head = False

    def loss_of(hidden: torch.Tensor) -> Opaque:
        backward(model.head(hidden.detach()).square().sum())
        return Opaque(hidden)

    model.returns = loss_of
    for step in range(2):
        run.backward(model(run.x(step)).tensor)


@way_beyond_the_reference
def backward_of_a_unit_within_forward(run: Run) -> None:
    model = run.net("first second head")

    def loss_of(hidden: torch.Tensor) -> torch.Tensor:
        leaf = hidden.detach().requires_grad_()
        backward(model.head(leaf).square().sum())
        assert leaf.grad is not None
        scale: torch.Tensor = model.scale
        return (hidden * leaf.grad * scale).sum()

    model.with_head, model.returns = False, loss_of
    for step in range(2):
        backward(model(run.x(step)))
        run.note()


@way
def backward_within_forward_that_reduces_what_an_earlier_one_kept(run: Run) -> None:
    """It reaches nothing of the root, whose forward goes on, and no other backward follows."""
    model = run.net("first second head")
    model.with_head = False
    for step in range(2):
        for is_last in (False, True):
            if run.shard is not None:
                model.set_requires_gradient_sync(is_last)
            if is_last:
                model.returns = lambda hidden: backward(model.head(hidden.detach()).square().sum())
                model(run.x(step))
                run.note()
            else:
                model.returns = lambda hidden: hidden
                backward(model(run.x(step)).square().sum())
        run.step()


@way
def whole_backward_within_forward(run: Run, units: str = "first second norm,head") -> None:
    model = run.net(units)
    model.with_head = False

    def train_on(hidden: torch.Tensor) -> torch.Tensor:
        backward(model.head(hidden).square().sum())
        return hidden.detach()

    model.returns = train_on
    for step in range(3):
        model(run.x(step))
        run.note()
        run.step()


@way_beyond_the_reference
def whole_backward_of_one_unit_within_its_forward(run: Run) -> None:
    whole_backward_within_forward(run, "")


def recomputed(run: Run, **which: bool) -> None:
    model = run.net()
    model.recompute = which
    for step in range(2):
        run.backward(model(run.x(step, grad=True)))


@way
def all_recomputed(run: Run) -> None:
    recomputed(run, first=False, second=False, norm=False, head=False)


@way
def all_recomputed_reentrantly(run: Run) -> None:
    recomputed(run, first=True, second=True, norm=True, head=True)


@way_beyond_the_reference
def head_of_a_group_recomputed_reentrantly(run: Run) -> None:
    recomputed(run, head=True)


@way
def norm_of_a_group_recomputed_reentrantly(run: Run) -> None:
    recomputed(run, norm=True)


@way
def root_recomputed(run: Run, *, reentrant: bool = False) -> None:
    model = run.net()
    for step in range(2):
        run.backward(checkpoint(model, run.x(step, grad=True), use_reentrant=reentrant))


@way
def root_recomputed_reentrantly(run: Run) -> None:
    root_recomputed(run, reentrant=True)


@way
def two_roots_in_one_graph(run: Run) -> None:
    first, second = run.net(), run.net()
    first.with_head = False
    for step in range(2):
        run.backward(second(first(run.x(step))))


@way
def two_roots_that_share_their_communication(run: Run) -> None:
    first, second = run.net(), run.net()
    first.with_head = False
    if run.shard is not None:
        from torch.distributed import fsdp  # noqa: PLC0415 - only the oracle may load it

        share = share_comm_ctx if isinstance(first, FSDPModule) else fsdp.share_comm_ctx
        first(run.x())
        second(run.x())
        share([first, second])
    for chunk in chunks_of(first(run.x())):
        run.backward(second(first.head(chunk)[:, :1] + chunk))


@way
def two_roots_one_after_the_other(run: Run) -> None:
    first, second = run.net(), run.net()
    first.with_head = False
    hidden = first(run.x())
    leaf = hidden.detach().requires_grad_()
    run.backward(second(leaf))
    backward(hidden, leaf.grad)
    run.note()


@way
def submodule_alone(run: Run) -> None:
    model = run.net()
    run.backward(model(run.x()))
    run.backward(model.first(run.x(1)))
    run.backward(model.first(run.x(2, grad=True)))
    run.backward(model(run.x(3)))


@way_beyond_the_reference
def tied_submodules_alone(run: Run) -> None:
    model = run.net(tied=True)
    run.backward(model(run.x()))
    run.backward(model.second(run.x(1)))
    run.backward(model.first(run.x(2, grad=True)))
    run.backward(model.first(run.x(3)) + model.second(run.x(3)).detach())
    run.backward(model(run.x(4)))


@way_beyond_the_reference
def tied_root_that_hides_its_output(run: Run) -> None:
    model = run.net("second", tied=True)
    model.returns = Opaque
    for step in range(2):
        run.backward(model(run.x(step)).tensor)
        run.step()


@way
def updated_in_backward(run: Run) -> None:
    model = run.net()
    model.with_head = False

    def update(param: torch.Tensor) -> None:
        assert param.grad is not None
        with torch.no_grad():
            param -= 0.1 * param.grad

    hidden = model(run.x())
    if run.shard is not None:
        for param in run.params.values():
            param.register_post_accumulate_grad_hook(update)  # type: ignore[no-untyped-call]  # PyTorch's
    for chunk in chunks_of(hidden):
        run.backward(model.head(chunk))
    run.backward(hidden)


@way
def gradient_of_the_input(run: Run) -> None:
    model = run.net()
    x = run.x(grad=True)
    torch.autograd.grad(model(x).square().sum(), x)
    run.note()
    run.backward(model(run.x(1)))


@way
def gradient_of_the_head_alone(run: Run) -> None:
    model = run.net()
    model.with_head = False
    hidden = model(run.x())
    leaf = hidden.detach().requires_grad_()
    torch.autograd.grad(model.head(leaf).square().sum(), leaf)
    run.note()
    run.backward(hidden)


@way
def same_graph_twice(run: Run) -> None:
    model = run.net()
    output = model(run.x())
    run.backward(output, retain_graph=True)
    run.backward(output)


def frozen(run: Run, *names: str) -> None:
    model = run.net()
    for name in names:
        model.get_submodule(name).requires_grad_(requires_grad=False)
    for step in range(2):
        run.backward(model(run.x(step)))


@way
def norm_frozen(run: Run) -> None:
    frozen(run, "norm")


@way
def body_frozen(run: Run) -> None:
    frozen(run, "first", "second", "norm")


@way
def head_frozen(run: Run) -> None:
    frozen(run, "head", "first")


@way
def head_unfrozen_later(run: Run) -> None:
    model = run.net()
    model.head.requires_grad_(requires_grad=False)
    run.backward(model(run.x()))
    model.head.requires_grad_(requires_grad=True)
    run.backward(model(run.x()))
    model.with_head = False
    for chunk in chunks_of(model(run.x())):
        run.backward(model.head(chunk))


@way
def output_that_needs_no_gradient(run: Run) -> None:
    model = run.net()
    model.returns = lambda out: (out.detach(), out)
    for step in range(2):
        run.backward(model(run.x(step))[1])


@way
def outputs_of_which_one_is_unused(run: Run) -> None:
    model = run.net("first second")
    model.returns = lambda out: (out * 2, model.head.weight.sum() + model.scale.sum())
    for step in range(2):
        outputs = model(run.x(step))
        run.backward(outputs[step])


@way
def two_forwards_and_a_backward_of_each(run: Run) -> None:
    model = run.net()
    outputs = [model(run.x(step)) for step in range(2)]
    for output in outputs:
        run.backward(output)


@way
def accumulated(run: Run) -> None:
    model = run.net()
    for step in range(3):
        if run.shard is not None:
            model.set_requires_gradient_sync(step == 2)
            model.set_is_last_backward(step == 2)
        backward(model(run.x(step)).square().sum())
    run.note()


@way
def zeroed_after_a_backward_that_is_not_the_last(run: Run) -> None:
    """As after a microbatch whose forward raised: the step starts over."""
    model = run.net()
    optimizer = torch.optim.SGD(run.params.values())
    model.set_is_last_backward(False)
    run.backward(model(run.x()))
    optimizer.zero_grad()
    model.set_is_last_backward(True)
    run.backward(model(run.x(1)))


@way
def in_place_on_an_output(run: Run) -> None:
    model = run.net()
    model.first.register_forward_hook(lambda _, __, out: out.mul_(2))
    run.backward(model(run.x()))


@way
def selectively_recomputed(run: Run) -> None:
    def saved(_: object, op: object, *__: object, **___: object) -> CheckpointPolicy:
        is_dear = op is torch.ops.aten.addmm.default
        return CheckpointPolicy.MUST_SAVE if is_dear else CheckpointPolicy.PREFER_RECOMPUTE

    model = run.net("first second norm head")
    contexts = partial(create_selective_checkpoint_contexts, saved)
    for step in range(2):
        x = run.x(step)
        output = checkpoint(model, x, use_reentrant=False, context_fn=contexts)
        run.backward(cast("torch.Tensor", output))
        run.step()


@way
def evaluated_in_between(run: Run) -> None:
    model = run.net()
    output = model(run.x())
    with torch.no_grad():
        model(run.x(1))
    run.backward(output)


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
