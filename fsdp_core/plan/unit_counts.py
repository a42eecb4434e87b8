"""What units save for backward, and how much they compute."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from fsdp_core import torch_private


def count_saved(
    model: nn.Module, make_loss: Callable[[], torch.Tensor], *, stops: Sequence[str]
) -> dict[str, int]:
    """Bytes that forward of each stop saves for backward.

    Parameters, buffers and views of them are not counted, and nothing twice: what two stops save
    counts for the first.

    Args:
        model: Runs forward only.
        make_loss: Runs it.
        stops: Names of modules.
    """
    known = {
        _key(tensor): tensor.untyped_storage()
        for tensor in map(torch_private.plain, (*model.parameters(), *model.buffers()))
    }
    saved = dict.fromkeys(stops, 0)
    running: list[str] = []

    def note(tensor: torch.Tensor) -> torch.Tensor:
        storage = torch_private.plain(tensor).untyped_storage()
        key = torch_private.storage_key(storage)
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
        make_loss()
    for handle in handles:
        handle.remove()
    return saved


def count_flops(model: nn.Module, make_loss: Callable[[], torch.Tensor]) -> dict[str, int]:
    """Floating-point operations of forward and backward, by module; "" is the whole.

    Args:
        model: Runs forward and backward.
        make_loss: Runs forward.
    """
    counter = FlopCounterMode(display=False, custom_mapping=_ATTENTION_ON_CPU)
    with counter:
        make_loss().backward()  # type: ignore[no-untyped-call]  # PyTorch's
    counts = counter.get_flop_counts()
    root = type(model).__name__
    found = {
        name.removeprefix(f"{root}."): sum(by_operator.values())
        for name, by_operator in counts.items()
    }
    return {**found, "": sum(counts["Global"].values())}


def _key(tensor: torch.Tensor) -> int:
    return torch_private.storage_key(tensor.untyped_storage())


def _attention(query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:  # noqa: ANN401 - shapes, as the counter gives them
    batch, heads, length, width = query
    return int(2 * batch * heads * length * key[-2] * (width + value[-1]))


def _attention_backward(grad: Any, query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:  # noqa: ANN401 - as above
    # Scores are computed again; then one product for each of the gradients, and one for scores'.
    del grad
    return _attention(query, key, value) * 5 // 2


# The counter that comes with PyTorch knows the kernels of accelerators alone.
_ATTENTION_ON_CPU = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _attention,  # noqa: SLF001 - an operator's name
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward,  # noqa: SLF001 - as above
}
