"""In which order a device works: streams and events on an accelerator, nothing but the host elsewhere."""

from __future__ import annotations

import enum
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Protocol, cast

import torch


class Stream(enum.Enum):
    """One sequence of device work. Streams run side by side unless one follows another."""

    COMPUTE = enum.auto()
    """The stream the user computes on: the current one, so not to be named within `enter`."""
    PACK = enum.auto()
    """Copies of slices into gather buffers, ahead of the gather that needs them."""
    GATHER = enum.auto()
    """All-gathers."""
    REDUCE = enum.auto()
    """Reduce-scatters, and what happens to their results."""
    ALL_REDUCE = enum.auto()
    """All-reduces over replicas, and what happens to their results."""


class Event(Protocol):
    """A point in a stream that another stream can follow."""


class Streams(Protocol):
    """Places work on streams and orders them.

    Attributes:
        run_apart: Whether they are an accelerator's, which the host runs ahead of. A collective must then be
            placed on its stream as well: on its process group's own stream it would have ordinary priority,
            and both streams would have to wait for each other.
    """

    run_apart: bool

    def enter(self, stream: Stream) -> AbstractContextManager[object]:
        """Work and allocations within belong to `stream`."""

    def record_event(self, stream: Stream) -> Event:
        """The present end of `stream`."""

    def wait_event(self, stream: Stream, event: Event) -> None:
        """What is placed on `stream` from now on starts after `event`."""

    def wait_stream(self, stream: Stream, earlier: Stream) -> None:
        """What is placed on `stream` from now on starts after all that is on `earlier`."""

    def enter_users(self, theirs: torch.Stream, stream: Stream) -> AbstractContextManager[object]:
        """Work within belongs to `theirs`, the user's, after what is on `stream` and before the rest."""

    def wait_on_host(self, event: Event) -> None:
        """Returns when the device has passed `event`."""

    def has_passed(self, event: Event) -> bool:
        """Whether the device is known to have passed `event`; the host does not wait."""

    @property
    def is_capturing(self) -> bool:
        """Whether work is only written down, in a graph to run later."""


class _HostEvent:
    """Host work is finished when the call returns: there is nothing to wait for."""


class HostStreams:
    """All streams are the calling thread."""

    run_apart = False

    _EVENT = _HostEvent()

    def enter(self, stream: Stream) -> AbstractContextManager[object]:
        """Changes nothing."""
        del stream
        return nullcontext()

    def record_event(self, stream: Stream) -> Event:
        """An event that is always passed."""
        del stream
        return self._EVENT

    def wait_event(self, stream: Stream, event: Event) -> None:
        """Does nothing: the host works in order."""

    def wait_stream(self, stream: Stream, earlier: Stream) -> None:
        """Does nothing: the host works in order."""

    def enter_users(self, theirs: torch.Stream, stream: Stream) -> AbstractContextManager[object]:
        """Makes `theirs` current, which orders nothing on the host."""
        del stream
        # The class of the host's streams is no context manager itself.
        return torch.cpu.stream(cast("torch.cpu.Stream", theirs))

    def wait_on_host(self, event: Event) -> None:
        """Does nothing: the host works in order."""

    def has_passed(self, event: Event) -> bool:
        """Always: the host works in order."""
        del event
        return True

    @property
    def is_capturing(self) -> bool:
        """Never."""
        return False


class StreamModule(Protocol):
    """The part of `torch.cuda`, or of another accelerator's module, that deals with streams."""

    def Stream(self, device: torch.device, *, priority: int) -> torch.Stream:  # noqa: N802 - a class there
        """A new stream; lower numbers have priority."""

    def stream(self, stream: torch.Stream) -> AbstractContextManager[object]:
        """Makes `stream` current within."""

    def current_stream(self, device: torch.device) -> torch.Stream:
        """That of the calling thread."""


class DeviceStreams:
    """The streams of one accelerator; COMPUTE is whichever stream is current.

    Communication streams have high priority: their small copies must not queue behind kernels.

    The streams are of the accelerator's own class. `torch.Stream.wait_event` expects a `torch.Event`, but
    users record events of the accelerator's class: with those it would read invalid memory.
    """

    run_apart = True

    def __init__(self, device: torch.device, streams: StreamModule) -> None:
        self._device = device
        self._module = streams
        self._streams = {
            stream: streams.Stream(device, priority=-1)
            for stream in Stream
            if stream is not Stream.COMPUTE
        }

    def enter(self, stream: Stream) -> AbstractContextManager[object]:
        """Makes it current."""
        return (
            nullcontext()
            if stream is Stream.COMPUTE
            else self._module.stream(self._streams[stream])
        )

    def record_event(self, stream: Stream) -> Event:
        """Records an event."""
        return cast("Event", self._stream(stream).record_event())

    def wait_event(self, stream: Stream, event: Event) -> None:
        """Makes the stream wait for the event; the host goes on."""
        self._stream(stream).wait_event(cast("torch.Event", event))

    def wait_stream(self, stream: Stream, earlier: Stream) -> None:
        """Makes one stream wait for another; the host goes on."""
        if stream is not earlier:
            self._stream(stream).wait_stream(self._stream(earlier))

    @contextmanager
    def enter_users(self, theirs: torch.Stream, stream: Stream) -> Iterator[None]:
        """Makes the user's stream wait, then ours; the host goes on."""
        theirs.wait_stream(self._stream(stream))
        with self._module.stream(theirs):
            yield
        self._stream(stream).wait_stream(theirs)

    def wait_on_host(self, event: Event) -> None:
        """Blocks the host."""
        cast("torch.Event", event).synchronize()

    def has_passed(self, event: Event) -> bool:
        """Asks the device, but not during a capture, which the question would end."""
        return not self.is_capturing and cast("torch.Event", event).query()

    @property
    def is_capturing(self) -> bool:
        """Asks the stream; an accelerator without graphs has nothing to ask."""
        ask = getattr(self._module, "is_current_stream_capturing", None)
        return ask is not None and bool(ask())

    def _stream(self, stream: Stream) -> torch.Stream:
        if stream is Stream.COMPUTE:
            return self._module.current_stream(self._device)
        return self._streams[stream]


def streams_for(device: torch.device) -> Streams:
    """The streams that suit `device`."""
    if device.type == "cpu":
        return HostStreams()
    return DeviceStreams(device, cast("StreamModule", torch.get_device_module(device)))
