"""Modules of a group that run alone, in part, or again."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.autograd import backward
from torch.utils.checkpoint import (
    checkpoint,
)

from tests.engine.ways.run import (
    CHUNKS,
    Raising,
    Run,
    chunks_of,
    way,
    way_beyond_the_reference,
)


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


@way_beyond_the_reference
def head_alone_after_a_backward_without_reduction(
    run: Run, switch: str = "set_requires_gradient_sync"
) -> None:
    model = run.net()
    set_reduces = getattr(model, switch) if run.shard is not None else lambda _: None
    set_reduces(False)
    backward(model(run.x()).square().sum())
    set_reduces(True)
    model.with_head = False
    with torch.no_grad():
        hidden = model(run.x(1))
    for chunk in chunks_of(hidden):
        run.backward(model.head(chunk))


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
