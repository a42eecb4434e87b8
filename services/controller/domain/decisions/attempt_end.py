"""What becomes of a job once no rank of its attempt lives any more.

Everything that waits for this (the gang's end, a commit, a lost node) calls ``settle``, which
looks at the facts so far: it either reaches the outcome or goes on waiting for a commit.
"""

from typing import Final

from services.contract.words.states import CheckpointState, ExitReason, JobState
from services.controller.domain.decisions import diagnose, retry, tracing
from services.controller.domain.job import checkpoint as checkpoints
from services.controller.domain.job.attempt import Attempt, Failure
from services.controller.domain.job.checkpoint import Checkpoint
from services.controller.domain.job.effects import Draft
from services.controller.domain.job.job import Job, Stop

_MOVES: Final = {
    "preempted": (ExitReason.PREEMPTED, "made room for"),
    "node_drained": (ExitReason.NODE_DRAINED, "left"),
    "resized": (ExitReason.RESIZED, "ended to continue with"),
}


def settle(draft: Draft) -> None:
    """Draw the conclusion from an attempt that is over, if all that it hangs on is known."""
    attempt = draft.job.attempt
    if attempt is None or not attempt.is_over:
        return
    stop = draft.job.stop
    if stop is not None and stop.kind == "kill":
        _abort_open(draft, attempt, sealed_too=False)
        _end_attempt(draft, ExitReason.KILLED)
        _cancel(draft, ExitReason.KILLED, "killed on request")
        return
    _abort_open(draft, attempt, sealed_too=draft.job.head_node in attempt.lost_nodes)
    pending = _pending_commit(draft.job, attempt)
    if pending is not None:
        if attempt.condition is None:
            reason = f"waiting until the checkpoint of step {pending.step} is committed"
            draft.change(reason=reason)
    elif attempt.has_trained(draft.job.spec.train.steps):
        _conclude_training(draft, attempt)
    elif stop is not None:
        _conclude_stop(draft, attempt, stop)
    elif attempt.has_drained():
        _stand(draft)
    else:
        _conclude_failure(draft, attempt)


def succeed_late(draft: Draft, linked: Checkpoint) -> None:
    """A job whose last checkpoint proves to be committed after its attempt was abandoned is done.

    Even one that has failed: all that it lacked was the word of this commit.
    """
    steps = draft.job.spec.train.steps
    trained = any(
        a.fence == linked.fence and a.has_trained(steps) and linked.step >= _last_due(draft.job, a)
        for a in draft.job.attempts
    )
    waiting = draft.job.state in {JobState.QUEUED, JobState.RESTARTING, JobState.FAILED}
    if waiting and trained and linked == draft.job.latest_checkpoint:
        _succeed(draft)


def _last_due(job: Job, attempt: Attempt) -> int:
    """The step of which there must be a checkpoint once the attempt has trained."""
    return job.spec.train.steps if attempt.early is None else attempt.last_step


def _conclude_training(draft: Draft, attempt: Attempt) -> None:
    latest = draft.job.latest_checkpoint
    is_saved = latest is not None and latest.step >= _last_due(draft.job, attempt)
    if is_saved or (draft.job.spec.entrypoint is not None and not _lost_its_last(draft, attempt)):
        _end_attempt(draft, ExitReason.COMPLETED)
        _succeed(draft)
    elif draft.job.stop is not None:
        _conclude_stop(draft, attempt, draft.job.stop)
    else:
        _conclude_failure(draft, attempt)


def _conclude_stop(draft: Draft, attempt: Attempt, stop: Stop) -> None:
    if stop.kind == "move":
        _conclude_move(draft, attempt, stop)
        return
    saved = draft.job.resume_point.step
    is_safe = saved >= attempt.last_step
    verb = "pause" if stop.kind == "pause" else "cancellation"
    if stop.checkpoint == "required" and not is_safe:
        why = _why_unsafe(draft.job, attempt)
        if stop.kind == "pause":
            _give_up_pause(draft, attempt, why, saved)
            return
        _end_attempt(draft, ExitReason.CHECKPOINT_FAILED)
        _cancel(
            draft,
            ExitReason.CHECKPOINT_FAILED,
            f"cancelled, but the checkpoint that this {verb} required failed ({why}); "
            f"what is saved ends at step {saved} of {attempt.last_step}",
        )
        return
    kept = f"at step {saved}" if is_safe else f"what is saved ends at step {saved}"
    if stop.kind == "pause":
        _end_attempt(draft, ExitReason.PAUSED)
        draft.transition(JobState.PAUSED, f"paused on request; {kept}", stop=None)
    else:
        _end_attempt(draft, ExitReason.CANCELLED)
        _cancel(draft, ExitReason.CANCELLED, f"cancelled on request; {kept}")


