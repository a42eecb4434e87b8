"""Nodes, their leases and their facts, in Redis and in memory."""

import asyncio

import pytest
from redis import Redis

from services.contract.redis import redis_keys as keys
from services.contract.words.states import NodeState
from services.controller.adapters.redis import redis_ports
from services.controller.adapters.redis.connection import MAX_BLOCK_S
from services.controller.domain.errors import DeposedError, NotFoundError, StaleWriteError
from services.controller.domain.scheduling.node import Drain, Measurement
from tests.controller.agent_double import append_fact
from tests.controller.histories import node
from tests.controller.profiles import FACTS
from tests.controller.stores.worlds import World

pytestmark = [pytest.mark.anyio, pytest.mark.redis]


async def test_facts_come_until_they_are_acknowledged(world: World) -> None:
    facts = world.ports.facts
    await facts.prepare()
    await facts.prepare()
    assert await facts.next(10, 0.01) == []
    for number in range(3):
        world.outside.fact(str(number), "loom-1")
    first = await facts.next(2, 1)
    assert [entry.body for entry in first] == ["0", "1"]
    assert [entry.body for entry in await facts.next(2, 1)] == ["2"]
    assert [entry.body for entry in await facts.unacknowledged(10)] == ["0", "1", "2"]
    await facts.acknowledge([entry.id for entry in first])
    assert [entry.body for entry in await facts.unacknowledged(10)] == ["2"]


async def test_a_fact_comes_with_the_node_that_told_it_in_the_order_of_all(world: World) -> None:
    facts = world.ports.facts
    await facts.prepare()
    for body, sender in (("0", "a"), ("1", "b"), ("2", "a")):
        world.outside.fact(body, sender)
    world.outside.fact_of_the_last_release("3")
    told = [(entry.body, entry.sender) for entry in await facts.next(10, 1)]
    of_now = [("0", "a"), ("1", "b"), ("2", "a")]
    assert [one for one in told if one[1]] == of_now
    assert sorted(told, key=lambda one: one[0]) == [*of_now, ("3", None)]
    assert await facts.next(10, 0.01) == []


async def test_while_agents_of_the_last_release_tell_facts_nobody_waits_long_for_those_of_others(
    redis_url: str,
) -> None:
    with Redis.from_url(redis_url) as redis:
        async with redis_ports(redis_url) as ports, asyncio.timeout(MAX_BLOCK_S / 2):
            await ports.facts.prepare()
            redis.rpush(keys.ARRIVED_FACTS, "0")
            assert [entry.body for entry in await ports.facts.next(10, MAX_BLOCK_S)] == ["0"]
            assert await ports.facts.next(10, MAX_BLOCK_S) == []
            redis.rpush(keys.ARRIVED_FACTS, "1")
            assert [entry.body for entry in await ports.facts.next(10, MAX_BLOCK_S)] == ["1"]


@pytest.mark.parametrize("named", ["b", "nobody", "", "a:facts", "x" * 100_000, "\0", "é", "*"])
async def test_whatever_one_agent_puts_into_the_order_all_facts_of_others_come(
    redis_url: str, named: str
) -> None:
    with Redis.from_url(redis_url, decode_responses=True) as redis:
        redis.flushall()
        redis.set(keys.node_facts("nobody"), "no list")
        redis.rpush(keys.FACT_SENDERS, *[named] * 7)
        for number in range(5):
            append_fact(redis, "ab"[number % 2], str(number))
            redis.rpush(keys.FACT_SENDERS, named)
        async with redis_ports(redis_url) as ports:
            await ports.facts.prepare()
            told: list[tuple[str | None, str]] = []
            while len(told) < 5:
                told += [(e.sender, e.body) for e in await ports.facts.next(2, 1)]
            assert [body for sender, body in told if sender == "a"] == ["0", "2", "4"]
            assert [body for sender, body in told if sender == "b"] == ["1", "3"]
            while redis.llen(keys.FACT_SENDERS):
                assert await ports.facts.next(2, 0.01) == []


async def test_who_adds_facts_without_end_holds_up_none_of_another(redis_url: str) -> None:
    with Redis.from_url(redis_url, decode_responses=True) as redis:
        redis.flushall()
        async with redis_ports(redis_url) as ports:
            await ports.facts.prepare()
            redis.rpush(keys.FACT_SENDERS, "a")
            append_fact(redis, "b", "of b")
            told: list[str | None] = []
            while "b" not in told:
                assert len(told) < 20
                redis.rpush(keys.node_facts("a"), *["of a"] * 20)
                told += [entry.sender for entry in await ports.facts.next(8, 1)]


