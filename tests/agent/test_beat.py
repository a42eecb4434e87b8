"""The beat's script against a real Redis: once, fenced, and under the lease."""

import asyncio
import re
from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import Any, TypeVar

import pytest
from redis.exceptions import NoPermissionError, OutOfMemoryError

from services.contract.messages.telemetry import MetricRecord, RankSample, StepRecord
from services.contract.redis import redis_keys
from services.contract.words.ids import new_job_id
from services.worker.agent.streams.redis_clients import writing_client
from services.worker.agent.telemetry.beat import Beat, BeatAnswer
from services.worker.agent.telemetry.gang_telemetry import Records
from tests.agent.conftest import JOB, NODE, Controller

T = TypeVar("T")
GANG = (JOB, 2)
SAMPLE = RankSample(
    rank=0, local_rank=0, fence=2, node_id=NODE, device="cpu", pid=1, phase="IDLE", step=7
)
STEP = StepRecord(step=7, fence=2, loss=0.1 + 0.2, tokens_per_s=1 / 3, step_time_s=0.1)


def write(url: str, number: int, *, life: str = "one", fence: int = 2) -> BeatAnswer:
    async def beat() -> BeatAnswer:
        async with writing_client(url) as redis:
            gang = (JOB, fence)
            beat = Beat(redis, redis, NODE, life)
            answer = await beat.renew([gang])
            if not (answer.taken_by or answer.fenced or answer.unknown):
                told = [Records(JOB, fence, (STEP,), ())]
                await beat.write(number, answer.now_ms, {gang: [SAMPLE]}, told)
            return replace(answer, now_ms="")

    return run(beat())


def run(work: Coroutine[object, object, T]) -> T:
    return asyncio.run(work)


@pytest.fixture
def job(controller: Controller) -> Controller:
    controller.open_job(fence=2)
    return controller


def test_a_repeated_beat_renews_the_lease_and_writes_no_record_twice(
    job: Controller, redis_url: str
) -> None:
    assert write(redis_url, 1) == BeatAnswer(lapsed=True)
    assert write(redis_url, 1) == BeatAnswer()
    assert job.steps() == [STEP]
    write(redis_url, 2)
    write(redis_url, 1)
    assert job.steps() == [STEP, STEP]
    lease_ms = job.client.pttl(redis_keys.node_lease(NODE))
    assert 0 < lease_ms <= redis_keys.NODE_LEASE_MS


@pytest.mark.parametrize("what", ["another type", "no number"])
def test_a_job_whose_record_makes_no_sense_costs_no_other_gang_its_beat(
    controller: Controller, redis_url: str, what: str
) -> None:
    other = new_job_id(1_700_000_000_000, bytes([1] * 10))
    controller.open_job(fence=3)
    if what == "another type":
        controller.client.rpush(redis_keys.job(other), "x")
    else:
        controller.client.hset(redis_keys.job(other), "fence", "no number")

    async def beat() -> BeatAnswer:
        async with writing_client(redis_url) as redis:
            return await Beat(redis, redis, NODE, "one").renew([(other, 2), GANG, (JOB, 3)])

    assert replace(run(beat()), now_ms="") == BeatAnswer(lapsed=True, fenced=(GANG,))


def test_a_beat_tells_the_ids_of_its_records_and_tells_them_again_when_it_is_repeated(
    job: Controller, redis_url: str
) -> None:
    async def beat(number: int, count: int) -> str:
        async with writing_client(redis_url) as redis:
            steps = tuple(STEP.model_copy(update={"step": n + 1}) for n in range(count))
            told = [Records(JOB, 2, steps, ())]
            given = await Beat(redis, redis, NODE, "one").write(number, "1", {}, told)
            return given[GANG]["steps"]

    first, again, second = (run(beat(n, count)) for n, count in ((1, 2_000), (1, 2_000), (2, 1)))
    rows: Any = job.client.xrange(redis_keys.job_steps(JOB))
    assert first == again
    assert [name for name, _ in rows] == [*first.split(" "), second]


def test_the_moment_of_a_sample_is_redis_time(job: Controller, redis_url: str) -> None:
    write(redis_url, 1)
    stored = job.client.hget(redis_keys.job_ranks(JOB), "0")
    sample = RankSample.model_validate_json(str(stored))
    seconds, _ = job.client.time()
    assert abs(sample.seen_ms - seconds * 1000) < 5_000
    assert sample == SAMPLE.model_copy(update={"seen_ms": sample.seen_ms})


