"""Where the collectives of a root live, or of several roots that share it."""

from __future__ import annotations

from functools import cached_property, partial
from typing import TYPE_CHECKING

from fsdp_core.comm import CollectiveLedger, CommLink, HostLanes, Lent, lanes_for
from fsdp_core.schedule import InFlightWindow

if TYPE_CHECKING:
    from collections.abc import Collection

    import torch

    from fsdp_core.param import PendingReduce
    from fsdp_core.runtime.observer import Observer, ObserverRelay


class CommHome:
    """Lanes, counts, and reductions in flight.

    Pipeline chunks are a root each, but compute on one device: with one home they have one set
    of lanes, so buffers that a chunk frees serve the next, and one window bounds them all.

    Attributes:
        reduces: Reductions in flight.
    """

    def __init__(self, device: torch.device) -> None:
        self.reduces: InFlightWindow[PendingReduce] = InFlightWindow()
        self._ledger = CollectiveLedger(self)
        self._make_lanes = partial(lanes_for, device)
        self._uncopied: list[Lent] = []
        self._relays: list[ObserverRelay] = []

    @cached_property
    def link(self) -> CommLink:
        """With the device's lanes, made when the first root is known: each is a stream."""
        return CommLink(self._make_lanes(), self._ledger, self._uncopied)

    @cached_property
    def inline_link(self) -> CommLink:
        """Everything on the current stream."""
        return CommLink(HostLanes(), self._ledger, self._uncopied)

    def await_copied(self) -> None:
        """Waits until no other rank copies this rank's slices: from then on they may be written.

        Raises:
            PeerError: A rank has ended.
        """
        for lent in self._uncopied:
            lent.await_copied()
        self._uncopied.clear()

    def forget_uncopied(self) -> None:
        """An iteration failed: others may have failed elsewhere, and have nothing to copy."""
        self._uncopied.clear()

    def tell(self, relay: ObserverRelay) -> None:
        """Adds a root whose observer is told of collectives."""
        if relay not in self._relays:
            self._relays.append(relay)

    def on_issue(self, group: str, sequence: int) -> None:
        """Tells every observer once, even if it watches several roots."""
        for observer in self._observers():
            observer.on_issue(group, sequence)

    def on_complete(self, group: str, sequence: int) -> None:
        """The same for completion."""
        for observer in self._observers():
            observer.on_complete(group, sequence)

    def _observers(self) -> Collection[Observer]:
        if len(self._relays) == 1:
            return (self._relays[0].target,)
        # By identity: an observer need not be hashable.
        return {id(relay.target): relay.target for relay in self._relays}.values()
