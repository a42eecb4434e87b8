"""Outputs that no hook sees, and backwards within a forward."""

from __future__ import annotations

import torch
from torch import nn
from torch.autograd import backward

from tests.engine.ways.run import (
    CHUNKS,
    Opaque,
    Run,
    chunks_of,
    way,
    way_beyond_the_reference,
)


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
