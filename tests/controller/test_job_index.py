"""Lists and counts from summaries and indexes: the same as from all records, and none of those is read."""

import asyncio
import json
import random
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from redis import Redis
from redis.asyncio import Redis as AsyncRedis

from services.contract.api.requests import JobPatch
from services.contract.api.views import StopRequest
from services.contract.redis import redis_keys as keys
from services.contract.words.ids import new_job_id
from services.contract.words.states import JobState
from services.controller.adapters.redis import job_index, redis_ports
from services.controller.api.guard import AccessPolicy
from services.controller.domain.decisions.dispatch import first_decision
from services.controller.domain.decisions.history import Occurrence
from services.controller.domain.errors import StateConflictError
from services.controller.domain.job.effects import Decision
from services.controller.domain.job.events import (
    JobEvent,
    KillAsked,
    PatchAsked,
    PauseAsked,
    ResumeAsked,
)
from services.controller.domain.job.job import Job
from services.controller.ports.coordination import Ports
from services.controller.ports.jobs import Actor, Change, JobSummary, Place
from services.controller.use_cases.change import apply_events
from services.controller.use_cases.event_feed import EventFilter, page_of_feed
from services.controller.use_cases.listing import JobFilter, JobOrder, page
from tests.controller.conftest import ControlPlane, open_plane
from tests.controller.histories import spec
from tests.waiting import until

pytestmark = pytest.mark.redis
OLD_RECORDS = Path(__file__).parent / "records_of_the_last_release.json"
ACTOR = Actor("test")
ORDERS: tuple[JobOrder, ...] = (
    "created",
    "-created",
    "updated",
    "-updated",
    "priority",
    "-priority",
)
FILTERS = (
    JobFilter(),
    JobFilter(states=frozenset({JobState.QUEUED})),
    JobFilter(states=frozenset({JobState.PAUSED, JobState.CANCELLED})),
    JobFilter(owner="alice"),
    JobFilter(labels=("team",)),
    JobFilter(labels=("team=a",), owner="bob"),
    JobFilter(labels=("team=b", "run=1"), states=frozenset({JobState.QUEUED})),
    JobFilter(text="RUN-1"),
)


@dataclass
class World:
    """A store that a random history is written into."""

    ports: Ports
    redis: Redis

    async def keep(self, number: int, chance: random.Random) -> str:
        labels = {"team": chance.choice("ab"), "run": str(number % 3)}
        made_ms = 5 + number // 2  # several at the same moment
        job = Job(
            id=new_job_id(made_ms, chance.randbytes(10)),
            spec=spec(name=f"run-{number}", labels=labels, priority=chance.randint(-2, 2)),
            owner=chance.choice(["alice", "bob"]),
            created_ms=made_ms,
            updated_ms=made_ms,
        )
        await self.ports.jobs.create(first_decision(job), ACTOR, None)
        return job.id

    async def happen(self, job_id: str, event: JobEvent, now_ms: int) -> None:
        await apply_events(self.ports, job_id, [Occurrence(event, now_ms)], ACTOR)

    def calls(self, command: str) -> int:
        """How often Redis was asked this."""
        stats = self.redis.info("commandstats").get(f"cmdstat_{command}", {})
        return int(stats.get("calls", 0))


@pytest.fixture
async def world(redis_url: str) -> AsyncIterator[World]:
    with Redis.from_url(redis_url, decode_responses=True) as redis:
        async with redis_ports(redis_url) as ports:
            yield World(ports, redis)


