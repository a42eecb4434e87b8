# ruff: noqa: SLF001 - private names are what this package is for
"""Tensors: many at once, and classes of their own."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar, cast

import torch
import torch.utils._pytree as pytree
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

AnyTensor = TypeVar("AnyTensor", bound=torch.Tensor)


Leaf = TypeVar("Leaf")


Tree = TypeVar("Tree")

OpOverload = torch._ops.OpOverload

MOVES = frozenset({torch.ops.aten._pin_memory.default, torch.ops.aten._to_copy.default})
"""Operators that give a tensor another place or dtype."""


def foreach_copy(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
    """Copies each source into its target, casting on the way, in as few kernels as possible."""
    torch._foreach_copy_(targets, sources)


def cat_into(target: torch.Tensor, tensors: list[torch.Tensor]) -> None:
    """Lays 1D tensors of one dtype end to end into `target`; quicker than to cut and copy."""
    torch.cat(tensors, out=target)


def foreach_div(tensors: list[torch.Tensor], divisor: float) -> None:
    """Divides each tensor in place by the one number, in as few kernels as possible."""
    torch._foreach_div_(tensors, divisor)


def foreach_norm(
    tensors: list[torch.Tensor], order: float, dtype: torch.dtype
) -> tuple[torch.Tensor, ...]:
    """The norm of each tensor, accumulated in `dtype`, in as few kernels as possible.

    The public `torch.nn.utils.get_total_norm` accumulates in the tensors' own dtype.
    """
    return tuple(torch._foreach_norm(tensors, order, dtype=dtype))


def foreach_scale(tensors: list[torch.Tensor], factor: torch.Tensor) -> None:
    """Multiplies each tensor in place by the one number, in as few kernels as possible."""
    torch._foreach_mul_(tensors, factor)


def chunk_cat(tensors: list[torch.Tensor], parts: int, out: torch.Tensor) -> None:
    """Pads dim 0 of each tensor to `parts` chunks and lays chunk i of all into row i of `out`."""
    torch._chunk_cat(tensors, 0, parts, out=out)


def is_wrapper(tensor: torch.Tensor) -> bool:
    """Whether the tensor is a subclass whose data lies in tensors that it wraps."""
    return bool(is_traceable_wrapper_subclass(tensor))


def swap(one: torch.Tensor, other: torch.Tensor) -> None:
    """Exchanges what two tensor objects are; whoever holds one holds the other then."""
    torch.utils.swap_tensors(one, other)  # type: ignore[no-untyped-call]  # PyTorch's


no_torch_function = torch._C._disabled_torch_function_impl
"""For a wrapper's `__torch_function__`: otherwise every result is made one of its class again."""


def wrapper_of(cls: type[AnyTensor], like: torch.Tensor) -> AnyTensor:
    """A tensor of `cls` without memory, with the shape, strides, dtype and device of `like`."""
    make = cast("Callable[..., AnyTensor]", torch.Tensor._make_wrapper_subclass)
    # As an inference tensor or not as `like` is, since one can be no view of the other.
    with torch.inference_mode(mode=like.is_inference()):
        return make(cls, like.size(), strides=like.stride(), dtype=like.dtype, device=like.device)


def tree_map_only(kind: type[Leaf], function: Callable[[Leaf], object], tree: Tree) -> Tree:
    """`tree` with `function` applied to its leaves of `kind`."""
    return cast("Tree", pytree.tree_map_only(kind, function, tree))


def writes_first_argument(op: torch._ops.OpOverload) -> bool:
    """Whether the operator works in place, so that its result is its first argument itself."""
    first = op._schema.arguments[:1]
    return any(each.alias_info is not None and each.alias_info.is_write for each in first)


def storage_start(tensor: torch.Tensor) -> int | None:
    """Where the tensor's storage begins; None of one that has none, such as a wrapper of others."""
    try:
        return tensor.untyped_storage().data_ptr()
    except (RuntimeError, NotImplementedError):
        return None
