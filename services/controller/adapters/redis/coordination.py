"""Leadership, time and wake-ups in Redis."""

import contextlib
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Final

import structlog
from redis.asyncio.client import PubSub
from redis.exceptions import ConnectionError as RedisConnectionError

from services.contract.redis import redis_keys as keys
from services.contract.redis.lease_keeper import RENEW_LEASE, LeaseKeeper
from services.controller.adapters.redis.connection import RedisClients, answering

_CONFIRMED_WITHIN_S: Final = 5.0
# Any agent may call: without a bound, one that calls faster than calls are taken would keep its controller from looking.
_CALLS_IN_A_ROW: Final = 1_000
_MARK: Final = f"return '{secrets.token_hex(8)}'"
"""A script of this process alone."""
# Redis 7 knows this function, and forgets scripts. Who may not ask Redis 6 goes by the script alone.
_RUN_OF_REDIS_6: Final = """
if redis.acl_check_cmd then return false end
local said = redis.pcall('INFO', 'server')
return type(said) == 'string' and string.match(said, 'run_id:(%x+)')
"""
_log = structlog.get_logger()

_TAKE_LEAD: Final = """
-- KEYS: leader, epoch; ARGV: holder, lease in ms
if not redis.call('SET', KEYS[1], ARGV[1], 'NX', 'PX', ARGV[2]) then
  redis.call('GET', KEYS[1])  -- what is no lease would never run out: this says so
  return 0
end
return redis.call('INCR', KEYS[2])
"""


_RELEASE_LEAD: Final = """
-- KEYS: leader; ARGV: holder
if redis.call('GET', KEYS[1]) ~= ARGV[1] then return 0 end
return redis.call('DEL', KEYS[1])
"""


class RedisLeadership:
    """The port ``Leadership``."""

    def __init__(self, clients: RedisClients, lease: LeaseKeeper) -> None:
        self._lease = lease
        self._take = clients.script(_TAKE_LEAD)
        self._renew = clients.script(RENEW_LEASE)
        self._release = clients.script(_RELEASE_LEAD)

    async def take(self, holder: str) -> int | None:
        """See ``Leadership.take``."""
        # Who asks has none, or gave up the one that it could not renew: it must run out.
        self._lease.given_up()
        with answering():
            epoch = await self._take(
                keys=[keys.LEADER, keys.EPOCH], args=[holder, keys.LEADER_LEASE_MS]
            )
        if epoch:
            self._lease.renewed(holder)
        return int(epoch) or None

    async def renew(self, holder: str) -> bool:
        """See ``Leadership.renew``."""
        with answering():
            is_ours = await self._renew(keys=[keys.LEADER], args=[holder, keys.LEADER_LEASE_MS])
        if is_ours:
            self._lease.renewed(holder)
        return bool(is_ours)

    async def release(self, holder: str) -> None:
        """See ``Leadership.release``."""
        self._lease.given_up()
        with answering():
            await self._release(keys=[keys.LEADER], args=[holder])


def note_late_loop(late_s: float) -> None:
    """Log that the event loop of the leader has not renewed its lease for so many seconds; a thread did."""
    _log.warning("loop_is_late", late_s=round(late_s, 1))


class RedisClock:
    """The port ``Clock``: Redis's own time, the only one that all processes share."""

    def __init__(self, clients: RedisClients) -> None:
        self._clients = clients

    async def now_ms(self) -> int:
        """See ``Clock.now_ms``."""
        with answering():
            seconds, micros = await self._clients.reads.time()
        return int(seconds) * 1000 + int(micros) // 1000


class RedisWaker:
    """The port ``Waker``.

    Args:
        subscription: To calls.
        is_same_life: Whether this life of Redis is that in which the subscription began.
    """

    def __init__(self, subscription: PubSub, is_same_life: Callable[[], Awaitable[bool]]) -> None:
        self._subscription = subscription
        self._is_same_life = is_same_life

    async def wait(self, timeout_s: float) -> None:
        """See ``Waker.wait``. Calls that came in a row count as one."""
        with answering():
            try:
                await self._hear(timeout_s)
            except RedisConnectionError:
                # Redis closes the connection of whoever takes calls more slowly than they come, and any agent may
                # call with megabytes. It is away only if it takes no new one, or was since it took the last one.
                await self._subscription.connect()  # type: ignore[no-untyped-call] # as below
                if not await self._is_same_life():
                    raise

    async def _hear(self, timeout_s: float) -> None:
        message = await self._subscription.get_message(timeout=timeout_s)
        for _ in range(_CALLS_IN_A_ROW):
            if message is None:
                return
            message = await self._subscription.get_message(timeout=0.0)


@contextlib.asynccontextmanager
async def listening(clients: RedisClients) -> AsyncIterator[RedisWaker]:
    """A waker that hears ``ml:wake`` until the block ends."""
    subscription = clients.wakes.pubsub()
    try:
        with answering():
            await subscription.subscribe(keys.WAKE)
            # Redis's confirmation: from here on no call is missed, and it counts as none.
            await subscription.get_message(timeout=_CONFIRMED_WITHIN_S)
            # No script outlives its server, and nobody else has this one. Redis 6 keeps scripts in its files.
            mark = await clients.reads.script_load(_MARK)
            run = await clients.reads.eval(_RUN_OF_REDIS_6, 0)

        async def is_same_life() -> bool:
            (is_there,) = await clients.reads.script_exists(mark)
            return bool(is_there) and await clients.reads.eval(_RUN_OF_REDIS_6, 0) == run

        yield RedisWaker(subscription, is_same_life)
    finally:
        await subscription.aclose()  # type: ignore[no-untyped-call] # not annotated in redis-py
