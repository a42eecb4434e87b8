"""A lease that outlives a busy event loop: a thread renews it while the loop of its holder is late.

Whatever one tenant or rank makes a process do, its loop may be busy for some seconds. Without this the node would be
lost, or the lead, with all that goes on there. One of the contract's two modules that need redis-py.
"""

import asyncio
import contextlib
import math
import threading
import time
from collections.abc import AsyncIterator, Callable
from typing import Final

from redis import Redis
from redis.backoff import NoBackoff
from redis.commands.core import Script
from redis.exceptions import RedisError
from redis.retry import Retry

LATE_BY_AT_MOST_S: Final = 20.0
"""A loop that has not renewed its lease for so long does not do what the lease says that it does."""
_ANSWER_WITHIN_S: Final = 1.0
_LOOKS_IN_A_LEASE: Final = 10
RENEW_LEASE: Final = """
-- KEYS: the lease; ARGV: holder, its length in ms
if redis.call('GET', KEYS[1]) ~= ARGV[1] then return 0 end
-- A write, as all decisions are: a Redis that refuses those refuses this, and so says why.
redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
return 1
"""
"""The script that renews a lease which the holder still has; answers whether it does."""


class LeaseKeeper:
    """Renews a lease that its holder has not renewed for half of its length.

    It renews what that holder still has, for ``LATE_BY_AT_MOST_S`` after the holder's own last renewal. It takes no
    lease, and none again that ran out or was given up: that is for the loop, which must learn of it.

    Args:
        redis_url: Of the server with the lease. It is contacted only when the loop is late.
        key: The lease.
        lease_ms: For how long it is valid once it is renewed.
        late: Called, in the thread, each time it was renewed here, with for how many seconds the loop has not.
    """

    def __init__(
        self, redis_url: str, key: str, lease_ms: int, late: Callable[[float], None]
    ) -> None:
        self._late = late
        self._redis_url = redis_url
        self._key = key
        self._lease_ms = lease_ms
        self._held: tuple[str, float] = "", -math.inf

    def renewed(self, holder: str) -> None:
        """Take note that the loop has taken or renewed the lease as ``holder`` just now."""
        self._held = holder, time.monotonic()

    def given_up(self) -> None:
        """Take note that the loop holds no lease."""
        self._held = "", -math.inf

    @contextlib.asynccontextmanager
    async def keeping(self) -> AsyncIterator[None]:
        """Keep the lease until the block ends."""
        over = threading.Event()
        thread = threading.Thread(target=self._keep, args=(over,), name="lease", daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            await asyncio.to_thread(thread.join)

    def _keep(self, over: threading.Event) -> None:
        lease_s = self._lease_ms / 1000
        client = Redis.from_url(
            self._redis_url,
            decode_responses=True,
            socket_timeout=_ANSWER_WITHIN_S,
            socket_connect_timeout=_ANSWER_WITHIN_S,
            retry=Retry(NoBackoff(), 0),
        )
        with client:
            renew = client.register_script(RENEW_LEASE)
            while not over.wait(lease_s / _LOOKS_IN_A_LEASE):
                late_s = time.monotonic() - self._held[1]
                if lease_s / 2 < late_s < LATE_BY_AT_MOST_S:
                    self._renew(renew)
                else:
                    # Thousands of agents share a server: none keeps a connection that it rarely needs.
                    client.connection_pool.disconnect()

    def _renew(self, renew: Script) -> None:
        holder, since = self._held
        try:
            is_held = renew(keys=[self._key], args=[holder, self._lease_ms])
        except (RedisError, OSError):  # also of redis-py's own files, where there is no descriptor
            return  # the loop meets the same, and says so
        if is_held:
            self._late(time.monotonic() - since)
