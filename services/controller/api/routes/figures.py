"""Figures of jobs for Prometheus."""

from fastapi import APIRouter, Response

from services.controller.api.context import WithContext, WithPrincipal
from services.controller.api.monitoring import CONTENT_TYPE
from services.controller.api.scopes import READS

router = APIRouter(prefix="/v1", tags=["system"])


@router.get(
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
