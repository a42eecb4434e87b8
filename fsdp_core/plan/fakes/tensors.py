# ruff: noqa: SLF001 - PyTorch offers no other way to profile without memory
"""Tensors without memory, and a look at every operator that makes one."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any, TypeAlias, cast

import torch
import torch.distributed as dist
import torch.utils._pytree as pytree
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _disable_current_modes,
    is_traceable_wrapper_subclass_type,
)

from fsdp_core.plan.fakes.answers import AnsweringFakes

_DEVICE = torch.ops.prim.device.default

LookInto: TypeAlias = Callable[
    [torch._ops.OpOverload, tuple[object, ...], Mapping[str, Any], object],
    tuple[object, int | None],
]


def without_memory() -> AbstractContextManager[object]:
    """Tensors made within have a device, shape, strides and storage size, but no memory."""
    return cast("AbstractContextManager[object]", AnsweringFakes())


@contextmanager
def with_memory() -> Iterator[None]:
    """Within, also within `without_memory`, operators run as kernels on tensors with memory.

    No mode looks at them and autograd records nothing, though gradients stay enabled if they are:
    on that depends what some kernels keep for backward.
    """
    below = cast("AbstractContextManager[object]", torch._C._AutoDispatchBelowAutograd())
    with cast("AbstractContextManager[object]", _disable_current_modes()), below:
        yield


def is_without_memory(tensor: torch.Tensor) -> bool:
    """Whether it was made within `without_memory`, or on the meta device."""
    return isinstance(tensor, FakeTensor) or tensor.is_meta


@contextmanager
def fake_ranks(ranks: int) -> Iterator[None]:
    """Within, this process is rank 0 of so many, whose collectives do nothing."""
    # Registers the backend.
    from torch.testing._internal.distributed.fake_pg import FakeStore  # noqa: PLC0415

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    try:
        yield
    finally:
        dist.destroy_process_group()


class OperatorWatch(TorchDispatchMode):
    """Calls back with each operator and what it returned; wrapper subclasses are looked into.

    What an operator allocates and frees within itself is not seen.
    """

    def __init__(
        self,
        on_result: Callable[[torch._ops.OpOverload, torch.Tensor], None],
        look_into: LookInto | None = None,
        on_look: Callable[[int], None] | None = None,
    ) -> None:
        """Watches once it is entered.

        Args:
            on_result: Called with each tensor that an operator returned.
            look_into: Called with each operator, what it was called with, and what it returned;
                returns what it must return, and what `on_look` is called with then, unless None.
            on_look: Called after `on_result`.
        """
        super().__init__()  # type: ignore[no-untyped-call]  # PyTorch's
        self._on_result = on_result
        self._look_into = look_into
        self._on_look = on_look

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Keeps `__torch_dispatch__` from being wrapped: nothing is compiled under such a mode."""
        return False

    def __torch_dispatch__(
        self,
        func: torch._ops.OpOverload,
        types: tuple[type, ...],
        args: tuple[object, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> object:
        """Runs `func`."""
        if func is _DEVICE and type(args[0]) is FakeTensor:
            return args[0].device  # autograd asks it of every gradient
        for kind in types:
            if kind is not FakeTensor and is_traceable_wrapper_subclass_type(kind):
                return NotImplemented  # it will come again, with the tensors inside
        kwargs, found = kwargs or {}, None
        result = func(*args, **kwargs)
        if self._look_into is not None:
            result, found = self._look_into(func, args, kwargs, result)
        if isinstance(result, torch.Tensor):
            self._on_result(func, result)
        elif result is not None:
            for leaf in pytree.tree_leaves(result):
                if isinstance(leaf, torch.Tensor):
                    self._on_result(func, leaf)
        if found is not None and self._on_look is not None:
            self._on_look(found)
        return result


@contextmanager
def watching_resizes(on_resize: Callable[[torch.UntypedStorage], None]) -> Iterator[None]:
    """Calls back after each `UntypedStorage.resize_`, which is no operator."""
    plain = torch.UntypedStorage.resize_

    def resize_(storage: torch.UntypedStorage, size: int) -> object:
        result = plain(storage, size)
        on_resize(storage)
        return result

    torch.UntypedStorage.resize_ = resize_  # type: ignore[method-assign,assignment]  # the only way to see it
    try:
        yield
    finally:
        torch.UntypedStorage.resize_ = plain  # type: ignore[method-assign]  # as it was


def storage_key(storage: torch.UntypedStorage) -> int:
    """Tells storages apart that live at the same time."""
    return int(storage._cdata)


def when_freed(
    storage: torch.UntypedStorage, call: Callable[[], None]
) -> weakref.ref[torch.UntypedStorage]:
    """Calls once nobody refers to `storage` any more, while the returned reference lives.

    PyTorch keeps the Python object of a storage alive as long as its memory.
    """
    return weakref.ref(storage, lambda _: call())


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """What this rank holds of `tensor`, if it is a DTensor, else itself."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor
