"""Where a request comes from, as far as its headers tell: names, origins, content types.

A controller on loopback without a token is still reachable by any page in a browser on the same
machine. So it answers to its own names alone (a page that rebinds its name to 127.0.0.1 still sends
that name), takes changes from pages of its own origin alone, and takes bodies as JSON alone (and code as
a gzipped archive), which no form can send and no script of another origin without asking first.
"""

from collections.abc import Set as AbstractSet
from http import HTTPStatus
from typing import Final
from urllib.parse import urlsplit

from fastapi import Response
from starlette.datastructures import Headers
from starlette.types import Scope

from services.controller.api.problems import problem_response
from services.controller.api.uploads import MEDIA_TYPE, is_code

SAFE_METHODS: Final = frozenset({"GET", "HEAD", "OPTIONS"})
_LOOPBACK_NAMES: Final = frozenset({"localhost", "127.0.0.1", "::1"})
_JSON: Final = frozenset({"application/json", "application/merge-patch+json"})
_ARCHIVE: Final = frozenset({MEDIA_TYPE})


def refuse_stranger(scope: Scope, names: AbstractSet[str], *, any_name: bool) -> Response | None:
    """Why a request is not to be served, or None.

    Args:
        scope: The request.
        names: Of this controller, beside those of loopback.
        any_name: Serve under every name: whoever asks has to show a token.
    """
    headers = Headers(scope=scope)
    host = headers.get("host", "")
    if not any_name and _name(host) not in _LOOPBACK_NAMES | names:
        return problem_response(
            HTTPStatus.MISDIRECTED_REQUEST,
            f"this controller does not serve the host name {host!r}: list its names in "
            "MESHLOOM_ALLOWED_HOSTS, or use localhost on loopback",
            scope=scope,
        )
    if "transfer-encoding" in headers and "content-length" in headers:
        return problem_response(
            HTTPStatus.BAD_REQUEST,
            "the request has Content-Length and Transfer-Encoding, which disagree about where it ends",
            # RFC 9112, 6.1: a proxy may have seen another end, and what follows as another request.
            headers={"Connection": "close"},
            scope=scope,
        )
    if scope["method"] in SAFE_METHODS:
        return None
    if _is_foreign(headers, host, names):
        return problem_response(
            HTTPStatus.FORBIDDEN,
            "pages of other origins may not send changes; if this page belongs to the controller "
            "under another name, add that name to MESHLOOM_ALLOWED_HOSTS",
            code="cross_origin",
            scope=scope,
        )
    taken = _ARCHIVE if is_code(scope) else _JSON
    if not _is_one_of(taken, headers):
        return problem_response(
            HTTPStatus.UNSUPPORTED_MEDIA_TYPE,
            f"send the body as `Content-Type: {min(taken)}`",
            headers={"Accept": ", ".join(sorted(taken))},
            scope=scope,
        )
    return None


def _is_one_of(media_types: AbstractSet[str], headers: Headers) -> bool:
    media_type = headers.get("content-type")
    if media_type is None:
        return headers.get("content-length", "0") == "0" and "transfer-encoding" not in headers
    return media_type.partition(";")[0].strip().lower() in media_types


def _is_foreign(headers: Headers, host: str, names: AbstractSet[str]) -> bool:
    if headers.get("sec-fetch-site") == "cross-site":
        return True
    origin = headers.get("origin")
    if origin is None:
        return False
    try:
        parts = urlsplit(origin)
    except ValueError:  # such as a bracket that nothing closes
        return True
    return parts.netloc != host and parts.hostname not in names


def _name(host: str) -> str:
    try:
        return (urlsplit(f"//{host}").hostname or "").lower()
    except ValueError:
        return ""
