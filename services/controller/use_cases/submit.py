"""Submitting a job: refuse what can never be, queue the rest and say why it waits."""

from dataclasses import dataclass, replace

from services.contract.api.plan_views import FromPlan, JobEstimate
from services.contract.api.views import JobView
from services.contract.jobs.entry_points import EntryPoints
from services.contract.jobs.specs import JobSpec
from services.contract.words.ids import new_job_id
from services.contract.words.problems import Fault
from services.controller.domain.decisions.dispatch import first_decision
from services.controller.domain.errors import InvalidRequestError
from services.controller.domain.job.job import Job, Origin, Planning
from services.controller.domain.job.spec_rules import against_the_rules
from services.controller.domain.job.support import unsupported
from services.controller.domain.plans import default_plan
from services.controller.domain.scheduling.elastic import place_most
from services.controller.domain.scheduling.placement import GangRequest, Never, NotNow, Placed
from services.controller.domain.scheduling.reservations import able_pool
from services.controller.ports.coordination import Ports
from services.controller.ports.jobs import Actor, Claim
from services.controller.use_cases.code import code_faults
from services.controller.use_cases.plans import Drawing, submittable
from services.controller.use_cases.present import job_view
from services.controller.use_cases.waiting import current_usages

_RANDOM_BYTES = 10
_TO_BE_PLANNED = "queued; its layout is chosen first (POST /v1/plans answers without a job)"


@dataclass(frozen=True)
class Submission:
    """A spec, or the plan that was made for one, and how it was handed in."""

    wanted: JobSpec | FromPlan
    claim: Claim | None = None
    dry_run: bool = False


@dataclass(frozen=True)
class Drafting:
    """Who asks for a job, which entry points it may name, what it begins with, and its estimate."""

    actor: Actor
    allowed: EntryPoints
    origin: Origin | None = None
    estimate: JobEstimate | None = None


async def submit(
    ports: Ports, submission: Submission, actor: Actor, allowed: EntryPoints, drawing: Drawing
) -> JobView:
    """Queue a job; the same claim again answers the same job.

    With ``dry_run`` nothing is kept; the answer shows the plan that would be run now. A job by a
    plan runs that very plan; one by a spec that leaves its layout open is planned first.

    Raises:
        InvalidRequestError: It can never run; all faults at once.
        StateConflictError: Its plan is not made yet, or failed.
        TooManyJobsError: Its owner has as many as one may have.
        KeyReusedError: The claim's key came with another body before.
    """
    if submission.claim is not None and not submission.dry_run:
        earlier = await ports.jobs.claimed(submission.claim)
        if earlier is not None:
            return job_view(earlier.job, (), {})
    spec, drafting = submission.wanted, Drafting(actor, allowed)
    if isinstance(spec, FromPlan):
        spec, estimate = await submittable(ports, spec.plan_id, drawing)
        drafting = replace(drafting, estimate=estimate)
    job, outcome = await draft_job(ports, spec, drafting)
    if submission.dry_run:
        return predicted(job, outcome)
    stored = await ports.jobs.create(first_decision(job), actor, submission.claim)
    return job_view(stored.job, (), {})


async def draft_job(ports: Ports, spec: JobSpec, drafting: Drafting) -> tuple[Job, Placed | NotNow]:
    """A job as it would be queued now, and where it would be placed.

    Raises:
        InvalidRequestError: It can never run; all faults at once.
    """
    outcome = await _predict(ports, spec, drafting)
    now_ms = await ports.clock.now_ms()
    job = Job(
        id=new_job_id(now_ms, ports.entropy(_RANDOM_BYTES)),
        spec=spec,
        owner=drafting.actor.name,
        reason=_TO_BE_PLANNED if spec.leaves_layout_open else _reason(outcome),
        created_ms=now_ms,
        updated_ms=now_ms,
        origin=drafting.origin,
        estimate=drafting.estimate,
        planning=Planning() if spec.leaves_layout_open else None,
    )
    return job, outcome


def predicted(job: Job, outcome: Placed | NotNow) -> JobView:
    """The job with the plan that would be run now, unless that is still to be made."""
    if job.planning is None and isinstance(outcome, Placed):
        job = job.model_copy(update={"plan": default_plan.gang(job.spec, outcome)})
    return job_view(job, (), {})


async def _predict(ports: Ports, spec: JobSpec, drafting: Drafting) -> Placed | NotNow:
    """Where the job would be placed now; refuses one that no known node can take."""
    allowed = drafting.allowed
    faults = drafting.actor.priority_faults(spec.priority)
    faults += against_the_rules(spec, allowed)
    faults += unsupported(spec, faults)
    faults += await code_faults(ports, spec, allowed)
    try:
        default_plan.shard(spec)
    except InvalidRequestError as error:
        faults += error.faults
    outcome = place_most(spec, await current_usages(ports))
    able = able_pool(GangRequest.of(spec), ports.pools)
    if isinstance(outcome, Never) and able is not None:
        pool, fit = able
        reason = f"no known node can take it; pool {pool.name} is asked for nodes"
        outcome = NotNow(fit.device, reason, blocks=False)
    if isinstance(outcome, Never):
        faults.append(Fault(pointer="/resources", detail=outcome.reason, code="never_fits"))
    if faults or isinstance(outcome, Never):
        raise InvalidRequestError(faults)
    return outcome


def _reason(outcome: Placed | NotNow) -> str:
    if isinstance(outcome, NotNow):
        return outcome.reason
    return f"queued; there are free slots on {', '.join(outcome.incarnations)}"
