"""Observing units: the user's observer, profiles and logs."""

from __future__ import annotations

import logging
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

from torch.profiler import record_function

from fsdp_core import torch_private
from fsdp_core.states import TrainingState

_LOGGER = logging.getLogger("fsdp_core")
_NOTHING: AbstractContextManager[object] = nullcontext()


class Observer(Protocol):
    """Called on the training thread; must return at once, and must not raise or communicate."""

    def on_state(self, state: TrainingState, unit_index: int, unit_fqn: str) -> None:
        """A unit entered `state`.

        Args:
            state: The new state.
            unit_index: Place of the unit in the root's pre-order of modules; the root is 0.
            unit_fqn: Names of the unit's modules from the root, joined by ", "; "" is the root.
        """

    def on_issue(self, group: str, sequence: int) -> None:
        """Collective number `sequence`, from 1, of the mesh axis `group` was started."""

    def on_complete(self, group: str, sequence: int) -> None:
        """It has ended.

        On an accelerator the engine notices this when the next one is started, or at the end of
        backward, so the call may be late, but never too early.
        """


class NullObserver:
    """Ignores everything: the observer of a root that has none."""

    def on_state(self, state: TrainingState, unit_index: int, unit_fqn: str) -> None:
        """Does nothing."""

    def on_issue(self, group: str, sequence: int) -> None:
        """Does nothing."""

    def on_complete(self, group: str, sequence: int) -> None:
        """Does nothing."""


class ObserverRelay:
    """Knows who observes a root at present.

    Attributes:
        target: The observer; the user may replace it at any time.
    """

    def __init__(self) -> None:
        self.target: Observer = NullObserver()


class UnitTracer:
    """Names a unit's phases in profiles and, at level DEBUG, in the log of `fsdp_core`.

    The names are the reference's, `FSDP::all_gather (layers.0)`, for that is what people search
    their traces for.

    Attributes:
        fqn: Names of the unit's modules from the root, joined by ", "; "" for a root.
    """

    def __init__(self) -> None:
        self.fqn = ""

    def span(self, what: str) -> AbstractContextManager[object]:
        """A span in the profile that is being recorded, if any.

        Entering a span costs about 5 us even when nobody records it, which is why it is asked
        first.
        """
        return record_function(self._label(what)) if torch_private.is_profiling() else _NOTHING

    def phase(self, what: str) -> AbstractContextManager[object]:
        """A span whose beginning is also logged."""
        if _LOGGER.isEnabledFor(logging.DEBUG):
            _LOGGER.debug("%s", self._label(what))
        return self.span(what)

    def _label(self, what: str) -> str:
        return f"FSDP::{what} ({self.fqn})" if self.fqn else f"FSDP::{what}"
