"""Making plans: have a model profiled, wait for that a little, work the plan out.

A plan that is still PROBING is concluded by whoever looks at it next, on any controller, so that
nothing is lost with the one that was asked.
"""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Final, NamedTuple

import structlog
from pydantic import ValidationError

from services.contract.api.plan_views import JobEstimate, PlanOutcome, PlanProbe, PlanView
from services.contract.api.pointers import faults_of
from services.contract.jobs.entry_points import EntryPoints
from services.contract.jobs.specs import JobSpec
from services.contract.messages.probe_ids import UnfitProfileError, refuse_unfit
from services.contract.messages.probing import (
    PROBES_WAITED_FOR,
    DeviceType,
    MeasureNode,
    ModelProbed,
    ProbeModel,
)
from services.contract.redis import redis_keys as keys
from services.contract.system.long_work import Turns
from services.contract.words.ids import new_plan_id
from services.contract.words.problems import Fault
from services.contract.words.states import NodeState, PlanState
from services.controller.domain.errors import (
    InvalidRequestError,
    NotFoundError,
    StateConflictError,
)
from services.controller.domain.job.effects import Send
from services.controller.domain.job.spec_rules import against_the_rules
from services.controller.domain.job.support import unsupported
from services.controller.domain.plans import default_plan, search
from services.controller.domain.plans.pace import Pace, kind_of, scale_of
from services.controller.domain.plans.plan import (
    Plan,
    Profiled,
    StillProbing,
    conclude,
    fail,
    judge,
)
from services.controller.domain.plans.search import RankRoom, Study
from services.controller.domain.scheduling.node import Node
from services.controller.domain.scheduling.placement import (
    GangRequest,
    NodeUsage,
    Placed,
    device_of,
    node_sets,
    place,
)
from services.controller.ports.coordination import Ports
from services.controller.ports.jobs import Actor
from services.controller.use_cases.code import code_faults
from services.controller.use_cases.present import moment
from services.controller.use_cases.waiting import current_usages

_log = structlog.get_logger()
TOO_MANY_PLANS: Final = "too_many_plans"
_RANDOM_BYTES: Final = 10
_MEASURED_WITHIN_MS: Final = 30_000
_FAILED_MEASURE_STANDS_MS: Final = 60_000
_LOOK_EVERY_S: Final = 0.1
# Of some 7 000 units; a list of plans reads all that are there.
_LONGEST_PLAN: Final = 2 << 20
_LONGEST_PAUSE_S: Final = 1.0


@dataclass(frozen=True)
class Drawing:
    """How plans are made here.

    ``wait_s``: for how long a request waits for a probe. ``probe_timeout_s``: how long a probe may
    take. ``hands``: plans are worked out one at a time, those of one owner after another's, beside the event
    loop. ``readers``: requests read in the same way what jobs have taken of the nodes. ``left_behind``: what lists have
    begun and do not wait for any longer.
    """

    wait_s: float = 5.0
    probe_timeout_s: float = 120.0
    hands: Turns = field(default_factory=Turns)
    readers: Turns = field(default_factory=Turns)
    left_behind: set[asyncio.Task[Plan | None]] = field(default_factory=set)


class Wanted(NamedTuple):
    """A spec and how its plan was asked for. ``fresh``: its model is profiled again."""

    spec: JobSpec
    fresh: bool = False


async def make_plan(
    ports: Ports, wanted: Wanted, actor: Actor, allowed: EntryPoints, drawing: Drawing
) -> PlanView:
    """A plan for a spec; still PROBING if its model could not be profiled soon enough.

    Raises:
        InvalidRequestError: The spec can never run; all faults at once.
        StateConflictError: No node is there that could profile the model, or the owner's other plans wait for theirs.
    """
    await _refuse_faulty(ports, wanted.spec, allowed)
    # This reads all active jobs, and no limit of requests at a time holds for plans: they wait for nodes.
    async with drawing.readers.of(actor.name):
        usages = await current_usages(ports)
    plan = await begin_plan(ports, wanted, actor.name, drawing, usages)
    return plan_view(await _patiently(ports, plan, drawing))


