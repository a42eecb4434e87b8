# ruff: noqa: SLF001 - PyTorch offers no other way to profile without memory
"""Dispatch modes that keep what PyTorch would compute again for every operator."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Final, Self, cast

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode, _FlopCounterMode

_aten: Final = torch.ops.aten
# They change nothing of a tensor without values, and say so in Python only, which takes 0.3 ms.
_FILLS: Final = frozenset(
    {_aten.normal_.default, _aten.uniform_.default, _aten.erfinv_.default, _aten.clamp_.default}
)
_PLAIN: Final = frozenset({bool, int, float, type(None)})


def without_drawing_twice() -> AbstractContextManager[object]:
    """Within, tensors on the meta device are filled with random numbers once for each shape.

    Arguments are checked that once; as tensors have no values there, nothing else would happen.
    """
    return cast("AbstractContextManager[object]", _Fills())  # type: ignore[no-untyped-call]  # PyTorch's


class _Fills(TorchDispatchMode):  # type: ignore[no-untyped-call]  # PyTorch's
    # Fills that went well; true of the process, since they depend on nothing else.
    _seen: Final[set[tuple[object, ...]]] = set()

    def __torch_dispatch__(
        self,
        func: torch._ops.OpOverload,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> object:
        kwargs = kwargs or {}
        if func not in _FILLS or type(args[0]) not in {torch.Tensor, torch.nn.Parameter}:
            return func(*args, **kwargs)
        tensor, *rest = args
        if not tensor.is_meta or any(
            type(each) not in _PLAIN for each in (*rest, *kwargs.values())
        ):
            return func(*args, **kwargs)
        values = tuple((type(each), each) for each in (*rest, *kwargs.values()))
        key = (func, tensor.dtype, tensor.shape, tensor.stride(), tuple(kwargs), values)
        if key in self._seen:
            return tensor
        result = func(*args, **kwargs)
        self._seen.add(key)
        return result


def flop_counter(more: Mapping[Any, Any]) -> FlopCounterMode:
    """PyTorch's counter, which asks only once whether an operator is made of others.

    Args:
        more: Functions that count for operators it does not know, from their arguments' shapes.
    """
    return _Counter(display=False, custom_mapping=dict(more))


class _Counter(FlopCounterMode):
    def __enter__(self) -> Self:
        self.flop_counts.clear()
        self.mod_tracker.__enter__()  # type: ignore[no-untyped-call]  # PyTorch's
        self.mode = _Counting(self)
        self.mode.__enter__()  # type: ignore[no-untyped-call]  # PyTorch's
        return self


class _Counting(_FlopCounterMode):
    _whole: Final[dict[object, bool]] = {}

    def __torch_dispatch__(
        self,
        func: Any,  # noqa: ANN401 - an operator, of one of PyTorch's several classes
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> object:
        whole = self._whole.get(func)
        if whole is None:
            whole = self._whole[func] = _is_whole(func)
        if not whole:
            return super().__torch_dispatch__(func, types, args, kwargs)  # type: ignore[no-untyped-call]  # PyTorch's
        kwargs = kwargs or {}
        packet = func._overloadpacket
        result = func(*args, **kwargs)
        return self.counter._count_flops(packet, result, args, kwargs)  # type: ignore[no-untyped-call]  # PyTorch's


def _is_whole(func: object) -> bool:
    """Whether it returns tensors, and is not made of other operators."""
    if not isinstance(func, torch._ops.OpOverload):
        return False
    composite = torch._C.DispatchKey.CompositeImplicitAutograd
    name: str = func.name()  # type: ignore[no-untyped-call]  # PyTorch's
    return (
        all(str(each.type) == "Tensor" for each in func._schema.returns)
        and composite not in func.py_kernels
        and not torch._C._dispatch_has_kernel_for_dispatch_key(name, composite)
    )
