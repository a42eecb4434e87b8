"""Methods besides `forward` that compute with a unit's parameters."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, cast

from fsdp_core.errors import ArgumentError
from fsdp_core.runtime import FSDPModule, fully_shard

if TYPE_CHECKING:
    from torch import nn


def register_fsdp_forward_method(module: nn.Module, method_name: str) -> None:
    """Makes ``module.<method_name>`` unshard and reshard as `forward` does.

    Args:
        module: A sharded module; any other is left as it is, so that one script serves both.
        method_name: Name of a method that takes and returns tensors as forward does.

    Raises:
        ArgumentError: There is no such method.
    """
    state = fully_shard.state(module)
    if state is None or not isinstance(module, FSDPModule):
        return
    method: Callable[..., object] | None = getattr(module, method_name, None)
    if method is None:
        raise ArgumentError(f"{type(module)} does not have a method {method_name}")

    @functools.wraps(method)
    def with_hooks(*args: object, **kwargs: object) -> object:
        target = cast("nn.Module", module)
        with state.running_method():
            args, kwargs = state.pre_forward(target, args, kwargs)
            return state.post_forward(target, args, method(*args, **kwargs))

    setattr(module, method_name, with_hooks)
