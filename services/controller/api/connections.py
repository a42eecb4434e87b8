"""Connections of HTTP with bounds: a client that sends nothing, or never ends, is not waited for."""

import asyncio
import asyncio.sslproto
import contextlib
import functools
import re
import socket
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, ClassVar, Final

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle

from services.contract.words.problems import PROBLEM_MEDIA_TYPE, PROBLEM_TYPE_BASE, Problem

_BUSY: Final = (
    b"HTTP/1.1 503 Service Unavailable\r\n"
    b"Retry-After: 1\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
)
_TOO_MANY_LINES: Final = b"HTTP/1.1 431 Request Header Fields Too Large\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
# Each is looked at by itself, in Python: as many as fit into 16 KiB, which h11 takes, cost a hundredth of
# a second, and many clients that end such a head at one moment would keep the loop from renewing the lead.
_MOST_LINES: Final = 100
# As h11 looks for it.
_END_OF_HEAD: Final = re.compile(rb"\n\r?\n")
# So much is read at a time: that many bytes of chunks of one byte take three thousandths of a second to parse.
_READ_BYTES: Final = 1_024
# Of hundreds of connections with such chunks one round of the loop would take a second; an operator's request takes ten.
_CHUNKED_A_ROUND: Final = 4
# Of a body whose length was announced there is nothing to parse: no more than is left of it, for what comes behind it may
# be in chunks.
_READ_BYTES_OF_A_BODY: Final = 1 << 16
# Of a body in chunks: what is not its content, and all that comes once the answer is out. As small chunks, so much
# takes a thirtieth of a second to parse. Beside that each chunk of 512 bytes or more has its framing, so that an
# archive of code of any size passes as clients send it.
_MOST_FRAMING_BYTES: Final = 1 << 15
_CONTENT_FOR_A_FRAMING_BYTE: Final = 64

# Behind TLS so much is read at a time, which is as much as one of its records holds.
_ENCRYPTED_BYTES: Final = 1 << 14
_PIECE_BYTES: Final = 1 << 16
# Hundreds of connections whose clients come back at once have one refused on each in every round of the loop, which then
# takes a third of a second; an operator's request takes ten rounds.
_REFUSED_A_ROUND: Final = 8


@dataclass(frozen=True)
class ConnectionLimits:
    """What a client may take of the controller.

    ``request_s``: from a connection's beginning, and on a kept one from a request's first byte, until
    head and body are there; and how long a client may leave an answer unread. ``open_at_once``: of
    all clients together. ``unread_bytes``: of all answers together that clients have not read yet.
    """

    request_s: float = 30.0
    open_at_once: int = 512
    unread_bytes: int = 1 << 28


