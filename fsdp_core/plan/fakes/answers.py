# ruff: noqa: SLF001 - PyTorch offers no other way to profile without memory
"""Tensors without memory, and operators on them that are answered as they were before."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, TypeAlias, cast

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

_DEVICE: Final = torch.ops.prim.device.default
_META: Final = torch.device("meta")
_NO_VALUE: Final = object()
# What stands in a key as it is, beside its type: 1 and 1.0 are equal.
_PLAIN: Final = frozenset(
    {
        *(bool, int, float, complex, str, type(None)),
        *(torch.device, torch.dtype, torch.layout, torch.memory_format),
    }
)
_UNSAFE_VIEW: Final = torch.ops.aten._unsafe_view.default
_c10d: Final = torch.ops._c10d_functional
# PyTorch remembers none of these: the first looks at its argument without being called a view, the
# others are no operators of ATen. All depend on nothing but what is in a key.
_ALSO: Final = frozenset(
    {
        _UNSAFE_VIEW,
        _c10d.all_reduce.default,
        _c10d.all_gather_into_tensor.default,
        _c10d.reduce_scatter_tensor.default,
        _c10d.wait_tensor.default,
    }
)


@dataclass(frozen=True, slots=True)
class _Answer:
    """What an operator returned: an argument, a view of one, a new tensor, or a value.

    Attributes:
        argument: Place of the argument that is returned or, if there is a shape, looked at.
        shape, stride, dtype, device, offset: Of a tensor.
        value: If no tensor is returned.
    """

    argument: int | None = None
    shape: torch.Size | None = None
    stride: tuple[int, ...] = ()
    dtype: torch.dtype = torch.float32
    device: torch.device = _META
    offset: int = 0
    value: object = _NO_VALUE


_Answers: TypeAlias = "_Answer | tuple[_Answer, ...]"


class AnsweringFakes(FakeTensorMode):  # type: ignore[no-untyped-call]  # PyTorch's
    """`FakeTensorMode` with a shorter way to what its cache answers.

    It learns only when PyTorch itself answered from its cache, keeps what that depends on, and
    gives what PyTorch would make of it; all else is left to PyTorch. Models repeat their
    operators: of an operator's time PyTorch's way takes some 80 us, this one some 8.
    """

    # PyTorch's cache is the process's as well.
    _answers: Final[dict[tuple[object, ...], _Answers]] = {}

    def __init__(self) -> None:
        super().__init__(allow_non_fake_inputs=True)
        self._attributes: dict[torch.device, dict[str, object]] = {}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Keeps `__torch_dispatch__` from being wrapped once more; PyTorch's own stays so."""
        return False

    def __torch_dispatch__(
        self,
        func: Any,  # noqa: ANN401 - an operator, of one of PyTorch's several classes
        types: Sequence[type],
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        """What `func` returns."""
        if func is _DEVICE and type(args[0]) is FakeTensor:
            return args[0].device
        kwargs = kwargs or {}
        key = self._key(func, args, kwargs)
        if key is None:
            return super().__torch_dispatch__(func, types, args, kwargs)
        answers = self._answers.get(key)
        if answers is not None:
            if isinstance(answers, tuple):
                return tuple([self._given(each, args) for each in answers])
            return self._given(answers, args)
        before = FakeTensorMode.cache_info()
        result = super().__torch_dispatch__(func, types, args, kwargs)
        after = FakeTensorMode.cache_info()
        answered = replace(before, hits=before.hits + 1) == after
        if answered or func in _ALSO:
            learnt = _learnt(func, args, result)
            if learnt is not None:
                self._answers[key] = learnt
        return result

    def _key(
        self, func: object, args: Sequence[object], kwargs: Mapping[str, object]
    ) -> tuple[object, ...] | None:
        """All that PyTorch's own key holds, or implies it; None if there may be no answer."""
        key: list[object] = [
            func,
            torch.get_default_dtype(),
            torch._C._get_default_device(),
            torch.is_inference_mode_enabled(),
            len(args),
        ]
        if not self._describe(args, key):
            return None
        if kwargs:
            key.extend(kwargs)
            if not self._describe(kwargs.values(), key):
                return None
        return tuple(key)

    def _describe(self, values: Iterable[object], key: list[object]) -> bool:
        for value in values:
            kind = type(value)
            if kind is FakeTensor:
                tensor = cast("FakeTensor", value)
                if (
                    tensor.fake_mode is not self
                    or tensor.constant is not None
                    or tensor.layout is not torch.strided
                ):
                    return False
                key += (
                    tensor.dtype,
                    tensor.shape,
                    tensor.stride(),
                    tensor.storage_offset(),
                    tensor.untyped_storage().nbytes(),
                    tensor.fake_device,
                    tensor.requires_grad,
                    tensor.is_conj(),
                    tensor.is_neg(),
                    tensor.is_inference(),
                )
            elif kind in _PLAIN:
                key += (kind, value)
            elif kind is list or kind is tuple:
                items = cast("Sequence[object]", value)
                key += (kind, len(items))
                if not self._describe(items, key):
                    return False
            else:
                return False
        return True

    def _given(self, answer: _Answer, args: Sequence[object]) -> object:
        if answer.shape is None:
            return answer.value if answer.argument is None else args[answer.argument]
        with torch._C._DisableTorchDispatch():
            bare = torch.empty_strided(
                answer.shape, answer.stride, dtype=answer.dtype, device=_META
            )
            if answer.argument is not None:
                storage = cast("torch.Tensor", args[answer.argument]).untyped_storage()
                bare.set_(storage, answer.offset, answer.shape, answer.stride)
        attributes = self._attributes.get(answer.device)
        if attributes is None:
            attributes = dict(FakeTensor(self, bare, answer.device).__dict__)
            self._attributes[answer.device] = attributes
        # What FakeTensor.__new__ does, but for what it computes again each time.
        made = _make_subclass(
            FakeTensor,
            bare,
            False,  # noqa: FBT003 - whether it requires a gradient
            dispatch_device=True,
            device_for_backend_keys=answer.device,
        )
        torch._C._set_throw_on_mutable_data_ptr(made)
        made.__dict__.update(attributes)
        return made


_make_subclass = cast("Callable[..., FakeTensor]", torch.Tensor._make_subclass)


def _learnt(func: Any, args: Sequence[object], result: object) -> _Answers | None:  # noqa: ANN401 - as above
    if isinstance(result, tuple):
        several = [_one(func, args, each) for each in result]
        return None if None in several else tuple(cast("list[_Answer]", several))
    return _one(func, args, result)


def _one(func: Any, args: Sequence[object], result: object) -> _Answer | None:  # noqa: ANN401 - as above
    if result is None or isinstance(result, int):
        return _Answer(value=result)
    for place, argument in enumerate(args):
        if argument is result:
            return _Answer(argument=place)
    if (
        not isinstance(result, FakeTensor)
        or result.layout is not torch.strided
        or result.constant is not None
        or result.requires_grad
        or result.is_conj()
        or result.is_neg()
    ):
        return None
    storage = result.untyped_storage()
    looked_at = [
        place
        for place, argument in enumerate(args)
        if isinstance(argument, torch.Tensor)
        and argument.untyped_storage()._cdata == storage._cdata
    ]
    if looked_at:
        if len(looked_at) > 1 or not (func.is_view or func is _UNSAFE_VIEW):
            return None
    elif func.is_view or storage.nbytes() != _bytes_of(result):
        return None
    return _Answer(
        looked_at[0] if looked_at else None,
        result.shape,
        result.stride(),
        result.dtype,
        result.fake_device,
        int(result.storage_offset()),
    )


def _bytes_of(tensor: torch.Tensor) -> int:
    """Of a storage that has no room for more."""
    if not tensor.numel():
        return 0
    last = sum(
        (size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    )
    return (last + 1) * tensor.itemsize
