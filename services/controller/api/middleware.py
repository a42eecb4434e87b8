"""What every request passes through: its id, its line in the log, its size limit."""

import contextlib
import re
import secrets
import time
from collections import Counter
from http import HTTPStatus
from typing import Final

import structlog
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from services.controller.api.concurrency import ParsingRounds
from services.controller.api.monitoring import Monitor
from services.controller.api.problems import problem_response
from services.controller.api.rates import Buckets
from services.controller.api.uploads import is_code
from services.controller.domain.access.rate import Rate

MAX_BODY_BYTES: Final = 1 << 18
"""Four times the largest spec: JSON may be indented, and may escape letters."""
# So much is read of a body that is refused: to a client that is still sending when the connection
# closes, the kernel shows a reset in place of the answer.
_READ_AT_MOST: Final = 1 << 21
_LARGE_BODY_BYTES: Final = 1 << 14
# A few milliseconds at most.
_SMALL_BODY_BYTES: Final = 1 << 10
_MOST_LARGE: Final = 32
# No browser takes an answer for a script or a page, nor hands it to a page of another origin.
_ALWAYS: Final = {
    "X-Content-Type-Options": "nosniff",
    "Cross-Origin-Resource-Policy": "same-origin",
}
_REQUEST_ID: Final = re.compile(r"[A-Za-z0-9._-]{1,64}")
_SAFE_METHODS: Final = frozenset({"GET", "HEAD", "OPTIONS"})
_PATH_CHARACTERS: Final = 300
# A log fills the disk on which Redis may write, too: who shows no token has few lines in it.
_STRANGERS: Final = Rate(per_s=1, burst=200)
_log = structlog.get_logger()


class Framing:
    """ASGI middleware: gives each request an id, echoes it, logs and counts the answer."""

    def __init__(self, app: ASGIApp, monitor: Monitor) -> None:
        self._app = app
        self._monitor = monitor
        self._unknown = Buckets(_STRANGERS)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on; an error that nobody caught becomes a problem."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        asked = Headers(scope=scope).get("x-request-id", "")
        request_id = asked if _REQUEST_ID.fullmatch(asked) else secrets.token_hex(8)
        scope.setdefault("state", {})["request_id"] = request_id
        began = time.perf_counter()
        status = 0

        async def send_framed(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = int(message["status"])
                headers = MutableHeaders(scope=message)
                headers["X-Request-ID"] = request_id
                for name, value in _ALWAYS.items():
                    headers.setdefault(name, value)
                self._note(scope, request_id, status, time.perf_counter() - began)
            await send(message)

        try:
            await self._app(scope, receive, send_framed)
        except Exception:
            path = scope["path"][:_PATH_CHARACTERS]
            _log.exception("request_failed", request_id=request_id, path=path)
            if status:
                raise
            answer = problem_response(
                HTTPStatus.INTERNAL_SERVER_ERROR,
                "internal error; see the log for this request id",
                code="internal_error",
                scope=scope,
            )
            await answer(scope, receive, send_framed)

    def _note(self, scope: Scope, request_id: str, status: int, seconds: float) -> None:
        route = getattr(scope.get("route"), "path", "(none)")
        self._monitor.answered(scope["method"], route, status, seconds)
        is_told = scope["method"] not in _SAFE_METHODS
        if is_told and "principal" not in scope["state"]:
            is_told = not self._unknown.take("strangers")
        write = _log.info if is_told else _log.debug
        write(
            "request",
            method=scope["method"][:_PATH_CHARACTERS],
            path=scope["path"][:_PATH_CHARACTERS],
            status=status,
            ms=round(seconds * 1000, 1),
            request_id=request_id,
        )


class BodyLimit:
    """ASGI middleware: refuses bodies above 256 KiB, announced or not, other than of code.

    The application gets them one at a time, those of one subject after another's: many that come together, of one
    or several subjects, must not keep the loop from renewing the lead. Of one subject 32 large ones may wait, and small
    ones need not.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._rounds = ParsingRounds()
        self._large: Counter[str] = Counter()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Read the body up to the limit and pass it on, or refuse it."""
        if scope["type"] != "http" or scope["method"] in _SAFE_METHODS or is_code(scope):
            await self._app(scope, receive, send)
            return
        announced = Headers(scope=scope).get("content-length", "0")
        body = bytearray()
        size = int(announced) if announced.isdecimal() and int(announced) > _READ_AT_MOST else 0
        more = True
        while more and size <= _READ_AT_MOST:
            message = await receive()
            if message["type"] != "http.request":
                return  # the client went away
            part = message.get("body", b"")
            size, more = size + len(part), message.get("more_body", False)
            if size <= MAX_BODY_BYTES:
                body += part
        if more or size > MAX_BODY_BYTES:
            refusal = problem_response(
                HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
                f"the body is larger than {MAX_BODY_BYTES} bytes",
                headers={"Connection": "close"},
                scope=scope,
            )
            await refusal(scope, receive, send)
            return
        asks = scope.get("state", {}).get("principal")
        subject = "" if asks is None else asks.subject
        is_large = len(body) > _LARGE_BODY_BYTES
        if is_large and self._large[subject] >= _MOST_LARGE:
            answer = problem_response(
                HTTPStatus.TOO_MANY_REQUESTS,
                f"{_MOST_LARGE} large bodies of {subject} wait for their turn; retry in a moment",
                headers={"Retry-After": "1"},
                scope=scope,
            )
            await answer(scope, receive, send)
            return
        with contextlib.ExitStack() as waiting:
            if is_large:
                self._large[subject] += 1
                waiting.callback(self._waits_no_more, subject)
            turn = self._in_turn(bytes(body), subject, receive, waiting)
            await self._app(scope, turn, send)

    def _waits_no_more(self, subject: str) -> None:
        self._large[subject] -= 1
        self._large += Counter()  # forgets subjects that have none

    def _in_turn(
        self, body: bytes, subject: str, receive: Receive, waiting: contextlib.ExitStack
    ) -> Receive:
        """The body that was read, once, when it may be parsed; then whatever the server says next."""
        pending = [body]

        async def replay() -> Message:
            if not pending:
                return await receive()
            if len(body) > _SMALL_BODY_BYTES:
                await self._rounds.begin(subject, len(body))
            waiting.close()
            return {"type": "http.request", "body": pending.pop(), "more_body": False}

        return replay
