"""A state of a node that may pass, such as a full disk: the job waits, at no cost of its budget."""

import pytest

from services.contract.api.views import StopRequest
from services.contract.messages.commands import CommitCheckpoint
from services.contract.messages.facts import (
    CheckpointLost,
    CheckpointWaits,
    ExitStanding,
    GangEnded,
    LaunchRefused,
)
from services.contract.words.ids import checkpoint_id
from services.contract.words.states import CheckpointState, ExitReason, JobState
from services.controller.domain.decisions.attempt_events import RESENT_MOST
from services.controller.domain.decisions.retry import BACKOFF_MS, CONDITION_MS
from services.controller.domain.job.events import AnswerOverdue, KillAsked, PauseAsked
from services.controller.domain.job.job import Job
from tests.controller.histories import (
    NODE,
    NOW,
    STEPS,
    began,
    commands,
    finished,
    killed,
    launched,
    linked,
    new_job,
    placed,
    play,
    progressed,
    running,
    vote,
    votes,
)

FULL = f"the checkpoint disk of {NODE} is full"
ERROR = "[Errno 28] No space left on device"
GRACE_S = 30.0


def refused(job: Job, fence: int) -> LaunchRefused:
    return LaunchRefused(job_id=job.id, fence=fence, node_id=NODE, reason=ERROR, condition=FULL)


def waits(job: Job, step: int) -> CheckpointWaits:
    name = checkpoint_id(job.id, step, 1)
    return CheckpointWaits(
        job_id=job.id, fence=1, node_id=NODE, checkpoint_id=name, step=step, condition=FULL
    )


def not_linked(job: Job, step: int) -> CheckpointLost:
    name = checkpoint_id(job.id, step, 1)
    return CheckpointLost(
        job_id=job.id, fence=1, node_id=NODE, checkpoint_id=name, reason=ERROR, condition=FULL
    )


def victims(job: Job, step: int) -> GangEnded:
    """The agent killed them when the grace was over."""
    end = killed(job, step=step)
    exits = [each.model_copy(update={"standing": ExitStanding.VICTIM}) for each in end.exits]
    return end.model_copy(update={"exits": tuple(exits)})


def test_a_launch_that_a_full_disk_prevents_is_tried_again_at_no_cost_until_there_is_room() -> None:
    job = new_job(faults={"max_restarts": 1})
    seen = []
    for fence in range(1, 8):
        job = play(job, [placed(job), refused(job, fence)]).job
        assert (job.state, job.restarts) == (JobState.RESTARTING, 0)
        seen.append(job.not_before_ms - NOW)
    assert seen == [*CONDITION_MS, CONDITION_MS[-1], CONDITION_MS[-1]]
    assert job.reason == (
        f"{FULL}: the job waits and tries again in 30 s; this restart is not counted"
    )
    diagnosis = job.attempts[-1].diagnosis
    assert diagnosis is not None
    assert "free space" in diagnosis.advice
    # A rank that is killed afterwards costs one restart, and does not wait for what has passed.
    job = play(job, [placed(job), launched(job, 8), progressed(job, 1, 8), killed(job, 8)]).job
    assert (job.state, job.restarts) == (JobState.RESTARTING, 1)
    assert job.not_before_ms - NOW == BACKOFF_MS[0]


def test_a_job_at_its_end_waits_for_room_and_succeeds() -> None:
    job = running()
    job = play(job, [began(job, STEPS), vote(job, STEPS, 0)]).job
    waiting = play(job, [waits(job, STEPS), waits(job, STEPS)])
    assert (waiting.job.state, [note.kind for note in waiting.notes]) == (
        JobState.RUNNING,
        ["checkpoint.waits"],
    )
    assert str(waiting.job.reason).startswith(FULL)
    job = play(waiting.job, [vote(job, STEPS, 1), finished(job)]).job
    assert FULL not in str(job.reason)
    job = play(job, [linked(job, STEPS)]).job
    assert job.state is JobState.SUCCEEDED


