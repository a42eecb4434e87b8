"""Server-sent events: entries as they come, a ping where nothing does, and an end."""

import asyncio
import functools
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from http import HTTPStatus
from typing import Final

from fastapi import Response
from fastapi.sse import KEEPALIVE_COMMENT, EventSourceResponse, format_sse_event
from starlette.types import Receive, Scope, Send

from services.contract.api.views import EventView, LogView
from services.contract.words.problems import PROBLEM_TYPE_BASE, Problem
from services.controller.domain.errors import (
    RecordsAwayError,
    StoreUnavailableError,
    TooManyOwnStreamsError,
    TooManyStreamsError,
)

MEDIA_TYPE: Final = "text/event-stream"
PING_EVERY_S: Final = 15.0
_LOOK_EVERY_S: Final = 1.0

Entries = AsyncIterator[EventView | LogView | None]


def wants_stream(accept: str) -> bool:
    """Whether the client asks for a stream rather than for a page."""
    return MEDIA_TYPE in accept.lower()


@dataclass(frozen=True)
class Viewer:
    """Who follows a stream.

    ``subject``: whose share of the slots it takes; None: nobody's, where no tokens are wanted.
    ``refused``: tells why they may not look any longer, or None.
    """

    subject: str | None
    refused: Callable[[], Awaitable[str | None]]


class StreamSlots:
    """How many streams may be open at a time, all together and for one subject.

    A subject may have a quarter of them, and one more only while more are free than it has: so the
    more subjects take all they can, the less each gets, and a few that act together leave some free.

    Args:
        limit: So many.
    """

    def __init__(self, limit: int = 64) -> None:
        self.free = limit
        self._share = max(1, limit // 4)
        self._taken: Counter[str] = Counter()

    def take(self, subject: str | None) -> None:
        """Open one more.

        Raises:
            TooManyStreamsError: All are open.
            TooManyOwnStreamsError: The subject has its share, or what is free is for others.
        """
        if self.free < 1:
            raise TooManyStreamsError(
                "all streams that this controller serves are in use (MESHLOOM_MAX_STREAMS); "
                "retry later, or read pages"
            )
        if subject is not None:
            self._refuse_more(subject, self._taken[subject])
        self.free -= 1
        if subject is not None:
            self._taken[subject] += 1

    def _refuse_more(self, subject: str, taken: int) -> None:
        if taken >= self._share:
            raise TooManyOwnStreamsError(
                f"{subject} has {taken} streams open, a quarter of what this controller "
                "serves (MESHLOOM_MAX_STREAMS); close one, or read pages"
            )
        if taken >= self.free:
            raise TooManyOwnStreamsError(
                f"{subject} has {taken} streams open and only {self.free} are free "
                "(MESHLOOM_MAX_STREAMS), which are for others; close one, or read pages"
            )

    def give_back(self, subject: str | None) -> None:
        """One has ended."""
        self.free += 1
        if subject is not None:
            self._taken[subject] -= 1
            self._taken += Counter()  # forgets subjects that have none


async def stream(
    entries: Entries, stopping: asyncio.Event, slots: StreamSlots, viewer: Viewer
) -> Response:
    """A stream of entries; whoever breaks off resumes with ``Last-Event-ID``.

    The first entry is awaited before the answer begins, so that errors still have their status.

    Raises:
        TooManyStreamsError: No slot is free.
        TooManyOwnStreamsError: The viewer has its share of them, or what is free is for others.
    """
    slots.take(viewer.subject)
    try:
        first = await anext(entries, _END)
    except BaseException:
        slots.give_back(viewer.subject)
        raise
    frames = _frames(first, entries, stopping, viewer.refused)
    give_back = functools.partial(slots.give_back, viewer.subject)
    return _SlottedResponse(frames, give_back, headers={"Cache-Control": "no-store"})


class _SlottedResponse(EventSourceResponse):
    """Gives its slot back whether or not its first byte was ever sent."""

    def __init__(
        self, frames: AsyncIterator[bytes], give_back: Callable[[], None], headers: dict[str, str]
    ) -> None:
        super().__init__(frames, headers=headers)
        self._give_back = give_back

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._give_back()


class _End:
    """The end of the entries."""


_END: Final = _End()


async def _frames(
    first: EventView | LogView | _End | None,
    entries: Entries,
    stopping: asyncio.Event,
    refused: Callable[[], Awaitable[str | None]],
) -> AsyncIterator[bytes]:
    """Entries have no name; named are ``end``, after which there are none, and ``refused``.

    The viewer is looked at each second, also while nothing of what comes is for them.
    """
    entry = first
    said_at = looked_at = time.monotonic()
    stop = asyncio.ensure_future(stopping.wait())
    following = asyncio.ensure_future(anext(entries, _END))
    try:
        yield b": meshloom\n\n"
        while not isinstance(entry, _End):
            if entry is not None:
                said_at = time.monotonic()
                yield format_sse_event(data_str=entry.model_dump_json(), id=entry.id)
            elif time.monotonic() - said_at >= PING_EVERY_S:
                said_at = time.monotonic()
                yield KEEPALIVE_COMMENT
            is_here = False
            while not is_here:
                await asyncio.wait(
                    [following, stop], timeout=_LOOK_EVERY_S, return_when=asyncio.FIRST_COMPLETED
                )
                if stopping.is_set():
                    return
                if time.monotonic() - looked_at >= _LOOK_EVERY_S:
                    looked_at = time.monotonic()
                    if reason := await refused():
                        yield format_sse_event(event="refused", data_str=_refusal(reason))
                        return
                is_here = following.done()
            entry = following.result()
            following = asyncio.ensure_future(anext(entries, _END))
        yield format_sse_event(event="end", data_str="{}")
    except (StoreUnavailableError, RecordsAwayError):
        return  # the client comes back for the rest
    finally:
        for task in (following, stop):
            task.cancel()
        await asyncio.gather(following, stop, return_exceptions=True)


def _refusal(reason: str) -> str:
    """As a request would be answered now."""
    status = HTTPStatus.UNAUTHORIZED
    return Problem(
        type=f"{PROBLEM_TYPE_BASE}unauthorized",
        title=status.phrase,
        status=status,
        code="unauthorized",
        detail=reason,
    ).model_dump_json(exclude_none=True)