def _stand(draft: Draft) -> None:
    """Ranks drain only if they are asked to: the request is forgotten, and nobody is at fault."""
    saved = draft.job.resume_point.step
    _end_attempt(draft, ExitReason.PAUSED)
    reason = (
        f"a stop had been requested, and Redis lost by whom; what is saved ends at step {saved}"
    )
    draft.transition(JobState.PAUSED, reason)


def _conclude_move(draft: Draft, attempt: Attempt, stop: Stop) -> None:
    """The job goes on, and pays nothing: unless what ended it was its own exception."""
    draft.change(stop=None)
    failure = retry.first_failure(attempt)
    why = retry.cause(attempt, failure)
    is_memory = why == ExitReason.OUT_OF_MEMORY
    is_own = is_memory and failure is not None and retry.is_exception(failure)
    if is_own or why in {ExitReason.USER_ERROR, ExitReason.NON_FINITE_LOSS}:
        _conclude_failure(draft, attempt)
        return
    is_preempted = stop.cause == "preempted"
    asked, verb = _MOVES[stop.cause or "node_drained"]
    _end_attempt(draft, why if why == ExitReason.NODE_LOST else asked)
    saved = draft.job.resume_point.step
    reason = f"{verb} {stop.by}; it continues from step {saved}, and this restart is not counted"
    draft.transition(JobState.RESTARTING, reason, not_before_ms=draft.now_ms)
    if is_preempted:
        waits = f"preempted by {stop.by}; it waits for free slots and continues from step {saved}"
        draft.transition(JobState.QUEUED, waits)


def _give_up_pause(draft: Draft, attempt: Attempt, why: str, saved: int) -> None:
    """Who requires a checkpoint prefers a job that goes on to one that stands without it."""
    draft.change(stop=None)
    draft.note("job.pause_failed", f"the pause required a checkpoint, which failed: {why}")
    if not attempt.has_drained():
        _conclude_failure(draft, attempt)
        return
    _end_attempt(draft, ExitReason.CHECKPOINT_FAILED)
    reason = (
        f"the pause was cancelled: it required a checkpoint, which failed ({why}); "
        f"the job continues from step {saved}"
    )
    draft.transition(JobState.RESTARTING, reason, not_before_ms=draft.now_ms)


def _conclude_failure(draft: Draft, attempt: Attempt) -> None:
    failure = retry.first_failure(attempt)
    verdict = retry.judge(draft.job, attempt, failure)
    _end_attempt(draft, retry.cause(attempt, failure), failure)
    if isinstance(verdict, retry.GiveUp):
        draft.transition(
            JobState.FAILED,
            verdict.reason,
            exit_reason=verdict.exit_reason,
            failure=failure,
            ended_ms=draft.now_ms,
            stop=None,
        )
        return
    wait = f" in {verdict.delay_ms / 1000:g} s" if verdict.delay_ms else ""
    not_before_ms = draft.now_ms + verdict.delay_ms
    if not verdict.counts:
        why = _uncounted(draft.job, attempt, failure)
        if attempt.was_prevented(failure):
            why = f"{attempt.condition}: the job waits and tries again{wait}"
        reason = f"{why}; this restart is not counted"
        draft.transition(JobState.RESTARTING, reason, not_before_ms=not_before_ms)
        return
    number = draft.job.restarts + 1
    draft.transition(
        JobState.RESTARTING,
        f"{retry.describe(failure)}; restart {number} of "
        f"{draft.job.spec.faults.max_restarts}{wait}",
        restarts=number,
        not_before_ms=not_before_ms,
    )


def _uncounted(job: Job, attempt: Attempt, failure: Failure | None) -> str:
    latest = job.latest_checkpoint
    if attempt.corrupt_source is None or latest is None:
        return retry.describe(failure)
    return (
        f"checkpoint {attempt.resumed_from} is corrupt ({attempt.corrupt_source}): resuming from "
        f"step {latest.step} instead"
    )


