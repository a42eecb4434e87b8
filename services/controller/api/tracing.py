"""Spans of requests that change something."""

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from services.controller.api.provenance import SAFE_METHODS
from services.controller.ports.tracing import Tracing

_PROPAGATED = ("traceparent", "tracestate")


class Traced:
    """ASGI middleware, only there where traces are wanted: a span for each request that may change something."""

    def __init__(self, app: ASGIApp, tracing: Tracing) -> None:
        self._app = app
        self._tracing = tracing

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on within its span."""
        if scope["type"] != "http" or scope["method"] in SAFE_METHODS:
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        told = {name: headers[name] for name in _PROPAGATED if name in headers}
        with self._tracing.request(scope["method"][:16], told) as answered:

            async def send_noted(message: Message) -> None:
                if message["type"] == "http.response.start":
                    route = getattr(scope.get("route"), "path", "(none)")
                    request_id = str(scope.get("state", {}).get("request_id", ""))
                    answered(route, int(message["status"]), request_id)
                await send(message)

            await self._app(scope, receive, send_noted)
