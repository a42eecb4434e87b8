"""What ranks tell, in Redis and in memory."""

from collections.abc import Callable, Iterable

import pytest
from redis import Redis

from services.contract.api.views import StopRequest
from services.contract.messages.telemetry import MetricRecord, RankStacks, StepRecord
from services.contract.redis import redis_keys as keys
from services.contract.system import long_work
from services.controller.adapters.redis import redis_ports
from services.controller.adapters.redis.connection import Unreadable
from services.controller.adapters.redis.telemetry_names import TelemetryNames
from services.controller.domain.decisions.history import Occurrence
from services.controller.domain.errors import CursorExpiredError
from services.controller.domain.job.events import KillAsked, PauseAsked, ResumeAsked
from services.controller.ports.machines import Log
from services.controller.use_cases.change import apply_events
from services.controller.use_cases.metrics import StepRange, get_metrics, get_some_metrics
from tests.controller.histories import NODE
from tests.controller.stores.worlds import ACTOR, OutsideRedis, World, job
from tests.waiting import Rounds

pytestmark = [pytest.mark.anyio, pytest.mark.redis]


async def test_what_a_job_told_is_kept_for_some_days_after_its_end(redis_url: str) -> None:
    with Redis.from_url(redis_url, decode_responses=True) as redis:
        async with redis_ports(redis_url, telemetry_kept_s=1_000) as ports:
            world = World(ports, OutsideRedis(redis))
            stored = await world.keep(job())
            name = stored.job.id
            world.outside.step(
                name, StepRecord(step=1, fence=1, loss=1, tokens_per_s=1, step_time_s=1)
            )
            world.outside.output(name, "{}")
            world.outside.metric(name, MetricRecord(step=1, fence=1, values={"hits": 1}))
            streams = (
                keys.job_steps(name),
                keys.job_metrics(name),
                keys.job_logs(name),
                keys.job_history(name),
            )
            for event, kept in (
                (PauseAsked(StopRequest()), False),
                (KillAsked(), True),
                (ResumeAsked(), False),
            ):
                happened = [Occurrence(event, 10)]
                stored = await apply_events(ports, name, happened, ACTOR)
                found = [redis.ttl(stream) for stream in streams]
                assert all(0 < left <= 1_000 if kept else left == -1 for left in found), event
            assert redis.ttl(keys.job_events(name)) == -1


async def test_metrics_of_users_are_kept_by_job(world: World) -> None:
    one, other = job().id, job().id
    telemetry = world.ports.telemetry
    records = [MetricRecord(step=n, fence=1, values={"hits": n / 7, "gap": None}) for n in (1, 2)]
    for record in records:
        world.outside.metric(one, record)
    assert await telemetry.metrics(one) == records
    assert await telemetry.metrics(other) == []
    assert await telemetry.last_metrics([other, one], 1) == {other: [], one: records[1:]}


async def test_output_is_read_behind_a_cursor_until_it_is_trimmed(world: World) -> None:
    name = job().id
    telemetry = world.ports.telemetry
    for number in range(5):
        world.outside.output(name, str(number))
    first = await telemetry.read(name, Log.OUTPUT, None, 2)
    rest = await telemetry.read(name, Log.OUTPUT, first[-1].id, 10)
    assert [entry.body for entry in first + rest] == ["0", "1", "2", "3", "4"]
    await telemetry.wait(name, Log.OUTPUT, first[-1].id, 10)
    await telemetry.wait(name, Log.OUTPUT, rest[-1].id, 0.01)
    world.outside.trim(name)
    with pytest.raises(CursorExpiredError):
        await telemetry.read(name, Log.OUTPUT, first[-1].id, 10)
    assert [entry.body for entry in await telemetry.read(name, Log.OUTPUT, None, 9)] == ["4"]


