"""What every request passes through: its id, its line in the log, its size limit."""

import re
import secrets
import time
from http import HTTPStatus
from typing import Final

import structlog
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from services.controller.api.monitoring import Monitor
from services.controller.api.problems import problem_response

MAX_BODY_BYTES: Final = 1 << 20
_REQUEST_ID: Final = re.compile(r"[A-Za-z0-9._-]{1,64}")
_SAFE_METHODS: Final = frozenset({"GET", "HEAD", "OPTIONS"})
_log = structlog.get_logger()


class Framing:
    """ASGI middleware: gives each request an id, echoes it, logs and counts the answer."""

    def __init__(self, app: ASGIApp, monitor: Monitor) -> None:
        self._app = app
        self._monitor = monitor

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
                MutableHeaders(scope=message)["X-Request-ID"] = request_id
                self._note(scope, request_id, status, time.perf_counter() - began)
            await send(message)

        try:
            await self._app(scope, receive, send_framed)
        except Exception:
            _log.exception("request_failed", request_id=request_id, path=scope["path"])
            if status:
                raise
            answer = problem_response(
                HTTPStatus.INTERNAL_SERVER_ERROR,
                "the controller has a fault; its log tells more under the request's id",
                code="internal_error",
                scope=scope,
            )
            await answer(scope, receive, send_framed)

    def _note(self, scope: Scope, request_id: str, status: int, seconds: float) -> None:
        route = getattr(scope.get("route"), "path", "(none)")
        self._monitor.answered(scope["method"], route, status, seconds)
        write = _log.debug if scope["method"] in _SAFE_METHODS else _log.info
        write(
            "request",
            method=scope["method"],
            path=scope["path"],
            status=status,
            ms=round(seconds * 1000, 1),
            request_id=request_id,
        )


class BodyLimit:
    """ASGI middleware: refuses bodies above 1 MiB, announced or not."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Read the body up to the limit and pass it on, or refuse it."""
        if scope["type"] != "http" or scope["method"] in _SAFE_METHODS:
            await self._app(scope, receive, send)
            return
        announced = Headers(scope=scope).get("content-length", "0")
        body = bytearray()
        is_whole = announced.isdigit() and int(announced) > MAX_BODY_BYTES
        while not is_whole:
            message = await receive()
            if message["type"] != "http.request":
                return  # the client went away
            body += message.get("body", b"")
            is_whole = not message.get("more_body", False) or len(body) > MAX_BODY_BYTES
        if len(body) > MAX_BODY_BYTES or (announced.isdigit() and int(announced) > MAX_BODY_BYTES):
            refusal = problem_response(
                HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
                f"the body is larger than {MAX_BODY_BYTES} bytes",
                headers={"Connection": "close"},
                scope=scope,
            )
            await refusal(scope, receive, send)
            return
        await self._app(scope, _replayed(bytes(body), receive), send)


def _replayed(body: bytes, receive: Receive) -> Receive:
    """The body that was read, once; then whatever the server says next."""
    pending = [body]

    async def replay() -> Message:
        if pending:
            return {"type": "http.request", "body": pending.pop(), "more_body": False}
        return await receive()

    return replay
