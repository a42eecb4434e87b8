"""What tells facts ends when it is told to, whatever its client was doing."""

import asyncio
import json
from pathlib import Path

import pytest

from services.contract.messages.facts import NodeLeft
from services.contract.redis.redis_keys import FACT_SENDERS, node_facts
from services.local.embedded_redis import EmbeddedRedis
from services.worker.agent.streams.outbox import MOST_WAITING, Outbox
from services.worker.agent.streams.redis_clients import writing_client
from tests.agent.conftest import NODE

MOMENTS = 300


@pytest.mark.redis
def test_it_ends_in_whatever_moment_it_is_told_to(redis_url: str) -> None:
    asyncio.run(end_in_many_moments(redis_url))


@pytest.mark.redis
def test_it_is_full_while_redis_is_away_and_so_much_waits_and_then_tells_all_of_it(
    tmp_path: Path,
) -> None:
    asyncio.run(fill_and_empty(tmp_path))


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
            await asyncio.wait([running], timeout=5)
            assert running.cancelled(), f"told to end in moment {moment % 30}, it goes on"