async def begin_plan(
    ports: Ports, wanted: Wanted, owner: str, drawing: Drawing, usages: tuple[NodeUsage, ...]
) -> Plan:
    """A plan for a spec without faults, of which no more is done than to ask one of these nodes.

    Raises:
        StateConflictError: No node is there that could profile the model, or the owner's other plans wait for theirs.
    """
    spec = wanted.spec
    device_type = device_of(GangRequest.of(spec), usages)
    chosen = _least_busy(usages, device_type)
    if chosen is None:
        raise StateConflictError(
            f"no node with {_DEVICES[device_type]} is ready to profile the model; start an agent "
            "(meshloom nodes lists them) and retry",
            code="no_node_to_probe",
        )
    node = chosen.node
    room = RankRoom.on(node, device_type)
    asked = search.ask(spec, room, node, drawing.probe_timeout_s)
    question = asked.model_copy(update={"owner": owner})
    now_ms = await ports.clock.now_ms()
    measure = _measure_of(chosen, question, now_ms)
    plan = Plan(
        id=new_plan_id(now_ms, ports.entropy(_RANDOM_BYTES)),
        spec=spec,
        owner=owner,
        device_type=device_type,
        probe_id=question.probe_id,
        node_id=node.id,
        cached=not wanted.fresh and await ports.plans.is_answered(question.probe_id),
        created_ms=now_ms,
        answer_by_ms=now_ms + int(question.timeout_s * 1000) * PROBES_WAITED_FOR,
        measured_by_ms=now_ms + _MEASURED_WITHIN_MS if measure else 0,
    )
    status = await ports.plans.keep(plan, Send(node.id, question), measure, fresh=wanted.fresh)
    if status == "too_many":
        raise StateConflictError(
            f"the models of {keys.PLANS_PROBING} plans of {owner} are being profiled, the most at a "
            "time; retry when some of these are made",
            code=TOO_MANY_PLANS,
        )
    _log.info("plan_asked", plan_id=plan.id, probe_id=plan.probe_id, node_id=node.id, asked=status)
    return plan


async def get_plan(ports: Ports, plan_id: str, drawing: Drawing) -> PlanView:
    """A plan as it is now.

    Raises:
        NotFoundError: There is none, or none any more.
    """
    return plan_view(await look_at_plan(ports, plan_id, drawing))


async def look_at_plan(
    ports: Ports, plan_id: str, drawing: Drawing, subject: str | None = None
) -> Plan:
    """The plan's record, concluded if that is due. ``subject``: as ``look``.

    Raises:
        NotFoundError: There is none, or none any more.
        RecordUnreadableError: Its record, or what was answered to it, makes no sense here.
    """
    return await look(ports, await ports.plans.load(plan_id), drawing, subject)


class Submittable(NamedTuple):
    """What a job by a plan is: a spec of which nothing is left to be chosen, and what to expect."""

    spec: JobSpec
    estimate: JobEstimate | None


async def submittable(ports: Ports, plan_id: str, drawing: Drawing) -> Submittable:
    """The job that a plan describes.

    Raises:
        InvalidRequestError: There is no such plan, or it is infeasible.
        StateConflictError: It is still PROBING, or has FAILED.
    """
    try:
        plan = await look_at_plan(ports, plan_id, drawing)
    except NotFoundError as error:
        raise _refusal(str(error), "plan_unknown") from error
    if plan.state is PlanState.PROBING:
        raise StateConflictError(
            f"{plan_id} is not ready yet: {plan.reason}; retry in a moment",
            code="plan_probing",
        )
    if plan.failure is not None:
        raise StateConflictError(
            f"{plan_id} failed: {plan.failure.reason}; {plan.failure.advice}", code="plan_failed"
        )
    made = plan.outcome
    if not made.feasible or made.sharding is None or made.micro_batch is None:
        advice = "; ".join(made.advice) or "change the spec and plan again"
        raise _refusal(f"{plan_id} is infeasible: {plan.reason}; {advice}", "plan_infeasible")
    try:
        spec = default_plan.planned(plan.spec, made.sharding, made.micro_batch)
    except ValidationError as error:
        raise InvalidRequestError(faults_of(error.errors(), None)) from error
    return Submittable(spec, plan.estimate)


