"""From REST to a trained, checkpointed and resumed model, and through what may go wrong."""

import asyncio
import json
from hashlib import sha256
from pathlib import Path

import pytest

from services.cli.errors import RefusedError
from services.contract.api.queue import DrainRequest
from services.contract.api.views import JobView, ResumeRequest, StopRequest
from services.contract.storage.commit_chain import CommitChain
from services.contract.words.states import (
    CheckpointState,
    ExitReason,
    JobState,
    NodeState,
)
from services.controller.adapters.redis import redis_ports
from tests.controller.replays import replay_all
from tests.e2e.conftest import LONG, Stack
from tests.waiting import until

pytestmark = [pytest.mark.ranks, pytest.mark.redis]


@pytest.fixture(scope="module")
def undisturbed(stack: Stack) -> dict[int, float | None]:
    """The losses of the long job that nobody disturbs."""
    job = stack.rested(stack.submit(**LONG).id)
    assert job.state is JobState.SUCCEEDED, job.failure
    return stack.losses(job.id)


def test_a_job_is_trained_checkpointed_and_told_about(stack: Stack) -> None:
    submitted = stack.submit()
    job = stack.rested(submitted.id)
    assert job.state is JobState.SUCCEEDED, (job.reason, job.failure)
    assert job.exit_reason is ExitReason.COMPLETED
    assert job.progress.step == 40
    losses = stack.losses(job.id)
    assert sorted(losses) == list(range(1, 41))
    assert (losses[40] or 9) < (losses[1] or 0)
    assert job.evaluation is not None
    assert job.evaluation.loss is not None
    assert job.evaluation.loss > 0
    assert "bigram" in job.evaluation.baselines

    committed = {c.step: c for c in stack.client.checkpoints(job.id).items}
    assert {20, 40} <= set(committed)
    newest = committed[40]
    assert newest.state is CheckpointState.COMMITTED
    assert newest.id == job.latest_checkpoint
    folder = CommitChain(stack.home / "checkpoints", job.id).shard_folder(newest.id)
    for shard in newest.shards:
        assert sha256((folder / shard.name).read_bytes()).hexdigest() == shard.sha256

    (listing,) = (stack.home / "nodes").glob(f"*/jobs/{job.id}/attempt-1/data.sha256")
    chain = CommitChain(stack.home / "checkpoints", job.id)
    assert chain.find(newest.id).data_digest == sha256(listing.read_bytes()).hexdigest()
    json_package = sha256(Path(json.__file__).read_bytes()).hexdigest()
    assert f"{json_package}  json/__init__.py" in listing.read_text().splitlines()

    kinds = [event.kind for event in stack.client.events(job.id).items]
    assert kinds[0] == "job.queued"
    assert any(kind.startswith("checkpoint.") for kind in kinds)


def test_a_paused_job_resumes_with_exactly_the_losses_of_an_undisturbed_one(
    stack: Stack, undisturbed: dict[int, float | None]
) -> None:
    job_id = stack.submit(**LONG).id
    stack.at_step(job_id, 10)
    stack.client.pause(job_id, StopRequest(checkpoint="required"))
    paused = stack.rested(job_id)
    assert paused.state is JobState.PAUSED, (paused.reason, paused.failure)
    assert paused.latest_checkpoint is not None
    stack.client.resume(job_id, ResumeRequest())
    done = until(lambda: _in_state(stack, job_id, JobState.SUCCEEDED), timeout_s=120)
    assert done.attempt == 2
    assert stack.losses(job_id) == undisturbed
    attempts = stack.client.attempts(job_id).items
    assert attempts[1].resumed_from == paused.latest_checkpoint
    assert attempts[1].first_step == paused.progress.step + 1


