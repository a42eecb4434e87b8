"""Serves the built dashboard: static files and nothing else, under a strict policy."""

from pathlib import Path
from typing import Final

from fastapi import FastAPI, Request, Response
from starlette.responses import FileResponse, HTMLResponse
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Message, Receive, Scope, Send

BUNDLE: Final = Path(__file__).parents[1] / "dashboard" / "bundle"
_HEADERS: Final = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
        "font-src 'self'; connect-src 'self'; base-uri 'none'; form-action 'none'; "
        "frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
}
_ABSENT: Final = """<!doctype html>
<html lang="en"><meta charset="utf-8"><title>Meshloom</title>
<h1>The dashboard is not built</h1>
<p>This controller runs, and its API answers under <code>/v1</code>.
Build the dashboard with <code>npm ci</code> and <code>npm run build</code>
in <code>services/controller/dashboard</code>.</p></html>
"""


def install(app: FastAPI, bundle: Path) -> None:
    """Serve ``index.html`` at ``/`` and the files beside it; a plain page if they are absent."""

    async def index(_request: Request) -> Response:
        page = bundle / "index.html"
        if not page.is_file():
            return HTMLResponse(_ABSENT, headers=_HEADERS)
        # Its name stays while the names of the assets carry their digests.
        return FileResponse(page, headers={**_HEADERS, "Cache-Control": "no-cache"})

    app.add_route("/", index, methods=["GET"], include_in_schema=False)
    assets = StaticFiles(directory=bundle / "assets", check_dir=False)
    app.mount("/assets", _WithHeaders(assets), name="assets")


class _WithHeaders:
    """ASGI wrapper that adds the policy to every answer."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                extra = [(k.lower().encode(), v.encode()) for k, v in _HEADERS.items()]
                message = {**message, "headers": [*message["headers"], *extra]}
            await send(message)

        await self._app(scope, receive, send_with_headers)