def plan_view(plan: Plan) -> PlanView:
    """A plan as the REST API shows it."""
    made = moment(plan.created_ms)
    return PlanView(
        **dict(plan.outcome),
        id=plan.id,
        state=plan.state,
        reason=plan.reason,
        failure=plan.failure,
        probe=PlanProbe(
            id=plan.probe_id, node_id=plan.node_id, cached=plan.cached, took_s=plan.took_s
        ),
        owner=plan.owner,
        created_at=made,
        expires_at=made + timedelta(seconds=keys.PLAN_TTL_S),
        spec=plan.spec,
    )


_DEVICES: Final = {"cpu": "CPU slots", "cuda": "GPUs"}


async def _refuse_faulty(ports: Ports, spec: JobSpec, allowed: EntryPoints) -> None:
    faults = against_the_rules(spec, allowed)
    faults += unsupported(spec, faults)
    faults += await code_faults(ports, spec, allowed)
    try:
        default_plan.shard(spec)
    except InvalidRequestError as error:
        faults += error.faults
    if spec.entrypoint is not None:
        detail = "entrypoint: a script is not profiled, so there is no plan for it; submit the job"
        faults.append(Fault(pointer="/entrypoint", detail=detail, code="not_planned"))
    if faults:
        raise InvalidRequestError(faults)


def _least_busy(usages: tuple[NodeUsage, ...], device_type: DeviceType) -> NodeUsage | None:
    """The node to ask: open ones first, then those with the least at work, then by name."""
    able = [
        usage
        for usage in usages
        if usage.node.state == NodeState.READY and usage.has_lease and usage.capacity(device_type)
    ]
    return min(
        able,
        key=lambda s: (not s.is_open, s.cpu_taken + len(s.accelerators_taken), s.node.id),
        default=None,
    )


def _measure_of(chosen: NodeUsage, question: ProbeModel, now_ms: int) -> Send | None:
    known = chosen.node.measured.get(question.device_type)
    stands = known is not None and (
        known.facts is not None or now_ms - known.at_ms < _FAILED_MEASURE_STANDS_MS
    )
    return None if stands else Send(chosen.node.id, MeasureNode(device_type=question.device_type))


async def _patiently(ports: Ports, plan: Plan, drawing: Drawing) -> Plan:
    """The plan once it is concluded, or as it is when the time to wait is over."""
    clock = asyncio.get_running_loop().time
    ends = clock() + drawing.wait_s
    await ports.plans.wait(plan.probe_id, drawing.wait_s)
    while True:
        plan = await look(ports, plan, drawing)
        if plan.state is not PlanState.PROBING or clock() >= ends:
            return plan
        await asyncio.sleep(_LOOK_EVERY_S)


