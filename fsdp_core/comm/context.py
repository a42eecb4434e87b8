"""What the units under one root, or under several, share in order to communicate."""

from __future__ import annotations

from collections import Counter
from functools import cached_property
from typing import TYPE_CHECKING, Protocol

from fsdp_core.comm.streams import HostStreams, Stream
from fsdp_core.schedule import InFlightWindow

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    import torch

    from fsdp_core.comm.streams import Event, Streams


class CollectiveListener(Protocol):
    """Told of every collective; must return at once and must not raise."""

    def on_issue(self, group: str, sequence: int) -> None:
        """Collective number `sequence` (from 1) of `group` was handed to the backend."""

    def on_complete(self, group: str, sequence: int) -> None:
        """The host has waited for it. On an accelerator the host only orders streams."""


class ListenerRelay(Protocol):
    """Knows who listens at present."""

    @property
    def target(self) -> CollectiveListener:
        """The present listener."""


class CopiedSlices(Protocol):
    """Slices that other ranks read where they lie."""

    def await_copied(self) -> None:
        """Waits until the others have copied what this rank has."""


class InFlightReduction(Protocol):
    """A reduction in flight."""

    def land(self, comm: CommContext) -> None:
        """Waits, and makes its result the gradients of the slices."""

    def drop(self, comm: CommContext) -> None:
        """Forgets the result, once it is there: the iteration it belongs to failed."""


class CollectiveCounts:
    """Numbers the collectives of each process group, so that whoever is behind can be named."""

    def __init__(self) -> None:
        self._issued: Counter[str] = Counter()
        self._relays: list[ListenerRelay] = []

    def issue(self, group: str) -> int:
        """Counts one more collective of `group`, from 1, equally on all its ranks; returns its number."""
        self._issued[group] += 1
        sequence = self._issued[group]
        for listener in self._listeners():
            listener.on_issue(group, sequence)
        return sequence

    def complete(self, group: str, sequence: int) -> None:
        """Collective number `sequence` of `group` was waited for."""
        for listener in self._listeners():
            listener.on_complete(group, sequence)

    def tell(self, relay: ListenerRelay) -> None:
        """Adds a root whose listener is told of collectives."""
        if relay not in self._relays:
            self._relays.append(relay)

    def _listeners(self) -> Collection[CollectiveListener]:
        if len(self._relays) == 1:
            return (self._relays[0].target,)
        # Each once, even if it watches several roots; by identity: it need not be hashable.
        return {id(relay.target): relay.target for relay in self._relays}.values()


class CommContext:
    """Where collectives are placed and counted, and what must not be let go before its time.

    Pipeline chunks are a root each, but compute on one device: with one context they have one set of
    streams, so buffers that a chunk frees serve the next, and one window bounds them all.

    Args:
        make_streams: Of the device; called when a root is known, for it makes streams.
        counts: Of another context that counts with this one.
        uncopied: The other's.

    Attributes:
        counts: Of collectives.
        uncopied: Slices that other ranks may still copy.
        reduces: Reductions in flight.
    """

    def __init__(
        self,
        make_streams: Callable[[], Streams],
        counts: CollectiveCounts | None = None,
        uncopied: list[CopiedSlices] | None = None,
    ) -> None:
        self.counts = CollectiveCounts() if counts is None else counts
        self.uncopied: list[CopiedSlices] = [] if uncopied is None else uncopied
        self.reduces: InFlightWindow[InFlightReduction] = InFlightWindow()
        self._make_streams = make_streams
        self._gathered: list[tuple[torch.Tensor, Event]] = []
        self._held: list[tuple[torch.Tensor, Event]] = []
        self._awaited: list[Event] = []
        self._with_results: dict[Stream, None] = {}

    @cached_property
    def streams(self) -> Streams:
        """Order device work."""
        return self._make_streams()

    @cached_property
    def inline(self) -> CommContext:
        """Counts with this one, but places everything on the current stream."""
        return CommContext(HostStreams, self.counts, self.uncopied)

    # -- Slices that others copy

    def await_copied(self) -> None:
        """Waits until no other rank copies this rank's slices: from then on they may be written.

        Raises:
            PeerError: A rank has ended.
        """
        for slices in self.uncopied:
            slices.await_copied()
        self.uncopied.clear()

    def forget_uncopied(self) -> None:
        """An iteration failed: others may have failed elsewhere, and have nothing to copy."""
        self.uncopied.clear()

    # -- Buffers in use on several streams

    def hold_gathered(self, buffer: torch.Tensor, event: Event) -> None:
        """Keeps a gather's buffer that is copied out until `event`.

        While it is held, the next gather need not wait for that copy before it takes its memory.
        """
        self._gathered.append((buffer, event))

    def let_go_gathered(self) -> None:
        """Gives the buffers back: gathers that are issued from now on come after their copies."""
        for _, event in self._gathered:
            self.streams.wait_event(Stream.PACK, event)
            self.streams.wait_event(Stream.GATHER, event)
        self._gathered.clear()

    def note_results(self, stream: Stream) -> None:
        """Has the compute stream follow `stream`, which made gradients, at the end of backward."""
        self._with_results[stream] = None

    def hold_until_passed(self, buffer: torch.Tensor, event: Event) -> None:
        """Keeps a buffer of the reduce stream that another stream reads until `event`.

        Without a reference the allocator could give it to the next reduction at once. The one
        held before is let go: the reduce stream then follows its event, which is an all-reduce
        earlier, so that one of them overlaps the next reduction.
        """
        self._let_go()
        self._held.append((buffer, event))

    def await_on_host(self, event: Event) -> None:
        """Has the host wait for `event` at the end of backward: it will read what was copied."""
        self._awaited.append(event)

    def end_backward(self) -> None:
        """Orders what follows on the compute stream, and on the host, after all reductions."""
        self._let_go()
        # No others: while a graph is captured, a stream without captured work cannot be followed.
        for stream in self._with_results:
            self.streams.wait_stream(Stream.COMPUTE, stream)
        self._with_results.clear()
        for event in self._awaited:
            self.streams.wait_on_host(event)
        self._awaited.clear()

    def _let_go(self) -> None:
        for _, event in self._held:
            self.streams.wait_event(Stream.REDUCE, event)
        self._held.clear()
