"""What tells facts ends when it is told to, whatever its client was doing."""

import asyncio
import json
from pathlib import Path

import pytest
from redis import Redis

from services.contract.messages.facts import NodeLeft
from services.contract.redis.redis_keys import FACT_SENDERS, node_facts
from services.controller.adapters.redis import redis_ports
from services.local.embedded_redis import EmbeddedRedis
from services.worker.agent.streams.outbox import MOST_WAITING, Outbox
from services.worker.agent.streams.redis_clients import writing_client
from tests.agent.conftest import NODE
from tests.waiting import until

MOMENTS = 300


@pytest.mark.redis
def test_it_ends_in_whatever_moment_it_is_told_to(redis_url: str) -> None:
    asyncio.run(end_in_many_moments(redis_url))


@pytest.mark.redis
def test_all_comes_that_was_told_while_the_order_of_facts_had_another_type(redis_url: str) -> None:
    with Redis.from_url(redis_url) as redis:
        asyncio.run(tell_of_retyped_senders(redis, redis_url))


@pytest.mark.system
@pytest.mark.redis
def test_it_is_full_while_redis_is_away_and_so_much_waits_and_then_tells_all_of_it(
    tmp_path: Path,
) -> None:
    asyncio.run(fill_and_empty(tmp_path))


async def tell_of_retyped_senders(redis: Redis, redis_url: str) -> None:
    async with writing_client(redis_url) as client, redis_ports(redis_url) as ports:
        await ports.facts.prepare()
        redis.set(FACT_SENDERS, "no list")
        outbox = Outbox(client, NODE)
        running = asyncio.create_task(outbox.run())
        outbox.tell(NodeLeft(node_id=NODE, incarnation="first"))
        # Redis does what it can of a transaction, which is tried again and again.
        await asyncio.to_thread(until, lambda: redis.llen(node_facts(NODE)) > 2)
        redis.delete(FACT_SENDERS)
        async with asyncio.timeout(60):
            await outbox.emptied()
            told = [entry.body for entry in await ports.facts.next(128, 0.01)]
            outbox.tell(NodeLeft(node_id=NODE, incarnation="last"))
            await outbox.emptied()
            while entries := await ports.facts.next(128, 0.01):
                told += [entry.body for entry in entries]
        lives = [json.loads(fact)["incarnation"] for fact in told]
        assert lives == ["first"] * (len(lives) - 1) + ["last"]
        assert redis.exists(node_facts(NODE), FACT_SENDERS) == 0
        running.cancel()
        await asyncio.wait([running])


async def fill_and_empty(folder: Path) -> None:
    with EmbeddedRedis.start(folder) as server:
        url = server.url
    async with writing_client(url) as client:
        outbox = Outbox(client, NODE)
        running = asyncio.create_task(outbox.run())
        for number in range(MOST_WAITING):
            assert not outbox.is_full()
            outbox.tell(NodeLeft(node_id=NODE, incarnation=str(number)))
        assert outbox.is_full()
        with EmbeddedRedis.start(folder) as server:
            assert server.url == url
            async with asyncio.timeout(120):
                await outbox.emptied()
            assert not outbox.is_full()
            told = await client.lrange(node_facts(NODE), 0, -1)
            assert await client.lrange(FACT_SENDERS, 0, -1) == [NODE] * MOST_WAITING
        assert [json.loads(fact)["incarnation"] for fact in told] == list(
            map(str, range(MOST_WAITING))
        )
        running.cancel()
        await asyncio.wait([running])


async def end_in_many_moments(redis_url: str) -> None:
    async with writing_client(redis_url) as client:
        await client.ping()
        for moment in range(MOMENTS):
            outbox = Outbox(client, NODE)
            running = asyncio.create_task(outbox.run())
            outbox.tell(NodeLeft(node_id=NODE, incarnation=str(moment)))
            for _ in range(moment % 30):
                await asyncio.sleep(0)
            running.cancel()
            await asyncio.wait([running], timeout=60)
            assert running.cancelled(), f"told to end in moment {moment % 30}, it goes on"
