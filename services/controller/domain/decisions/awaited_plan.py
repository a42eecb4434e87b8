"""A job whose layout is left open waits for its plan before it waits for seats."""

from pydantic import ValidationError

from services.contract.words.states import ExitReason, JobState
from services.controller.domain.job.attempt import Failure
from services.controller.domain.job.effects import Draft
from services.controller.domain.job.events import (
    PlanAsked,
    PlanMade,
    PlanMissed,
    PlanRefused,
    SpecFaulted,
)
from services.controller.domain.job.job import WAITING_STATES, Job, Planning
from services.controller.domain.plans import default_plan


def awaits_plan(job: Job) -> bool:
    """Whether it is given no seats because its layout is not chosen yet."""
    return job.planning is not None and job.state in WAITING_STATES


def on_asked(event: PlanAsked, draft: Draft) -> None:
    """Remember which plan it waits for, unless its spec was changed since that was asked for."""
    if not awaits_plan(draft.job) or event.revision != draft.job.revision:
        return
    again = draft.job.planning is not None and draft.job.planning.again
    draft.change(planning=Planning(plan_id=event.plan_id, again=again), reason=event.reason)
    draft.note("job.planning", event.reason, plan_id=event.plan_id)


def on_made(event: PlanMade, draft: Draft) -> None:
    """Run by the plan: what was left open is settled, and stays so for all attempts."""
    if not _is_awaited(draft.job, event.estimate.plan_id):
        return
    asked = draft.job.spec
    try:
        spec = default_plan.planned(asked, event.sharding, event.estimate.micro_batch)
    except ValidationError as error:
        # With all that was chosen it is larger than a spec may be, and would be the next time.
        found = error.errors(include_url=False)[0]["msg"]
        _run_unplanned(
            draft, event.estimate.plan_id, f"no plan could be made: with what was chosen, {found}"
        )
        return
    mesh = event.sharding.mesh
    words = (
        f"planned as {mesh.dp_replicate} x {mesh.dp_shard} x {mesh.tp} "
        f"(dp_replicate x dp_shard x tp), micro-batch {event.estimate.micro_batch}: "
        f"{event.estimate.reason}"
    )
    draft.change(spec=spec, asked=asked, estimate=event.estimate, planning=None, reason=words)
    draft.note("job.planned", words, plan_id=event.estimate.plan_id)


def on_missed(event: PlanMissed, draft: Draft) -> None:
    """No plan could be made: that is no reason not to run, by the layout that needs none.

    Only if nobody answered is another node, or the same one, asked once more.
    """
    planning = draft.job.planning
    if planning is None or not _is_awaited(draft.job, event.plan_id):
        return
    if event.unanswered and not planning.again:
        draft.change(planning=Planning(again=True), reason=event.reason)
        return
    _run_unplanned(draft, event.plan_id, event.reason)


def on_refused(event: PlanRefused, draft: Draft) -> None:
    """It cannot run as it is asked for; resumed, it is planned again."""
    if not _is_awaited(draft.job, event.plan_id):
        return
    words = f"{event.reason}; {event.advice}; or use plan: default to run it anyway"
    draft.transition(
        JobState.FAILED,
        words,
        exit_reason=ExitReason.INFEASIBLE,
        ended_ms=draft.now_ms,
        planning=Planning(),
        stop=None,
    )


def on_faulted(event: SpecFaulted, draft: Draft) -> None:
    """Its ranks would fail as the probe did, after they had waited for seats."""
    if not _is_awaited(draft.job, event.plan_id):
        return
    draft.transition(
        JobState.FAILED,
        f"the spec is wrong: {event.reason}",
        exit_reason=ExitReason.USER_ERROR,
        failure=Failure(node_id=event.node_id, error=event.reason, traceback=event.traceback),
        ended_ms=draft.now_ms,
        planning=Planning(),
        stop=None,
    )


def _run_unplanned(draft: Draft, plan_id: str, why: str) -> None:
    words = f"{why}; the job runs with the default layout"
    draft.change(planning=None, reason=words)
    draft.note("job.unplanned", words, plan_id=plan_id)


def _is_awaited(job: Job, plan_id: str) -> bool:
    return awaits_plan(job) and job.planning is not None and job.planning.plan_id == plan_id
