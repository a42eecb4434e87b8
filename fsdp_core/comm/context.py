"""What the units under one root, or under several, share in order to communicate."""

from __future__ import annotations

import weakref
from collections import Counter, deque
from functools import cached_property, partial
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
        """It has ended; on an accelerator this is noticed when the next one is issued, or backward ends."""


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


class Recoverable(Protocol):
    """A root, which forgets a backward that raised."""

    def recover_if_failed(self) -> None:
        """Drops what its last backward left in flight, if that raised."""

    def lose_gradients(self) -> None:
        """Has its backward that goes on raise at its end: what it had in flight did not arrive."""


class CollectiveCounts:
    """Numbers the collectives of each process group, so that whoever is behind can be named."""

    def __init__(self) -> None:
        self._issued: Counter[str] = Counter()
        self._relays: list[ListenerRelay] = []
        self._on_device: dict[str, deque[tuple[int, Callable[[], bool]]]] = {}

    def issue(self, group: str) -> int:
        """Counts one more collective of `group`, from 1, equally on all its ranks; returns its number."""
        if self._on_device:
            self.poll()
        self._issued[group] += 1
        sequence = self._issued[group]
        for listener in self._listeners():
            listener.on_issue(group, sequence)
        return sequence

    def complete(self, group: str, sequence: int) -> None:
        """Collective number `sequence` of `group` has ended."""
        for listener in self._listeners():
            listener.on_complete(group, sequence)

    def complete_once(self, group: str, sequence: int, has_passed: Callable[[], bool]) -> None:
        """Collective number `sequence` of `group` will have ended when `has_passed` says so; see `poll`."""
        self._on_device.setdefault(group, deque()).append((sequence, has_passed))
        self.poll()

    def poll(self) -> None:
        """Tells of collectives that a device has ended since it was asked last."""
        for group, waiting in list(self._on_device.items()):
            while waiting and waiting[0][1]():
                self.complete(group, waiting.popleft()[0])
            if not waiting:
                del self._on_device[group]

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
        self._roots: weakref.WeakSet[Recoverable] = weakref.WeakSet()
        self._in_flight_of: weakref.ref[Recoverable] | None = None
        self._gathered: list[tuple[torch.Tensor, Event]] = []
        self._held: list[tuple[torch.Tensor, Event]] = []
        self._awaited: list[Event] = []
        self._averages: list[InFlightReduction] = []
        self._undecided: list[tuple[object, Event, Callable[[], None]]] = []
        self._with_results: dict[Stream, None] = {}

    @cached_property
    def streams(self) -> Streams:
        """Order device work."""
        return self._make_streams()

    @cached_property
    def inline(self) -> CommContext:
        """Counts with this one, but places everything on the current stream."""
        return CommContext(HostStreams, self.counts, self.uncopied)

    # -- Several roots

    def add_root(self, root: Recoverable) -> None:
        """`root` communicates here from now on."""
        self._roots.add(root)

    def recover_failed(self, besides: Recoverable | None = None) -> None:
        """Drops what backwards that raised left in flight, before another root, `besides`, lands it.

        A backward that goes on has not raised, so within one nobody need be excepted.
        """
        if self.has_several_roots:
            for root in [each for each in self._roots if each is not besides]:
                root.recover_if_failed()

    def have_in_flight(self, root: Recoverable) -> None:
        """What is in flight from now on is of `root`."""
        self._in_flight_of = weakref.ref(root)

    @property
    def root_in_flight(self) -> Recoverable | None:
        """Whose reductions are in flight, or were last."""
        return None if self._in_flight_of is None else self._in_flight_of()

    def has_in_flight(self, root: Recoverable) -> bool:
        """Whether what is in flight is of `root`: it is never of several."""
        if self._in_flight_of is None or not self.has_several_roots:
            return True
        return self.root_in_flight is root

    @property
    def has_several_roots(self) -> bool:
        """Whether what is in flight may be another root's."""
        return len(self._roots) > 1

    # -- Collectives that end

    def completion(
        self, group: str, sequence: int, placed_on: Stream, waited_on: Stream | None
    ) -> Callable[[], None]:
        """What to call when a collective, just issued, has been waited for.

        Args:
            group: Its axis.
            sequence: Its number.
            placed_on: The stream that it is work of.
            waited_on: Where it runs beside: the stream that will have waited for it.
        """
        if not self.streams.run_apart or self.streams.is_capturing:
            return partial(self.counts.complete, group, sequence)
        placed = self.streams.record_event(placed_on)

        def ended() -> None:
            event = placed if waited_on is None else self.streams.record_event(waited_on)
            self.counts.complete_once(group, sequence, partial(self.streams.has_passed, event))

        return ended

    def decide_later(self, about: object, event: Event, decide: Callable[[], None]) -> None:
        """Has `decide` called at the end of backward, once the device has passed `event`.

        Args:
            about: Whose gradients it gives; see `is_undecided`.
            event: After which the host can read what it needs.
            decide: Gives gradients.
        """
        self._undecided.append((about, event, decide))

    def is_undecided(self, about: object) -> bool:
        """Whether gradients of `about` are still to be given; what comes after must not overtake them."""
        return any(each is about for each, _, _ in self._undecided)

    def decide(self) -> None:
        """Calls what `decide_later` was given, in order."""
        undecided, self._undecided = self._undecided, []
        for _, event, decide in undecided:
            self.streams.wait_on_host(event)
            decide()

    def forget_undecided(self) -> None:
        """The iteration failed: its gradients are lost."""
        self._undecided.clear()

    def average_later(self, pending: InFlightReduction) -> None:
        """Keeps an all-reduce over replicas until the next reduction lands, or backward ends."""
        self._averages.append(pending)

    def land_averages(self) -> None:
        """Lands all-reduces over replicas, in order."""
        averages, self._averages = self._averages, []
        for pending in averages:
            pending.land(self)
            # A parameter's hook may have run another root's backward, which raised.
            self.recover_failed()

    def drop_averages(self) -> None:
        """Waits for them and forgets their results."""
        averages, self._averages = self._averages, []
        for pending in averages:
            pending.drop(self)

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
        self.counts.poll()

    def _let_go(self) -> None:
        for _, event in self._held:
            self.streams.wait_event(Stream.REDUCE, event)
        self._held.clear()
