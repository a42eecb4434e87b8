"""Ranks, metrics and nodes."""

from http import HTTPStatus
from typing import Annotated, Final

from fastapi import APIRouter, Query, Request, Response

from services.contract.api.views import (
    DiagnosisView,
    JobView,
    MetricsPart,
    MetricsView,
    NodeList,
    NodeView,
    RankList,
    RankView,
)
from services.controller.api.conditional import answer, answer_page, next_link
from services.controller.api.context import WithActor, WithContext, WithPorts, WithPrincipal
from services.controller.api.scopes import OWNS_JOB, READS, READS_NODE
from services.controller.domain.job.events import DiagnosisAsked
from services.controller.use_cases import inspect as use_cases
from services.controller.use_cases import metrics as of_metrics
from services.controller.use_cases.jobs import change_course
from services.controller.use_cases.records import await_records

_MOST_NAMES: Final = 80
_NAMES_CHARACTERS: Final = 6_000
router = APIRouter(prefix="/v1", tags=["inspect"])


@router.get("/jobs/{job_id}/ranks", response_model=RankList, dependencies=[READS])
async def list_ranks(job_id: str, request: Request, ports: WithPorts) -> Response:
    """Every rank of the newest attempt: phase, unit, step, lag, memory."""
    return answer(request, await use_cases.list_ranks(ports, job_id))


@router.get("/jobs/{job_id}/ranks/{rank}", response_model=RankView, dependencies=[READS])
async def get_rank(job_id: str, rank: int, request: Request, ports: WithPorts) -> Response:
    """One rank."""
    return answer(request, await use_cases.get_rank(ports, job_id, rank))


@router.post(
    "/jobs/{job_id}/diagnose",
    status_code=HTTPStatus.ACCEPTED,
    response_model=JobView,
    dependencies=[OWNS_JOB],
)
async def diagnose(job_id: str, request: Request, ports: WithPorts, actor: WithActor) -> Response:
    """Inspect the running ranks, which continue.

    `GET …/diagnosis` has the result a second or two later.
    """
    view = await change_course(ports, job_id, DiagnosisAsked(), actor)
    return answer(request, view, status=HTTPStatus.ACCEPTED)


@router.get("/jobs/{job_id}/diagnosis", response_model=DiagnosisView, dependencies=[READS])
async def get_diagnosis(
    job_id: str, request: Request, context: WithContext, asks: WithPrincipal
) -> Response:
    """The verdict on the newest attempt that failed or was inspected, and its ranks' stacks."""
    async with context.turns.of(asks.subject):
        return await answer_page(request, await use_cases.get_diagnosis(context.ports, job_id))


@router.get(
    "/jobs/{job_id}/metrics", response_model=MetricsView | MetricsPart, dependencies=[READS]
)
async def metrics(  # noqa: PLR0913 one parameter a part of the request
    job_id: str,
    request: Request,
    context: WithContext,
    asks: WithPrincipal,
    *,
    name: Annotated[
        list[Annotated[str, Query(max_length=_NAMES_CHARACTERS)]] | None,
        Query(
            max_length=_MOST_NAMES,
            description="only these metrics, also the user's: `loss,grad_norm`, or one for each "
            "`name`",
        ),
    ] = None,
    from_step: Annotated[int, Query(ge=0)] = 0,
    to_step: Annotated[int | None, Query(ge=0)] = None,
    max_points: Annotated[int, Query(ge=2, le=10_000)] = 1000,
) -> Response:
    """Loss, throughput and the user's metrics by step, thinned out to `max_points`.

    A job has at most 64 user metrics; `names` lists them, `names_left_out` counts the rest.
    """
    wanted = of_metrics.StepRange(from_step, to_step, max_points)
    await await_records(context.ports, job_id)
    async with context.turns.of(asks.subject):
        if name is not None:
            names = frozenset(part.strip() for each in name for part in each.split(","))
            some = await of_metrics.get_some_metrics(context.ports, job_id, wanted, names)
            return await answer_page(request, some)
        return await answer_page(
            request, await of_metrics.get_metrics(context.ports, job_id, wanted)
        )


@router.get("/nodes", response_model=NodeList, dependencies=[READS])
async def list_nodes(
    request: Request,
    ports: WithPorts,
    limit: Annotated[int, Query(ge=1, le=1000)] = 200,
    cursor: str | None = None,
) -> Response:
    """Known nodes by name, their leases, and the jobs that they run."""
    page = await use_cases.list_nodes(ports, cursor, limit)
    return answer(request, page, headers=next_link(request, page.next_cursor))


@router.get("/nodes/{node_id}", response_model=NodeView, dependencies=[READS_NODE])
async def get_node(node_id: str, request: Request, ports: WithPorts) -> Response:
    """One node."""
    return answer(request, await use_cases.get_node(ports, node_id))
