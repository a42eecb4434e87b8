"""What tells facts ends when it is told to, whatever its client was doing."""

import asyncio

import pytest

from services.contract.messages.facts import NodeLeft
from services.worker.agent.outbox import Outbox
from services.worker.agent.redis_clients import writing_client
from tests.agent.conftest import NODE

MOMENTS = 300


@pytest.mark.redis
def test_it_ends_in_whatever_moment_it_is_told_to(redis_url: str) -> None:
    asyncio.run(end_in_many_moments(redis_url))


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
