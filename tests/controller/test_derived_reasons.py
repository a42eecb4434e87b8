"""Why a job waits follows from who runs: it is worked out for whoever asks, and written nowhere."""

import asyncio

import pytest

from services.contract.redis import redis_keys as keys
from services.contract.words.states import JobState
from tests.controller.conftest import ControlPlane
from tests.controller.virtual_cluster import VirtualCluster
from tests.waiting import until


def test_one_jobs_end_writes_few_records_however_many_wait() -> None:
    async def course() -> None:
        cluster = VirtualCluster({"a": 2})
        names = [await cluster.submit(train={"steps": 8, "global_batch": 12}) for _ in range(40)]
        await cluster.seconds(3)
        assert (await cluster.job(names[0])).state is JobState.RUNNING
        before = {name: stored.version for name, stored in cluster.server.jobs.items()}
        assert [before[name] for name in names[1:]] == [1] * 39
        await cluster.seconds(6)
        ended, follows = await cluster.job(names[0]), await cluster.job(names[1])
        assert (ended.state, follows.fence) == (JobState.SUCCEEDED, 1)
        waiting = names[2:]
        assert {cluster.server.jobs[name].version for name in waiting} == {1}

    asyncio.run(course())


@pytest.mark.redis
def test_a_job_that_waits_says_who_is_in_its_way_now(plane: ControlPlane) -> None:
    plane.agent.join()
    first, second, third = (plane.submit(resources={"ranks": 4}) for _ in range(3))
    gang = plane.agent.launches(first)
    plane.agent.trains(gang, [1])
    until(lambda: first in plane.job(third)["reason"], every_s=0.01)
    written = plane.redis.hget(keys.job(third), "version")
    plane.act(first, "kill")
    plane.agent.ends(gang, 1, signal=9)
    plane.in_state(first, "CANCELLED")
    plane.agent.launches(second)
    reason = until(lambda: _reason_with(plane, third, second), every_s=0.01)
    assert first not in reason
    assert reason == _in_list(plane, third)["reason"] == _in_queue(plane, third)["reason"]
    assert plane.redis.hget(keys.job(third), "version") == written == "1"
    events = plane.get(f"/v1/jobs/{third}/events")["items"]
    assert [event["kind"] for event in events] == ["job.queued"]


@pytest.mark.redis
def test_while_nobody_can_say_who_runs_a_job_says_what_it_was_queued_with(
    quiet_plane: ControlPlane,
) -> None:
    job_id = quiet_plane.submit()
    quiet_plane.redis.set(keys.NODES, "of another type")
    assert quiet_plane.job(job_id)["reason"] == "no node has joined yet"


def _reason_with(plane: ControlPlane, job_id: str, word: str) -> str | None:
    reason = str(plane.job(job_id)["reason"])
    return reason if word in reason else None


def _in_list(plane: ControlPlane, job_id: str) -> dict[str, str]:
    return next(job for job in plane.get("/v1/jobs")["items"] if job["id"] == job_id)


def _in_queue(plane: ControlPlane, job_id: str) -> dict[str, str]:
    return next(job for job in plane.get("/v1/queue")["items"] if job["job_id"] == job_id)
