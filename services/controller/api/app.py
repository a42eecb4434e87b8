"""The web application, whole, from what it needs."""

from pathlib import Path
from typing import Any, Final

from fastapi import FastAPI
from fastapi.routing import APIRoute

from services.controller.api import dashboard, openapi, problems
from services.controller.api.audit import Audit
from services.controller.api.concurrency import Shares
from services.controller.api.context import Context
from services.controller.api.guard import AccessPolicy, Guard
from services.controller.api.middleware import BodyLimit, Framing
from services.controller.api.routes import (
    audit,
    checkpoints,
    code,
    events,
    inspect,
    jobs,
    plans,
    queue,
    system,
    tokens,
    traces,
    unreadable,
    watch,
    webhooks,
)
from services.controller.api.scopes import unscoped
from services.controller.api.tracing import Traced

ROUTERS: Final = (
    *(jobs.router, watch.router, events.router, inspect.router, queue.router),
    *(plans.router, checkpoints.router, traces.router, code.router),
    *(system.scoped, tokens.router, webhooks.router, audit.router, unreadable.router),
)
"""What is served under ``/v1``: every route there says which scope it takes."""


def create_app(
    context: Context, policy: AccessPolicy, *, bundle: Path = dashboard.BUNDLE
) -> FastAPI:
    """The controller's API and dashboard.

    Args:
        context: The world and this process.
        policy: Who may ask.
        bundle: The folder of the built dashboard.

    Raises:
        ValueError: A route does not say who may use it.
    """
    for route in (route for router in ROUTERS for route in unscoped(router)):
        raise ValueError(f"{route} names no scope: give it dependencies=[…] of api.scopes")
    app = FastAPI(
        title="Meshloom",
        summary="Sharded training as a service",
        version="1",
        openapi_url="/v1/openapi.json",
        # Their pages load scripts from elsewhere.
        docs_url=None,
        redoc_url=None,
        # A redirect is no problem document, and hides a client's empty id.
        redirect_slashes=False,
    )
    app.state.context = context
    for router in ROUTERS:
        app.include_router(router, responses=openapi.ERROR_ANSWERS)
    app.include_router(system.router)
    dashboard.install(app, bundle)
    problems.install(app)
    # Not from the OpenAPI document, which takes half a second to make, when a stranger may be the first to ask.
    app.state.methods = [
        (route.path_regex, route.methods)
        for router in (*ROUTERS, system.router)
        for route in router.routes
        if isinstance(route, APIRoute)
    ]

    def make_document() -> dict[str, Any]:
        if app.openapi_schema is None:
            app.openapi_schema = openapi.document(app)
        return app.openapi_schema

    app.openapi = make_document  # type: ignore[method-assign] # the way that FastAPI documents
    # The one that is added last is met first.
    app.add_middleware(Shares)
    app.add_middleware(BodyLimit)
    if context.tracing is not None:
        # Behind the guard: spans that wait to be sent are few, and strangers must not take their room.
        app.add_middleware(Traced, tracing=context.tracing)
    app.add_middleware(Guard, policy=policy, ports=context.ports)
    app.add_middleware(Audit, ports=context.ports)
    app.add_middleware(Framing, monitor=context.monitor)
    return app