async def look(ports: Ports, plan: Plan, drawing: Drawing, subject: str | None = None) -> Plan:
    """The plan after all that is known by now, concluded if that is due.

    ``subject``: among whose turns it is worked out; None: its owner's.

    Raises:
        NotFoundError: There is none any more.
        RecordUnreadableError: What was answered to it makes no sense here.
    """
    if plan.state is not PlanState.PROBING:
        return plan
    if not await ports.plans.is_answered(plan.probe_id):
        verdict = await _judged(ports, plan, None)
        return (
            plan if isinstance(verdict, StillProbing | Profiled) else await _failed(ports, verdict)
        )
    async with drawing.hands.of(plan.owner if subject is None else subject):
        known = await ports.plans.load(plan.id)
        if known.state is not PlanState.PROBING:
            return known
        # It may have megabytes, which take the loop half a second and a hundred of memory: by turns, after which the
        # loop is others' for as long.
        began = time.monotonic()
        answer = await ports.plans.answer(plan.probe_id)
        verdict = await _judged(ports, plan, answer)
        await asyncio.sleep(min(time.monotonic() - began, _LONGEST_PAUSE_S))
        if isinstance(verdict, StillProbing):
            return plan
        if isinstance(verdict, Plan):
            return await _failed(ports, verdict)
        usages = await current_usages(ports)
        paces = await ports.plans.paces(plan.probe_id)
        try:
            study = _study(plan, verdict, usages, paces)
            outcome = await asyncio.to_thread(_work_out, answer, study)
        except UnfitProfileError as error:
            concluded = fail(plan, "raised", str(error))
        except Exception as error:  # noqa: BLE001 whatever it is, it ends this plan alone
            # Without a conclusion it would be worked out, and trip us up, at each look.
            _log.exception("plan_not_worked_out", plan_id=plan.id)
            concluded = fail(plan, "search_failed", f"{type(error).__name__}: {error}")
        else:
            concluded = conclude(plan, verdict, outcome)
        return await ports.plans.conclude(concluded)


async def _judged(
    ports: Ports, plan: Plan, answer: ModelProbed | None
) -> StillProbing | Profiled | Plan:
    asked = await ports.nodes.node(plan.node_id)
    return judge(plan, answer, asked, await ports.clock.now_ms())


async def _failed(ports: Ports, plan: Plan) -> Plan:
    _log.info("plan_failed", plan_id=plan.id, reason=plan.reason)
    return await ports.plans.conclude(plan)


def _work_out(answer: ModelProbed | None, study: Study) -> PlanOutcome:
    if answer is not None:  # an agent's word, which may not be ours
        refuse_unfit(answer)
    outcome = search.work_out(study)
    # How long the rest is follows from how many ranks there are.
    size = len(outcome.model_dump_json(exclude={"ranks", "memory"}))
    if size > _LONGEST_PLAN:
        raise UnfitProfileError(
            f"the plan's units and their modules take {size >> 10} KiB to tell, more than the "
            f"{_LONGEST_PLAN >> 10} KiB that are kept: name fewer modules in plan.units, or shorter ones"
        )
    return outcome


def _study(
    plan: Plan, found: Profiled, usages: tuple[NodeUsage, ...], paces: Sequence[Pace]
) -> Study:
    """Where the job would run now, or could run later: its room is that of the tightest node."""
    gang, device_type = GangRequest.of(plan.spec), plan.device_type
    outcome = place(gang, usages)
    if isinstance(outcome, Placed):
        gangs = [outcome.nodes]
    else:
        ready = [s for s in usages if s.node.state == NodeState.READY]
        able = [s for s in ready if s.capacity(device_type)]
        gangs = [tuple(s.node for s in r.usages) for r in node_sets(gang, able, device_type)]
    # Without any, the reason that it can never run is told with the asked node's plan.
    gangs = gangs or [tuple(s.node for s in usages if s.node.id == plan.node_id)]
    tightest = [
        min((_room(node, device_type, paces) for node in nodes), key=lambda room: room.memory_bytes)
        for nodes in gangs
    ]
    room = max(tightest, key=lambda room: (room.memory_bytes, room.facts is not None))
    return Study(plan.spec, found, room, usages)


def _room(node: Node, device_type: DeviceType, paces: Sequence[Pace]) -> RankRoom:
    factor = scale_of(paces, kind_of(node.inventory, device_type))
    return search.scaled(RankRoom.on(node, device_type), factor)


def _refusal(detail: str, code: str) -> InvalidRequestError:
    return InvalidRequestError([Fault(pointer="/plan_id", detail=detail, code=code)])
