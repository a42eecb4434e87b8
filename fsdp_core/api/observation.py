"""Watching a model train."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fsdp_core.errors import ArgumentError
from fsdp_core.runtime import fully_shard

if TYPE_CHECKING:
    from torch import nn

    from fsdp_core.runtime import Observer


def observe(model: nn.Module, observer: Observer) -> None:
    """Tells `observer` of every state and collective of the units below `model` from now on.

    Args:
        model: The root: the module whose forward the training loop calls.
        observer: Replaces the one before.

    Raises:
        ArgumentError: `model` was not given to `fully_shard`, or is not the root.
    """
    state = fully_shard.state(model)
    if state is None or (not state.context.is_solo and state.index != 0):
        raise ArgumentError(
            f"Only a root module can be observed, and {type(model).__name__} is "
            f"{'not sharded' if state is None else f'the unit {state.fqn!r} of another'}. "
            "Pass the model that fully_shard was applied to last."
        )
    state.relay.target = observer
