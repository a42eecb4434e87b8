"""Files as answers: whole or a range of bytes (RFC 9110, section 14), by their digest's ETag."""

import functools
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from http import HTTPStatus
from typing import Final

from fastapi import Request, Response
from fastapi.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from services.contract.storage.exports import ExportedFile
from services.controller.api.sse import StreamSlots, Viewer
from services.controller.domain.errors import RangeNotSatisfiableError

Content = Callable[[int, int], Awaitable[AsyncIterator[bytes]]]
_LOOK_EVERY_S: Final = 1.0
_RANGE: Final = re.compile(r"bytes=([0-9]{0,19})-([0-9]{0,19})")


async def download(
    request: Request, file: ExportedFile, content: Content, slots: StreamSlots, viewer: Viewer
) -> Response:
    """The file, or the range of it that is asked for; 304 if the client has it.

    It takes a slot of the streams until its last byte is sent, and is cut short once the viewer may not read it any longer.

    Raises:
        RangeNotSatisfiableError: The range begins behind the end of the file.
        TooManyStreamsError: No slot is free.
        TooManyOwnStreamsError: The viewer has its share of them.
    """
    tag = f'"{file.sha256}"'
    headers = {
        "ETag": tag,
        "Accept-Ranges": "bytes",
        "Cache-Control": "no-cache",
        "Content-Disposition": f'attachment; filename="{file.name}"',
    }
    if tag in request.headers.get("if-none-match", ""):
        return Response(status_code=HTTPStatus.NOT_MODIFIED, headers=headers)
    condition = request.headers.get("if-range", tag)
    asked = request.headers.get("range") if condition == tag else None
    found = None if asked is None else wanted_range(asked, file.bytes)
    start, end = found or (0, file.bytes)
    headers["Content-Length"] = str(end - start)
    if found is not None:
        headers["Content-Range"] = f"bytes {start}-{end - 1}/{file.bytes}"
    slots.take(viewer.subject)
    try:
        parts = await content(start, end)
    except BaseException:
        slots.give_back(viewer.subject)
        raise
    status = HTTPStatus.OK if found is None else HTTPStatus.PARTIAL_CONTENT
    return _SlottedDownload(parts, status, headers, viewer, slots)


def wanted_range(asked: str, size: int) -> tuple[int, int] | None:
    """Start and end (not included) that a Range header means; None: it is not one range of bytes.

    Raises:
        RangeNotSatisfiableError: It begins behind the end, or is the last 0 bytes.
    """
    match = _RANGE.fullmatch(asked.strip())
    if match is None or asked.strip() == "bytes=-":
        return None
    first, last = match.groups()
    if first == "":
        start, end = max(size - int(last), 0), size
    else:
        start, end = int(first), size if last == "" else min(int(last) + 1, size)
        if last != "" and int(last) < start:
            return None
    if start >= end:
        raise RangeNotSatisfiableError(f"the file has {size} bytes; the range was {asked[:100]!r}")
    return start, end


class _SlottedDownload(StreamingResponse):
    """Closes the file, and gives the slot back, whether or not its first byte was ever sent."""

    def __init__(
        self,
        parts: AsyncIterator[bytes],
        status: int,
        headers: dict[str, str],
        viewer: Viewer,
        slots: StreamSlots,
    ) -> None:
        super().__init__(
            _while_admitted(parts, viewer),
            status_code=status,
            headers=headers,
            media_type="application/octet-stream",
        )
        self._parts = parts
        self._give_back = functools.partial(slots.give_back, viewer.subject)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._give_back()
            close = getattr(self._parts, "aclose", None)
            if close is not None:
                await close()


async def _while_admitted(parts: AsyncIterator[bytes], viewer: Viewer) -> AsyncIterator[bytes]:
    """The parts until the viewer's token is revoked or expires: a large file takes hours."""
    looked_at = time.monotonic()
    async for part in parts:
        if time.monotonic() - looked_at >= _LOOK_EVERY_S:
            looked_at = time.monotonic()
            if await viewer.refused():
                return
        yield part