@pytest.mark.anyio
@pytest.mark.parametrize("is_built", [True, False])
async def test_every_list_is_that_of_all_records(world: World, *, is_built: bool) -> None:
    if is_built:
        await world.ports.jobs.index()
    chance = random.Random(7)  # noqa: S311 no secret
    names: list[str] = []
    for moment in range(100, 220):
        if len(names) < 12 or chance.random() < 0.2:
            names.append(await world.keep(len(names), chance))
            continue
        job_id = chance.choice(names)
        if chance.random() < 0.1:
            names.remove(job_id)
            await world.ports.jobs.delete(await world.ports.jobs.load(job_id))
            continue
        patch = {
            "labels": {"team": chance.choice(["a", "b", None])},
            "priority": chance.randint(-2, 2),
        }
        events: list[JobEvent] = [
            PauseAsked(StopRequest()),
            ResumeAsked(),
            KillAsked(),
            PatchAsked(JobPatch.model_validate(patch)),
        ]
        try:
            await world.happen(job_id, chance.choice(events), moment)
        except StateConflictError:
            continue
    whole = [stored.job for stored in await world.ports.jobs.page(None, 1_000)]
    assert sorted(job.id for job in whole) == sorted(names)
    for wanted in FILTERS:
        fitting = [job for job in whole if wanted.matches(JobSummary.of(job))]
        for order in ORDERS:
            shown = await _all_pages(world.ports, wanted, order)
            assert shown == _sorted(fitting, order), (wanted, order)
    counted = await world.ports.jobs.counts()
    assert {state: n for state, n in counted.items() if n} == _count(job.state for job in whole)


