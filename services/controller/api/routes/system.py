"""Whether the controller lives, serves, and which build it is, open to everybody; and its figures."""

import importlib.metadata
from http import HTTPStatus
from typing import Final

from fastapi import APIRouter, Request, Response

from services.contract.api.views import Health, Version
from services.controller.api.conditional import answer
from services.controller.api.context import WithContext, WithPrincipal
from services.controller.api.monitoring import CONTENT_TYPE
from services.controller.api.scopes import READS
from services.controller.domain.errors import StoreUnavailableError

router = APIRouter(tags=["system"])
scoped = APIRouter(prefix="/v1", tags=["system"])
"""What of it names jobs: not open to everybody."""
_RETRY: Final = {"Retry-After": "1"}


def _version() -> str:
    try:
        return importlib.metadata.version("meshloom")
    except importlib.metadata.PackageNotFoundError:
        return "0+source"  # run from a tree that was not installed


@router.get("/healthz", response_model=Health)
async def healthz() -> Health:
    """The process is alive."""
    return Health(status="ok")


@router.get("/readyz", response_model=Health, responses={503: {"model": Health}})
async def readyz(context: WithContext) -> Response:
    """The controller can serve: Redis answers, and accepts the commands of all loops."""
    epoch = context.epoch()
    role = "standby" if epoch is None else f"leading, epoch {epoch}"
    trouble = context.trouble()
    try:
        await context.ports.clock.now_ms()
    except StoreUnavailableError as error:
        trouble = str(error)
    if trouble is not None:
        health = Health(status="unavailable", checks={"redis": trouble, "leadership": role})
        return Response(
            health.model_dump_json(),
            status_code=HTTPStatus.SERVICE_UNAVAILABLE,
            media_type="application/json",
            headers=_RETRY,
        )
    checks = {"redis": "ok", "leadership": role}
    if unread := context.ports.unreadable():
        # Open to everybody: it does not name them.
        checks["records"] = f"{len(unread)} cannot be read by this version"
    health = Health(status="ok", checks=checks)
    return Response(health.model_dump_json(), media_type="application/json")


@router.get("/metrics", response_class=Response, responses={200: {"content": {"text/plain": {}}}})
async def metrics(context: WithContext) -> Response:
    """Figures of the whole cluster for Prometheus; nothing of a single job."""
    context.monitor.leads(context.epoch() is not None)
    return Response(
        await context.monitor.exposition(context.ports), headers={"Content-Type": CONTENT_TYPE}
    )


@scoped.get(
    "/metrics",
    response_class=Response,
    responses={200: {"content": {"text/plain": {}}}},
    dependencies=[READS],
)
async def all_metrics(context: WithContext, asks: WithPrincipal) -> Response:
    """All figures of `/metrics`, and those of the newest 100 running jobs, for Prometheus."""
    context.monitor.leads(context.epoch() is not None)
    async with context.turns.of(asks.subject):
        text = await context.monitor.job_exposition(context.ports)
    return Response(text, headers={"Content-Type": CONTENT_TYPE})


@router.get("/version", response_model=Version)
async def version(request: Request) -> Response:
    """The version of the controller that answers."""
    return answer(request, Version(version=_version()))
