"""What people ask of a job, and what becomes of it."""

import pytest

from services.contract.api.views import StopRequest
from services.contract.messages.commands import LaunchGang, StopGang, TakeCheckpoint
from services.contract.messages.facts import CheckpointLost
from services.contract.words.ids import checkpoint_id
from services.contract.words.states import ExitReason, JobState
from services.controller.domain.errors import InvalidRequestError, StateConflictError
from services.controller.domain.job.events import (
    CancelAsked,
    CheckpointAsked,
    KillAsked,
    MoveAsked,
    PauseAsked,
    ResumeAsked,
)
from tests.controller.histories import (
    NODE,
    STEPS,
    began,
    commands,
    crashed,
    finished,
    killed,
    launched,
    linked,
    new_job,
    placed,
    play,
    progressed,
    running,
    saved,
    votes,
)

PAUSE = PauseAsked(StopRequest())
CANCEL = CancelAsked(StopRequest())
REQUIRED = StopRequest(checkpoint="required", grace_s=30)
MOVE = MoveAsked("preempted", "job_urgent", "makes room for job_urgent", 60.0)


def test_a_queued_job_pauses_resumes_and_cancels_without_any_rank() -> None:
    job = new_job()
    paused = play(job, [PAUSE]).job
    assert paused.state is JobState.PAUSED
    assert play(paused, [ResumeAsked()]).job.state is JobState.QUEUED
    assert play(paused, [CANCEL]).job.state is JobState.CANCELLED
    assert play(job, [KillAsked()]).job.exit_reason is ExitReason.KILLED


def test_a_pause_drains_commits_and_stands() -> None:
    decision = play(running(), [PAUSE])
    job = decision.job
    (stop,) = commands(decision)
    assert isinstance(stop, StopGang)
    assert (stop.mode, stop.checkpoint, stop.grace_s) == ("drain", "best_effort", 60)
    assert job.state is JobState.PAUSING
    job = play(job, [*votes(job, 20), finished(job, step=20, drained=True)]).job
    assert job.state is JobState.PAUSING
    job = play(job, [linked(job, 20)]).job
    assert job.state is JobState.PAUSED
    assert job.attempts[-1].exit_reason is ExitReason.PAUSED
    (launch,) = commands(play(play(job, [ResumeAsked()]).job, [placed(job)]))
    assert isinstance(launch, LaunchGang)
    assert (launch.fence, launch.resume_from) == (2, checkpoint_id(job.id, 20, 1))


def test_a_required_checkpoint_that_fails_gives_the_pause_up_and_the_job_goes_on() -> None:
    job = play(running(), saved(running(), 10)).job
    job = play(job, [PauseAsked(REQUIRED)]).job
    lost = CheckpointLost(
        job_id=job.id,
        fence=1,
        node_id=NODE,
        checkpoint_id=checkpoint_id(job.id, 20, 1),
        reason="No space left on device",
    )
    job = play(job, [began(job, 20), lost, finished(job, step=20, drained=True)]).job
    assert job.state is JobState.RESTARTING
    assert "No space left on device" in str(job.reason)
    assert "continues from step 10" in str(job.reason)
    assert job.stop is None


def test_a_required_checkpoint_that_fails_is_told_by_a_cancelled_job() -> None:
    job = play(running(), [CancelAsked(REQUIRED)]).job
    job = play(job, [finished(job, step=20, drained=True)]).job
    assert job.state is JobState.CANCELLED
    assert job.exit_reason is ExitReason.CHECKPOINT_FAILED


def test_stopping_only_gets_more_severe() -> None:
    job = play(running(), [PAUSE]).job
    cancelling = play(job, [CANCEL])
    assert cancelling.job.state is JobState.CANCELLING
    with pytest.raises(StateConflictError):
        play(cancelling.job, [PAUSE])
    assert play(cancelling.job, [CANCEL]).sends == ()
    killing = play(cancelling.job, [KillAsked()])
    (kill,) = commands(killing)
    assert isinstance(kill, StopGang)
    assert kill.mode == "kill"
    assert play(killing.job, [CANCEL]).sends == ()
    job = play(killing.job, [killed(job)]).job
    assert (job.state, job.exit_reason) == (JobState.CANCELLED, ExitReason.KILLED)


