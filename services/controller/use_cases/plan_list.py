"""Which plans a list shows, the newest first."""

import asyncio
import functools
from dataclasses import dataclass
from typing import Final

from services.contract.api.plan_views import PlanList, PlanSummary, PlanView
from services.contract.system.long_work import GiveWay, at_once, in_turns
from services.contract.words.states import PlanState
from services.controller.domain.errors import NotFoundError, RecordUnreadableError
from services.controller.domain.plans.plan import Plan
from services.controller.ports.coordination import Ports
from services.controller.ports.jobs import Place
from services.controller.ports.plans import AmongPlans
from services.controller.use_cases import cursors
from services.controller.use_cases.plans import Drawing, look, plan_view

# Of a spec of 64 KiB each may take a twentieth of a second.
_CHUNK: Final = 10
_WORKS_FOR_S: Final = 5.0


@dataclass(frozen=True)
class PlanFilter:
    """Which plans are asked for."""

    states: frozenset[PlanState] = frozenset()
    owner: str | None = None

    @property
    def among(self) -> AmongPlans:
        """What of it the store can tell without reading records."""
        return AmongPlans(self.states, self.owner)

    def matches(self, plan: Plan) -> bool:
        """Whether the plan is among them, by its owner and its present state."""
        if self.states and plan.state not in self.states:
            return False
        return self.owner is None or plan.owner == self.owner


async def list_plans(
    ports: Ports,
    wanted: PlanFilter,
    cursor: str | None,
    limit: int,
    drawing: Drawing,
    give_way: GiveWay = at_once,
) -> PlanList:
    """At most ``limit`` plans behind ``cursor``, and the cursor behind them if there are more.

    One that is PROBING by its record may be over by now: it is looked at first, so that the list
    says what each plan itself would say. But a list neither waits for plans that others work out nor, after some seconds,
    for the one that it began, which goes on: the rest are shown as they were.

    ``give_way`` is called after each few plans: to look through a thousand of each owner may take minutes.

    Raises:
        InvalidRequestError: The cursor is none of ours.
    """
    place = cursors.to_place(cursor)
    last = place
    clock = asyncio.get_running_loop().time
    ends = clock() + _WORKS_FOR_S
    found: list[PlanSummary] = []
    while True:
        chunk = await ports.plans.page(place, _CHUNK, wanted.among)
        # Others have their turn between two: some are worked out here.
        async for record in in_turns(chunk.plans):
            left_s = 0.0 if drawing.hands.is_taken else ends - clock()
            plan = await _present(ports, record, drawing, left_s)
            if plan is None or not wanted.matches(plan):
                continue
            if len(found) == limit and last is not None:
                return PlanList(items=tuple(found), next_cursor=cursors.from_place(last))
            found.append(_summary(plan_view(plan)))
            last = Place(plan.created_ms, plan.id)
        if chunk.behind is None:
            return PlanList(items=tuple(found))
        place = chunk.behind
        waits = clock()
        await give_way()
        ends += clock() - waits


async def _present(ports: Ports, plan: Plan, drawing: Drawing, wait_s: float) -> Plan | None:
    if plan.state is not PlanState.PROBING or wait_s <= 0:
        return plan
    looking = asyncio.create_task(_looked_at(ports, plan, drawing))
    drawing.left_behind.add(looking)
    looking.add_done_callback(functools.partial(_over, drawing))
    done, _ = await asyncio.wait({looking}, timeout=wait_s)
    return looking.result() if done else plan


def _over(drawing: Drawing, looking: asyncio.Task[Plan | None]) -> None:
    drawing.left_behind.discard(looking)
    if not looking.cancelled():
        looking.exception()  # marks it as seen: the list may wait no longer


async def _looked_at(ports: Ports, plan: Plan, drawing: Drawing) -> Plan | None:
    try:
        return await look(ports, plan, drawing)
    except NotFoundError:  # it was forgotten meanwhile
        return None
    except RecordUnreadableError:  # one answer that makes no sense must not hide all other plans
        return plan


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
        ranks=plan.spec.fewest_ranks,
        device_type=plan.device_type,
        mesh=plan.mesh,
        micro_batch=plan.micro_batch,
        peak_bytes=max((kind.peak.total for kind in plan.memory), default=None),
        memory_limit_bytes=plan.memory_limit_bytes,
        step_time_s=None if plan.step_time is None else plan.step_time.total_s,
    )
