"""Choosing layouts for jobs that leave them open, before they are given seats.

A job names the plan that is made for it, so whoever leads next goes on where this one stopped.
"""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Iterator, Sequence
from typing import Final

import structlog

from services.contract.api.plan_views import PlanFailure
from services.contract.redis import redis_keys as keys
from services.contract.words.states import PlanState
from services.controller.domain.decisions.awaited_plan import awaits_plan
from services.controller.domain.decisions.history import Occurrence
from services.controller.domain.errors import (
    DeposedError,
    NotFoundError,
    RecordUnreadableError,
    StaleWriteError,
    StateConflictError,
    StoreUnavailableError,
)
from services.controller.domain.job.events import (
    JobEvent,
    PlacementDelayed,
    PlanAsked,
    PlanMade,
    PlanMissed,
    PlanRefused,
    SpecFaulted,
)
from services.controller.domain.job.job import Job
from services.controller.domain.plans.pace import STEPS_READ, can_tell, pace_of
from services.controller.domain.plans.plan import Plan
from services.controller.domain.scheduling.placement import NodeUsage
from services.controller.ports.coordination import Ports
from services.controller.ports.jobs import Actor
from services.controller.use_cases.change import apply_events
from services.controller.use_cases.plans import (
    TOO_MANY_PLANS,
    Drawing,
    Wanted,
    begin_plan,
    look_at_plan,
)
from services.controller.use_cases.progress import if_it_answers
from services.controller.use_cases.waiting import current_usages

_log = structlog.get_logger()
_ACTOR: Final = Actor("controller")
# No owner's name: behind all plans that one asks for, a job would hold up the others' jobs, which are looked at after it.
_OWN_TURNS: Final = ""
_NOT_OF_THE_MODEL: Final = frozenset({"no_answer", "search_failed"})
_REST_S: Final = 1.0
# Whoever submits a job calls; calls can be missed.
_REST_WITHOUT_ANY_S: Final = 5.0
_REST_WHILE_PROBING_S: Final = 0.1
# Jobs that come meanwhile are seen by the next look.
_PART_S: Final = 1.0


