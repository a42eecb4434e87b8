"""Several roots on one device, as the chunks of a pipeline are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from fsdp_core.errors import ArgumentError
from fsdp_core.runtime import FSDPModule

if TYPE_CHECKING:
    from fsdp_core.runtime import FSDPState


def share_comm_ctx(modules: Sequence[FSDPModule]) -> None:
    """Gives several roots one set of streams, one count of collectives, one in-flight window.

    Streams and the memory pools behind them are then not multiplied by the number of roots. The
    order in which each root prefetches stays its own. Call it between iterations, on all ranks.

    Args:
        modules: Root modules on one device; none or one means nothing to do.

    Raises:
        ArgumentError: Some module is not sharded.
    """
    states = [_state_of(module) for module in modules]
    for state in states[1:]:
        state.context.move_to(states[0].context.shared)


def _state_of(module: object) -> FSDPState:
    if not isinstance(module, FSDPModule):
        raise ArgumentError(f"Expects list of FSDPModules but got {module}")
    return module._get_fsdp_state()  # noqa: SLF001 - a name of the reference
