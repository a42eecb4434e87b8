"""The active jobs in a controller's memory: true whoever writes, and read again only where they changed."""

import asyncio
import dataclasses
import math
import os
import random
import threading
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
from redis import Redis

from services.contract.api.views import StopRequest
from services.contract.messages.facts import NodeJoined
from services.contract.messages.telemetry import StepRecord
from services.contract.redis import redis_keys as keys
from services.contract.system import long_work
from services.contract.words.ids import new_job_id
from services.contract.words.states import JobState
from services.controller.adapters.redis import redis_ports, telemetry, working_set
from services.controller.adapters.redis.connection import answering, connected
from services.controller.adapters.redis.jobs import RedisJobs
from services.controller.domain.decisions.dispatch import first_decision
from services.controller.domain.decisions.history import Occurrence
from services.controller.domain.errors import (
    DeposedError,
    StateConflictError,
    StoreUnavailableError,
)
from services.controller.domain.job.effects import Decision
from services.controller.domain.job.events import JobEvent, KillAsked, PauseAsked, ResumeAsked
from services.controller.domain.job.job import Job
from services.controller.domain.scheduling import survey
from services.controller.domain.scheduling.placement import NodeUsage
from services.controller.domain.scheduling.queue import Schedule, schedule
from services.controller.ports.coordination import Ports
from services.controller.ports.jobs import Actor, Change, Stored
from services.controller.ports.machines import FactEntry
from services.controller.use_cases.change import apply_events
from services.controller.use_cases.facts import apply_facts
from services.controller.use_cases.jobs import get_job
from services.controller.use_cases.queue import get_queue
from services.controller.use_cases.reconcile import Reconciler
from tests.controller.histories import node, play, spec

pytestmark = [pytest.mark.anyio, pytest.mark.redis]
ACTOR = Actor("test")
PAUSE, RESUME = PauseAsked(StopRequest()), ResumeAsked()


@dataclass
class Pair:
    """Two controllers on one Redis: ``here`` looks, ``there`` writes."""

    here: Ports
    there: Ports
    redis: Redis

    async def seen(self) -> dict[str, Stored]:
        return {stored.job.id: stored for stored in await self.here.jobs.active()}

    async def keep(self, number: int = 0) -> str:
        stored = await self.there.jobs.create(first_decision(_job(number)), ACTOR, None)
        return stored.job.id

    async def happen(self, job_id: str, event: JobEvent) -> Stored:
        return await apply_events(self.there, job_id, [Occurrence(event, 10)], ACTOR)

    def records_read(self) -> int:
        """How many records of jobs Redis was asked for: each with its checkpoints."""
        return self.calls("hgetall")

    def calls(self, command: str) -> int:
        """How often Redis was asked this."""
        stats = self.redis.info("commandstats").get(f"cmdstat_{command}", {})
        return int(stats.get("calls", 0))


def _job(number: int) -> Job:
    made_ms = 5 + number
    job_id = new_job_id(made_ms, os.urandom(10))
    return Job(id=job_id, spec=spec(), created_ms=made_ms, updated_ms=made_ms)


@pytest.fixture
async def pair(redis_url: str, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Pair]:
    """Here nothing is known but by the stream: versions are never compared."""
    monkeypatch.setattr(working_set, "_FEW", -1)
    with Redis.from_url(redis_url, decode_responses=True) as redis:
        async with (
            connected(redis_url) as clients,
            redis_ports(redis_url) as ports,
            redis_ports(redis_url) as there,
        ):
            jobs = RedisJobs(clients, compared_every_s=math.inf)
            yield Pair(dataclasses.replace(ports, jobs=jobs), there, redis)


async def test_what_another_controller_writes_is_seen_at_once(pair: Pair) -> None:
    assert await pair.seen() == {}
    job_id = await pair.keep()
    assert (await pair.seen())[job_id].version == 1
    paused = await pair.happen(job_id, PAUSE)
    assert paused.job.state is JobState.PAUSED
    assert await pair.seen() == {}
    await pair.happen(job_id, RESUME)
    assert (await pair.seen())[job_id] == await pair.there.jobs.load(job_id)
    await pair.happen(job_id, KillAsked())
    assert await pair.seen() == {}
    other = await pair.keep(1)
    assert list(await pair.seen()) == [other]
    await pair.there.jobs.delete(await pair.there.jobs.load(other))
    assert await pair.seen() == {}