def _lost_its_last(draft: Draft, attempt: Attempt) -> bool:
    """Whether the last state that a script saved was not committed."""
    return any(
        c.state == CheckpointState.ABORTED
        and c.fence == attempt.fence
        and c.step >= attempt.last_step
        for c in draft.job.checkpoints.values()
    )


def _how_it_succeeded(job: Job) -> str:
    script = job.spec.entrypoint
    if script is None:
        early = next((a.early for a in reversed(job.attempts) if a.early is not None), None)
        if early is not None:
            return f"{early}; the last checkpoint is committed"
        return f"all {job.spec.train.steps} steps are done and the last checkpoint is committed"
    words = f"{script.what} ended with exit code 0 on all ranks"
    if all(attempt.first_step is None for attempt in job.attempts):
        return (
            f"{words} without a report, so its steps are unknown. Call "
            "meshloom.session.report(step, loss=...) in it for curves, an ETA and hang detection"
        )
    latest = job.latest_checkpoint
    saved = "no checkpoint" if latest is None else f"a checkpoint of step {latest.step}"
    return f"{words} after step {max(a.last_step for a in job.attempts)}, with {saved}"


def _succeed(draft: Draft) -> None:
    draft.transition(
        JobState.SUCCEEDED,
        _how_it_succeeded(draft.job),
        exit_reason=ExitReason.COMPLETED,
        failure=None,
        ended_ms=draft.now_ms,
        stop=None,
    )


def _cancel(draft: Draft, exit_reason: ExitReason, reason: str) -> None:
    draft.transition(
        JobState.CANCELLED, reason, exit_reason=exit_reason, ended_ms=draft.now_ms, stop=None
    )


def _end_attempt(draft: Draft, reason: ExitReason, failure: Failure | None = None) -> None:
    attempt = draft.job.attempts[-1]
    diagnosis = diagnose.of_end(attempt, reason, failure)
    saved = max(draft.job.resume_point.step, attempt.resumed_step)
    last_step = max(attempt.last_step, attempt.resumed_step)
    draft.change_attempt(
        ended_ms=draft.now_ms,
        exit_reason=reason,
        failure=failure,
        last_step=last_step,
        lost_steps=max(last_step - saved, 0),
        hang=(),
        looks=(),
        diagnosis=attempt.diagnosis
        if diagnosis is None
        else diagnosis.model_copy(update={"at_ms": draft.now_ms}),
        # Only the exits of a finished gang are asked for again (by succeed_late).
        exits=attempt.exits if attempt.has_trained(draft.job.spec.train.steps) else (),
    )
    tracing.end_with_attempt(draft, reason)
    draft.note(
        "attempt.ended",
        f"attempt {attempt.fence} ended after step {last_step}: {reason}",
        fence=attempt.fence,
        exit_reason=reason,
        last_step=last_step,
        verdict=None if diagnosis is None else diagnosis.verdict,
        rank=None if diagnosis is None else diagnosis.rank,
    )


def _abort_open(draft: Draft, attempt: Attempt, *, sealed_too: bool) -> None:
    """Votes come before the gang's end: what lacks one now will never have it."""
    book = dict(draft.job.checkpoints)
    for known in draft.job.checkpoints.values():
        writing = known.state == CheckpointState.WRITING
        sealed = known.state == CheckpointState.SEALED
        if known.fence == attempt.fence and (writing or (sealed and sealed_too)):
            why = "the attempt ended before every rank had voted" if writing else attempt.lost
            book[known.id] = checkpoints.abort(known, why or "the attempt was lost")
            draft.note("checkpoint.aborted", f"checkpoint {known.id}: {why}", checkpoint=known.id)
    draft.change(checkpoints=book)


def _pending_commit(job: Job, attempt: Attempt) -> Checkpoint | None:
    pending = [
        c
        for c in job.checkpoints.values()
        if c.state == CheckpointState.SEALED and c.fence == attempt.fence
    ]
    return max(pending, key=lambda c: c.step, default=None)


def _why_unsafe(job: Job, attempt: Attempt) -> str:
    aborted = [
        c
        for c in job.checkpoints.values()
        if c.state == CheckpointState.ABORTED and c.fence == attempt.fence
    ]
    if aborted:
        return max(aborted, key=lambda c: c.step).reason or "it was aborted"
    if attempt.lost is not None:
        return attempt.lost
    return retry.describe(retry.first_failure(attempt)) if attempt.exits else "no rank wrote one"