class FewARound:
    """Does what it is given in the order in which that came, for a few connections in each round of the loop.

    Args:
        most: For so many; those that are closed do not count.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._is_planned = False
        self._waiting: deque[tuple[asyncio.BaseTransport, Callable[[], None]]] = deque()

    def add(
        self,
        loop: asyncio.AbstractEventLoop,
        transport: asyncio.BaseTransport,
        do: Callable[[], None],
    ) -> None:
        """Have it done in a later round, unless the connection is closed by then."""
        self._waiting.append((transport, do))
        self._plan(loop)

    def _plan(self, loop: asyncio.AbstractEventLoop) -> None:
        if self._waiting and not self._is_planned:
            self._is_planned = True
            loop.call_soon(self._work, loop)

    def _work(self, loop: asyncio.AbstractEventLoop) -> None:
        left = self._most
        try:
            for _ in range(len(self._waiting)):
                if not left:
                    break
                transport, do = self._waiting.popleft()
                if not transport.is_closing():
                    left -= 1
                    do()
        finally:  # if one fails, the others have their turn
            self._is_planned = False
            self._plan(loop)


class BoundedProtocol(H11Protocol):
    """HTTP/1.1 by uvicorn, with a deadline for each request and a bound of connections.

    A body in chunks that are tiny, or that goes on after its answer, ends its connection; so does a head of
    many lines. Uvicorn has a time-out only for kept connections on which nothing comes. A stream of events has
    no deadline: its request is complete, and it is read.
    """

    limits: ClassVar = ConnectionLimits()
    refusals: ClassVar = FewARound(_REFUSED_A_ROUND)
    chunked: ClassVar = FewARound(_CHUNKED_A_ROUND)
    _deadline: asyncio.TimerHandle | None = None
    _stalled: asyncio.TimerHandle | None = None
    _framing_bytes: int = 0
    _left: int = 0
    _lines: int = 0
    _pending: bytes = b""
    _is_refused: bool = False

    @classmethod
    def within(cls, limits: ConnectionLimits) -> type[H11Protocol]:
        """The protocol with other limits; uvicorn takes a class, and makes its objects by itself."""
        own = {
            "limits": limits,
            "refusals": FewARound(_REFUSED_A_ROUND),
            "chunked": FewARound(_CHUNKED_A_ROUND),
        }
        return type(cls.__name__, (cls,), own)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override] # as in uvicorn
        """Take the connection, if need be in place of one whose client keeps it waiting."""
        super().connection_made(transport)
        # Without it, a kept connection's answer waits 40 ms for the client's acknowledgement: asyncio
        # asks for it only where the listening socket names its protocol.
        self._read_at_a_time(_READ_BYTES)
        accepted: Any = transport.get_extra_info("socket")
        accepted.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if len(self.connections) > self.limits.open_at_once:
            self._to_be_refused().refuse()
        self._watch()

    def data_received(self, data: bytes) -> None:
        """Take a part of a request; the first one starts the request's deadline. Chunks have to wait for their turn."""
        if self._takes_no_more():
            return
        if self._pending or self._has_to_wait(data):
            self._take_later(data)
            return
        head, rest = self._parted(data)
        if self._has_many_lines(data):
            self._answer_last(lambda: _TOO_MANY_LINES)
            return
        self._take(head)
        if rest and not self._takes_no_more():
            take = self._take_later if self._has_to_wait(rest) else self._take
            take(rest)

    def _takes_no_more(self) -> bool:
        """Whether what comes is passed over: for what is behind a connection's last request h11 would refuse that."""
        return self._is_refused or self.conn.their_state is h11.MUST_CLOSE

    def _parted(self, data: bytes) -> tuple[bytes, bytes]:
        """What of it belongs to a head, and what is behind."""
        if self.conn.their_state is not h11.IDLE:
            return data, b""
        before = self._before()
        end = _END_OF_HEAD.search(before + data)
        size = len(data) if end is None else end.end() - len(before)
        return data[:size], data[size:]

    def _before(self) -> bytes:
        """What of a head's end has come already."""
        return self.conn.trailing_data[0][-2:]

    def _has_to_wait(self, data: bytes) -> bool:
        """Whether it has chunks in it, or may have: those of a request behind a body whose length was announced."""
        is_body = self.conn.their_state is h11.SEND_BODY
        return is_body and (self._is_in_chunks() or len(data) > self._left)

    def _is_amid_chunks(self) -> bool:
        return self.conn.their_state is h11.SEND_BODY and self._is_in_chunks()

    def _take_later(self, data: bytes) -> None:
        """Nothing more is read until it is taken, unless whoever gets the body has that resumed."""
        self._pending += data
        self.transport.pause_reading()
        if len(self._pending) == len(data):
            self.chunked.add(self.loop, self.transport, self._take_pending)

    def _take_pending(self) -> None:
        data, self._pending = self._pending, b""
        if not data or self._is_refused or self.transport.is_closing():
            return
        self._take(data)
        if not self.flow.read_paused:
            self.transport.resume_reading()

    def eof_received(self) -> None:
        """Take what waits for its turn: behind TLS this comes although reading is paused, and then the connection is closed."""
        self._take_pending()

    def _take(self, data: bytes) -> None:
        cycle: RequestResponseCycle | None = self.cycle
        before = self._taken()
        if (
            cycle is not None
            and self.conn.their_state is h11.IDLE
            and not self.conn.trailing_data[0]
        ):
            self._deadline = _cancel(self._deadline)  # that of an idle connection: a request begins
        with self._no_second_answer():
            super().data_received(data)
        if self._is_amid_chunks():
            content = self._taken() - (before if self.cycle is cycle else 0)
            granted = content // _CONTENT_FOR_A_FRAMING_BYTE
            self._framing_bytes = max(0, self._framing_bytes + len(data) - content - granted)
            if self._framing_bytes > _MOST_FRAMING_BYTES:
                self.transport.abort()
        else:
            self._framing_bytes = 0
        if self.cycle is cycle:
            self._left -= len(data)
        self._read_on(is_new=self.cycle is not cycle)

    def _read_on(self, *, is_new: bool) -> None:
        if is_new:
            self._left = self._announced() - self._taken()
        self._read_at_a_time(max(_READ_BYTES, min(self._left, _READ_BYTES_OF_A_BODY)))
        self._watch()

    def _read_at_a_time(self, size: int) -> None:
        transport: Any = self.transport
        transport.max_size = size

    def _has_many_lines(self, data: bytes) -> bool:
        """Whether a head of which this is a part has more lines than any that is meant well."""
        if self.conn.their_state is not h11.IDLE:
            self._lines = 0
            return False
        before = self._before()
        seen = before + data
        end = _END_OF_HEAD.search(seen)
        last = len(seen) if end is None else end.end()
        lines = self._lines + seen.count(b"\n", len(before), last)
        self._lines = lines if end is None else 0
        return lines > _MOST_LINES

    def send_400_response(self, msg: str) -> None:
        """A problem as any other, which the client gets although it may still send."""
        self._answer_last(functools.partial(self._bad_request, msg))

    def _bad_request(self, msg: str) -> bytes:
        status = HTTPStatus.BAD_REQUEST
        problem = Problem(
            type=f"{PROBLEM_TYPE_BASE}bad-request",
            title=status.phrase,
            status=status,
            code="bad_request",
            detail=f"{msg} It is not HTTP/1.1: look for control characters in header values",
        )
        headers = [
            (b"content-type", PROBLEM_MEDIA_TYPE.encode()),
            (b"connection", b"close"),
        ]
        parts = (
            h11.Response(status_code=status, headers=headers, reason=status.phrase.encode()),
            h11.Data(data=problem.model_dump_json().encode()),
            h11.EndOfMessage(),
        )
        return b"".join(self.conn.send(part) or b"" for part in parts)

    def _answer_last(self, answer: Callable[[], bytes]) -> None:
        """Pass over what comes until the client ends the connection, or its time is over.

        One that is closed with bytes unread is reset, and the client may lose the answer. That is made when it is sent,
        which is of few in one round of the loop.
        """
        self._is_refused = True
        cycle: RequestResponseCycle | None = self.cycle
        if cycle is not None:  # whoever works on the request would answer it, too
            cycle.disconnected = True
            cycle.waiting_for_100_continue = False
            cycle.message_event.set()
        self.flow.resume_reading()  # else nobody sees that the client has gone
        self.refusals.add(self.loop, self.transport, functools.partial(self._end_with, answer))
        self._watch()

    def _end_with(self, answer: Callable[[], bytes]) -> None:
        if self.transport.is_closing():  # the client has gone, or its time was over
            return
        with self._no_second_answer():
            self.transport.write(answer())
            if not self.transport.can_write_eof():
                self.transport.close()
                return
            with contextlib.suppress(OSError):  # the client has reset the connection
                self.transport.write_eof()

    @contextlib.contextmanager
    def _no_second_answer(self) -> Iterator[None]:
        """Within, a body that turns out to be none after its answer ends the connection, and no more.

        Uvicorn would answer once more, which h11 refuses, and asyncio writes a traceback for each into the log.
        """
        try:
            yield
        except h11.LocalProtocolError:
            self.transport.abort()

    def _taken(self) -> int:
        """How much of the body waits for the application, which takes nothing meanwhile."""
        cycle: RequestResponseCycle | None = self.cycle  # before the first request there is none
        return 0 if cycle is None else len(cycle.body)

    def _announced(self) -> int:
        """How long a body will be; 0 where that is not known, or there is none.

        A request that names a length as well as chunks is in chunks to h11, until the application refuses it.
        """
        if self.conn.their_state is not h11.SEND_BODY or self._is_in_chunks():
            return 0
        lengths = [value for name, value in self.scope["headers"] if name == b"content-length"]
        return int(lengths[0]) if lengths else 0

    def _is_in_chunks(self) -> bool:
        return any(name == b"transfer-encoding" for name, _ in self.scope["headers"])

    def on_response_complete(self) -> None:
        """Begin with the next request: a part of it may be here already."""
        cycle = self.cycle
        with self._no_second_answer():
            super().on_response_complete()
        self._read_on(is_new=self.cycle is not cycle)

    def _watch(self) -> None:
        # One that closes stays open until what is left of its answer is read, and so little is left that nothing is paused.
        is_ending = self._is_refused or self.transport.is_closing()
        if is_ending or self.conn.their_state in {h11.IDLE, h11.SEND_BODY}:
            if self._deadline is None:
                self._deadline = self.loop.call_later(self.limits.request_s, self.transport.abort)
        else:
            self._deadline = _cancel(self._deadline)

    def pause_writing(self) -> None:
        """The client does not read what it is sent."""
        super().pause_writing()
        self._stalled = self.loop.call_later(self.limits.request_s, self.transport.abort)
        self._end_stalled()

    def _end_stalled(self) -> None:
        """End the connections that have gone unread longest, until all unread answers are within their limit."""
        others = (c for c in self.connections if isinstance(c, BoundedProtocol))
        stalled = [(c._stalled.when(), id(c), c) for c in others if c._stalled is not None]  # noqa: SLF001 its own class
        sizes = {place: c.transport.get_write_buffer_size() for _, place, c in stalled}
        unread = sum(sizes.values())
        for _, place, each in sorted(stalled):
            if unread <= self.limits.unread_bytes:
                break
            unread -= sizes[place]
            each.transport.abort()

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
        if self.conn.their_state is h11.IDLE and not self._is_refused:
            self.transport.write(_BUSY)
        # To close it would be to wait for a client that does not read, or behind TLS does not take its leave.
        self.transport.abort()

    def _to_be_refused(self) -> "BoundedProtocol":
        """The oldest of those whose request is not there yet, or of those that go unread: of the kind that has more.

        Whoever fills one kind would else have everybody in the other refused, one at each further connection.
        """
        others = [c for c in self.connections if isinstance(c, BoundedProtocol) and c is not self]
        kinds = ([c._deadline for c in others], [c._stalled for c in others])  # noqa: SLF001 its own class
        waiting = max(
            ([(t.when(), n) for n, t in enumerate(timers) if t is not None] for timers in kinds),
            key=len,
        )
        return others[min(waiting)[1]] if waiting else self


