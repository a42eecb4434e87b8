"""When an agent beats, and what its beats write where."""

import asyncio
import contextlib
import selectors
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import cast
from urllib.parse import urlsplit

import pytest
from redis import Redis as SyncRedis
from redis.asyncio import Redis
from redis.exceptions import TimeoutError as NoAnswerError

from services.contract.messages.facts import Fact, Inventory, RunningGang
from services.contract.messages.telemetry import LogLine, MetricRecord, RankSample, StepRecord
from services.contract.redis import redis_keys
from services.contract.redis.lease_keeper import LeaseKeeper
from services.contract.words.ids import new_job_id
from services.worker.agent import session as session_module
from services.worker.agent.session import Life, Session
from services.worker.agent.storage.journal import Journal
from services.worker.agent.streams.redis_clients import ANSWER_WITHIN_S, Connections, writing_client
from services.worker.agent.supervisor import Supervisor
from services.worker.agent.telemetry.beat import Beat, BeatAnswer, LearnedNames
from services.worker.agent.telemetry.gang_telemetry import Records
from tests.agent.conftest import JOB, NODE
from tests.chaos.proxy import ChaosProxy, Mode
from tests.waiting import until

LEASE_S = redis_keys.NODE_LEASE_MS / 1000


class InstantSelector(selectors.SelectSelector):
    """Waits for nothing: the time that would have been waited has passed."""

    passed_s = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        found = super().select(0)
        if not found and timeout is not None:
            self.passed_s += timeout
        return found


class InstantLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._instant = InstantSelector()
        super().__init__(self._instant)

    def time(self) -> float:
        return self._instant.passed_s


def unused_lease() -> LeaseKeeper:
    return LeaseKeeper("redis://nowhere", "lease", redis_keys.NODE_LEASE_MS, lambda _: None)


class SilentRedis:
    """Answers the first beat, then none."""

    def __init__(self) -> None:
        self.asked: list[float] = []

    async def renew(self, *_: object) -> BeatAnswer:
        loop = asyncio.get_running_loop()
        self.asked.append(loop.time())
        if len(self.asked) == 1:
            return BeatAnswer()
        if len(self.asked) == 5:
            raise asyncio.CancelledError
        await asyncio.sleep(ANSWER_WITHIN_S)
        raise NoAnswerError("no answer")

    async def write(self, *_: object) -> Mapping[object, object]:
        return {}

    async def write_metrics(self, _: object) -> Mapping[object, str]:
        return {}


@pytest.mark.parametrize("is_idle", [True, False], ids=["idle", "busy"])
def test_a_third_beat_is_sent_well_before_the_lease_ends_if_two_get_no_answer(
    is_idle: bool,  # noqa: FBT001 parametrized
) -> None:
    redis = SilentRedis()

    async def beat() -> None:
        supervisor = SimpleNamespace(
            telemetry_names=LearnedNames(),
            urgent=asyncio.Event(),
            is_idle=is_idle,
            take_records=list,
            samples=dict,
            fence_off=lambda _: None,
            records_written=lambda **_: None,
        )
        async with writing_client("redis://nowhere") as client:
            session = Session(
                Connections(client, client, client),
                Life(
                    "node",
                    "life",
                    Inventory(hostname="a", cpu_slots=1, cpu_count=1, memory_bytes=1),
                ),
                cast("Supervisor", supervisor),
                lambda _: None,
                journal=None,  # type: ignore[arg-type]  # there are no records
                lease=unused_lease(),
            )
            session._beat = cast("Beat", redis)
            await session.run()

    with asyncio.Runner(loop_factory=InstantLoop) as runner, pytest.raises(asyncio.CancelledError):
        runner.run(beat())
    first, _, _, third, _ = redis.asked
    assert third - first < LEASE_S - 0.5


DELETED, UNKNOWN = (new_job_id(1_700_000_000_000, bytes([number] * 10)) for number in (1, 2))
TAKEN = 3
STEP = StepRecord(step=7, fence=2, loss=0.5, tokens_per_s=1.0, step_time_s=0.1)
LINE = LogLine(rank=0, fence=2, stream="stdout", text="Hello", time_ms=1)
METRIC = MetricRecord(step=7, fence=2, values={"hits": 0.5})


