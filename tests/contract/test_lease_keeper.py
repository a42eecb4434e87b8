"""Leases of a process whose event loop is busy."""

import asyncio
import resource
from collections.abc import Iterator

import pytest
from redis import Redis

from services.contract.redis import lease_keeper
from services.contract.redis.lease_keeper import LeaseKeeper
from tests.waiting import until

LEASE = "a-lease"
LEASE_MS = 1_500


@pytest.fixture
def redis(redis_url: str) -> Iterator[Redis]:
    with Redis.from_url(redis_url, decode_responses=True) as client:
        yield client


def still_held_after(redis: Redis, seconds: float) -> bool:
    """Whether it is held all that time, in which the loop does nothing else. It is never taken again."""
    redis.blpop(["nothing"], timeout=seconds)
    return redis.get(LEASE) == "one"


def take(redis: Redis, keeper: LeaseKeeper) -> None:
    redis.set(LEASE, "one", px=LEASE_MS)
    keeper.renewed("one")


def test_a_busy_loop_keeps_its_lease_until_it_ends(redis_url: str, redis: Redis) -> None:
    late: list[float] = []

    async def be_busy() -> None:
        keeper = LeaseKeeper(redis_url, LEASE, LEASE_MS, late.append)
        async with keeper.keeping():
            take(redis, keeper)
            assert still_held_after(redis, 2 * LEASE_MS / 1000)
        assert not still_held_after(redis, 1.5 * LEASE_MS / 1000)

    asyncio.run(be_busy())
    assert late == sorted(late)
    assert late[0] > LEASE_MS / 2000


def test_a_moment_without_descriptors_costs_no_later_lease(redis_url: str, redis: Redis) -> None:
    most = resource.getrlimit(resource.RLIMIT_NOFILE)

    async def be_busy() -> None:
        keeper = LeaseKeeper(redis_url, LEASE, LEASE_MS, lambda _: None)
        async with keeper.keeping():
            take(redis, keeper)
            resource.setrlimit(resource.RLIMIT_NOFILE, (3, most[1]))
            try:
                until(lambda: redis.pttl(LEASE) < LEASE_MS / 5)
            finally:
                resource.setrlimit(resource.RLIMIT_NOFILE, most)
            take(redis, keeper)
            assert still_held_after(redis, 2 * LEASE_MS / 1000)

    asyncio.run(be_busy())


def test_a_loop_that_is_stuck_loses_its_lease(
    redis_url: str, redis: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lease_keeper, "LATE_BY_AT_MOST_S", 1.5 * LEASE_MS / 1000)

    async def be_stuck() -> None:
        keeper = LeaseKeeper(redis_url, LEASE, LEASE_MS, lambda _: None)
        async with keeper.keeping():
            take(redis, keeper)
            assert still_held_after(redis, 1.2 * LEASE_MS / 1000)
            until(lambda: redis.get(LEASE) is None)

    asyncio.run(be_stuck())


@pytest.mark.parametrize("becomes", ["given up", "run out", "taken"])
def test_a_lease_that_is_over_is_not_renewed(redis_url: str, redis: Redis, becomes: str) -> None:
    async def be_busy() -> None:
        keeper = LeaseKeeper(redis_url, LEASE, LEASE_MS, lambda _: None)
        async with keeper.keeping():
            take(redis, keeper)
            if becomes == "given up":
                keeper.given_up()
            elif becomes == "run out":
                redis.delete(LEASE)
            else:
                redis.set(LEASE, "two", px=LEASE_MS)
            until(lambda: redis.get(LEASE) is None)

    asyncio.run(be_busy())


def test_it_asks_only_while_the_loop_is_late(redis_url: str, redis: Redis) -> None:
    async def renew_twice() -> None:
        keeper = LeaseKeeper(redis_url, LEASE, LEASE_MS, lambda _: None)
        async with keeper.keeping():
            take(redis, keeper)
            until(lambda: len(redis.client_list()) == 2)
            keeper.renewed("one")
            until(lambda: len(redis.client_list()) == 1)

    asyncio.run(renew_twice())
