"""TLS to Redis by files that may be replaced: each new connection reads them again.

Of the contract only this module, ``lease_keeper`` and ``redis_address`` need redis-py; they are imported only by what
connects to Redis.
"""

from collections.abc import Mapping
from typing import Any

from redis.asyncio import Redis, SSLConnection


class _ReadsItsFiles(SSLConnection):
    """redis-py keeps what a connection object once read, for as long as its pool has it: days."""

    def _connection_arguments(self) -> Mapping[str, Any]:
        self.ssl_context.context = None
        return super()._connection_arguments()


def following_files(client: Redis) -> Redis:
    """``client``, whose connections trust what the files of its URL hold when they are made."""
    pool = client.connection_pool
    if pool.connection_class is SSLConnection:
        pool.connection_class = _ReadsItsFiles
    return client
