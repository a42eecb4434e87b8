"""``/v1/plans``: what a job will need, before anything is allocated."""

from http import HTTPStatus
from typing import Annotated, Final

from fastapi import APIRouter, Query, Request, Response

from services.contract.api.plan_views import PlanList, PlanView
from services.contract.jobs.specs import JobSpec
from services.contract.words.states import PlanState
from services.controller.api.conditional import answer, next_link
from services.controller.api.context import WithActor, WithContext, WithPrincipal
from services.controller.api.routes.jobs import refuse_unspeakable
from services.controller.api.scopes import READS, SUBMITS
from services.controller.use_cases import plans as use_cases
from services.controller.use_cases.plan_list import PlanFilter, list_plans

router = APIRouter(prefix="/v1/plans", tags=["plans"])
_ASK_AGAIN_AFTER_S: Final = 1


@router.post(
    "",
    status_code=HTTPStatus.CREATED,
    response_model=PlanView,
    responses={202: {"model": PlanView, "description": "The model is still being profiled: retry"}},
    dependencies=[SUBMITS],
)
async def make_plan(
    spec: JobSpec,
    request: Request,
    context: WithContext,
    actor: WithActor,
    *,
    fresh: Annotated[bool, Query(description="Profile the model again")] = False,
) -> Response:
    """Plan a job: mesh, units, memory, traffic, time, and why other layouts lost.

    Allocates nothing. `POST /v1/jobs` with the plan's id runs exactly that plan.
    """
    refuse_unspeakable(spec)
    view = await use_cases.make_plan(
        context.ports,
        use_cases.Wanted(spec, fresh),
        actor,
        context.entry_points,
        context.drawing,
    )
    headers = {"Location": f"/v1/plans/{view.id}"}
    if view.state is PlanState.PROBING:
        headers["Retry-After"] = str(_ASK_AGAIN_AFTER_S)
        return answer(request, view, status=HTTPStatus.ACCEPTED, headers=headers)
    return answer(request, view, status=HTTPStatus.CREATED, headers=headers)


@router.get("", response_model=PlanList, dependencies=[READS])
async def get_plans(  # noqa: PLR0913 one parameter a filter
    request: Request,
    context: WithContext,
    asks: WithPrincipal,
    *,
    state: Annotated[list[PlanState] | None, Query(description="any of these")] = None,
    owner: Annotated[str | None, Query(max_length=200, description="whose, exactly")] = None,
    limit: Annotated[int, Query(ge=1, le=200)] = 50,
    cursor: str | None = None,
) -> Response:
    """Plans of the last seven days, newest first."""
    wanted = PlanFilter(frozenset(state or ()), owner)
    async with context.plan_turns.in_parts(asks.subject) as give_way:
        page = await list_plans(context.ports, wanted, cursor, limit, context.drawing, give_way)
    return answer(request, page, headers=next_link(request, page.next_cursor))


@router.get("/{plan_id}", response_model=PlanView, dependencies=[READS])
async def get_plan(plan_id: str, request: Request, context: WithContext) -> Response:
    """One plan: PROBING, READY (feasible or not) or FAILED."""
    return answer(request, await use_cases.get_plan(context.ports, plan_id, context.drawing))
