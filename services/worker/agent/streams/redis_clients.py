"""The agent's connections to Redis: one that writes and never repeats, one that waits, and telemetry's.

What is tried again is tried by who knows what it does: ``while_away``.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError
from tenacity import (
    AsyncRetrying,
    RetryCallState,
    retry_if_exception_type,
    stop_after_delay,
    stop_never,
    wait_random_exponential,
)

from services.contract.redis import redis_keys
from services.contract.redis.tls_files import following_files

BLOCK_MS: Final = 2_000
# What says that Redis is away. Not every OSError does: a full disk raises one too.
REDIS_AWAY: Final = (RedisError, ConnectionError)
RULES_ARE_OLD: Final = "make the users' file again: python -m services.controller.acl NODE …"
"""What to do where a server's rules for agents are older than what they do."""
ANSWER_WITHIN_S: Final = 1.5
"""A node's lease outlives two beats that get no answer for so long."""
# Random, so that a thousand agents do not come back at the moment in which Redis does.
_WAIT: Final = wait_random_exponential(multiplier=0.1, min=0.05, max=1.0)

LONGEST_RECORD: Final = 1 << 18
"""Longer entries of a stream, and lines of a file of records, are passed over."""
_BYTES_AT_ONCE: Final = 4 << 20
# One by one: of a thousand together Redis would make gigabytes.
_READ_NEWEST: Final = """
-- KEYS: stream; ARGV: from where, how many, field, the longest entry, about how many bytes are read at once
local rows, from, left = {}, ARGV[1], tonumber(ARGV[5])
while #rows < tonumber(ARGV[2]) and left > 0 do
  local found = redis.pcall('XREVRANGE', KEYS[1], from, '-', 'COUNT', 1)
  if found.err then return found end
  local row = found[1]
  if not row then break end
  -- Each further field takes time, too, though it is empty.
  local body, bytes = '', 16 * (#row[2] - 2)
  for at = 1, #row[2], 2 do
    bytes = bytes + #row[2][at] + #row[2][at + 1]
    if row[2][at] == ARGV[3] then body = row[2][at + 1] end
  end
  rows[#rows + 1] = {row[1], bytes > tonumber(ARGV[4]) and '' or body}
  from, left = '(' .. row[1], left - bytes
end
return rows
"""


@dataclass(frozen=True)
class Connections:
    """To Redis: one that commands do not block, one that waits for commands, one for telemetry.

    ``telemetry`` is ``writing`` where it has no server of its own. None of them retries.
    """

    writing: Redis
    waiting: Redis
    telemetry: Redis

    @property
    def telemetry_is_apart(self) -> bool:
        """Whether the server with the leases may answer while the one with telemetry does not."""
        return self.telemetry is not self.writing


class NewestFirst:
    """Reads streams to which any agent of a job adds as much as it likes, and entries of hundreds of megabytes.

    Backwards, so that what is added meanwhile is never come to.
    """

    def __init__(self, client: Redis) -> None:
        self._read = client.register_script(_READ_NEWEST)

    async def rows(self, key: str, start: str, count: int) -> list[tuple[str, str]]:
        """Ids and bodies of up to ``count`` entries from ``start`` on; the body is empty of one that is too long.

        Only where the stream ends there is none.
        """
        field, most = redis_keys.MESSAGE_FIELD, (LONGEST_RECORD, _BYTES_AT_ONCE)
        answer: Any = await self._read(keys=[key], args=[start, count, field, *most])
        return [(entry, body) for entry, body in answer]


def writing_client(url: str) -> Redis:
    """For scripts and pipelines. redis-py's own retries would apply a write twice."""
    return _client(url, ANSWER_WITHIN_S)


def waiting_client(url: str) -> Redis:
    """For reads that block ``BLOCK_MS``; its socket waits longer than Redis does."""
    return _client(url, ANSWER_WITHIN_S + BLOCK_MS / 1000)


def while_away(said: Callable[[str], None], give_up_s: float | None = None) -> AsyncRetrying:
    """Tries again for as long as Redis is away, after random times that grow to a second.

    To be gone through by ``async for``, with what is tried in ``with`` its variable.

    Args:
        said: Called with the reason before each wait.
        give_up_s: After so long the error is raised; None: never.
    """

    def say(state: RetryCallState) -> None:
        said(str(state.outcome.exception() if state.outcome is not None else ""))

    return AsyncRetrying(
        retry=retry_if_exception_type(REDIS_AWAY),
        wait=_WAIT,
        stop=stop_never if give_up_s is None else stop_after_delay(give_up_s),
        before_sleep=say,
        reraise=True,
    )


def _client(url: str, timeout_s: float) -> Redis:
    client = Redis.from_url(
        url,
        decode_responses=True,
        # Other agents may write any bytes into what ranks report, and this one reads some of it.
        encoding_errors="replace",
        socket_timeout=timeout_s,
        socket_connect_timeout=ANSWER_WITHIN_S,
        retry=Retry(NoBackoff(), 0),
        protocol=2,
    )
    return following_files(client)
