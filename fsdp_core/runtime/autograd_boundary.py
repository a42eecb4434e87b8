"""Where autograd tells a unit that its backward begins and ends."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Sequence
from types import MethodType
from typing import TypeVar, cast

import torch
from torch import nn

from fsdp_core import torch_private
from fsdp_core.runtime.copies import Copies
from fsdp_core.runtime.tensor_tree import grad_tensors, map_tensors

T = TypeVar("T")


def call_before_backward(
    tree: T, callback: Callable[[torch.Tensor], torch.Tensor], modules: Sequence[nn.Module]
) -> T:
    """Calls `callback` with the gradient of each output tensor in `tree`, as it arrives.

    Args:
        tree: What forward returned.
        callback: Returns the gradient to go on with.
        modules: The unit's, for the warning.
    """
    if torch.is_grad_enabled():
        for tensor in grad_tensors(tree):
            if torch_private.is_view(tensor):
                _warn_of_view(modules)
            tensor.register_hook(callback)  # type: ignore[no-untyped-call]  # PyTorch's
        if torch_private.transforms_active():
            # Within a transform an output may deny that it requires a gradient, although the
            # value that leaves the transform does: it needs a node of its own.
            return map_tensors(lambda t: t if t.requires_grad else _output(callback, t), tree)
    return tree


def call_with_grads(tree: object, callback: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Calls `callback` with the gradient of each tensor in `tree` that has one, as it arrives."""
    if torch.is_grad_enabled():
        for tensor in grad_tensors(tree):
            tensor.register_hook(callback)  # type: ignore[no-untyped-call]  # PyTorch's


def weakly(method: Callable[[], None]) -> Callable[[torch.Tensor], None]:
    """A hook that calls a bound method while its object lives.

    A parameter that owned its unit would keep it alive: the garbage collector does not see all
    that autograd refers to.
    """
    bound = cast("MethodType", method)
    owner, function = weakref.ref(bound.__self__), bound.__func__

    def hook(_: torch.Tensor) -> None:
        if (alive := owner()) is not None:
            function(alive)

    return hook


def _output(callback: Callable[[torch.Tensor], torch.Tensor], tensor: torch.Tensor) -> torch.Tensor:
    if not (tensor.is_floating_point() or tensor.is_complex()):
        return tensor
    return _OutputBoundary.pass_through(callback, tensor)


def call_after_backward(tree: T, callback: Callable[[], None], copies: Copies | None = None) -> T:
    """Calls `callback` once the gradients of all input tensors in `tree` are known.

    Args:
        tree: What forward is given.
        callback: Called without arguments.
        copies: Takes note of what is copied.

    Returns:
        `tree` with its gradient-requiring tensors passed through one autograd node. Without
        such tensors no node exists, and the root's final callback stands in for it.
    """
    if not torch.is_grad_enabled():
        return tree
    tensors = grad_tensors(tree)
    if not tensors:
        return tree
    boundary = _TransformedInputBoundary if torch_private.transforms_active() else _InputBoundary
    apply = cast("Callable[..., tuple[torch.Tensor, ...]]", boundary.apply)
    passed = iter(apply(callback, *tensors))
    return map_tensors(lambda t: next(passed) if t.requires_grad else t, tree, copies)


class _OutputBoundary(torch.autograd.Function):
    """The identity; its backward calls back with the gradient."""

    generate_vmap_rule = True

    @classmethod
    def pass_through(
        cls, callback: Callable[[torch.Tensor], torch.Tensor], tensor: torch.Tensor
    ) -> torch.Tensor:
        return cast("Callable[..., torch.Tensor]", cls.apply)(callback, tensor)

    @staticmethod
    def forward(callback: Callable[..., torch.Tensor], tensor: torch.Tensor) -> torch.Tensor:
        del callback
        return tensor

    @staticmethod
    def setup_context(
        ctx: torch.autograd.function.FunctionCtx,
        inputs: tuple[object, ...],
        output: torch.Tensor,
    ) -> None:
        del output
        ctx.callback = inputs[0]  # type: ignore[attr-defined]  # how a Function keeps values

    @staticmethod
    def backward(
        ctx: torch.autograd.function.FunctionCtx, grad: torch.Tensor
    ) -> tuple[None, torch.Tensor]:
        return None, ctx.callback(grad)  # type: ignore[attr-defined]  # set above

    @staticmethod
    def jvp(
        ctx: torch.autograd.function.FunctionCtx, _: None, tangent: torch.Tensor | None
    ) -> torch.Tensor | None:
        """The tangent's own backward needs the parameters as well."""
        if tangent is None:
            return None
        return _OutputBoundary.pass_through(ctx.callback, tangent)  # type: ignore[attr-defined]  # set above


class _InputBoundary(torch.autograd.Function):
    """The identity of several tensors; its backward calls back when all gradients are there."""

    @staticmethod
    def forward(
        ctx: torch.autograd.function.FunctionCtx,
        callback: Callable[[], None],
        *tensors: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        ctx.callback = callback  # type: ignore[attr-defined]  # how a Function keeps values
        return tensors

    @staticmethod
    def backward(
        ctx: torch.autograd.function.FunctionCtx, *grads: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, ...]:
        ctx.callback()  # type: ignore[attr-defined]  # set above
        return (None, *grads)

    @staticmethod
    def jvp(
        ctx: torch.autograd.function.FunctionCtx, _: None, *tangents: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        """Tangents pass: the end of the whole backward stands in for theirs.

        Of an input that is returned as it is, PyTorch wants a view of the tangent.
        """
        del ctx
        return tuple(tangent.view_as(tangent) for tangent in tangents)


class _TransformedInputBoundary(_InputBoundary):
    """The same within a transform of `torch.func`.

    Only a function that sets its context apart can be transformed. To call it costs seven times as
    much, for PyTorch inspects its signature.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(  # type: ignore[override]  # the other form of forward
        callback: Callable[[], None], *tensors: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        del callback
        return tensors

    @staticmethod
    def setup_context(
        ctx: torch.autograd.function.FunctionCtx,
        inputs: tuple[object, ...],
        output: tuple[torch.Tensor, ...],
    ) -> None:
        del output
        ctx.callback = inputs[0]  # type: ignore[attr-defined]  # how a Function keeps values


def _warn_of_view(modules: Sequence[nn.Module]) -> None:
    names = ", ".join(type(module).__name__ for module in modules)
    warnings.warn(
        f"FSDP2-wrapped module ({names}) returned a view tensor. An in-place operation on it "
        "replaces its gradient function and with it the hook that unshards the module before "
        "backward. Write `out = out + y` instead of `out += y`, or return a clone.",
        UserWarning,
        stacklevel=2,
    )
