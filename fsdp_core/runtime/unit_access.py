"""From a module to its unit."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, cast

from fsdp_core.errors import StateError
from fsdp_core.runtime.fsdp_state import FSDPState, state_of, states_in

if TYPE_CHECKING:
    from torch import nn

    from fsdp_core.param import FSDPParamGroup


class UnitAccess:
    """What all methods of `FSDPModule` begin with."""

    def _get_fsdp_state(self) -> FSDPState:
        state = state_of(cast("nn.Module", self))
        if state is None:
            raise StateError(f"No FSDP state found on {self}")
        return state

    def _states(self, *, recurse: bool) -> Iterator[FSDPState]:
        if recurse:
            yield from states_in(cast("nn.Module", self))
        else:
            yield self._get_fsdp_state()

    def _groups(self, *, recurse: bool = False) -> Iterator[FSDPParamGroup]:
        for state in self._states(recurse=recurse):
            yield from state.groups
