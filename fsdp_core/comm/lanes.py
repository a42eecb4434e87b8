"""Ordered places of execution: streams on an accelerator, nothing but the host elsewhere."""

from __future__ import annotations

import enum
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Protocol, cast

import torch


class Lane(enum.Enum):
    """One sequence of device work. Lanes run side by side unless one follows another."""

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


class Mark(Protocol):
    """A point in a lane that another lane can follow."""


class Lanes(Protocol):
    """Places work on lanes and orders them.

    Attributes:
        are_streams: Whether what is placed on a lane runs on a stream of its own. A collective must then be
            placed on that stream as well: handed over to its process group's stream it would have
            ordinary priority, and both streams would have to wait for each other.
    """

    are_streams: bool

    def enter(self, lane: Lane) -> AbstractContextManager[object]:
        """Work and allocations within belong to `lane`."""

    def mark(self, lane: Lane) -> Mark:
        """The present end of `lane`."""

    def follow_mark(self, lane: Lane, mark: Mark) -> None:
        """What is placed on `lane` from now on starts after `mark`."""

    def follow(self, lane: Lane, earlier: Lane) -> None:
        """What is placed on `lane` from now on starts after all that is on `earlier`."""

    def enter_stream(self, stream: torch.Stream, lane: Lane) -> AbstractContextManager[object]:
        """Work within belongs to the user's `stream`, after what is on `lane` and before the rest."""

    def wait_on_host(self, mark: Mark) -> None:
        """Returns when the device has passed `mark`."""


class _HostMark:
    """Host work is finished when the call returns: there is nothing to wait for."""


class HostLanes:
    """All lanes are the calling thread."""

    are_streams = False

    _MARK = _HostMark()

    def enter(self, lane: Lane) -> AbstractContextManager[object]:
        """Changes nothing."""
        del lane
        return nullcontext()

    def mark(self, lane: Lane) -> Mark:
        """A mark that is always passed."""
        del lane
        return self._MARK

    def follow_mark(self, lane: Lane, mark: Mark) -> None:
        """Already so."""

    def follow(self, lane: Lane, earlier: Lane) -> None:
        """Already so."""

    def enter_stream(self, stream: torch.Stream, lane: Lane) -> AbstractContextManager[object]:
        """Makes `stream` current, which orders nothing on the host."""
        del lane
        # The class of the host's streams is no context manager itself.
        return torch.cpu.stream(cast("torch.cpu.Stream", stream))

    def wait_on_host(self, mark: Mark) -> None:
        """Already so."""


class Streams(Protocol):
    """The part of `torch.cuda`, or of another accelerator's module, that deals with streams."""

    def Stream(self, device: torch.device, *, priority: int) -> torch.Stream:  # noqa: N802 - a class there
        """A new stream; lower numbers have priority."""

    def stream(self, stream: torch.Stream) -> AbstractContextManager[object]:
        """Makes `stream` current within."""

    def current_stream(self, device: torch.device) -> torch.Stream:
        """That of the calling thread."""


class DeviceLanes:
    """A stream per lane on one accelerator; COMPUTE is whichever stream is current.

    Communication lanes have high priority: their small copies must not queue behind kernels.

    The streams are of the accelerator's own class. A plain `torch.Stream` takes an event of
    that class, which is what users record, for a plain one and reads memory that is not there.
    """

    are_streams = True

    def __init__(self, device: torch.device, streams: Streams) -> None:
        self._device = device
        self._module = streams
        self._streams = {
            lane: streams.Stream(device, priority=-1) for lane in Lane if lane is not Lane.COMPUTE
        }

    def enter(self, lane: Lane) -> AbstractContextManager[object]:
        """Makes the lane's stream current."""
        return nullcontext() if lane is Lane.COMPUTE else self._module.stream(self._streams[lane])

    def mark(self, lane: Lane) -> Mark:
        """Records an event."""
        return cast("Mark", self._stream(lane).record_event())

    def follow_mark(self, lane: Lane, mark: Mark) -> None:
        """Makes the lane's stream wait for the event; the host goes on."""
        self._stream(lane).wait_event(cast("torch.Event", mark))

    def follow(self, lane: Lane, earlier: Lane) -> None:
        """Makes one stream wait for another; the host goes on."""
        if lane is not earlier:
            self._stream(lane).wait_stream(self._stream(earlier))

    @contextmanager
    def enter_stream(self, stream: torch.Stream, lane: Lane) -> Iterator[None]:
        """Makes the user's stream wait, then the lane's; the host goes on."""
        stream.wait_stream(self._stream(lane))
        with self._module.stream(stream):
            yield
        self._stream(lane).wait_stream(stream)

    def wait_on_host(self, mark: Mark) -> None:
        """Blocks the host."""
        cast("torch.Event", mark).synchronize()

    def _stream(self, lane: Lane) -> torch.Stream:
        if lane is Lane.COMPUTE:
            return self._module.current_stream(self._device)
        return self._streams[lane]


def lanes_for(device: torch.device) -> Lanes:
    """The lanes that suit `device`."""
    if device.type == "cpu":
        return HostLanes()
    return DeviceLanes(device, cast("Streams", torch.get_device_module(device)))
