"""Redis loses everything while jobs train, stand and are done: storage brings them back."""

import os
import signal
from typing import Final

import psutil
import pytest
import redis

from services.cli.errors import CliError
from services.contract.api.requests import CloneRequest
from services.contract.api.views import JobView, ResumeRequest, StopRequest
from services.contract.jobs.code_archives import pack
from services.contract.words.states import CheckpointState, JobState
from tests.e2e.conftest import LONG, Stack
from tests.waiting import until

pytestmark = [pytest.mark.ranks, pytest.mark.redis]

_MODEL: Final = """
from torch import nn

def table(width):
    return nn.Sequential(nn.Embedding(256, width), nn.Linear(width, 256))
"""
_QUICK: Final = {
    "train": {"steps": 240, "global_batch": 4, "seed": 7},
    "checkpoint": {"every_steps": 60},
}
# It rests between its steps: whoever recovers has the processor.
_ENDLESS: Final = {
    **LONG,
    "train": {"steps": 1_000_000, "global_batch": 4, "seed": 7},
    "checkpoint": {"every_steps": 20, "keep_last": 2},
}


_CODE: Final = pack([("brought.py", _MODEL.encode(), False)])


def wipe(stack: Stack) -> None:
    url = stack.part("services.worker.agent").environ()["MESHLOOM_REDIS_URL"]
    with redis.Redis.from_url(url) as client:
        client.flushall()
        assert client.keys("ml:job:*") == []


def copied(stack: Stack) -> dict[bytes, tuple[int, bytes]]:
    """All that Redis knows: of each key for how many milliseconds, 0: for ever, and what."""
    url = stack.part("services.worker.agent").environ()["MESHLOOM_REDIS_URL"]
    with redis.Redis.from_url(url) as client:
        keys = client.keys()
        with client.pipeline(transaction=True) as pipe:
            for key in keys:
                pipe.pttl(key)
                pipe.dump(key)
            told = pipe.execute()
    pairs = zip(keys, told[0::2], told[1::2], strict=True)
    return {key: (max(ttl, 0), content) for key, ttl, content in pairs if content is not None}


def put_back(stack: Stack, copy: dict[bytes, tuple[int, bytes]]) -> None:
    """As a replica does that takes the place of the server and had received no more than this."""
    url = stack.part("services.worker.agent").environ()["MESHLOOM_REDIS_URL"]
    with redis.Redis.from_url(url) as client, client.pipeline(transaction=True) as pipe:
        pipe.flushall()
        for key, (ttl, content) in copy.items():
            pipe.restore(key, ttl, content)
        pipe.execute()


def job_in(stack: Stack, job_id: str, state: JobState) -> JobView:
    """The job once it is known and in that state."""

    def look() -> JobView | None:
        try:
            job = stack.job(job_id)
        except CliError:  # not known yet
            return None
        return job if job.state is state else None

    return until(look, timeout_s=120)


def committed(stack: Stack, job_id: str) -> set[str]:
    items = stack.client.checkpoints(job_id).items
    return {c.id for c in items if c.state is CheckpointState.COMMITTED}


def pids(stack: Stack, job_id: str) -> list[int | None]:
    return [rank.pid for rank in stack.client.ranks(job_id).items]


def living(stack: Stack, job_id: str) -> list[int]:
    return until(lambda: [pid for pid in pids(stack, job_id) if pid])


def end(ranks: list[int]) -> None:
    for pid in ranks:
        os.kill(pid, signal.SIGKILL)


def assert_goes_on(stack: Stack, job_id: str, reached: int, ended: list[int]) -> None:
    """In another attempt, by itself, from what was committed."""
    # The lost ranks' attempt may be seen once more, and may have committed after the last look at it.
    resumed_from = until(lambda: _resumed_from(stack, job_id))
    resumed = stack.client.checkpoint(resumed_from).step
    assert resumed >= reached
    until(lambda: _newest_step(stack, job_id) > resumed)
    assert not set(ended) & set(pids(stack, job_id))


def _resumed_from(stack: Stack, job_id: str) -> str | None:
    """The checkpoint from which the newest attempt has begun."""
    try:
        attempts = stack.client.attempts(job_id).items
    except CliError:  # not known yet
        return None
    return attempts[-1].resumed_from if attempts else None


