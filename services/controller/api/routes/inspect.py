"""Ranks, metrics and nodes."""

from typing import Annotated

from fastapi import APIRouter, Query, Request, Response

from services.contract.views import (
    MetricsView,
    NodeList,
    NodeView,
    RankList,
    RankView,
)
from services.controller.api.conditional import answer
from services.controller.api.context import WithPorts
from services.controller.use_cases import inspect as use_cases

router = APIRouter(prefix="/v1", tags=["inspect"])


@router.get("/jobs/{job_id}/ranks", response_model=RankList)
async def list_ranks(job_id: str, request: Request, ports: WithPorts) -> Response:
    """Every rank of the newest attempt: phase, unit, step, lag, memory."""
    return answer(request, await use_cases.list_ranks(ports, job_id))


@router.get("/jobs/{job_id}/ranks/{rank}", response_model=RankView)
async def get_rank(job_id: str, rank: int, request: Request, ports: WithPorts) -> Response:
    """One rank."""
    return answer(request, await use_cases.get_rank(ports, job_id, rank))


@router.get("/jobs/{job_id}/metrics", response_model=MetricsView)
async def metrics(
    job_id: str,
    request: Request,
    ports: WithPorts,
    from_step: Annotated[int, Query(ge=0)] = 0,
    to_step: Annotated[int | None, Query(ge=0)] = None,
    max_points: Annotated[int, Query(ge=2, le=10_000)] = 1000,
) -> Response:
    """Loss and throughput by step, thinned out to `max_points`."""
    wanted = use_cases.StepRange(from_step, to_step, max_points)
    return answer(request, await use_cases.get_metrics(ports, job_id, wanted))


@router.get("/nodes", response_model=NodeList)
async def list_nodes(request: Request, ports: WithPorts) -> Response:
    """All nodes that ever joined, their leases, and what runs there."""
    return answer(request, await use_cases.list_nodes(ports))


@router.get("/nodes/{node_id}", response_model=NodeView)
async def get_node(node_id: str, request: Request, ports: WithPorts) -> Response:
    """One node."""
    return answer(request, await use_cases.get_node(ports, node_id))
