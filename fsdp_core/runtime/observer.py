"""Where the engine is, told to the outside while it happens."""

from __future__ import annotations

from typing import Protocol

from fsdp_core.states import TrainingState


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
        """It was waited for by the host; on an accelerator only enqueued to be waited for."""


class NullObserver:
    """Ignores everything: the observer of a root that has none."""

    def on_state(self, state: TrainingState, unit_index: int, unit_fqn: str) -> None:
        """Does nothing."""

    def on_issue(self, group: str, sequence: int) -> None:
        """Does nothing."""

    def on_complete(self, group: str, sequence: int) -> None:
        """Does nothing."""


class ObserverRelay:
    """Passes everything on to whoever observes at present.

    Attributes:
        target: The present observer; the user may replace it at any time.
    """

    def __init__(self) -> None:
        self.target: Observer = NullObserver()

    def on_state(self, state: TrainingState, unit_index: int, unit_fqn: str) -> None:
        """See `Observer`."""
        self.target.on_state(state, unit_index, unit_fqn)

    def on_issue(self, group: str, sequence: int) -> None:
        """See `Observer`."""
        self.target.on_issue(group, sequence)

    def on_complete(self, group: str, sequence: int) -> None:
        """See `Observer`."""
        self.target.on_complete(group, sequence)
