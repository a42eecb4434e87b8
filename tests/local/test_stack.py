"""The owner of a stack that is ended while it starts."""

import asyncio
from pathlib import Path

import psutil
import pytest

from services.local.settings import LocalSettings
from services.local.stack import running_stack
from tests.e2e.conftest import free_port
from tests.waiting import until

pytestmark = pytest.mark.redis


def test_nothing_of_a_start_that_was_ended_goes_on(tmp_path: Path) -> None:
    before = psutil.Process().children()
    redis_log = tmp_path / "logs" / "redis.log"

    async def start() -> None:
        async with running_stack(LocalSettings(home=tmp_path, port=free_port())):
            pytest.fail("nothing else can have come up")

    async def end_it_early() -> None:
        starting = asyncio.create_task(start())
        await asyncio.to_thread(until, redis_log.exists, every_s=0.001)
        starting.cancel()
        await asyncio.wait([starting])
        assert starting.cancelled()
        # One that still waits for Redis would print that its connection broke.
        assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(end_it_early())
    assert set(psutil.Process().children()) <= set(before)
