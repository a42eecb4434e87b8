"""A test that asks for `world` runs once on Redis and once in memory."""

import itertools
from collections.abc import AsyncIterator

import pytest
from redis import Redis

from services.controller.adapters.memory import memory_ports
from services.controller.adapters.memory.server import MemoryServer
from services.controller.adapters.redis import redis_ports
from tests.controller.stores.worlds import OutsideMemory, OutsideRedis, World


@pytest.fixture(params=["memory", "redis"])
async def world(request: pytest.FixtureRequest) -> AsyncIterator[World]:
    if request.param == "memory":
        ticks = itertools.count(1_000_000)
        server = MemoryServer(now_ms=lambda: next(ticks))
        yield World(memory_ports(server), OutsideMemory(server))
        return
    url = request.getfixturevalue("redis_url")
    with Redis.from_url(url, decode_responses=True) as redis:
        async with redis_ports(url) as ports:
            yield World(ports, OutsideRedis(redis))
