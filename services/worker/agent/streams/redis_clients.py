"""The agent's two connections to Redis: one that writes and never repeats, one that waits."""

from typing import Final

from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError

BLOCK_MS: Final = 2_000
# What says that Redis is away. Not every OSError does: a full disk raises one too.
REDIS_AWAY: Final = (RedisError, ConnectionError)
RULES_ARE_OLD: Final = "make the users' file again: python -m services.controller.acl NODE …"
"""What to do where a server's rules for agents are older than what they do."""
_ANSWER_WITHIN_S: Final = 2.0


def writing_client(url: str) -> Redis:
    """For scripts and pipelines. redis-py's own retries would apply a write twice."""
    return _client(url, _ANSWER_WITHIN_S)


def waiting_client(url: str) -> Redis:
    """For reads that block ``BLOCK_MS``; its socket waits longer than Redis does."""
    return _client(url, _ANSWER_WITHIN_S + BLOCK_MS / 1000)


def _client(url: str, timeout_s: float) -> Redis:
    return Redis.from_url(
        url,
        decode_responses=True,
        socket_timeout=timeout_s,
        socket_connect_timeout=_ANSWER_WITHIN_S,
        retry=Retry(NoBackoff(), 0),
        protocol=2,
    )