class Planner:
    """Has the open layouts of jobs chosen, in the name of one term.

    Args:
        ports: The world.
        epoch: The term.
        drawing: How plans are made.
        part_s: After so long a look ends once each owner has had a turn; the next one goes on from there.
    """

    def __init__(self, ports: Ports, epoch: int, drawing: Drawing, part_s: float = _PART_S) -> None:
        self._ports = ports
        self._epoch = epoch
        self._drawing = drawing
        self._part_s = part_s
        # Of each owner the job that was looked at last.
        self._reached: dict[str, str] = {}
        self._paced: set[tuple[str, int]] = set()

    async def look(self) -> float:
        """Do all that is due; returns the seconds after which to look again at the latest.

        Raises:
            DeposedError: The term is over.
        """
        active = [stored.job for stored in await self._ports.jobs.active()]
        waiting = [job for job in active if awaits_plan(job)]
        waits = Counter(job.owner for job in waiting if _plan_of(job) is not None)
        named = waits.total()
        nameless = len(waiting) - named
        # Read once for all of them, and before searches that take their time.
        usages = await current_usages(self._ports) if nameless else ()
        clock = asyncio.get_running_loop().time
        ends = clock() + self._part_s
        queues = self._queues(waiting)
        share_s = self._part_s / max(len(queues), 1)
        while queues:
            queues = [
                jobs for jobs in queues if await self._take_turn(jobs, usages, waits, share_s)
            ]
            if clock() >= ends:
                break
        awaits_pace = await self._keep_paces(active)
        if named:
            return _REST_WHILE_PROBING_S
        return _REST_S if nameless or awaits_pace else _REST_WITHOUT_ANY_S

    def _queues(self, waiting: Sequence[Job]) -> list[Iterator[Job]]:
        """Each owner's jobs, from behind the one that was reached last; who has few goes first.

        Thousands of one owner take minutes, a plan that is searched for tens of seconds: others' must not wait for all of those.
        """
        owners: dict[str, list[Job]] = {}
        for job in waiting:
            owners.setdefault(job.owner, []).append(job)
        self._reached = {name: self._reached.get(name, "") for name in owners}
        return [
            iter(sorted(jobs, key=lambda job: (job.id <= self._reached[job.owner], job.id)))
            for jobs in sorted(owners.values(), key=len)
        ]

    async def _take_turn(
        self,
        jobs: Iterator[Job],
        usages: tuple[NodeUsage, ...],
        waits: Counter[str],
        share_s: float,
    ) -> bool:
        """Look at an owner's jobs until something happens to one, or for ``share_s``; answers whether there may be more.

        Most of many wait for a profile, or until they may ask for one. Were a turn of each of them over, one whose profile
        is there would wait for as many of the others' searches.
        """
        clock = asyncio.get_running_loop().time
        ends = clock() + share_s
        for job in jobs:
            self._reached[job.owner] = job.id
            if _plan_of(job) is not None:
                is_done = await self._advance(job, self._next(job))
            elif waits[job.owner] < keys.PLANS_PROBING:
                is_done = await self._advance(job, self._ask(job, usages, waits))
            else:
                continue
            if is_done or clock() >= ends:
                return True
        return False

    async def _keep_paces(self, active: Sequence[Job]) -> bool:
        """What the first steps of attempts took, once each: later plans of the model use it.

        Answers whether there are attempts of which too little is known yet.
        """
        self._paced &= {(job.id, job.fence) for job in active}
        new = [job for job in active if can_tell(job) and (job.id, job.fence) not in self._paced]
        if not new:
            return False
        names = [job.id for job in new]
        records = await if_it_answers(self._ports.telemetry.last_steps(names, STEPS_READ))
        nodes = await self._ports.nodes.nodes()
        for job in new:
            pace = pace_of(job, records.get(job.id, ()), nodes)
            if pace is None or job.estimate is None or job.estimate.probe_id is None:
                continue
            self._paced.add((job.id, job.fence))
            probe_id = job.estimate.probe_id
            known = {(each.job_id, each.fence) for each in await self._ports.plans.paces(probe_id)}
            if (job.id, job.fence) not in known:
                await self._ports.plans.keep_pace(probe_id, pace)
        return any((job.id, job.fence) not in self._paced for job in new)

    async def _advance(self, job: Job, found: Awaitable[JobEvent | None]) -> bool:
        """Whether it is further now than before."""
        try:
            event = await found
            if event is not None:
                now_ms = await self._ports.clock.now_ms()
                happened = [Occurrence(event, now_ms)]
                await apply_events(self._ports, job.id, happened, _ACTOR, self._epoch)
        except (StaleWriteError, NotFoundError, RecordUnreadableError):
            return False  # it is looked at again soon, as it is then
        except (StoreUnavailableError, DeposedError):
            raise
        except Exception:  # noqa: BLE001 one job that trips us up must not stop all others
            _log.exception("job_not_planned", job_id=job.id)
            return False
        return event is not None and not isinstance(event, PlacementDelayed)

    async def _next(self, job: Job) -> JobEvent | None:
        """What happens to the job now, if anything."""
        plan_id = _plan_of(job)
        if plan_id is None:
            return None
        try:
            plan = await look_at_plan(self._ports, plan_id, self._drawing, _OWN_TURNS)
        except NotFoundError:
            return await self._ask(job, await current_usages(self._ports), Counter())
        except RecordUnreadableError as error:
            # The node can tell it again.
            return PlanMissed(plan_id, f"no plan could be made: {error}", unanswered=True)
        return _outcome(plan)

    async def _ask(self, job: Job, usages: tuple[NodeUsage, ...], waits: Counter[str]) -> JobEvent:
        """``waits``: how many plans each owner waits for; none is asked for beyond the limit."""
        try:
            plan = await self._begin(job, usages)
        except StateConflictError as error:
            if error.code == TOO_MANY_PLANS:
                waits[job.owner] = keys.PLANS_PROBING
            return PlacementDelayed(f"its layout is not chosen yet: {error}")
        waits[job.owner] += 1
        return PlanAsked(plan.id, f"its layout is being chosen: {plan.reason}", job.revision)

    async def _begin(self, job: Job, usages: tuple[NodeUsage, ...]) -> Plan:
        # Whoever was asked before and did not answer must not be waited for.
        wanted = Wanted(job.spec, fresh=job.planning is not None and job.planning.again)
        return await begin_plan(self._ports, wanted, job.owner, self._drawing, usages)


def _plan_of(job: Job) -> str | None:
    return None if job.planning is None else job.planning.plan_id


def _outcome(plan: Plan) -> JobEvent | None:
    if plan.state is PlanState.PROBING:
        return None
    if plan.failure is not None:
        return _missed(plan, plan.failure)
    made = plan.outcome
    if made.feasible and made.sharding is not None and plan.estimate is not None:
        return PlanMade(made.sharding, plan.estimate)
    advice = "; ".join(made.advice) or "change the spec"
    return PlanRefused(plan.id, f"its plan is infeasible: {plan.reason}", advice)


def _missed(plan: Plan, failure: PlanFailure) -> JobEvent:
    if failure.code == "wrong_spec" and not plan.cached:
        return SpecFaulted(plan.id, failure.reason, plan.node_id, failure.traceback)
    # What was found before may have been corrected since: the code is no part of the question.
    again = failure.code in {"no_answer", "wrong_spec"}
    why = f"the model could not be profiled: {failure.reason}"
    if failure.code in _NOT_OF_THE_MODEL:
        why = f"no plan could be made: {failure.reason}; {failure.advice}"
    return PlanMissed(plan.id, why, unanswered=again)
