"""Writes down who changed what, and who was refused."""

from http import HTTPStatus
from typing import Final

import structlog
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from services.controller.api.provenance import SAFE_METHODS
from services.controller.domain.errors import StoreUnavailableError
from services.controller.domain.rate import Rate
from services.controller.domain.token import Principal
from services.controller.ports.access import AuditRecord
from services.controller.ports.office import Ports

_REFUSALS: Final = frozenset({HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN})
# Who is refused may try for ever: the trail is bounded and must not be flooded out by them.
_REFUSAL_RATE: Final = Rate(per_s=1, burst=200)
_PATH_CHARACTERS: Final = 300
_log = structlog.get_logger()


class Audit:
    """ASGI middleware: an entry for each request that may change something or was refused.

    The entry stands before its answer is sent. Where the store does not take it, it is in the log.
    """

    def __init__(self, app: ASGIApp, ports: Ports) -> None:
        self._app = app
        self._ports = ports

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on and note the answer."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def send_noted(message: Message) -> None:
            if message["type"] == "http.response.start":
                await self._note(scope, int(message["status"]))
            await send(message)

        await self._app(scope, receive, send_noted)

    async def _note(self, scope: Scope, status: int) -> None:
        is_refusal = status in _REFUSALS
        if scope["method"] in SAFE_METHODS and not is_refusal:
            return
        record = _record(scope, status)
        try:
            if is_refusal and await self._ports.rates.take("audit:refusals", _REFUSAL_RATE):
                _log.warning("refused_too_often_to_audit", **record.model_dump())
                return
            await self._ports.audit.append(record)
        except StoreUnavailableError:
            _log.error("not_audited", **record.model_dump())


def _record(scope: Scope, status: int) -> AuditRecord:
    state = scope.get("state", {})
    asks: Principal | None = state.get("principal")
    return AuditRecord(
        actor=None if asks is None else asks.subject,
        scope=None if asks is None else asks.scope,
        request_id=state.get("request_id", ""),
        method=scope["method"],
        path=scope["path"][:_PATH_CHARACTERS].encode(errors="backslashreplace").decode(),
        status=status,
    )