async def test_stacks_of_a_rank_take_the_place_of_those_before_and_go_with_the_job(
    world: World,
) -> None:
    stored = await world.keep(job())
    job_id = stored.job.id
    telemetry = world.ports.telemetry
    assert await telemetry.stacks(job_id) == []
    await telemetry.keep_stacks(job_id, [])
    await telemetry.keep_stacks(job_id, [stacks(1, "old"), stacks(0, "a")])
    await telemetry.keep_stacks(job_id, [stacks(1, "new")])
    assert await telemetry.stacks(job_id) == [stacks(0, "a"), stacks(1, "new")]
    await world.ports.jobs.delete(stored)
    assert await telemetry.stacks(job_id) == []


def stacks(rank: int, text: str) -> RankStacks:
    return RankStacks(rank=rank, fence=1, node_id=NODE, text=text)


async def test_steps_come_back_in_their_order(world: World) -> None:
    name, other = job().id, job().id
    records = [
        StepRecord(step=n, fence=1, loss=1.0, tokens_per_s=1, step_time_s=1) for n in (1, 2, 3)
    ]
    for record in records:
        world.outside.step(name, record)
    assert await world.ports.telemetry.steps(name) == records
    last = await world.ports.telemetry.last_steps([name, other], 2)
    assert last == {name: records[1:], other: []}
    assert await world.ports.telemetry.samples([name]) == {name: {}}
    assert await world.ports.telemetry.progress([name]) == {name: {}}


async def test_a_name_that_is_secret_is_not_shown(redis_url: str) -> None:
    name, secret = job().id, bytes(range(16)).hex()
    stream = keys.job_steps(TelemetryNames(secret).of(name))
    with Redis.from_url(redis_url, decode_responses=True) as redis:
        redis.set(stream, "x")
        async with redis_ports(redis_url, telemetry_secret=secret) as ports:
            assert await ports.telemetry.steps(name) == []
            assert ports.unreadable() == (keys.job_steps(name),)
            redis.delete(stream)
            assert await ports.telemetry.steps(name) == []
            assert ports.unreadable() == ()


async def test_of_a_history_few_records_are_read_before_others_have_their_turn(
    redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two thousand of 64 names take a second, and the same loop renews the lead."""
    rounds, read_at = Rounds(), list[int]()
    read_all = Unreadable.read_all

    def noted(
        self: Unreadable, key: str, parse: Callable[[str], object], texts: Iterable[str]
    ) -> list[object]:
        few = list(texts)
        assert len(few) <= 100
        read_at.append(rounds.made)
        return read_all(self, key, parse, few)

    with Redis.from_url(redis_url, decode_responses=True) as redis:
        async with redis_ports(redis_url) as ports:
            outside, name = OutsideRedis(redis), job().id
            for step in range(1, 251):
                outside.metric(name, MetricRecord(step=step, fence=1, values={"hits": step}))
            monkeypatch.setattr(Unreadable, "read_all", noted)
            async with rounds:
                assert len(await ports.telemetry.metrics(name)) == 250
                assert len((await ports.telemetry.last_metrics([name], 250))[name]) == 250
    assert len(read_at) == 6
    assert read_at == sorted(set(read_at))


@pytest.mark.parametrize("world", ["memory"], indirect=True)
async def test_while_metrics_are_worked_out_others_have_their_turns(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 50 000 records with 64 names each this takes seconds."""
    monkeypatch.setattr(long_work, "_TURN_S", -1.0)
    name = (await world.keep(job())).job.id
    for step in range(1, 101):
        world.outside.metric(name, MetricRecord(step=step, fence=1, values={"hits": step}))
    async with Rounds() as rounds:
        whole = await get_metrics(world.ports, name, StepRange())
    assert [point.step for point in whole.user_metrics] == list(range(1, 101))
    assert rounds.made >= 200  # for the names, and for the points
    async with Rounds() as rounds:
        part = await get_some_metrics(world.ports, name, StepRange(), frozenset({"hits"}))
    assert len(part.items) == 100
    assert rounds.made >= 200