def test_the_commit_of_the_last_checkpoint_is_commanded_again_until_there_is_room() -> None:
    job = running()
    job = play(job, [began(job, STEPS), *votes(job, STEPS), not_linked(job, STEPS)]).job
    job = play(job, [finished(job)]).job
    assert (job.state, job.restarts) == (JobState.RUNNING, 0)
    assert str(job.reason).startswith(FULL)
    (again,) = commands(play(job, [AnswerOverdue()]))
    assert isinstance(again, CommitCheckpoint)
    assert play(job, [KillAsked()]).job.state is JobState.CANCELLED
    assert play(job, [linked(job, STEPS)]).job.state is JobState.SUCCEEDED


def test_a_commit_within_a_run_is_commanded_again_for_as_long_as_it_takes() -> None:
    """Longer than an agent that gives no answer is waited for."""
    job = running()
    job = play(job, [began(job, 10), *votes(job, 10)]).job
    for _ in range(RESENT_MOST + 5):
        job = play(job, [not_linked(job, 10)]).job
        assert str(job.reason).startswith(FULL)
        asked = play(job, [AnswerOverdue()])
        assert [type(each) for each in commands(asked)] == [CommitCheckpoint]
        job = asked.job
    done = play(job, [linked(job, 10)]).job
    assert done.latest_checkpoint is not None
    assert (done.state, done.attempts[-1].condition) == (JobState.RUNNING, None)
    assert FULL not in str(done.reason)


def test_a_checkpoint_whose_place_a_later_one_has_taken_is_given_up_on_a_full_disk() -> None:
    job = running()
    job = play(job, [began(job, 10), *votes(job, 10), not_linked(job, 10)]).job
    job = play(job, [began(job, 20), *votes(job, 20), not_linked(job, 20), not_linked(job, 10)]).job
    states = {each.step: each.state for each in job.checkpoints.values()}
    assert states == {10: CheckpointState.ABORTED, 20: CheckpointState.SEALED}
    # Its agent may learn later that it was linked all the same.
    job = play(job, [linked(job, 10), linked(job, 20)]).job
    assert {each.state for each in job.checkpoints.values()} == {CheckpointState.COMMITTED}
    assert job.latest_checkpoint is not None
    assert job.latest_checkpoint.step == 20


@pytest.mark.parametrize("kind", ["required", "best_effort"])
def test_a_pause_waits_for_room_within_its_grace_and_costs_no_restart(kind: str) -> None:
    job = running(faults={"max_restarts": 0})
    asked = StopRequest.model_validate({"checkpoint": kind, "grace_s": GRACE_S})
    job = play(job, [PauseAsked(asked), began(job, 20), waits(job, 20)]).job
    assert job.state is JobState.PAUSING
    assert str(job.reason).startswith(FULL)
    job = play(job, [victims(job, 20)], NOW + int(GRACE_S * 1000)).job
    assert job.restarts == 0
    if kind == "best_effort":
        assert job.state is JobState.PAUSED
    else:  # whoever requires a checkpoint prefers that the job goes on
        assert job.state is JobState.RESTARTING
        assert job.attempts[-1].exit_reason is ExitReason.CHECKPOINT_FAILED


def test_a_commit_that_a_pause_waits_for_is_given_up_when_its_grace_is_over() -> None:
    job = running()
    job = play(job, [PauseAsked(StopRequest(grace_s=GRACE_S)), *votes(job, 20)]).job
    job = play(job, [finished(job, step=20, drained=True), not_linked(job, 20)]).job
    assert job.state is JobState.PAUSING
    assert str(job.reason).startswith(FULL)
    job = play(job, [not_linked(job, 20)], NOW + int(GRACE_S * 1000)).job
    assert job.state is JobState.PAUSED
    assert "what is saved ends at step 0" in str(job.reason)
