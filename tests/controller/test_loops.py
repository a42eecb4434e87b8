"""Leadership and the fact consumer, on the twin in memory."""

import asyncio
import contextlib
import itertools
import time
from collections.abc import Callable, Sequence

import pytest
from redis import Redis
from tenacity import AsyncRetrying, RetryCallState, wait_none

from services.contract.redis import redis_keys
from services.controller.adapters.memory import memory_ports
from services.controller.adapters.memory.server import MemoryServer
from services.controller.adapters.redis import redis_ports
from services.controller.domain.errors import (
    DeposedError,
    RecordTooLongError,
    StoreUnavailableError,
)
from services.controller.loops import facts as fact_loop
from services.controller.loops import store_retry
from services.controller.loops.leader import Leader
from services.controller.loops.observer import Observer
from services.controller.loops.store_retry import StoreRetry
from services.controller.ports.coordination import Ports
from services.controller.ports.machines import FactEntry

pytestmark = pytest.mark.anyio


@pytest.fixture
def server() -> MemoryServer:
    ticks = itertools.count(1_000_000)
    return MemoryServer(now_ms=lambda: next(ticks))


async def come_true(look: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not look():  # noqa: ASYNC110 what is awaited sets no event
            await asyncio.sleep(0)


async def test_one_leads_and_the_next_takes_over_when_it_ends(server: MemoryServer) -> None:
    terms: list[int] = []

    async def run_term(epoch: int) -> None:
        terms.append(epoch)
        await asyncio.Event().wait()

    leadership = memory_ports(server).leadership
    first, second = Leader(leadership, "a", run_term), Leader(leadership, "b", run_term)
    leading = asyncio.create_task(first.lead())
    await come_true(lambda: first.epoch == 1)
    waiting = asyncio.create_task(second.lead())
    leading.cancel()
    await asyncio.wait([leading])
    assert first.epoch is None
    await come_true(lambda: terms == [1, 2])
    assert second.epoch == 2
    waiting.cancel()
    await asyncio.wait([waiting])
    assert server.leader is None


@pytest.mark.parametrize("error", [DeposedError("over"), RuntimeError("a bug")])
async def test_a_term_that_ends_gives_the_lead_back_and_is_followed_by_another(
    server: MemoryServer, error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("services.controller.loops.leader._ASK_EVERY_S", 0)
    epochs: list[int] = []

    async def run_term(epoch: int) -> None:
        epochs.append(epoch)
        if epoch == 1:
            raise error
        await asyncio.Event().wait()

    leading = asyncio.create_task(Leader(memory_ports(server).leadership, "a", run_term).lead())
    await come_true(lambda: epochs == [1, 2])
    leading.cancel()
    await asyncio.wait([leading])


async def test_a_loop_bears_an_absent_store_and_says_so_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    monkeypatch.setattr(store_retry, "_WAIT", wait_none())
    absences: list[int] = []
    retry = StoreRetry("test", lambda: absences.append(1))
    answers = iter([StoreUnavailableError("gone"), StoreUnavailableError("gone"), None])

    async def work() -> None:
        answer = next(answers)
        if answer is not None:
            raise answer

    await retry.round(work)
    assert len(absences) == 2
    assert [record.message for record in caplog.records] == ["store_unavailable", "store_is_back"]


async def test_a_loop_that_was_answered_in_between_waits_from_the_beginning_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tries: list[int] = []

    def wait(state: RetryCallState) -> float:
        tries.append(state.attempt_number)
        return 0.0

    monkeypatch.setattr(store_retry, "_WAIT", wait)
    retry = StoreRetry("test")
    rounds = iter([False, False, True, False, None])

    async def work() -> None:
        answered = next(rounds)
        if answered is None:
            return
        if answered:
            retry.succeeded()
        raise StoreUnavailableError("gone")

    await retry.round(work)
    assert tries == [1, 2, 1, 2]


def test_loops_wait_random_times_that_grow_to_a_bound() -> None:
    state = RetryCallState(AsyncRetrying(), None, (), {})
    for number, longest_s in ((1, 0.1), (2, 0.2), (4, 0.8), (30, 2.0)):
        state.attempt_number = number
        waits = {store_retry._WAIT(state) for _ in range(100)}
        assert len(waits) > 90
        assert 0.05 <= min(waits) <= max(waits) <= longest_s
        assert max(waits) > 0.7 * longest_s


async def test_a_loop_ends_although_what_it_waits_for_swallows_the_cancellation() -> None:
    waiting = asyncio.Event()
    rounds: list[int] = []

    async def work() -> None:
        rounds.append(1)
        waiting.set()
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.Event().wait()

    async def loop() -> None:
        retry = StoreRetry("test")
        while True:
            await retry.round(work)

    looping = asyncio.create_task(loop())
    await waiting.wait()
    looping.cancel()
    async with asyncio.timeout(20):
        await asyncio.wait([looping])
    assert looping.cancelled()
    assert len(rounds) == 1


async def test_a_leader_ends_although_the_renewal_swallows_the_cancellation(
    server: MemoryServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("services.controller.loops.leader._RENEW_EVERY_S", 0.001)
    leadership = memory_ports(server).leadership
    renewing = asyncio.Event()

    async def renew(_holder: str) -> bool:
        renewing.set()
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.Event().wait()
        return True

    monkeypatch.setattr(leadership, "renew", renew)

    async def run_term(_epoch: int) -> None:
        await asyncio.Event().wait()

    leading = asyncio.create_task(Leader(leadership, "a", run_term).lead())
    await renewing.wait()
    leading.cancel()
    async with asyncio.timeout(20):
        await asyncio.wait([leading])
    assert leading.cancelled()
    assert server.leader is None


async def test_a_leader_whose_loop_is_busy_for_longer_than_its_lease_leads_on(
    redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("services.controller.loops.leader._RENEW_EVERY_S", 0.2)
    monkeypatch.setattr(redis_keys, "LEADER_LEASE_MS", 1_500)
    monkeypatch.setattr("services.controller.adapters.redis.LEADER_LEASE_MS", 1_500)
    begun: list[int] = []
    renewals: list[bool] = []

    async def run_term(epoch: int) -> None:
        begun.append(epoch)
        await asyncio.Event().wait()

    with Redis.from_url(redis_url, decode_responses=True) as redis:
        async with redis_ports(redis_url) as ports:
            renew = ports.leadership.renew

            async def counted(holder: str) -> bool:
                renewals.append(await renew(holder))
                return renewals[-1]

            monkeypatch.setattr(ports.leadership, "renew", counted)
            leading = asyncio.create_task(Leader(ports.leadership, "a", run_term).lead())
            await come_true(lambda: bool(begun))
            ends = time.monotonic() + 3.0
            while time.monotonic() < ends:
                assert redis.get(redis_keys.LEADER) == "a"
            await come_true(lambda: len(renewals) > 1)
            leading.cancel()
            await asyncio.wait([leading])
        assert not redis.exists(redis_keys.LEADER)
    assert all(renewals)
    assert begun == [1]


async def test_a_leader_that_saw_an_answer_too_late_asks_again(
    server: MemoryServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("services.controller.loops.leader._RENEW_EVERY_S", 0.001)
    monkeypatch.setattr("services.controller.loops.leader._LEASE_S", 0.2)
    leadership = memory_ports(server).leadership
    renew = leadership.renew
    renewals: list[bool] = []
    terms: list[int] = []

    async def late(holder: str) -> bool:
        if not renewals:
            renewals.append(False)
            ends = time.monotonic() + 0.3
            while time.monotonic() < ends:
                """The loop is busy with something else."""
            raise StoreUnavailableError("no answer in time")
        renewals.append(await renew(holder))
        return renewals[-1]

    monkeypatch.setattr(leadership, "renew", late)

    async def run_term(epoch: int) -> None:
        terms.append(epoch)
        await asyncio.Event().wait()

    leading = asyncio.create_task(Leader(leadership, "a", run_term).lead())
    await come_true(lambda: len(renewals) > 2)
    leading.cancel()
    await asyncio.wait([leading])
    assert all(renewals[1:])
    assert terms == [1]


async def test_a_fact_that_trips_a_handler_is_given_up_and_holds_up_nobody(
    server: MemoryServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    heeded: list[str] = []
    tries: list[str] = []

    async def apply_facts(_ports: Ports, entries: Sequence[FactEntry], _epoch: int) -> None:
        for entry in entries:
            if entry.body == "poison":
                tries.append(entry.body)
                raise RuntimeError("a bug in a handler")
            heeded.append(entry.body)

    monkeypatch.setattr(fact_loop, "apply_facts", apply_facts)
    monkeypatch.setattr(fact_loop, "_LOOK_BACK_EVERY_S", 0.01)
    monkeypatch.setattr(fact_loop, "_BLOCK_S", 0.001)
    for body in ("poison", "good"):
        server.tell(body)
    running = asyncio.create_task(fact_loop.FactLoop(memory_ports(server), 1).run())
    await come_true(lambda: not server.facts and not server.delivered)
    running.cancel()
    await asyncio.wait([running])
    assert set(heeded) == {"good"}
    assert len(tries) > 5


async def test_facts_that_are_handled_alone_are_observed_and_a_record_too_long_is_tried_once(
    server: MemoryServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    tries: list[list[str]] = []
    waited: list[float] = []

    async def apply_facts(_ports: Ports, entries: Sequence[FactEntry], _epoch: int) -> None:
        tries.append([entry.body for entry in entries])
        if "long" in tries[-1]:
            raise RecordTooLongError("it has a text of a gigabyte")

    monkeypatch.setattr(fact_loop, "apply_facts", apply_facts)
    for body in ("good", "long", "better"):
        server.tell(body)
    observer = Observer(fact_handled=waited.append)
    loop = fact_loop.FactLoop(memory_ports(server), 1, observer=observer)
    running = asyncio.create_task(loop.run())
    await come_true(lambda: not server.facts and not server.delivered)
    running.cancel()
    await asyncio.wait([running])
    assert tries == [["good", "long", "better"], ["good"], ["long"], ["better"]]
    assert len(waited) == 3


async def test_a_fact_is_acknowledged_only_after_it_was_committed(
    server: MemoryServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    outcomes = iter([StoreUnavailableError("gone"), DeposedError("over")])

    async def apply_facts(_ports: Ports, _entries: Sequence[FactEntry], _epoch: int) -> None:
        raise next(outcomes)

    monkeypatch.setattr(fact_loop, "apply_facts", apply_facts)
    server.tell("fact")
    with pytest.raises(DeposedError):
        await fact_loop.FactLoop(memory_ports(server), 1).run()
    assert [entry.body for entry in server.delivered.values()] == ["fact"]