class FakeSupervisor:
    """Gangs that make one record of each kind in each of the first beats."""

    is_idle = False

    def __init__(self, *gangs: tuple[str, int]) -> None:
        self.urgent = asyncio.Event()
        self.telemetry_names = LearnedNames()
        self.left = TAKEN
        self.gangs = gangs
        self.ended: list[tuple[str, int]] = []
        self.fenced: list[tuple[str, int]] = []

    def take_records(self, *, only_ended: bool = False) -> list[Records]:  # noqa: ARG002 all are both
        if self.left == 0:
            return [Records(*gang, (), (), ()) for gang in self.gangs]
        self.left -= 1
        return [Records(*gang, (STEP,), (LINE,), (METRIC,)) for gang in self.gangs]

    def samples(self) -> dict[tuple[str, int], list[RankSample]]:
        return {
            gang: [
                RankSample(
                    rank=0,
                    local_rank=0,
                    fence=gang[1],
                    node_id=NODE,
                    device="cpu",
                    pid=1,
                    phase="IDLE",
                    step=7,
                )
            ]
            for gang in self.gangs
        }

    def running(self) -> tuple[RunningGang, ...]:
        return ()

    def fence_off(self, fenced: list[tuple[str, int]]) -> None:
        self.fenced += fenced

    def records_written(self, held_back: Collection[tuple[str, int]]) -> None:
        self.ended = [gang for gang in self.gangs if gang not in held_back]


def session_of(
    connections: Connections,
    supervisor: FakeSupervisor,
    folder: Path,
    tell: Callable[[Fact], None] = lambda _: None,
    lease: LeaseKeeper | None = None,
) -> Session:
    inventory = Inventory(hostname="a", cpu_slots=1, cpu_count=1, memory_bytes=1)
    return Session(
        connections,
        Life(NODE, "life", inventory),
        cast("Supervisor", supervisor),
        tell,
        Journal(folder, f"{NODE}.life"),
        lease or unused_lease(),
    )


async def written_of(client: Redis, job_id: str) -> list[int]:
    """How many samples, steps, lines and metrics of a job there are."""
    streams = (redis_keys.job_steps, redis_keys.job_logs, redis_keys.job_metrics)
    samples = await client.hlen(redis_keys.job_ranks(job_id))
    return [samples, *[await client.xlen(key(job_id)) for key in streams]]


@contextlib.asynccontextmanager
async def beating(session: Session) -> AsyncIterator[None]:
    task = asyncio.create_task(session.run())
    try:
        yield
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


