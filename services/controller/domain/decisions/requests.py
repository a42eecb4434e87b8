"""What people ask of a job: pause, resume, cancel, kill, a checkpoint now.

Asking again for what is already so, or already under way, changes nothing.
"""

from typing import Literal

from services.contract.api.views import StopRequest
from services.contract.messages.commands import DiagnoseGang, TakeCheckpoint
from services.contract.words.problems import Fault
from services.contract.words.states import CheckpointState, ExitReason, JobState
from services.controller.domain.decisions.attempt_end import settle
from services.controller.domain.decisions.attempt_events import stop_command
from services.controller.domain.errors import InvalidRequestError, StateConflictError
from services.controller.domain.job.effects import Draft
from services.controller.domain.job.events import (
    CancelAsked,
    CheckpointAsked,
    DiagnosisAsked,
    KillAsked,
    PauseAsked,
    ResumeAsked,
)
from services.controller.domain.job.job import RESUMABLE_STATES, SEVERITY, Job, Planning, Stop


def on_pause(event: PauseAsked, draft: Draft) -> None:
    """Drain the gang, or just stand still if there is none.

    Raises:
        StateConflictError: The job has ended, or is being stopped for good.
    """
    state = draft.job.state
    if state in {JobState.PAUSED, JobState.PAUSING}:
        return
    if draft.job.is_terminal or state == JobState.CANCELLING:
        raise StateConflictError(f"the job is {state}: it cannot be paused")
    if draft.job.attempt is None:
        draft.transition(JobState.PAUSED, "paused on request; no rank was running", stop=None)
    else:
        _stop(draft, "pause", event.stop)


def on_cancel(event: CancelAsked, draft: Draft) -> None:
    """Drain the gang for good, or end at once if there is none.

    Raises:
        StateConflictError: The job succeeded or failed.
    """
    if _stop_for_good_is_done(draft.job):
        return
    if draft.job.attempt is None:
        _cancel_idle(draft, ExitReason.CANCELLED, "cancelled on request; no rank was running")
    else:
        _stop(draft, "cancel", event.stop)


def on_kill(_event: KillAsked, draft: Draft) -> None:
    """End all ranks at once.

    Raises:
        StateConflictError: The job succeeded or failed.
    """
    if _stop_for_good_is_done(draft.job):
        return
    if draft.job.attempt is None:
        _cancel_idle(draft, ExitReason.KILLED, "killed on request; no rank was running")
    else:
        _stop(draft, "kill", StopRequest(checkpoint="none", grace_s=0))


def on_resume(event: ResumeAsked, draft: Draft) -> None:
    """Queue the job again; its next attempt goes on from a committed checkpoint.

    If its layout is still open, it is planned by what there is now.

    Raises:
        StateConflictError: The job succeeded, is being stopped, or runs and another checkpoint
            is named.
        InvalidRequestError: The named checkpoint is not a committed one of this job.
    """
    job = draft.job
    if job.state not in RESUMABLE_STATES:
        _refuse_resume(job, event)
        return
    if job.purge_node is not None:
        raise StateConflictError("the job's checkpoints are being removed: it cannot continue")
    if event.from_checkpoint is not None:
        if not _can_begin_with(job, event.from_checkpoint):
            raise InvalidRequestError(
                [
                    Fault(
                        pointer="/from_checkpoint",
                        detail=f"{event.from_checkpoint} is not a committed checkpoint of "
                        f"{job.id}; GET /v1/jobs/{job.id}/checkpoints lists them",
                        code="unknown_checkpoint",
                    )
                ]
            )
        draft.change(base_checkpoint=event.from_checkpoint, base_fence=job.fence)
    if draft.job.has_lost_its_checkpoints:
        raise StateConflictError(
            "every checkpoint to resume from is corrupt: restore the files and verify one, name "
            "another, or delete the corrupt ones to start over"
        )
    draft.transition(
        JobState.QUEUED,
        f"resumed on request, {draft.job.resume_point.words}",
        exit_reason=None,
        failure=None,
        ended_ms=None,
        stop=None,
        restarts=0,
        run_fence=job.fence,
        not_before_ms=draft.now_ms,
        found=False,
        planning=None if job.planning is None else Planning(),
    )


