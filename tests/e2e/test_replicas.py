"""A lost replica costs a step, not a restart: SIGKILL and SIGSTOP to ranks of a running job."""

import os
import signal

import pytest

from services.contract.api.views import JobView, ReplicasView
from services.contract.words.states import JobState
from tests.e2e.conftest import REST, Stack
from tests.waiting import until

pytestmark = [pytest.mark.ranks, pytest.mark.redis]

STEPS = 150


def replicas(job: JobView) -> ReplicasView:
    found = job.replicas
    assert found is not None
    return found


def send(stack: Stack, job_id: str, rank: int, number: signal.Signals) -> None:
    pid = next(each.pid for each in stack.client.ranks(job_id).items if each.rank == rank)
    assert pid is not None
    os.kill(pid, number)


def all_present_again(stack: Stack, job_id: str, returned: int) -> JobView:
    """The job once so many replicas have come back."""

    def look() -> JobView | None:
        job = stack.job(job_id)
        assert job.state not in REST, job.reason
        now = replicas(job)
        return job if (now.returned, now.present) == (returned, now.count) else None

    return until(look)


def test_replicas_are_lost_and_return_within_one_attempt(stack: Stack) -> None:
    job = stack.submit(
        name="replicas",
        model={
            "factory": "paced_models:PacedDecoder",
            "args": {"pace_s": 0.05, "dim": 32, "layers": 2, "heads": 2},
        },
        train={"steps": STEPS, "global_batch": 6, "seed": 7},
        resources={"ranks": 3, "device": "cpu"},
        mesh={"dp_replicate": 3},
        faults={"on_replica_loss": "continue", "max_restarts": 0, "hang_timeout_s": 5},
        checkpoint={"every_steps": 0},
    )
    stack.at_step(job.id, 5)
    losses = ((0, signal.SIGKILL), (1, signal.SIGSTOP), (2, signal.SIGKILL))
    for number, (rank, sent) in enumerate(losses, start=1):
        send(stack, job.id, rank, sent)
        job = all_present_again(stack, job.id, number)
        # Nothing was saved yet: what it goes on with came from memory.
        assert stack.client.checkpoints(job.id).items == ()
        stack.at_step(job.id, job.progress.step + 5)
    done = stack.rested(job.id)
    assert (done.state, done.restarts, done.attempt) == (JobState.SUCCEEDED, 0, 1), done.reason
    assert (replicas(done).lost, replicas(done).returned) == (3, 3)
    assert sorted(stack.losses(job.id)) == list(range(1, STEPS + 1))
    kinds = [event.kind for event in stack.client.events(job.id).items]
    assert [kind for kind in kinds if kind.startswith("replica.")] == [
        "replica.lost",
        "replica.returned",
    ] * 3
