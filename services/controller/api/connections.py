"""Connections of HTTP with bounds: a client that sends nothing, or never ends, is not waited for."""

import asyncio
import socket
from dataclasses import dataclass
from typing import Any, ClassVar, Final

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

_BUSY: Final = (
    b"HTTP/1.1 503 Service Unavailable\r\n"
    b"Retry-After: 1\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
)
# So much is read at a time: chunks of one byte take a tenth of a second to parse in the 256 KiB that
# asyncio reads, and many clients that send such would keep the loop from renewing the lead.
_READ_BYTES: Final = 4_096


@dataclass(frozen=True)
class ConnectionLimits:
    """What a client may take of the controller.

    ``request_s``: from a connection's beginning, and on a kept one from a request's first byte, until
    head and body are there; and how long a client may leave an answer unread. ``open_at_once``: of
    all clients together.
    """

    request_s: float = 30.0
    open_at_once: int = 512


class BoundedProtocol(H11Protocol):
    """HTTP/1.1 by uvicorn, with a deadline for each request and a bound of connections.

    Uvicorn has a time-out only for kept connections on which nothing comes. A stream of events has no
    deadline: its request is complete, and it is read.
    """

    limits: ClassVar = ConnectionLimits()
    _deadline: asyncio.TimerHandle | None = None
    _stalled: asyncio.TimerHandle | None = None

    @classmethod
    def within(cls, limits: ConnectionLimits) -> type[H11Protocol]:
        """The protocol with other limits; uvicorn takes a class, and makes its objects by itself."""
        return type(cls.__name__, (cls,), {"limits": limits})

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override] # as in uvicorn
        """Take the connection, if need be in place of the oldest whose request is not there yet."""
        super().connection_made(transport)
        # Without it, a kept connection's answer waits 40 ms for the client's acknowledgement: asyncio
        # asks for it only where the listening socket names its protocol.
        selector_transport: Any = transport
        selector_transport.max_size = _READ_BYTES
        accepted: Any = transport.get_extra_info("socket")
        accepted.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if len(self.connections) > self.limits.open_at_once:
            self._oldest_unready().refuse()
        self._watch()

    def data_received(self, data: bytes) -> None:
        """Take a part of a request; the first one starts the request's deadline."""
        super().data_received(data)
        self._watch()

    def on_response_complete(self) -> None:
        """Begin with the next request: a part of it may be here already."""
        super().on_response_complete()
        self._watch()

    def _watch(self) -> None:
        if self.conn.their_state in {h11.IDLE, h11.SEND_BODY}:
            if self._deadline is None:
                self._deadline = self.loop.call_later(self.limits.request_s, self.transport.abort)
        else:
            self._deadline = _cancel(self._deadline)

    def pause_writing(self) -> None:
        """The client does not read what it is sent."""
        super().pause_writing()
        self._stalled = self.loop.call_later(self.limits.request_s, self.transport.abort)

    def resume_writing(self) -> None:
        """It reads again."""
        super().resume_writing()
        self._stalled = _cancel(self._stalled)

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget its deadlines."""
        super().connection_lost(exc)
        self._deadline = _cancel(self._deadline)
        self._stalled = _cancel(self._stalled)

    def refuse(self) -> None:
        """End the connection, for there are too many."""
        self.connections.discard(self)
        if self.conn.their_state is h11.IDLE:
            self.transport.write(_BUSY)
        self.transport.close()

    def _oldest_unready(self) -> "BoundedProtocol":
        """A connection whose request is not there yet; this one if there is none."""
        others = (c for c in self.connections if isinstance(c, BoundedProtocol) and c is not self)
        waiting = [(c._deadline.when(), id(c), c) for c in others if c._deadline is not None]  # noqa: SLF001 its own class
        return min(waiting)[2] if waiting else self


def _cancel(timer: asyncio.TimerHandle | None) -> asyncio.TimerHandle | None:
    """What is left of a timer that is no longer wanted: nothing."""
    if timer is not None:
        timer.cancel()
    return None
