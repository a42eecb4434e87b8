"""Curves and output: in Redis while it has them, in storage as they come, read by the same endpoints."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest
import redis

from services.cli.errors import CliError
from services.contract.api.views import ResumeRequest, StopRequest
from services.contract.redis import redis_keys as keys
from services.contract.words.states import JobState
from services.worker.agent.storage.record_files import STEPS, read_entries, records_folder
from tests.e2e.conftest import LONG, Stack
from tests.waiting import until

pytestmark = [pytest.mark.ranks, pytest.mark.redis]

BUDGET: Final = 20 * 1024
SCRIPT: Final = {
    "train": {"steps": 1_000_000, "global_batch": 4, "seed": 7},
    "checkpoint": {"every_steps": 20, "keep_last": 2},
}


@contextlib.contextmanager
def redis_of(stack: Stack) -> Iterator["redis.Redis"]:
    url = stack.part("services.worker.agent").environ()["MESHLOOM_REDIS_URL"]
    with redis.Redis.from_url(url, decode_responses=True) as client:
        yield client


def root(stack: Stack) -> Path:
    return stack.home / "checkpoints"


def kept(client: "redis.Redis", job_id: str) -> dict[str, int]:
    """What Redis keeps of a job for longer than those who read now need it, in bytes by key."""
    names: Any = client.keys(f"{keys.job(job_id)}*")
    goes_soon = {name for name in names if 0 <= int(str(client.ttl(name))) <= keys.RECALLED_S}
    return {n: int(str(client.memory_usage(n, samples=0))) for n in set(names) - goes_soon}


def let_go(client: "redis.Redis", job_id: str) -> set[str]:
    """What goes by itself within minutes is gone; answers which keys that were."""
    names: Any = client.keys(f"{keys.job(job_id)}:*")
    gone = {name for name in names if 0 <= int(str(client.ttl(name))) <= keys.RECALLED_S}
    client.delete(*gone)
    return gone


def told(stack: Stack, job_id: str) -> dict[str, object]:
    """What people read of a job's records."""
    return {
        "metrics": stack.client.metrics(job_id, max_points=10_000),
        "logs": list(stack.client.logs(job_id)),
        "events": stack.client.events(job_id, limit=1000),
        "job": stack.job(job_id).progress,
    }


def closed(stack: Stack, client: "redis.Redis", job_id: str) -> None:
    until(lambda: client.exists(keys.job_last(job_id)))
    # What may go is told a moment later.
    until(lambda: client.ttl(keys.job_records(job_id)) >= 0)
    assert {p.name for p in records_folder(root(stack), job_id).iterdir()} >= {
        "steps.jsonl.gz",
        "events.jsonl.gz",
    }


def test_an_ended_job_takes_20_kilobytes_and_is_told_as_before_from_storage(stack: Stack) -> None:
    job_id = stack.submit(
        train={"steps": 400, "global_batch": 4, "seed": 7},
        checkpoint={"every_steps": 20},
    ).id
    assert stack.rested(job_id).state is JobState.SUCCEEDED
    # Each checkpoint that is not kept is an event more, the last one's after the end.
    until(lambda: len(stack.client.checkpoints(job_id).items) == 2)
    with redis_of(stack) as client:
        closed(stack, client, job_id)
        before = told(stack, job_id)
        assert len(stack.losses(job_id)) == 400
        assert sum(kept(client, job_id).values()) <= BUDGET, kept(client, job_id)

        gone = let_go(client, job_id)
        assert {keys.job_steps(job_id), keys.job_logs(job_id), keys.job_records(job_id)} <= gone
        assert stack.job(job_id).progress == before["job"]
        assert told(stack, job_id) == before
        # What was brought back goes again by itself.
        assert sum(kept(client, job_id).values()) <= BUDGET, kept(client, job_id)
        let_go(client, job_id)
        assert stack.client.events(job_id, limit=1000) == before["events"]

    assert stack.client.delete(job_id)
    until(lambda: not records_folder(root(stack), job_id).exists(), timeout_s=90)
    with pytest.raises(CliError, match="no job"):
        stack.client.metrics(job_id)


def test_a_wiped_redis_costs_a_curve_what_was_not_in_storage_yet(stack: Stack) -> None:
    job_id = stack.submit(**{**LONG, **SCRIPT}).id
    stack.at_step(job_id, 30)
    # Two attempts, of which the second does steps again.
    stack.client.pause(job_id, StopRequest(checkpoint="none"))
    stack.rested(job_id)
    stack.client.resume(job_id, ResumeRequest())
    stack.at_step(job_id, 60)

    before = stack.client.metrics(job_id, max_points=10_000)
    newest = max(view.step for view in before.items)
    # The first attempt may have gone further than the second one has by now.
    shown = {(view.step, view.fence) for view in before.items}
    until(lambda: shown <= _steps_in_storage(stack, job_id))
    with redis_of(stack) as client:
        client.flushall()
        assert not client.exists(keys.job_steps(job_id))

    until(lambda: _state(stack, job_id) is JobState.RUNNING, timeout_s=120)
    until(lambda: max(stack.losses(job_id), default=0) > newest + 20)
    after = stack.client.metrics(job_id, max_points=10_000)
    steps = [view.step for view in after.items]
    assert len(steps) == len(set(steps))
    known = {view.step: view for view in after.items}
    assert [known.get(view.step) for view in before.items] == list(before.items)
    stack.client.kill(job_id)
    stack.rested(job_id)


def _state(stack: Stack, job_id: str) -> JobState | None:
    try:
        return stack.job(job_id).state
    except CliError:
        return None


def _steps_in_storage(stack: Stack, job_id: str) -> set[tuple[int, int]]:
    entries = read_entries(root(stack), job_id, STEPS)
    records = [STEPS.parse(body) for body in entries.values()]
    return {(record.step, record.fence) for record in records}  # type: ignore[attr-defined] # StepRecord
