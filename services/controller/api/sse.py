"""Server-sent events: entries as they come, a ping where nothing does, and an end."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from typing import Final

from fastapi import Response
from fastapi.sse import KEEPALIVE_COMMENT, EventSourceResponse, format_sse_event
from starlette.types import Receive, Scope, Send

from services.contract.views import EventView, LogView
from services.controller.domain.errors import StoreUnavailableError, TooManyStreamsError

MEDIA_TYPE: Final = "text/event-stream"
PING_EVERY_S: Final = 15.0

Entries = AsyncIterator[EventView | LogView | None]


def wants_stream(accept: str) -> bool:
    """Whether the client asks for a stream rather than for a page."""
    return MEDIA_TYPE in accept.lower()


class StreamSlots:
    """How many streams may be open at a time.

    Args:
        limit: So many.
    """

    def __init__(self, limit: int = 64) -> None:
        self.free = limit

    def take(self) -> None:
        """Open one more.

        Raises:
            TooManyStreamsError: All are open.
        """
        if self.free < 1:
            raise TooManyStreamsError(
                "as many streams are open as this controller serves (MESHLOOM_MAX_STREAMS); "
                "come back later, or ask for pages"
            )
        self.free -= 1

    def give_back(self) -> None:
        """One has ended."""
        self.free += 1


async def stream(entries: Entries, stopping: asyncio.Event, slots: StreamSlots) -> Response:
    """A stream of entries; whoever breaks off resumes with ``Last-Event-ID``.

    The first entry is awaited before the answer begins, so that errors still have their status.

    Raises:
        TooManyStreamsError: No slot is free.
    """
    slots.take()
    try:
        first = await anext(entries, _END)
    except BaseException:
        slots.give_back()
        raise
    return _SlottedResponse(
        _frames(first, entries, stopping), slots, headers={"Cache-Control": "no-store"}
    )


class _SlottedResponse(EventSourceResponse):
    """Gives its slot back whether or not its first byte was ever sent."""

    def __init__(
        self, frames: AsyncIterator[bytes], slots: StreamSlots, headers: dict[str, str]
    ) -> None:
        super().__init__(frames, headers=headers)
        self._slots = slots

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._slots.give_back()


class _End:
    """The end of the entries."""


_END: Final = _End()


async def _frames(
    first: EventView | LogView | _End | None, entries: Entries, stopping: asyncio.Event
) -> AsyncIterator[bytes]:
    """Named ``end`` is the event after which nothing more comes; all others have no name."""
    entry = first
    said_at = time.monotonic()
    yield b": meshloom\n\n"
    with contextlib.suppress(StoreUnavailableError):
        while not isinstance(entry, _End):
            if entry is not None:
                said_at = time.monotonic()
                yield format_sse_event(data_str=entry.model_dump_json(), id=entry.id)
            elif time.monotonic() - said_at >= PING_EVERY_S:
                said_at = time.monotonic()
                yield KEEPALIVE_COMMENT
            entry = await _next_or_stop(entries, stopping)
            if stopping.is_set():
                return
        yield format_sse_event(event="end", data_str="{}")


async def _next_or_stop(
    entries: Entries, stopping: asyncio.Event
) -> EventView | LogView | _End | None:
    """The next entry; the end if the process is about to end."""
    following = asyncio.ensure_future(anext(entries, _END))
    stop = asyncio.ensure_future(stopping.wait())
    try:
        await asyncio.wait([following, stop], return_when=asyncio.FIRST_COMPLETED)
        return following.result() if following.done() else _END
    finally:
        for task in (following, stop):
            task.cancel()
        await asyncio.gather(following, stop, return_exceptions=True)