def keep_tls_buffers_small() -> None:
    """Have asyncio read 16 KiB at a time of what is encrypted, where it would take 256 KiB for each connection.

    It has that buffer before the handshake, and strangers may begin thousands of those.
    """
    asyncio.sslproto.SSLProtocol.max_size = _ENCRYPTED_BYTES


class BoundedTlsProtocol(BoundedProtocol, asyncio.BufferedProtocol):
    """The same behind TLS, where the transport would hand over 256 KiB at once, had it no buffer to fill."""

    def __init__(self, *arguments: Any, **options: Any) -> None:  # noqa: ANN401 passed through to uvicorn
        super().__init__(*arguments, **options)
        self._buffer = memoryview(bytearray(_READ_BYTES))

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override] # as in uvicorn
        """Take the connection; what it is sent is written in pieces."""
        in_pieces: Any = _WritesInPieces(transport)
        super().connection_made(in_pieces)

    def _read_at_a_time(self, size: int) -> None:
        if size != len(self._buffer):
            self._buffer = memoryview(bytearray(size))

    def get_buffer(self, sizehint: int) -> memoryview:  # noqa: ARG002 asyncio names it
        """Where the next bytes go; what is left over comes in a later turn of the loop."""
        return self._buffer

    def buffer_updated(self, nbytes: int) -> None:
        """Take them."""
        self.data_received(bytes(self._buffer[:nbytes]))


class _WritesInPieces:
    """A transport behind TLS that knows how much is unread.

    What asyncio has encrypted and handed on in one write it does not count, and the protocol is not told that the
    client does not read: of many writes that is true of the first alone.
    """

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport

    def write(self, data: bytes) -> None:
        for start in range(0, len(data), _PIECE_BYTES):
            # asyncio would write a line into the log for each piece.
            if self._transport.is_closing():
                return
            self._transport.write(data[start : start + _PIECE_BYTES])

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 all else is the transport's
        return getattr(self._transport, name)


def _cancel(timer: asyncio.TimerHandle | None) -> asyncio.TimerHandle | None:
    """What is left of a timer that is no longer wanted: nothing."""
    if timer is not None:
        timer.cancel()
    return None
