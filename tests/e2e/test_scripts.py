"""Scripts in the place of our loop, through the whole of Meshloom."""

import os
import signal

import pytest

from services.contract.api.views import JobView, ResumeRequest, StopRequest
from services.contract.words.ids import checkpoint_id
from services.contract.words.states import JobState
from tests.e2e.conftest import Stack

pytestmark = [pytest.mark.ranks, pytest.mark.redis]

STEPS = 200


def example(stack: Stack) -> JobView:
    args = ["--steps", str(STEPS), "--every", "50", "--dim", "16"]
    return stack.client.submit(
        {
            "name": "script",
            "entrypoint": {"module": "example_script", "args": args},
            "resources": {"ranks": 2, "device": "cpu"},
        }
    )


def test_a_script_that_is_paused_resumed_and_killed_has_the_losses_of_one_left_alone(
    stack: Stack,
) -> None:
    alone = stack.rested(example(stack).id)
    assert (alone.state, alone.exit_reason) == (JobState.SUCCEEDED, "completed"), alone.reason
    assert alone.reason == (
        f"example_script ended with exit code 0 on all ranks after step {STEPS}, with a checkpoint "
        f"of step {STEPS}"
    )
    assert (alone.progress.step, alone.progress.of) == (STEPS, STEPS)

    job = example(stack).id
    stack.at_step(job, 20)
    stack.client.pause(job, StopRequest())
    paused = stack.rested(job)
    assert (paused.state, paused.exit_reason) == (JobState.PAUSED, None), paused.reason
    assert paused.latest_checkpoint == checkpoint_id(job, paused.progress.step, 1)
    assert paused.progress.step < STEPS
    stack.client.resume(job, ResumeRequest())
    stack.at_step(job, paused.progress.step + 10)
    pid = stack.client.ranks(job).items[1].pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    ended = stack.rested(job)
    assert (ended.state, ended.restarts, ended.attempt) == (JobState.SUCCEEDED, 1, 3), ended.reason
    assert stack.losses(job) == stack.losses(alone.id)


def test_a_script_without_a_report_succeeds_and_the_job_says_what_it_lacks(stack: Stack) -> None:
    done = stack.rested(
        stack.client.submit(
            {
                "entrypoint": {"script": "silent_script.py"},
                "resources": {"ranks": 2, "device": "cpu"},
            }
        ).id
    )
    assert done.state is JobState.SUCCEEDED
    assert done.reason is not None
    assert done.reason.startswith(
        "silent_script.py ended with exit code 0 on all ranks without a report, "
    )
    assert (done.progress.step, done.progress.of) == (0, None)