def test_a_job_makes_room_and_leaves_a_drained_node_without_losing_or_paying_anything(
    stack: Stack, undisturbed: dict[int, float | None]
) -> None:
    job_id = stack.submit(**LONG, faults={"max_restarts": 0}).id
    stack.at_step(job_id, 7)
    urgent = stack.submit(resources={"ranks": 4, "device": "cpu"}, priority=5)
    assert stack.rested(urgent.id).state is JobState.SUCCEEDED
    (node,) = stack.client.nodes().items
    # Its second attempt has begun, and has most of its steps before it.
    until(lambda: _first_step_of(stack, job_id, 2))
    assert stack.client.drain(node.id, DrainRequest()).state is NodeState.DRAINING
    until(lambda: stack.job(job_id).state is JobState.RESTARTING)

    def waits_for_the_node() -> bool:
        told = [(entry.job_id, "draining" in entry.reason) for entry in stack.client.queue().items]
        return told == [(job_id, True)]

    until(waits_for_the_node)
    assert stack.client.undrain(node.id).state is NodeState.READY
    done = stack.rested(job_id)
    assert (done.state, done.restarts) == (JobState.SUCCEEDED, 0)
    first, second, third = stack.client.attempts(job_id).items
    assert (first.exit_reason, first.lost_steps) == (ExitReason.PREEMPTED, 0)
    assert (second.exit_reason, second.lost_steps) == (ExitReason.NODE_DRAINED, 0)
    assert third.exit_reason is ExitReason.COMPLETED
    assert stack.losses(job_id) == undisturbed


def test_a_cancelled_job_can_be_brought_back(
    stack: Stack, undisturbed: dict[int, float | None]
) -> None:
    job_id = stack.submit(**LONG).id
    stack.at_step(job_id, 4)
    stack.client.cancel(job_id, StopRequest())
    assert stack.rested(job_id).state is JobState.CANCELLED
    stack.client.resume(job_id, ResumeRequest())
    until(lambda: _in_state(stack, job_id, JobState.SUCCEEDED), timeout_s=120)
    assert stack.losses(job_id) == undisturbed


def test_a_crash_in_the_users_model_ends_as_failed_with_its_traceback(stack: Stack) -> None:
    job = stack.submit(model={"factory": "crashing_models:RaisesInForward"})
    failed = stack.rested(job.id)
    assert failed.state is JobState.FAILED
    assert failed.exit_reason is ExitReason.USER_ERROR
    assert failed.failure is not None
    assert failed.failure.rank == 1
    assert "wrong in its own way" in (failed.failure.error or "")
    assert "crashing_models.py" in (failed.failure.traceback or "")


def test_a_job_that_can_never_fit_is_refused_and_one_that_cannot_now_waits(stack: Stack) -> None:
    with pytest.raises(RefusedError, match="5"):
        stack.submit(resources={"ranks": 5, "device": "cpu"}, train={"steps": 1, "global_batch": 5})
    large = {"resources": {"ranks": 4, "device": "cpu"}}
    endless = {**LONG, "train": {"steps": 1_000_000, "global_batch": 4, "seed": 7}}
    running = stack.submit(**endless, **large)
    stack.at_step(running.id, 1)
    waiting = stack.submit(**large)
    held = until(lambda: _with_reason(stack, waiting.id))
    assert held.state is JobState.QUEUED
    stack.client.kill(running.id)
    assert stack.rested(running.id).exit_reason is ExitReason.KILLED
    assert stack.rested(waiting.id).state is JobState.SUCCEEDED


def test_ranks_write_logs_that_the_api_shows(stack: Stack) -> None:
    job = stack.rested(stack.submit().id)
    texts = [line.text for line in stack.client.logs(job.id, rank=0)]
    assert texts
    log_folders = list(Path(stack.home / "nodes").glob(f"*/jobs/{job.id}/attempt-*"))
    assert log_folders


def _in_state(stack: Stack, job_id: str, state: JobState) -> JobView | None:
    job = stack.job(job_id)
    assert job.state is not JobState.FAILED, job.failure
    return job if job.state is state else None


def _first_step_of(stack: Stack, job_id: str, fence: int) -> int | None:
    attempts = {attempt.fence: attempt for attempt in stack.client.attempts(job_id).items}
    return attempts[fence].first_step if fence in attempts else None


def _with_reason(stack: Stack, job_id: str) -> JobView | None:
    job = stack.job(job_id)
    return job if job.reason and "slot" in job.reason else None


def test_the_history_of_every_run_so_far_makes_its_record_again(stack: Stack) -> None:
    url = stack.part("services.controller").environ()["MESHLOOM_REDIS_URL"]

    async def replay() -> int:
        async with redis_ports(url) as ports:
            return len(await replay_all(ports))

    assert asyncio.run(replay()) >= 1
