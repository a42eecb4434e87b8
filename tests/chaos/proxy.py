"""A TCP proxy between one client and its Redis that can be told to misbehave."""

import asyncio
import contextlib
import threading
from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from typing import Self

_CHUNK = 65_536
_READY_WITHIN_S = 10


class Mode(Enum):
    """What becomes of the bytes.

    ``CUT``: connections are reset, new ones at once. ``BLACK_HOLE``: connections are accepted and
    kept, and no byte comes through either way. ``LOSE_REPLIES``: requests arrive, and the
    connection is reset instead of the first byte of a reply.
    """

    PASS = "pass"  # noqa: S105 no password: a way to treat bytes
    CUT = "cut"
    BLACK_HOLE = "black hole"
    LOSE_REPLIES = "lose replies"


class ChaosProxy:
    """Listens on a port of loopback and passes on to a unix socket, in a thread of its own.

    Attributes:
        port: Where it listens; the same for all its life.
        replies_lost: How many connections it has reset instead of passing on a reply.
    """

    def __init__(self, upstream: Path) -> None:
        self.port = 0
        self.replies_lost = 0
        self._upstream = upstream
        self._mode = Mode.PASS
        self._writers: set[asyncio.StreamWriter] = set()
        self._loop = asyncio.new_event_loop()

    @classmethod
    @contextlib.contextmanager
    def to(cls, upstream: Path) -> Iterator[Self]:
        """Run one until the block ends."""
        proxy = cls(upstream)
        thread = threading.Thread(target=proxy._loop.run_forever, name="chaos-proxy", daemon=True)
        thread.start()
        listening = asyncio.run_coroutine_threadsafe(proxy._listen(), proxy._loop)
        server = listening.result(_READY_WITHIN_S)
        try:
            yield proxy
        finally:
            ending = asyncio.run_coroutine_threadsafe(proxy._end(server), proxy._loop)
            ending.result(_READY_WITHIN_S)
            proxy._loop.call_soon_threadsafe(proxy._loop.stop)
            thread.join()
            proxy._loop.close()

    @property
    def mode(self) -> Mode:
        """How it behaves now."""
        return self._mode

    @mode.setter
    def mode(self, mode: Mode) -> None:
        asyncio.run_coroutine_threadsafe(self._change(mode), self._loop).result(_READY_WITHIN_S)

    @contextlib.contextmanager
    def misbehaving(self, mode: Mode) -> Iterator[None]:
        """Behave so until the block ends."""
        self.mode = mode
        try:
            yield
        finally:
            self.mode = Mode.PASS

    async def _listen(self) -> asyncio.Server:
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = server.sockets[0].getsockname()[1]
        return server

    async def _change(self, mode: Mode) -> None:
        # What was swallowed is missing from the middle of a conversation: it cannot go on.
        if mode is Mode.CUT or self._mode is Mode.BLACK_HOLE:
            self._reset()
        self._mode = mode

    async def _end(self, server: asyncio.Server) -> None:
        server.close()
        self._mode = Mode.CUT
        self._reset()
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)

    def _reset(self) -> None:
        for writer in self._writers:
            writer.transport.abort()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._mode is Mode.CUT:
            writer.transport.abort()
            return
        try:
            behind = await asyncio.open_unix_connection(str(self._upstream))
        except OSError:  # the server is dead: its client is to see that
            writer.transport.abort()
            return
        pair = {writer, behind[1]}
        self._writers |= pair
        try:
            requests = asyncio.ensure_future(self._pump(reader, behind[1], is_reply=False))
            replies = asyncio.ensure_future(self._pump(behind[0], writer, is_reply=True))
            pumps = {requests, replies}
            await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
            for pump in pumps:
                pump.cancel()
            await asyncio.wait(pumps)
        finally:
            self._writers -= pair
            for end in pair:
                end.transport.abort()

    async def _pump(
        self, source: asyncio.StreamReader, target: asyncio.StreamWriter, *, is_reply: bool
    ) -> None:
        with contextlib.suppress(OSError):
            while chunk := await source.read(_CHUNK):
                if is_reply and self._mode is Mode.LOSE_REPLIES:
                    self.replies_lost += 1
                    return
                if self._mode is not Mode.BLACK_HOLE:
                    target.write(chunk)
                    await target.drain()