async def test_a_look_reads_those_jobs_alone_that_changed(pair: Pair) -> None:
    names = [await pair.keep(number) for number in range(20)]
    assert sorted(await pair.seen()) == sorted(names)
    before = pair.records_read()
    for _ in range(3):
        await pair.seen()
    assert pair.records_read() == before
    changed = await pair.happen(names[3], PAUSE)
    await pair.happen(names[3], RESUME)
    read = pair.records_read()  # the writer read them, too
    assert (await pair.seen())[names[3]].version == changed.version + 1
    assert pair.records_read() == read + 1


async def test_a_node_that_joins_is_read_without_the_others(pair: Pair) -> None:
    epoch = await pair.there.leadership.take("leader")
    assert epoch is not None
    for number in range(5):
        await pair.there.nodes.put(node(f"n{number}"), epoch, None)
    joins = [
        NodeJoined(node_id=name, incarnation="life-2", number=1, inventory=node().inventory)
        for name in ("n1", "new")
    ]
    entries = [
        FactEntry(f"1-{number}", join.model_dump_json(), join.node_id)
        for number, join in enumerate(joins, 1)
    ]
    before = pair.calls("hgetall")
    await apply_facts(pair.there, entries, epoch)
    assert pair.calls("hgetall") == before
    found = {node.id: node.incarnation for node in await pair.there.nodes.nodes()}
    assert found == dict.fromkeys(("n0", "n2", "n3", "n4"), "life-1") | {
        "n1": "life-2",
        "new": "life-2",
    }


async def test_ones_own_commit_is_known_without_reading_it(pair: Pair) -> None:
    job_id = await pair.keep()
    before = (await pair.seen())[job_id]
    changed = before.job.model_copy(update={"reason": "another"})
    after = await pair.here.jobs.commit(Change(before, Decision(changed), ACTOR))
    read = pair.records_read()
    assert await pair.seen() == {job_id: after}
    assert pair.records_read() == read
    assert await pair.there.jobs.load(job_id) == after


@pytest.mark.parametrize("how", ["trimmed", "deleted", "retyped"])
async def test_a_change_that_was_missed_is_found(pair: Pair, how: str) -> None:
    names = [await pair.keep(number) for number in range(3)]
    await pair.seen()
    await pair.happen(names[0], KillAsked())
    await pair.happen(names[1], PAUSE)
    await pair.happen(names[1], RESUME)
    if how == "trimmed":
        pair.redis.xtrim(keys.CHANGED_JOBS, maxlen=1, approximate=False)
    else:
        pair.redis.delete(keys.CHANGED_JOBS)
    if how == "retyped":
        pair.redis.set(keys.CHANGED_JOBS, "of another type")
        await pair.happen(names[2], KillAsked())  # which it does not keep from being written
    seen = await pair.seen()
    assert seen == {s.job.id: s for s in await pair.there.jobs.active()}
    assert names[0] not in seen
    assert seen[names[1]].version == 3


async def test_a_redis_that_lost_everything_is_noticed(pair: Pair) -> None:
    await pair.keep()
    kept = _job(1)
    stored = await pair.there.jobs.create(first_decision(kept), ACTOR, None)
    assert len(await pair.seen()) == 2
    pair.redis.flushall()
    assert await pair.seen() == {}
    # The same id and the same version, but another record.
    other = kept.model_copy(update={"reason": "found again"})
    assert await pair.there.jobs.create(first_decision(other), ACTOR, None) != stored
    assert (await pair.seen())[kept.id].job.reason == "found again"


async def test_a_write_by_a_controller_that_tells_no_changes_is_found(redis_url: str) -> None:
    async with connected(redis_url) as clients, redis_ports(redis_url) as there:
        here = RedisJobs(clients, compared_every_s=0.0)
        ended, goes_on = (_job(number) for number in range(2))
        for job in (ended, goes_on):
            await there.jobs.create(first_decision(job), ACTOR, None)
        await there.jobs.index()
        assert len(await here.active()) == 2
        with Redis.from_url(redis_url, decode_responses=True) as redis:
            # As the scripts of the last release wrote them.
            done = play(ended, [KillAsked()]).job
            _as_before(redis, done, active=False)
            _as_before(redis, goes_on.model_copy(update={"reason": "another"}), active=True)
        (seen,) = await here.active()
        assert (seen.job.id, seen.job.reason, seen.version) == (goes_on.id, "another", 2)
        assert (await there.jobs.counts())[JobState.CANCELLED] == 1