async def test_nodes_and_leases_are_kept_apart(world: World) -> None:
    epoch = await world.ports.leadership.take("a")
    assert epoch is not None
    await world.ports.nodes.put(node("b"), epoch, None)
    await world.ports.nodes.put(node("a"), epoch, None)
    world.outside.lease("a", "life-1")
    assert [n.id for n in await world.ports.nodes.nodes()] == ["a", "b"]
    leases = await world.ports.nodes.leases(["a", "b"])
    assert list(leases) == ["a"]
    assert leases["a"].incarnation == "life-1"
    assert 0 < leases["a"].left_ms <= 5000


async def test_a_drain_stands_whatever_the_leader_writes_of_the_node(world: World) -> None:
    epoch = await world.ports.leadership.take("a")
    assert epoch is not None
    nodes = world.ports.nodes
    with pytest.raises(NotFoundError):
        await nodes.drain("a", Drain(asked_ms=1))
    await nodes.put(node("a"), epoch, None)
    (before,) = await nodes.nodes()
    await nodes.drain("a", Drain(asked_ms=1, grace_s=5))
    await nodes.put(before, epoch, None)
    (draining,) = await nodes.nodes()
    assert draining.drain == Drain(asked_ms=1, grace_s=5)
    assert draining.shown_state is NodeState.DRAINING
    await nodes.put(draining, epoch, None)
    await nodes.drain("a", None)
    assert [n.shown_state for n in await nodes.nodes()] == [NodeState.READY]


async def test_a_node_that_joined_meanwhile_is_not_overwritten(world: World) -> None:
    epoch = await world.ports.leadership.take("a")
    assert epoch is not None
    nodes = world.ports.nodes
    await nodes.put(node("a"), epoch, None)
    (before,) = await nodes.nodes()
    joined = before.model_copy(update={"incarnation": "life-2", "fact_id": "2-0"})
    await nodes.put(joined, epoch, before)
    with pytest.raises(StaleWriteError):
        await nodes.put(before.model_copy(update={"state": NodeState.LOST}), epoch, before)
    with pytest.raises(StaleWriteError):
        await nodes.put(node("b"), epoch, node("b"))
    assert await nodes.nodes() == [joined]


async def test_a_node_is_forgotten_with_all_of_its_own_unless_it_lives(world: World) -> None:
    epoch = await world.ports.leadership.take("a")
    assert epoch is not None
    nodes = world.ports.nodes
    for name in ("a", "a-2"):
        await nodes.put(node(name), epoch, None)
        await nodes.drain(name, Drain(asked_ms=1))
        await nodes.keep_measured(name, "cpu", Measurement(at_ms=1), epoch)
    known, other = await nodes.nodes()
    assert [await nodes.node(name) for name in ("a", "a-2", "a-3")] == [known, other, None]
    with pytest.raises(DeposedError):
        await nodes.forget(known, epoch + 1)
    with pytest.raises(StaleWriteError):
        await nodes.forget(known.model_copy(update={"fact_id": "2-0"}), None)
    await nodes.forget(known, epoch)
    assert await nodes.nodes() == [other]
    await nodes.put(node("a"), epoch, None)
    assert (await nodes.nodes())[0] == node("a")
    world.outside.lease("a", "life-1")
    with pytest.raises(StaleWriteError):
        await nodes.forget(node("a"), None)


async def test_nothing_of_a_forgotten_node_stays_in_redis(redis_url: str) -> None:
    async with redis_ports(redis_url) as ports:
        epoch = await ports.leadership.take("a")
        assert epoch is not None
        await ports.nodes.put(node("a"), epoch, None)
        with Redis.from_url(redis_url, decode_responses=True) as redis:
            # As an agent may that does not say that it told of something.
            redis.rpush(keys.node_facts("a"), "a fact")
            redis.xadd(keys.node_inbox("a"), {keys.MESSAGE_FIELD: "a command"})
            redis.hset(keys.node_beat("a"), "number", "1")
            await ports.nodes.forget(node("a"), epoch)
            assert redis.keys("ml:node*") == []


async def test_what_a_node_measured_stands_whatever_the_leader_writes_of_it(world: World) -> None:
    epoch = await world.ports.leadership.take("a")
    assert epoch is not None
    nodes = world.ports.nodes
    await nodes.put(node("a"), epoch, None)
    await nodes.put(node("b"), epoch, None)
    found = Measurement(facts=FACTS, at_ms=7)
    await nodes.keep_measured("a", "cpu", found, epoch)
    for known in await nodes.nodes():
        await nodes.put(known, epoch, None)
    assert {n.id: n.measured for n in await nodes.nodes()} == {"a": {"cpu": found}, "b": {}}
    with pytest.raises(DeposedError):
        await nodes.keep_measured("a", "cpu", found, epoch - 1)