@pytest.mark.anyio
async def test_jobs_that_are_deleted_while_a_list_is_read_hide_no_others(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(job_index, "_PAGE", 8)
    await world.ports.jobs.index()
    chance = random.Random(7)  # noqa: S311 no secret
    names = [await world.keep(number, chance) for number in range(40)]
    doomed = set(names[::3])
    left = set(names) - doomed
    read = AsyncRedis.zrevrangebyscore

    async def read_and_delete(self: AsyncRedis, *args: Any, **options: Any) -> Any:  # noqa: ANN401 as redis-py types it
        rows: Any = await read(self, *args, **options)
        if read_now := doomed.intersection(name for name, _ in rows):
            doomed.discard(name := max(read_now))
            await world.ports.jobs.delete(await world.ports.jobs.load(name))
        return rows

    monkeypatch.setattr(AsyncRedis, "zrevrangebyscore", read_and_delete)
    shown: list[str] = []
    cursor: str | None = None
    while cursor is not None or not shown:
        found, cursor = await page(world.ports, JobFilter(), "-created", cursor, 20)
        shown += [stored.job.id for stored in found]
    assert len(doomed) < len(names[::3])
    assert sorted(name for name in shown if name in left) == sorted(left)


@pytest.mark.anyio
async def test_a_page_of_records_reads_no_others(world: World) -> None:
    chance = random.Random(5)  # noqa: S311 no secret
    for number in range(9):
        await world.keep(number, chance)
    before = world.calls("hgetall")
    found = await world.ports.jobs.page(None, 4)
    last = found[-1].job
    found += await world.ports.jobs.page(Place(last.created_ms, last.id), 4)
    assert len({stored.job.id for stored in found}) == 8
    assert world.calls("hgetall") == before + 8


@pytest.mark.anyio
async def test_a_list_reads_the_records_of_its_page_alone(world: World) -> None:
    await world.ports.jobs.index()
    chance = random.Random(7)  # noqa: S311 no secret
    names = [await world.keep(number, chance) for number in range(40)]
    for name in names[:30]:
        await world.happen(name, KillAsked(), 100)
    await world.ports.jobs.active()
    before = world.calls("hgetall")
    waiting = JobFilter(states=frozenset({JobState.QUEUED}))
    found, _ = await page(world.ports, waiting, "-created", None, 50)
    assert len(found) == 10
    assert world.calls("hgetall") == before, "those that are active are in memory"
    summaries = world.calls("hmget")
    ended = JobFilter(states=frozenset({JobState.CANCELLED}))
    found, cursor = await page(world.ports, ended, "-updated", None, 3)
    assert (len(found), cursor is not None) == (3, True)
    assert world.calls("hgetall") == before + 3
    assert world.calls("hmget") == summaries + 30 + 3


@pytest.mark.anyio
async def test_events_are_chosen_by_label_and_owner_without_reading_a_record(world: World) -> None:
    await world.ports.jobs.index()
    chance = random.Random(7)  # noqa: S311 no secret
    names = [await world.keep(number, chance) for number in range(40)]
    for name in names:
        await world.happen(name, KillAsked(), 100)
    ended = await world.ports.jobs.page(None, 1_000)
    hers = {stored.job.id for stored in ended if stored.job.owner == "alice"}
    before = world.calls("hgetall")
    told = await page_of_feed(world.ports, EventFilter(owner="alice", labels=("run",)), None, 1_000)
    assert {event.job_id for event in told.items} == hers
    assert world.calls("hgetall") == before


@pytest.mark.anyio
async def test_jobs_are_counted_without_asking_for_any(world: World) -> None:
    await world.ports.jobs.index()
    chance = random.Random(7)  # noqa: S311 no secret
    names = [await world.keep(number, chance) for number in range(10)]
    await world.happen(names[0], KillAsked(), 100)
    before = world.calls("hget"), world.calls("hmget")
    counted = await world.ports.jobs.counts()
    assert (counted[JobState.QUEUED], counted[JobState.CANCELLED]) == (9, 1)
    assert (world.calls("hget"), world.calls("hmget")) == before


@pytest.mark.anyio
async def test_jobs_that_come_and_go_meanwhile_are_no_reason_to_rebuild(
    world: World, redis_url: str
) -> None:
    await world.ports.jobs.index()
    is_over = False

    async def come_and_go(number: int) -> None:
        chance = random.Random(number)  # noqa: S311 no secret
        async with redis_ports(redis_url) as ports:
            other = World(ports, world.redis)
            while not is_over:
                job_id = await other.keep(number, chance)
                await ports.jobs.delete(await ports.jobs.load(job_id))

    async with asyncio.TaskGroup() as group:
        for number in range(4):
            group.create_task(come_and_go(number))
        try:
            built = [await world.ports.jobs.index() for _ in range(60)]
        finally:
            is_over = True
    assert set(built) == {0}


@pytest.mark.anyio
async def test_of_deleted_jobs_no_index_holds_anything(world: World) -> None:
    chance = random.Random(7)  # noqa: S311 no secret
    kept, *names = [await world.keep(number, chance) for number in range(4)]
    jobs = world.ports.jobs
    await jobs.delete(await jobs.load(names[0]))
    await jobs.delete_unread(names[1])
    before, doomed = await jobs.load(kept), await jobs.load(names[2])
    changed = Decision(before.job.model_copy(update={"reason": "another"}))
    await jobs.commit(Change(before, changed, ACTOR, deletes=doomed))
    held = {
        member
        for key in world.redis.scan_iter("ml:jobs:*", _type="zset")
        for member in world.redis.zrange(key, 0, -1)
    }
    assert held == {kept}


@pytest.mark.anyio
async def test_what_an_older_version_deleted_is_shown_nowhere_and_removed(world: World) -> None:
    await world.ports.jobs.index()
    chance = random.Random(7)  # noqa: S311 no secret
    kept, gone = [await world.keep(number, chance) for number in range(2)]
    # As the script of the last release did it.
    world.redis.zrem(keys.JOBS, gone)
    world.redis.srem(keys.ACTIVE_JOBS, gone)
    world.redis.delete(keys.job(gone))
    waiting = JobFilter(states=frozenset({JobState.QUEUED}))
    found, _ = await page(world.ports, waiting, "-created", None, 50)
    assert [stored.job.id for stored in found] == [kept]
    assert (await world.ports.jobs.counts())[JobState.QUEUED] == 1
    assert gone in world.redis.zrange(keys.jobs_in_state("QUEUED"), 0, -1)
    await world.ports.jobs.index()
    assert world.redis.zrange(keys.jobs_in_state("QUEUED"), 0, -1) == [kept]


@pytest.mark.anyio
async def test_an_index_of_another_type_costs_its_list_time_and_no_write(world: World) -> None:
    await world.ports.jobs.index()
    chance = random.Random(7)  # noqa: S311 no secret
    world.redis.set(keys.jobs_in_state("QUEUED"), "of another type")
    name = await world.keep(0, chance)
    waiting = JobFilter(states=frozenset({JobState.QUEUED}))
    found, _ = await page(world.ports, waiting, "-created", None, 50)
    assert [stored.job.id for stored in found] == [name]
    assert keys.jobs_in_state("QUEUED") in world.ports.unreadable()


def test_records_of_the_last_release_are_taken_over(redis_url: str) -> None:
    told = json.loads(OLD_RECORDS.read_text())
    with Redis.from_url(redis_url, decode_responses=True) as redis:
        _write(redis, told["records"])
        assert not redis.exists(keys.JOB_INDEX)
        with open_plane(redis_url, AccessPolicy(), leads=False) as standby:
            _shows(standby, told["jobs"])
        with open_plane(redis_url, AccessPolicy()) as plane:
            until(lambda: redis.get(keys.JOB_INDEX) == keys.JOB_INDEX_FORMAT, every_s=0.01)
            ended = {
                n: j for n, j in told["jobs"].items() if j["state"] in {"SUCCEEDED", "CANCELLED"}
            }
            for state in {job["state"] for job in ended.values()}:
                listed = redis.zrange(keys.jobs_in_state(state), 0, -1)
                assert listed == sorted(n for n, j in ended.items() if j["state"] == state)
            _shows(plane, told["jobs"])
            # The controller goes on with what waits.
            (waiting,) = (n for n, j in told["jobs"].items() if j["state"] == "QUEUED")
            plane.agent.join("life-2", slots=8)
            plane.agent.launches(waiting)


def _shows(plane: ControlPlane, jobs: dict[str, dict[str, Any]]) -> None:
    """Whether the lists are those that the last release showed of these jobs."""
    questions: dict[str, Callable[[dict[str, Any]], bool]] = {
        "": lambda _: True,
        "state=SUCCEEDED": lambda job: job["state"] == "SUCCEEDED",
        "state=PAUSED&state=CANCELLED": lambda job: job["state"] in {"PAUSED", "CANCELLED"},
        "label=team%3Da": lambda job: job["labels"].get("team") == "a",
        "owner=local&sort=-updated": lambda job: job["owner"] == "local",
    }
    for query, fits in questions.items():
        shown = {job["id"] for job in plane.get(f"/v1/jobs?{query}")["items"]}
        assert shown == {name for name, job in jobs.items() if fits(job)}, query
    text = plane.client.get("/metrics").text
    succeeded = sum(job["state"] == "SUCCEEDED" for job in jobs.values())
    assert f'meshloom_jobs{{state="SUCCEEDED"}} {float(succeeded)}' in text


def _write(redis: Redis, records: dict[str, Any]) -> None:
    for key, record in records.items():
        match record["type"]:
            case "hash":
                redis.hset(key, mapping=record["value"])
            case "zset":
                redis.zadd(key, record["value"])
            case "set":
                redis.sadd(key, *record["value"])
            case "string":
                redis.set(key, record["value"])
            case "stream":
                for entry_id, fields in record["value"]:
                    redis.xadd(key, fields, id=entry_id)


async def _all_pages(ports: Ports, wanted: JobFilter, order: JobOrder) -> list[str]:
    found: list[str] = []
    cursor: str | None = None
    while True:
        items, cursor = await page(ports, wanted, order, cursor, 4)
        found += [stored.job.id for stored in items]
        if cursor is None:
            return found


def _sorted(jobs: Iterable[Job], order: JobOrder) -> list[str]:
    def key(job: Job) -> tuple[int, str]:
        field = order.removeprefix("-")
        if field == "priority":
            return job.spec.priority, job.id
        return (job.created_ms if field == "created" else job.updated_ms), job.id

    return [job.id for job in sorted(jobs, key=key, reverse=order.startswith("-"))]


def _count(states: Iterable[JobState]) -> dict[JobState, int]:
    counted: dict[JobState, int] = {}
    for state in states:
        counted[state] = counted.get(state, 0) + 1
    return counted