async def test_jobs_that_are_written_while_all_are_compared_do_not_have_all_asked_for(
    redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Thousands wait and somebody submits: each comparison meets a new one."""
    monkeypatch.setattr(working_set, "_FEW", -1)
    with Redis.from_url(redis_url, decode_responses=True) as redis:
        async with connected(redis_url) as clients, redis_ports(redis_url) as there:
            here = RedisJobs(clients, compared_every_s=0.0)
            pair = Pair(dataclasses.replace(there, jobs=here), there, redis)
            names = [await pair.keep(number) for number in range(150)]
            assert sorted(await pair.seen()) == sorted(names)
            jobs = here._active
            compare, ask = jobs._digest, jobs._stamps_of
            asked_for: list[str] = []

            async def compare_late(**asked: Any) -> Any:  # noqa: ANN401 passed through
                names.append(await pair.keep(len(names)))
                return await compare(**asked)

            async def ask_noted(names: Sequence[str]) -> dict[str, str]:
                asked_for.extend(names)
                return await ask(names)

            monkeypatch.setattr(jobs, "_digest", compare_late)
            monkeypatch.setattr(jobs, "_stamps_of", ask_noted)
            read = pair.records_read()
            assert set(names[:150]) <= (await pair.seen()).keys()
            monkeypatch.undo()
            later = set(names[150:])
            assert later >= set(asked_for)
            assert 0 < pair.records_read() - read <= len(later)
            assert sorted(await pair.seen()) == sorted(names)


async def test_a_redis_that_takes_no_writes_hides_no_active_jobs(redis_url: str) -> None:
    async with connected(redis_url) as clients, redis_ports(redis_url) as there:
        here = RedisJobs(clients, compared_every_s=0.0)
        job = _job(0)
        await there.jobs.create(first_decision(job), ACTOR, None)
        await there.jobs.index()
        assert len(await here.active()) == 1
        with Redis.from_url(redis_url, decode_responses=True) as redis:
            _as_before(redis, play(job, [KillAsked()]).job, active=False)
            redis.config_set("min-replicas-to-write", 1)
            try:
                assert await here.active() == []
            finally:
                redis.config_set("min-replicas-to-write", 0)
        assert await here.active() == []
        assert (await there.jobs.counts())[JobState.CANCELLED] == 1


async def test_jobs_that_many_write_at_once_are_seen_as_they_are(pair: Pair) -> None:
    chance = random.Random(7)  # noqa: S311 no secret
    names = [await pair.keep(number) for number in range(8)]
    events: list[JobEvent] = [PAUSE, RESUME, PAUSE, RESUME, KillAsked()]

    async def write(ports: Ports) -> None:
        for _ in range(25):
            event: JobEvent = chance.choice(events)
            try:
                await apply_events(ports, chance.choice(names), [Occurrence(event, 10)], ACTOR)
            except StateConflictError:
                continue  # not in the state that the job is in

    async def look() -> None:
        for _ in range(60):
            await pair.seen()

    await asyncio.gather(write(pair.here), write(pair.there), write(pair.there), look())
    seen = await pair.seen()
    active = pair.redis.smembers(keys.ACTIVE_JOBS)
    assert seen.keys() == active
    for name in names:
        if name in seen:
            assert seen[name] == await pair.there.jobs.load(name)


async def test_the_next_leader_acts_on_what_came_under_the_last_one(pair: Pair) -> None:
    first = await pair.here.leadership.take("here")
    assert first is not None
    last = Reconciler(pair.here, first)
    await last.look()
    job_id = await pair.keep()
    assert job_id in await pair.seen()
    pair.redis.delete(keys.LEADER)
    second = await pair.there.leadership.take("there")
    assert second is not None
    await pair.there.nodes.put(node(), second, None)
    pair.redis.set(keys.node_lease(node().id), "life-1", px=60_000)
    await Reconciler(pair.there, second).look()
    assert (await pair.seen())[job_id].job.state is JobState.PLACING
    other = await pair.keep(1)
    with pytest.raises(DeposedError):
        await last.look()
    assert (await pair.there.jobs.load(other)).job.state is JobState.QUEUED


async def test_a_look_goes_through_the_queue_only_when_something_changed(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(survey, "KEPT_MS", 10**9)
    monkeypatch.setattr(telemetry, "_RECENT_S", 0.0)
    epoch = await pair.here.leadership.take("here")
    assert epoch is not None
    await pair.here.nodes.put(node(slots=2), epoch, None)
    pair.redis.set(keys.node_lease(node().id), "life-1", px=600_000)
    runs, waits = await pair.keep(), await pair.keep(1)
    reconciler = Reconciler(pair.here, epoch)
    for _ in range(3):
        await reconciler.look()
    seen = await pair.seen()
    assert [seen[name].job.state for name in (runs, waits)] == [JobState.PLACING, JobState.QUEUED]

    async def steps_read() -> int:
        """The speed of jobs that run is read where the queue is gone through."""
        before = pair.calls("xrevrange")
        await reconciler.look()
        return pair.calls("xrevrange") - before

    assert await steps_read() == 0
    await pair.keep(2)
    assert await steps_read() == 1
    assert await steps_read() == 0
    pair.redis.delete(keys.node_lease(node().id))
    assert await steps_read() == 1
    await pair.happen(runs, KillAsked())
    assert await steps_read() == 1


async def test_requests_that_come_at_once_have_the_queue_gone_through_once_beside_the_event_loop(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loop also renews the lead: thousands of jobs that wait for a hundred nodes take a while."""
    loop, began, goes_on = asyncio.get_running_loop(), asyncio.Event(), threading.Event()
    threads: list[int] = []

    def long(
        jobs: Sequence[Job],
        usages: Sequence[NodeUsage],
        remaining_ms: Mapping[str, int],
        now_ms: int,
    ) -> Schedule:
        threads.append(threading.get_ident())
        loop.call_soon_threadsafe(began.set)
        assert goes_on.wait(30), "the event loop waits for the survey"
        return schedule(jobs, usages, remaining_ms, now_ms)

    epoch = await pair.here.leadership.take("here")
    assert epoch is not None
    await pair.here.nodes.put(node(slots=2), epoch, None)
    names = [await pair.keep(number) for number in range(70)]
    await pair.seen()
    monkeypatch.setattr(survey, "schedule", long)
    asked = [asyncio.create_task(get_job(pair.here, name)) for name in names[:4]]
    asked_queue = asyncio.create_task(get_queue(pair.here))
    await began.wait()
    goes_on.set()
    reasons = [view.reason for view in await asyncio.gather(*asked)]
    shown = [entry.reason for entry in (await asked_queue).items]
    assert shown[:4] == reasons
    assert all(reason and "lost or silent: " in reason for reason in reasons), reasons
    assert len(threads) == 1
    assert threads != [threading.get_ident()]


async def test_estimates_made_at_once_read_a_jobs_steps_from_redis_once(pair: Pair) -> None:
    names = [_job(0).id, _job(1).id]
    step = StepRecord(step=1, fence=1, loss=1.0, tokens_per_s=1, step_time_s=1)
    pair.redis.xadd(keys.job_steps(names[0]), {keys.MESSAGE_FIELD: step.model_dump_json()})
    read = pair.here.telemetry.recent_steps
    assert await read(names[:1], 8) == {names[0]: [step]}
    before = pair.calls("xrevrange")
    assert await read(names, 8) == {names[0]: [step], names[1]: []}
    assert await read(names, 8) == {names[0]: [step], names[1]: []}
    assert pair.calls("xrevrange") - before == 1
    assert await pair.here.telemetry.last_steps(names[:1], 8) == {names[0]: [step]}
    assert pair.calls("xrevrange") - before == 2


def _as_before(redis: Redis, job: Job, *, active: bool) -> None:
    redis.hincrby(keys.job(job.id), "version", 1)
    redis.hset(
        keys.job(job.id),
        mapping={"doc": job.model_dump_json(), "fence": job.fence, "state": job.state},
    )
    if not active:
        redis.srem(keys.ACTIVE_JOBS, job.id)


async def test_a_look_that_is_cancelled_wherever_it_is_leaves_out_nothing_of_the_next(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Others have their turn after each record, so that there is a place to be cancelled at.
    monkeypatch.setattr(long_work, "_TURN_S", -1.0)
    names = {await pair.keep(number) for number in range(3)}
    await pair.seen()
    steps = 0
    is_done = False
    while not is_done:
        names |= {await pair.keep(10 + 2 * steps), await pair.keep(11 + 2 * steps)}
        looking = asyncio.create_task(pair.here.jobs.active())
        for _ in range(steps):
            await asyncio.sleep(0)
        is_done = not looking.cancel()
        await asyncio.wait([looking])
        assert set(await pair.seen()) == names
        steps += 1
    assert steps > 5


@pytest.mark.parametrize("transaction", [True, False])
async def test_what_redis_refuses_within_a_pipeline_is_told_as_that(
    redis_url: str, *, transaction: bool
) -> None:
    async with connected(redis_url) as clients:

        async def write() -> None:
            with answering():
                async with clients.writes.pipeline(transaction=transaction) as pipe:
                    pipe.set("ml:test", "1")
                    await pipe.execute()

        await clients.writes.config_set("min-replicas-to-write", 1)
        try:
            with pytest.raises(StoreUnavailableError, match="too few replicas follow it"):
                await write()
        finally:
            await clients.writes.config_set("min-replicas-to-write", 0)
