"""What all units of one root share during an iteration."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from fsdp_core import torch_private
from fsdp_core.comm import CommLink, Lane
from fsdp_core.param import PendingReduce
from fsdp_core.runtime.observer import ObserverRelay
from fsdp_core.runtime.unit_options import UnitOptions
from fsdp_core.schedule import BackwardOrder, ForwardOrder, InFlightWindow


class Unit(Protocol):
    """What the context asks of a unit."""

    @property
    def options(self) -> UnitOptions:
        """Its configuration."""

    def prefetch_in_forward(self) -> None:
        """Starts the gather that the unit's next forward needs."""

    def prefetch_in_backward(self) -> None:
        """Starts the gather that the unit's next backward needs."""

    def drop_gathers(self) -> None:
        """Ends gathers in flight that nobody used."""

    def complete_partial_forward(self, output: object) -> object:
        """Ends a forward in which only some of the unit's modules ran."""

    def complete_backward(self) -> None:
        """Runs the post-backward that autograd did not, if so."""

    def go_idle(self) -> None:
        """Ends the iteration."""


class RootContext:
    """Order, prefetch and in-flight collectives of the units under one root.

    It is built whole: at construction of a unit for that unit alone (`is_solo`), which is
    enough to unshard it, and for the tree at the root's first forward.

    Attributes:
        units: In pre-order of the root's modules; the root first.
        link: Where collectives are placed and counted.
        relay: The root's observer.
        is_solo: Whether no root has been determined yet.
        backward_order: Post-forwards of this iteration.
        forward_order: Pre-forwards of this and the previous iteration.
        reduces: Reductions in flight.
    """

    def __init__(
        self, units: Sequence[Unit], link: CommLink, relay: ObserverRelay, *, is_solo: bool
    ) -> None:
        self.units = tuple(units)
        self.link = link
        self.relay = relay
        self.is_solo = is_solo
        self.backward_order = BackwardOrder()
        self.forward_order = ForwardOrder()
        self.reduces: InFlightWindow[PendingReduce] = InFlightWindow(1)
        self._forward_root: Unit | None = None
        self._end_is_queued = False
        self._prefetched: list[Unit] = []

    def begin_forward(self, unit: Unit) -> bool:
        """Opens a pass unless one is open; returns whether `unit` opened it.

        The opener need not be the root: a submodule may run alone, for example in evaluation.
        """
        if self._forward_root is not None:
            return False
        self._forward_root = unit
        # The optimizer's update of the slices must be done before they are packed.
        self.link.lanes.follow(Lane.PACK, Lane.COMPUTE)
        self.link.lanes.follow(Lane.GATHER, Lane.COMPUTE)
        if not torch_private.in_backward():
            self.forward_order.begin()
            # Outside backward nothing can be queued; what is left is from one that raised.
            self._end_is_queued = False
        return True

    def prefetch_forward(self, index: int, chosen: Sequence[Unit]) -> None:
        """Starts gathers for the units that follow unit `index`: the `chosen`, else the foreseen.

        Recomputation in backward follows no forward order and prefetches nothing.
        """
        if torch_private.in_backward():
            return
        foreseen = self.forward_order.enter(index)
        targets = chosen or ([] if foreseen is None else [self.units[foreseen]])
        for target in targets:
            target.prefetch_in_forward()
            self._prefetched.append(target)

    def prefetch_backward(self, index: int, chosen: Sequence[Unit]) -> None:
        """Starts gathers for the units whose backward follows that of unit `index`."""
        if chosen:
            for target in chosen:
                target.prefetch_in_backward()
        elif (foreseen := self.backward_order.take(index)) is not None:
            self.units[foreseen].prefetch_in_backward()

    def end_forward(self, unit: Unit, output: object) -> object:
        """Closes the pass if `unit` opened it; returns forward's output, hooked if need be."""
        if self._forward_root is not unit:
            return output
        # Innermost first, as their forwards would have ended.
        for other in reversed(self.units):
            if other is not unit:
                output = other.complete_partial_forward(output)
        if not torch_private.in_backward():
            self.forward_order.end()
        # An unused guess would be stale after the next update.
        for guess in self._prefetched:
            guess.drop_gathers()
        self._prefetched.clear()
        self._forward_root = None
        return output

    def queue_end_of_backward(self) -> None:
        """Has the iteration ended when the running backward is, once."""
        if not self._end_is_queued:
            self._end_is_queued = True
            torch_private.queue_after_backward(self._end_backward)

    def admit_reduce(self, pending: PendingReduce) -> None:
        """Takes a reduction into the window; see `make_room_for_reduce`."""
        self.reduces.admit(pending)

    def make_room_for_reduce(self) -> None:
        """Lands the oldest reductions, before the buffer of one more is allocated."""
        for pending in self.reduces.room_for_one():
            pending.land(self.link)

    def _end_backward(self) -> None:
        self._end_is_queued = False
        self._forward_root = None
        for unit in self.units:
            unit.complete_backward()
        if self.units[0].options.is_last_backward:
            for pending in self.reduces.drain():
                pending.land(self.link)
            for unit in self.units:
                unit.drop_gathers()
            self.backward_order.clear()
            self.link.end_backward()
        for unit in self.units:
            unit.go_idle()
