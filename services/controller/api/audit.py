"""Writes down who changed what, and who was refused."""

from collections import Counter
from http import HTTPStatus
from typing import Final

import structlog
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from services.controller.api.provenance import SAFE_METHODS
from services.controller.api.rates import Buckets
from services.controller.domain.access.rate import Rate
from services.controller.domain.access.token import Principal
from services.controller.domain.errors import StoreUnavailableError
from services.controller.ports.access import AuditRecord
from services.controller.ports.coordination import Ports

_REFUSALS: Final = frozenset({HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN})
_REFUSED: Final = range(400, 500)
# Who is refused may try forever: the trail is bounded and must not be flooded out by them. Those who
# showed no valid token share one bucket, everybody else has their own.
_REFUSAL_RATE: Final = Rate(per_s=1, burst=200)
_PATH_CHARACTERS: Final = 300
# A method may be any word, as long as a request's head: a page of such cannot be read, and the trail would
# fill Redis.
_METHOD_CHARACTERS: Final = 32
_log = structlog.get_logger()


class Audit:
    """ASGI middleware: an entry for each request that may change something or was refused.

    The entry stands before its answer is sent. Where the store does not take it, it is in the log.
    Of many refusals some are left out, and the next one that is kept says how many.
    """

    def __init__(self, app: ASGIApp, ports: Ports) -> None:
        self._app = app
        self._ports = ports
        self._buckets = Buckets(_REFUSAL_RATE)
        self._left_out: Counter[str] = Counter()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on and note the answer."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        is_noted = False

        async def send_noted(message: Message) -> None:
            nonlocal is_noted
            if message["type"] == "http.response.start":
                is_noted = True
                await self._note(scope, int(message["status"]))
            await send(message)

        try:
            await self._app(scope, receive, send_noted)
        except Exception:
            if not is_noted:  # it is answered further out, and may have changed something
                await self._note(scope, HTTPStatus.INTERNAL_SERVER_ERROR)
            raise

    async def _note(self, scope: Scope, status: int) -> None:
        if scope["method"] in SAFE_METHODS and status not in _REFUSALS:
            return
        record = _record(scope, status)
        try:
            if record.actor is None or status in _REFUSED:
                bucket = f"of:{record.actor}" if record.actor else "strangers"
                if self._buckets.take(bucket):
                    self._leave_out(bucket, record)
                    return
                record = record.model_copy(update={"left_out": self._left_out.pop(bucket, 0)})
            await self._ports.audit.append(record)
        except StoreUnavailableError:
            _log.error("not_audited", **record.model_dump())

    def _leave_out(self, bucket: str, record: AuditRecord) -> None:
        self._left_out[bucket] += 1
        if self._left_out[bucket] == 1:  # the log must not be flooded either
            _log.warning("refused_too_often_to_audit", **record.model_dump())


def _record(scope: Scope, status: int) -> AuditRecord:
    state = scope.get("state", {})
    asks: Principal | None = state.get("principal")
    return AuditRecord(
        actor=None if asks is None else asks.subject,
        scope=None if asks is None else asks.scope,
        request_id=state.get("request_id", ""),
        method=scope["method"][:_METHOD_CHARACTERS],
        path=scope["path"][:_PATH_CHARACTERS].encode(errors="backslashreplace").decode(),
        status=status,
    )