@pytest.mark.parametrize("fence", [1, 2])
def test_a_beat_is_told_of_a_void_attempt(job: Controller, redis_url: str, fence: int) -> None:
    job.open_job(fence=fence + 1)
    assert write(redis_url, 1, fence=fence).fenced == ((JOB, fence),)


def test_a_gang_whose_job_redis_has_lost_is_unknown_and_not_fenced(
    controller: Controller, redis_url: str
) -> None:
    answer = write(redis_url, 1)
    assert (answer.fenced, answer.unknown) == ((), (GANG,))
    controller.client.sadd(redis_keys.DELETED_JOBS, JOB)
    answer = write(redis_url, 2)
    assert (answer.fenced, answer.unknown) == ((GANG,), ())


def test_a_beat_under_the_lease_of_another_writes_nothing(job: Controller, redis_url: str) -> None:
    write(redis_url, 1, life="one")
    assert write(redis_url, 1, life="two") == BeatAnswer(taken_by="one")
    assert job.steps() == [STEP]


def test_another_life_counts_its_beats_again(job: Controller, redis_url: str) -> None:
    write(redis_url, 9, life="one")
    job.client.delete(redis_keys.node_lease(NODE))
    write(redis_url, 1, life="two")
    assert job.steps() == [STEP, STEP]


def test_a_lease_is_released_by_its_holder_alone(job: Controller, redis_url: str) -> None:
    async def release(life: str) -> None:
        async with writing_client(redis_url) as redis:
            await Beat(redis, redis, NODE, life).release()

    write(redis_url, 1)
    run(release("two"))
    assert job.client.exists(redis_keys.node_lease(NODE))
    run(release("one"))
    assert not job.client.exists(redis_keys.node_lease(NODE))


METRICS = tuple(MetricRecord(step=n, fence=2, values={"hits": n / 7}) for n in range(1, 4))


def write_metrics(url: str, *told: Records) -> None:
    async def beat() -> None:
        async with writing_client(url) as redis:
            await Beat(redis, redis, NODE, "one").write_metrics(told)

    run(beat())


def test_rules_of_redis_that_know_no_metrics_refuse_them_alone(
    job: Controller, redis_url: str
) -> None:
    of_job = (redis_keys.job, redis_keys.job_ranks, redis_keys.job_steps, redis_keys.job_logs)
    keys = [redis_keys.DELETED_JOBS, "ml:node:*", *(key(JOB) for key in of_job)]
    job.client.acl_setuser("old", enabled=True, passwords="+old", keys=keys, commands=["+@all"])
    url = re.sub("//:[^@]*@", "//old:old@", redis_url)
    assert write(url, 1) == BeatAnswer(lapsed=True)
    with pytest.raises(NoPermissionError):
        write_metrics(url, Records(JOB, 2, (), (), METRICS))
    assert job.steps() == [STEP]


def test_a_stream_to_which_nothing_can_be_added_costs_no_lease(
    job: Controller, redis_url: str
) -> None:
    last = (1 << 64) - 1
    job.client.xadd(redis_keys.job_steps(JOB), {redis_keys.MESSAGE_FIELD: "{}"}, f"{last}-{last}")
    assert write(redis_url, 1) == BeatAnswer(lapsed=True)
    assert write(redis_url, 2) == BeatAnswer()
    assert job.client.hexists(redis_keys.job_ranks(JOB), "0")


@pytest.mark.parametrize("key", [redis_keys.job_ranks, redis_keys.job_steps, redis_keys.job_logs])
def test_a_key_that_another_agent_retyped_costs_its_own_records_alone(
    job: Controller, redis_url: str, key: Callable[[str], str]
) -> None:
    job.client.set(key(JOB), "another type")
    assert write(redis_url, 1) == BeatAnswer(lapsed=True)
    written = {"ranks": redis_keys.job_ranks, "steps": redis_keys.job_steps}
    kinds = {name: job.client.type(its(JOB)) for name, its in written.items() if its is not key}
    assert kinds.items() <= {"ranks": "hash", "steps": "stream"}.items()


def test_metrics_that_redis_has_no_memory_for_are_refused_and_may_be_written_later(
    job: Controller, redis_url: str
) -> None:
    told = Records(JOB, 2, (), (), METRICS)
    job.client.config_set("maxmemory", "1")
    try:
        with pytest.raises(OutOfMemoryError):
            write_metrics(redis_url, told)
    finally:
        job.client.config_set("maxmemory", "0")
    write_metrics(redis_url, told)
    assert job.metrics() == list(METRICS)