async def once(condition: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(30):
        while not await condition():  # noqa: ASYNC110 Redis has what is waited for
            await asyncio.sleep(0.01)


def test_a_beat_writes_telemetry_of_current_attempts_alone(redis_url: str, tmp_path: Path) -> None:
    supervisor = FakeSupervisor((DELETED, 2), (UNKNOWN, 2), (JOB, 1), (JOB, 2))

    async def beat() -> None:
        async with writing_client(redis_url) as client:
            await client.hset(redis_keys.job(JOB), "fence", "2")
            await client.hset(redis_keys.job(DELETED), "fence", "2")
            await client.sadd(redis_keys.DELETED_JOBS, DELETED)
            session = session_of(Connections(client, client, client), supervisor, tmp_path)

            async def all_is_written() -> bool:
                return await written_of(client, JOB) == [1, TAKEN, TAKEN, TAKEN]

            async with beating(session):
                await once(all_is_written)
            assert await written_of(client, DELETED) == [0, 0, 0, 0]
            assert await written_of(client, UNKNOWN) == [0, 0, 0, 0]

    asyncio.run(beat())
    assert set(supervisor.fenced) == {(JOB, 1), (DELETED, 2)}
    assert set(supervisor.ended) == {(JOB, 2), (JOB, 1), (DELETED, 2)}


def test_a_redis_that_refuses_a_part_of_each_beat_is_not_joined_with_each_of_them(
    redis_url: str, tmp_path: Path
) -> None:
    told: list[Fact] = []

    async def beat() -> None:
        async with writing_client(redis_url) as client:
            session = session_of(
                Connections(client, client, client), FakeSupervisor(), tmp_path, told.append
            )
            session.join()
            with SyncRedis.from_url(redis_url, decode_responses=True) as other:
                other.set(redis_keys.node_lease(NODE), "life")
                other.set(redis_keys.node_beat(NODE), "another's")
                async with beating(session):
                    await asyncio.to_thread(_beats, other, 4)
                    other.delete(redis_keys.node_beat(NODE))
                    await asyncio.to_thread(until, lambda: len(told) > 1)
                    await asyncio.to_thread(_beats, other, 2)

    asyncio.run(beat())
    assert [fact.kind for fact in told] == ["node_joined", "node_joined"]


def test_an_agent_whose_loop_is_busy_for_longer_than_a_lease_has_its_node(
    redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks with much to say, or much to remove, are no loss of their node."""
    lease_ms = 1_500
    monkeypatch.setattr(redis_keys, "NODE_LEASE_MS", lease_ms)
    key = redis_keys.node_lease(NODE)
    told: list[Fact] = []
    late: list[float] = []

    async def beat() -> None:
        lease = LeaseKeeper(redis_url, key, lease_ms, late.append)
        with SyncRedis.from_url(redis_url, decode_responses=True) as other:
            async with writing_client(redis_url) as client, lease.keeping():
                connections = Connections(client, client, client)
                session = session_of(
                    connections, FakeSupervisor(), tmp_path, told.append, lease=lease
                )
                await session.take_lease(None)
                session.join()
                async with beating(session):
                    await asyncio.to_thread(_beats, other, 1)
                    ends = time.monotonic() + 2 * lease_ms / 1000
                    while time.monotonic() < ends:
                        assert other.get(key) == "life"
                    await asyncio.to_thread(_beats, other, 1)
                    await session.release_lease()
                assert not other.exists(key)

    asyncio.run(beat())
    assert [fact.kind for fact in told] == ["node_joined"]
    assert late


def _beats(client: SyncRedis, count: int) -> None:
    """Wait for so many; of two scripts each."""

    def scripts() -> int:
        told = cast("dict[str, dict[str, int]]", client.info("commandstats"))
        return sum(told.get(f"cmdstat_{name}", {}).get("calls", 0) for name in ("eval", "evalsha"))

    before = scripts()
    until(lambda: scripts() >= before + 2 * count)


def test_an_agent_that_has_left_joins_no_more_when_redis_comes_back(
    redis_url: str, tmp_path: Path
) -> None:
    """Attempts would be placed on its node while it waits for its ranks to end."""
    told: list[Fact] = []

    async def beat() -> None:
        async with writing_client(redis_url) as client:
            connections = Connections(client, client, client)
            session = session_of(connections, FakeSupervisor(), tmp_path, told.append)
            session.join()
            session.leave()
            async with beating(session), asyncio.timeout(30):  # in a Redis without its lease
                await session.loss_suspected.wait()

    asyncio.run(beat())
    assert [fact.kind for fact in told] == ["node_joined", "node_left"]


async def never(**_: object) -> object:
    raise NoAnswerError("no answer")


class NewestNeverComes:
    """A client of a Redis in which the newest entry of each stream is too long to come in time."""

    def __init__(self, client: Redis) -> None:
        self._client = client

    def __getattr__(self, name: str) -> object:
        return getattr(self._client, name)

    def register_script(self, text: str) -> object:
        return never if "XREVRANGE" in text else self._client.register_script(text)


def test_an_agent_joins_though_an_entry_of_its_last_job_never_comes(
    redis_url: str, tmp_path: Path
) -> None:
    """Another agent of the job, which may add what it likes, kept this one away for as long as the entry was there."""

    async def hand_over() -> int:
        async with writing_client(redis_url) as client:
            await client.hset(redis_keys.job(JOB), "fence", "2")
            hindered = cast("Redis", NewestNeverComes(client))
            connections = Connections(hindered, hindered, hindered)
            session = session_of(connections, FakeSupervisor(), tmp_path)
            await session.take_lease(None)
            async with asyncio.timeout(20):
                await session.hand_over([Records(JOB, 2, (STEP,), ())])
            return int(await client.xlen(redis_keys.job_steps(JOB)))

    assert asyncio.run(hand_over()) == 1


@pytest.mark.parametrize("mode", [Mode.CUT, Mode.LOSE_REPLIES])
def test_while_the_server_for_telemetry_is_away_leases_live_ends_are_told_and_records_are_held(
    redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: Mode
) -> None:
    monkeypatch.setattr(session_module, "_TELEMETRY_AWAITED_S", 0.0)
    supervisor = FakeSupervisor((JOB, 2))
    parts = urlsplit(redis_url)

    async def beat() -> None:
        with ChaosProxy.to(Path(parts.path)) as proxy:
            apart = f"redis://:{parts.password}@127.0.0.1:{proxy.port}"
            async with writing_client(redis_url) as client, writing_client(apart) as telemetry:
                await client.hset(redis_keys.job(JOB), "fence", "2")
                connections = Connections(client, client, telemetry)
                session = session_of(connections, supervisor, tmp_path)

                async def renewed() -> bool:
                    return bool(await client.exists(redis_keys.node_lease(NODE)))

                async def ended() -> bool:
                    return supervisor.ended == [(JOB, 2)] and supervisor.left == 0

                async def all_is_written() -> bool:
                    _, steps, lines, metrics = await written_of(client, JOB)
                    # Metrics that are repeated are shown once.
                    return (steps, lines) == (TAKEN, TAKEN) and metrics >= TAKEN

                async with beating(session):
                    with proxy.misbehaving(mode):
                        for _ in range(2):
                            await client.delete(redis_keys.node_lease(NODE))
                            await once(renewed)
                        await once(ended)
                    await once(all_is_written)

    asyncio.run(beat())
