"""A command that no agent answers is sent again so often, and not for ever."""

import itertools

import pytest

from services.contract.api.views import StopRequest
from services.contract.messages.commands import RetireCheckpoint
from services.contract.words.states import ExitReason, JobState
from services.controller.domain.decisions.attempt_events import (
    ANSWER_DUE_MS,
    RESENT_MOST,
    is_overdue,
)
from services.controller.domain.decisions.dispatch import decide
from services.controller.domain.job.events import AnswerOverdue, JobEvent, KillAsked, PauseAsked
from services.controller.domain.job.job import Job
from tests.controller.histories import (
    NODE,
    NOW,
    began,
    commands,
    linked,
    new_job,
    placed,
    play,
    running,
    votes,
)


def overdue(job: Job) -> tuple[Job, int]:
    """The job once nothing is overdue any more, and how often something was."""
    now_ms = NOW
    for times in itertools.count():
        if not is_overdue(job, now_ms := now_ms + ANSWER_DUE_MS + 60_001):
            return job, times
        job = decide(job, AnswerOverdue(), now_ms).job
    raise AssertionError


@pytest.mark.parametrize(
    ("events", "state", "reason"),
    [
        ([], JobState.RESTARTING, ExitReason.NODE_LOST),
        ([KillAsked()], JobState.CANCELLED, ExitReason.KILLED),
        ([PauseAsked(StopRequest(grace_s=30))], JobState.PAUSED, ExitReason.PAUSED),
    ],
)
def test_what_no_agent_answers_is_sent_again_so_often_then_the_attempt_ends(
    events: list[JobEvent], state: JobState, reason: ExitReason
) -> None:
    job, times = overdue(play(new_job(), [placed(new_job()), *events]).job)
    assert times == RESENT_MOST + 1
    assert job.state is state
    assert job.attempts[-1].exit_reason is reason
    assert NODE in str(job.attempts[-1].lost)


def test_a_commit_that_no_agent_answers_is_given_up_and_training_goes_on() -> None:
    job = running()
    job, times = overdue(play(job, [began(job, 10), *votes(job, 10)]).job)
    assert times == RESENT_MOST + 1
    assert (job.state, job.attempts[-1].ended_ms) == (JobState.RUNNING, None)
    (given_up,) = job.checkpoints.values()
    assert given_up.state == "ABORTED"
    assert NODE in str(given_up.reason)


def test_a_deletion_of_which_nobody_tells_is_commanded_again_once_a_minute() -> None:
    job = running(checkpoint={"keep_last": 1})
    told: list[str] = []
    for number in range(120):  # a commit a second, and no agent removes any
        decision = play(job, [linked(job, number + 1, number=number + 2)], NOW + 1 + 1000 * number)
        job = decision.job
        told += [c.checkpoint_id for c in commands(decision) if isinstance(c, RetireCheckpoint)]
    assert len(set(told)) == 119
    assert max(map(told.count, told)) == 2
