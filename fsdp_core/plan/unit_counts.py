"""What units save for backward, and how much they compute."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import nn

from fsdp_core.plan import fakes


@dataclass(frozen=True)
class UnitCounts:
    """What was counted, by name of the module.

    Attributes:
        saved: Bytes that forward of each stop saves for backward. Parameters, buffers and views of
            them are not counted, and nothing twice: what two stops save counts for the first.
        flops: Floating-point operations of forward and backward; "" is the whole.
    """

    saved: dict[str, int]
    flops: dict[str, int]


def count(
    model: nn.Module, make_loss: Callable[[], torch.Tensor], *, stops: Sequence[str]
) -> UnitCounts:
    """Runs forward and backward once, on tensors without memory.

    Args:
        model: What is run.
        make_loss: Runs forward.
        stops: Names of modules.
    """
    counter = fakes.flop_counter(_ON_CPU)
    with counter:
        saved, loss = _saved_by(model, make_loss, stops)
        loss.backward()  # type: ignore[no-untyped-call]  # PyTorch's
    counts = counter.get_flop_counts()
    root = type(model).__name__
    flops = {
        name.removeprefix(f"{root}."): sum(by_operator.values())
        for name, by_operator in counts.items()
    }
    return UnitCounts(saved, {**flops, "": sum(counts.get("Global", {}).values())})


def _saved_by(
    model: nn.Module, make_loss: Callable[[], torch.Tensor], stops: Sequence[str]
) -> tuple[dict[str, int], torch.Tensor]:
    known = {
        _key(tensor): tensor.untyped_storage()
        for tensor in map(fakes.plain, (*model.parameters(), *model.buffers()))
    }
    saved = dict.fromkeys(stops, 0)
    running: list[str] = []

    def note(tensor: torch.Tensor) -> torch.Tensor:
        storage = fakes.plain(tensor).untyped_storage()
        key = fakes.storage_key(storage)
        if running and key not in known:
            known[key] = storage  # kept, so that no other can have its key
            saved[running[-1]] += storage.nbytes()
        return tensor

    def enter(name: str) -> Callable[..., None]:
        return lambda *_: running.append(name)

    def leave(*_: object) -> None:
        running.pop()

    handles = []
    for name in stops:
        module = model.get_submodule(name)
        handles += [
            module.register_forward_pre_hook(enter(name)),
            module.register_forward_hook(leave),
        ]
    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        loss = make_loss()
    for handle in handles:
        handle.remove()
    return saved, loss


def _key(tensor: torch.Tensor) -> int:
    return fakes.storage_key(tensor.untyped_storage())


def _attention(query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:  # noqa: ANN401 - shapes, as the counter gives them
    batch, heads, length, width = query
    return int(2 * batch * heads * length * key[-2] * (width + value[-1]))


def _attention_backward(grad: Any, query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:  # noqa: ANN401 - as above
    # Scores are computed again; then one product for each of the gradients, and one for scores'.
    del grad
    return _attention(query, key, value) * 5 // 2


def _recurrent(sequence: Any, of_inputs: Any, of_states: Any, *_: Any, **__: Any) -> int:  # noqa: ANN401 - as above
    length, batch, _width = sequence
    return int(2 * length * batch * (prod(of_inputs) + prod(of_states)))


def _recurrent_backward(*shapes: Any, **named: Any) -> int:  # noqa: ANN401 - as above
    return 2 * _recurrent(*shapes, **named)


# The counter that comes with PyTorch knows the kernels of accelerators alone.
_ON_CPU = {
    torch.ops.aten.mkldnn_rnn_layer: _recurrent,
    torch.ops.aten.mkldnn_rnn_layer_backward: _recurrent_backward,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _attention,  # noqa: SLF001 - an operator's name
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward,  # noqa: SLF001 - as above
}
