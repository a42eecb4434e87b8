# ruff: noqa: SLF001 - private names are what this package is for
"""What autograd, transforms and the profiler are doing at present."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import cast

import torch
from torch.autograd import Variable, profiler
from torch.utils import _python_dispatch as dispatch
from torch.utils.checkpoint import _CachedTorchDispatchMode, _CachingTorchDispatchMode


def preserve_version(tensors: Sequence[torch.Tensor]) -> AbstractContextManager[None]:
    """Writes within do not count as modifications of what autograd saved.

    The unsharded parameter is refilled with the same values between forward and backward.
    Inference tensors have no version.
    """
    versioned = tuple(tensor for tensor in tensors if not tensor.is_inference())
    guard = torch.autograd.grad_mode._unsafe_preserve_version_counter(versioned)
    return cast("AbstractContextManager[None]", guard)


def shift_version(tensor: torch.Tensor, by: int) -> None:
    """Counts modifications of `tensor` and its views that were none, or takes them back.

    Autograd refuses what it saved at another version. Inference tensors have none.
    """
    if not tensor.is_inference():
        torch._C._autograd._unsafe_set_version_counter((tensor,), (tensor._version + by,))


def versions(tensors: Sequence[torch.Tensor]) -> list[int]:
    """How often each tensor counts as modified."""
    return [tensor._version for tensor in tensors]


def set_versions(tensors: Sequence[torch.Tensor], counts: Sequence[int]) -> None:
    """Sets how often each tensor counts as modified; see `shift_version`."""
    torch._C._autograd._unsafe_set_version_counter(tuple(tensors), tuple(counts))


def queue_after_backward(callback: Callable[[], None]) -> None:
    """Runs `callback` once, when the running backward has finished all its work."""
    Variable._execution_engine.queue_callback(callback)


def in_backward() -> bool:
    """Whether this thread executes a backward; true in activation recomputation."""
    return bool(torch._C._current_graph_task_id() != -1)


def in_compiled_autograd() -> bool:
    """Whether the running backward is one graph that compiled autograd made of all nodes."""
    compiled = sys.modules.get("torch._dynamo.compiled_autograd")  # loaded by whoever uses it
    return compiled is not None and bool(compiled.in_compiled_autograd_region)


def is_view(tensor: torch.Tensor) -> bool:
    """Whether autograd treats the tensor as a view of another."""
    return tensor._base is not None


def post_accumulate_hooks(tensor: torch.Tensor) -> list[Callable[[torch.Tensor], None]]:
    """Hooks that `register_post_accumulate_grad_hook` put on a leaf.

    Autograd never accumulates into a sharded parameter, so the engine calls them.
    """
    hooks = tensor._post_accumulate_grad_hooks
    return list(hooks.values()) if hooks else []


@contextmanager
def outside_inference_mode() -> Iterator[None]:
    """Tensors made within are ordinary ones, usable by a later training step."""
    with torch.inference_mode(mode=False):
        yield


def is_profiling() -> bool:
    """Whether a profiler records; a flag that PyTorch keeps for cheap questions (0.02 us)."""
    return profiler._is_profiler_enabled


_NOTHING: AbstractContextManager[object] = nullcontext()


def transforms_active() -> bool:
    """Whether a transform of `torch.func` is being computed."""
    return bool(torch._C._are_functorch_transforms_active())


def gradients_nest() -> bool:
    """Whether one gradient of `torch.func` is being taken within another."""
    if not transforms_active():
        return False
    transforms = torch._C._functorch.get_interpreter_stack() or ()
    return sum(each.key() == torch._C._functorch.TransformType.Grad for each in transforms) > 1


def outside_transforms() -> AbstractContextManager[object]:
    """Tensors made and collectives done within are no part of a `torch.func` transform."""
    if not transforms_active():
        return _NOTHING
    return cast("AbstractContextManager[object]", torch._C._DisableFuncTorch())


def outside_selective_checkpoint() -> AbstractContextManager[object]:
    """What is done within is neither counted nor kept by selective activation checkpointing.

    That pairs each operator of a forward with the same one of its recomputation, by its number. The
    engine's own are not the same ones: the first gather packs otherwise than later ones, and what is
    whole is not gathered again.
    """
    mode = dispatch._get_current_dispatch_mode()
    if not isinstance(mode, _CachingTorchDispatchMode | _CachedTorchDispatchMode):
        return _NOTHING
    return _outside_innermost_mode()


@contextmanager
def _outside_innermost_mode() -> Iterator[None]:
    with dispatch._pop_mode_temporarily(), outside_selective_checkpoint():
        yield