def test_a_job_that_was_done_before_its_pause_took_effect_succeeds() -> None:
    job = play(running(), [PAUSE]).job
    job = play(job, [*saved(job, STEPS), finished(job)]).job
    assert job.state is JobState.SUCCEEDED


def test_a_failed_or_cancelled_job_resumes_and_a_succeeded_one_does_not() -> None:
    job = running()
    cancelled = play(job, [CANCEL, killed(job)]).job
    assert cancelled.state is JobState.CANCELLED
    resumed = play(cancelled, [ResumeAsked()]).job
    assert (resumed.state, resumed.ended_ms, resumed.exit_reason) == (JobState.QUEUED, None, None)
    done = play(job, [*saved(job, STEPS), finished(job)]).job
    with pytest.raises(StateConflictError):
        play(done, [ResumeAsked()])
    with pytest.raises(StateConflictError):
        play(done, [CANCEL])


def test_a_resume_names_a_committed_checkpoint_and_its_line_alone_counts() -> None:
    job = running()
    job = play(job, [*saved(job, 10, number=2), *saved(job, 20, number=3), CANCEL]).job
    job = play(job, [finished(job, step=20, drained=True)]).job
    with pytest.raises(InvalidRequestError) as refused:
        play(job, [ResumeAsked(checkpoint_id(job.id, 15, 1))])
    assert refused.value.faults[0].pointer == "/from_checkpoint"
    named = checkpoint_id(job.id, 10, 1)
    job = play(job, [ResumeAsked(named)]).job
    assert job.latest_checkpoint is not None
    assert job.latest_checkpoint.id == named
    job = play(job, [placed(job), launched(job, 2), progressed(job, 11, 2), killed(job, 2)]).job
    assert job.latest_checkpoint is not None
    assert job.latest_checkpoint.id == named


def test_a_checkpoint_is_asked_of_one_node_and_only_while_running() -> None:
    (command,) = commands(play(running(), [CheckpointAsked()]))
    assert isinstance(command, TakeCheckpoint)
    with pytest.raises(StateConflictError):
        play(new_job(), [CheckpointAsked()])


# --- moves ----------------------------------------------------------------------------------------


def test_a_pause_or_kill_overtakes_a_move_and_a_move_overtakes_nothing() -> None:
    moving = play(running(), [MOVE]).job
    assert (moving.state, play(moving, [MOVE]).sends) == (JobState.RUNNING, ())
    pausing = play(moving, [PAUSE])
    assert (pausing.job.state, len(commands(pausing))) == (JobState.PAUSING, 1)
    assert play(pausing.job, [MOVE]).notes == ()
    (kill,) = commands(play(moving, [KillAsked()]))
    assert isinstance(kill, StopGang)
    assert kill.mode == "kill"


def test_a_gang_that_does_not_drain_in_time_is_killed_and_the_job_still_pays_nothing() -> None:
    job = play(running(faults={"max_restarts": 0}), [MOVE]).job
    moved = play(job, [*saved(job, 3), killed(job, step=5)]).job
    assert (moved.state, moved.restarts, moved.stop) == (JobState.QUEUED, 0, None)
    assert moved.attempts[-1].exit_reason is ExitReason.PREEMPTED
    assert moved.attempts[-1].lost_steps == 2


def test_an_exception_of_its_own_during_a_move_is_judged_as_ever() -> None:
    job = play(running(faults={"max_restarts": 0}), [MOVE]).job
    failed = play(job, [crashed(job, "ValueError: x")]).job
    assert (failed.state, failed.stop) == (JobState.FAILED, None)


def test_a_job_that_was_done_before_its_move_took_effect_succeeds() -> None:
    job = play(running(), [MOVE]).job
    assert play(job, [*saved(job, STEPS), finished(job)]).job.state is JobState.SUCCEEDED