def assert_trains_on(stack: Stack, job_id: str, ranks: list[int]) -> None:
    """In the same attempt and the same processes, and commits."""
    training = job_in(stack, job_id, JobState.RUNNING)
    assert training.attempt == 1
    assert training.restarts == 0
    newest = {c.step for c in stack.client.checkpoints(job_id).items}
    until(lambda: _newest_step(stack, job_id) > max(newest, default=0))
    until(lambda: pids(stack, job_id) == ranks)
    assert all(psutil.pid_exists(pid) for pid in ranks)
    kinds = [event.kind for event in stack.client.events(job_id).items]
    assert kinds[0] == "job.found_again"


def test_a_wiped_redis_costs_no_committed_checkpoint_and_no_training(stack: Stack) -> None:
    done = stack.rested(stack.submit(name="done", labels={"team": "loom"}).id)
    assert done.state is JobState.SUCCEEDED, done.failure
    code, _ = stack.client.upload_code(_CODE)
    model = {"factory": "brought:table", "args": {"width": 16}}
    standing_id = stack.submit(**_QUICK, model=model, code=code.digest).id
    stack.at_step(standing_id, 20)
    stack.client.pause(standing_id, StopRequest(checkpoint="required"))
    standing = stack.rested(standing_id)
    training_id = stack.submit(**_ENDLESS).id
    struck_id = stack.submit(**_ENDLESS).id
    until(lambda: committed(stack, training_id) and committed(stack, struck_id))
    before = {job: committed(stack, job) for job in (done.id, standing_id)}
    ranks, struck = living(stack, training_id), living(stack, struck_id)
    reached = _newest_step(stack, struck_id)

    wipe(stack)
    end(struck)

    # Whoever was training trains on.
    assert_trains_on(stack, training_id, ranks)

    # Whose ranks were lost with Redis goes on by itself, from what it had committed.
    assert_goes_on(stack, struck_id, reached, struck)
    stack.client.kill(struck_id)

    # Who had ended has ended, who stood stands; both with all that they had committed.
    again = job_in(stack, done.id, JobState.SUCCEEDED)
    assert (again.name, again.labels, again.created_at) == ("done", done.labels, done.created_at)
    found = job_in(stack, standing_id, JobState.PAUSED)
    assert "found again in storage" in str(found.reason)
    assert found.latest_checkpoint == standing.latest_checkpoint
    assert {job: committed(stack, job) for job in before} == before

    # And goes on from there, in an attempt that no older one shares its number with. Its code is now in
    # its folder of the storage alone.
    (here,) = stack.home.glob("nodes/*/code")
    here.rename(stack.home / "code-that-is-gone")
    assert found.spec.code == code.digest
    with pytest.raises(CliError, match="meshloom submit FILE --code DIR"):
        stack.client.clone(standing_id, CloneRequest())
    stack.client.resume(standing_id, ResumeRequest())
    assert job_in(stack, standing_id, JobState.SUCCEEDED).attempt == 2
    (attempt,) = stack.client.attempts(standing_id).items
    assert attempt.resumed_from == standing.latest_checkpoint

    stack.client.pause(training_id, StopRequest(checkpoint="required"))
    paused = job_in(stack, training_id, JobState.PAUSED)
    latest = stack.client.checkpoint(str(paused.latest_checkpoint))
    assert latest.step == paused.progress.step
    stack.client.kill(training_id)


def test_a_job_goes_on_from_commits_that_an_older_copy_of_redis_does_not_know(stack: Stack) -> None:
    job_id = stack.submit(**_ENDLESS).id
    known = until(lambda: committed(stack, job_id))
    copy = copied(stack)
    until(lambda: known.isdisjoint(committed(stack, job_id)))
    ranks, reached = living(stack, job_id), _newest_step(stack, job_id)

    put_back(stack, copy)
    end(ranks)

    def goes_on() -> bool:
        source = _resumed_from(
            stack, job_id
        )  # of the attempt that finds the known one gone, that one
        return source is not None and stack.client.checkpoint(source).step >= reached

    until(goes_on)
    until(lambda: _newest_step(stack, job_id) > reached)
    assert stack.job(job_id).restarts == 1  # of the ranks that were killed
    stack.client.kill(job_id)


def _newest_step(stack: Stack, job_id: str) -> int:
    items = stack.client.checkpoints(job_id).items
    return max((c.step for c in items if c.state is CheckpointState.COMMITTED), default=0)
