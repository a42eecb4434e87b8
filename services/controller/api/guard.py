"""Who may ask: bearer tokens, and nobody's web page on this machine's behalf.

A controller on loopback without a token is still reachable by any page in a browser here. It
therefore answers only to loopback names (a page that rebinds its own name is refused), and never
takes a change from a page of another origin.
"""

import hmac
from dataclasses import dataclass
from http import HTTPStatus
from typing import Final
from urllib.parse import urlsplit

from fastapi import Response
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from services.controller.api.problems import problem_response

_PROTECTED: Final = "/v1"
_SAFE_METHODS: Final = frozenset({"GET", "HEAD", "OPTIONS"})
_LOOPBACK_NAMES: Final = frozenset({"localhost", "127.0.0.1", "::1"})


@dataclass(frozen=True)
class AccessPolicy:
    """``token``: what a bearer must show. ``loopback_only``: answer to no other host's name."""

    token: str | None = None
    loopback_only: bool = False


class Guard:
    """ASGI middleware that lets through who may ask."""

    def __init__(self, app: ASGIApp, policy: AccessPolicy) -> None:
        self._app = app
        self._policy = policy

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, or answer why not."""
        if scope["type"] == "http":
            refusal = self._refusal(scope)
            if refusal is not None:
                await refusal(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _refusal(self, scope: Scope) -> Response | None:
        headers = Headers(scope=scope)
        host = headers.get("host", "")
        if self._policy.loopback_only and _name(host) not in _LOOPBACK_NAMES:
            return problem_response(
                HTTPStatus.MISDIRECTED_REQUEST,
                f"this controller answers only as localhost, not as {host!r}: "
                "set MESHLOOM_TOKEN to serve under other names",
                scope=scope,
            )
        if scope["method"] not in _SAFE_METHODS and _is_foreign(headers, host):
            return problem_response(
                HTTPStatus.FORBIDDEN,
                "pages of other origins may not change anything here",
                code="cross_origin",
                scope=scope,
            )
        if self._policy.token is None or not _is_protected(scope["path"]):
            return None
        shown = headers.get("authorization", "")
        if hmac.compare_digest(shown.encode(), f"Bearer {self._policy.token}".encode()):
            return None
        return problem_response(
            HTTPStatus.UNAUTHORIZED,
            "send the token as `Authorization: Bearer …` (MESHLOOM_TOKEN)",
            headers={"WWW-Authenticate": 'Bearer realm="meshloom"'},
            scope=scope,
        )


def _is_protected(path: str) -> bool:
    return path == _PROTECTED or path.startswith(f"{_PROTECTED}/")


def _is_foreign(headers: Headers, host: str) -> bool:
    origin = headers.get("origin")
    if origin is None:
        return False
    try:
        return urlsplit(origin).netloc != host
    except ValueError:  # such as a bracket that nothing closes
        return True


def _name(host: str) -> str:
    try:
        return (urlsplit(f"//{host}").hostname or "").lower()
    except ValueError:
        return ""