def on_checkpoint(_event: CheckpointAsked, draft: Draft) -> None:
    """Have the ranks take a checkpoint at the next step on which they agree.

    Raises:
        StateConflictError: The job does not run.
    """
    job, attempt = draft.job, draft.job.attempt
    if job.state != JobState.RUNNING or attempt is None or attempt.is_over:
        raise StateConflictError(
            f"the job is {job.state}: only a running job can take a checkpoint"
        )
    # One node is enough, and two might make the ranks agree twice.
    if job.head_node is not None:
        draft.send(TakeCheckpoint(job_id=job.id, fence=attempt.fence), [job.head_node])
    draft.note("checkpoint.asked", "a checkpoint at the next agreed step was requested")


def on_diagnosis(_event: DiagnosisAsked, draft: Draft) -> None:
    """Have the agents look into the ranks of the newest attempt, which go on.

    Raises:
        StateConflictError: No rank lives.
    """
    job, attempt = draft.job, draft.job.attempt
    if attempt is None or attempt.is_over:
        raise StateConflictError(
            f"the job is {job.state} and none of its ranks is running; for how the last attempt "
            f"ended, see GET /v1/jobs/{job.id}/diagnosis"
        )
    draft.change_attempt(looks=())
    draft.send(DiagnoseGang(job_id=job.id, fence=attempt.fence), attempt.live_nodes)
    draft.note("diagnosis.asked", "the agents were asked to inspect the ranks")


def _stop(draft: Draft, kind: Literal["pause", "cancel", "kill"], request: StopRequest) -> None:
    before = draft.job.stop
    if before is not None and SEVERITY[before.kind] >= SEVERITY[kind]:
        return
    stop = Stop(
        kind=kind,
        checkpoint=request.checkpoint,
        grace_s=request.grace_s,
        asked_ms=draft.now_ms,
    )
    target = JobState.PAUSING if kind == "pause" else JobState.CANCELLING
    words = {"pause": "pausing", "cancel": "cancelling", "kill": "killing"}[kind]
    reason = f"{words} on request (checkpoint: {request.checkpoint})"
    draft.change(stop=stop)
    if draft.job.state == target:
        draft.change(reason=reason)
        draft.note(f"job.{words}", reason)
    else:
        draft.transition(target, reason)
    attempt = draft.job.attempt
    if attempt is not None and attempt.live_nodes:
        draft.send(stop_command(draft.job, attempt, draft.now_ms), attempt.live_nodes)
    settle(draft)


def _stop_for_good_is_done(job: Job) -> bool:
    if job.state in {JobState.SUCCEEDED, JobState.FAILED}:
        raise StateConflictError(f"the job is {job.state}: there is nothing to stop")
    return job.state == JobState.CANCELLED


def _cancel_idle(draft: Draft, exit_reason: ExitReason, reason: str) -> None:
    draft.transition(
        JobState.CANCELLED, reason, exit_reason=exit_reason, ended_ms=draft.now_ms, stop=None
    )


def _can_begin_with(job: Job, checkpoint_id: str) -> bool:
    """Whether it is a committed checkpoint of this job, or the one with which the clone begins."""
    known = job.checkpoints.get(checkpoint_id)
    if known is not None:
        return known.state == CheckpointState.COMMITTED
    return job.resume_point.checkpoint_id == checkpoint_id


def _refuse_resume(job: Job, event: ResumeAsked) -> None:
    """Whoever resumes a job that already goes on gets what was asked for, unless it differs."""
    if job.state == JobState.SUCCEEDED:
        raise StateConflictError("the job SUCCEEDED: all its steps are done")
    if job.state in {JobState.PAUSING, JobState.CANCELLING}:
        raise StateConflictError(f"the job is {job.state}: resume it once it has stopped")
    if event.from_checkpoint not in {None, job.base_checkpoint}:
        raise StateConflictError(
            f"the job is {job.state}: pause it before resuming it from another checkpoint"
        )
