"""Which plans a list shows, the newest first."""

from dataclasses import dataclass
from typing import Final

from services.contract.api.plan_views import PlanList, PlanSummary, PlanView
from services.contract.words.states import PlanState
from services.controller.domain.errors import NotFoundError, RecordUnreadableError
from services.controller.domain.plans.plan import Plan
from services.controller.ports.coordination import Ports
from services.controller.ports.jobs import Place
from services.controller.use_cases import cursors
from services.controller.use_cases.plans import Drawing, get_plan, plan_view

_CHUNK: Final = 50


@dataclass(frozen=True)
class PlanFilter:
    """Which plans are asked for."""

    states: frozenset[PlanState] = frozenset()
    owner: str | None = None

    def matches(self, plan: PlanView) -> bool:
        """Whether the plan is among them."""
        if self.states and plan.state not in self.states:
            return False
        return self.owner is None or plan.owner == self.owner


async def list_plans(
    ports: Ports, wanted: PlanFilter, cursor: str | None, limit: int, drawing: Drawing
) -> PlanList:
    """At most ``limit`` plans behind ``cursor``, and the cursor behind them if there are more.

    One that is PROBING by its record may be over by now: it is looked at first, so that the list
    says what each plan itself would say.

    Raises:
        InvalidRequestError: The cursor is none of ours.
    """
    place = cursors.to_place(cursor)
    last = place
    found: list[PlanSummary] = []
    while True:
        chunk = await ports.plans.page(place, _CHUNK)
        for plan in chunk:
            view = await _present(ports, plan, drawing)
            if view is None or not wanted.matches(view):
                continue
            if len(found) == limit and last is not None:
                return PlanList(items=tuple(found), next_cursor=cursors.from_place(last))
            found.append(_summary(view))
            last = Place(plan.created_ms, plan.id)
        if len(chunk) < _CHUNK:
            return PlanList(items=tuple(found))
        place = Place(chunk[-1].created_ms, chunk[-1].id)


async def _present(ports: Ports, plan: Plan, drawing: Drawing) -> PlanView | None:
    if plan.state is not PlanState.PROBING:
        return plan_view(plan)
    try:
        return await get_plan(ports, plan.id, drawing)
    except NotFoundError:  # it was forgotten meanwhile
        return None
    except RecordUnreadableError:  # one answer that makes no sense must not hide all other plans
        return plan_view(plan)


def _summary(plan: PlanView) -> PlanSummary:
    return PlanSummary(
        id=plan.id,
        state=plan.state,
        reason=plan.reason,
        feasible=plan.feasible,
        name=plan.spec.name,
        owner=plan.owner,
        created_at=plan.created_at,
        expires_at=plan.expires_at,
        ranks=plan.spec.worlds[0],
        device_type=plan.device_type,
        mesh=plan.mesh,
        micro_batch=plan.micro_batch,
        peak_bytes=max((kind.peak.total for kind in plan.memory), default=None),
        memory_limit_bytes=plan.memory_limit_bytes,
        step_time_s=None if plan.step_time is None else plan.step_time.total_s,
    )
