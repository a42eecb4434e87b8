"""Several roots, submodules alone, frozen parameters, graphs that are used twice or in part."""

from __future__ import annotations

import torch
from torch.autograd import backward

from fsdp_core import FSDPModule, share_comm_ctx
from tests.engine.ways.run import (
    Opaque,
    Run,
    chunks_of,
    way,
    way_beyond_the_reference,
)


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
def evaluated_in_between(run: Run) -> None:
    model = run.net()
    output = model(run.x())
    with torch.no_grad():
        model(run.x(1))
    run.backward(output)
