"""How the controller talks to Redis: a client for each temperament.

Writes are never retried: redis-py cannot know whether a lost reply's command was applied, and
would apply it twice. Blocking reads have their own pools, whose socket time-out lies above BLOCK;
those of the loops are not those of the streams, so that followers can never silence a loop.
"""

import contextlib
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from typing import Final, TypeVar

import structlog
from pydantic import ValidationError
from redis.asyncio import BlockingConnectionPool, Redis
from redis.asyncio.retry import Retry
from redis.backoff import ConstantBackoff, NoBackoff
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import ReadOnlyError
from redis.exceptions import TimeoutError as RedisTimeoutError

from services.controller.domain.errors import StoreUnavailableError

MAX_BLOCK_S: Final = 20.0
MAX_STREAMS: Final = 64
_ANSWER_S: Final = 5.0
# Requests beyond these wait for a connection instead of failing.
_CONNECTIONS: Final = 64
# One to read on, and room for one that a cancelled read has not given back yet.
_LOOP_CONNECTIONS: Final = 4
_READ_RETRIES: Final = 1
_READ_BACKOFF_S: Final = 0.05


_UNREADABLE_KEPT: Final = 1_000
_log = structlog.get_logger()
T = TypeVar("T")


class Unreadable:
    """Records that this version cannot read. Each costs itself alone, and is logged once."""

    def __init__(self) -> None:
        self._known: dict[str, object] = {}

    @property
    def names(self) -> tuple[str, ...]:
        """Keys, with the field or the entry where a key holds several records."""
        return tuple(self._known)

    def read(self, name: str, parse: Callable[[str], T], text: str) -> T | None:
        """The record ``text`` of this name; None if ``parse`` raises ValidationError."""
        try:
            value = parse(text)
        except ValidationError as error:
            self.note(name, hash(text), error)
            return None
        self.forget(name)
        return value

    def note(self, name: str, content: object, error: BaseException | None) -> None:
        """It cannot be read; said once for the same ``content``, for loops come by each second."""
        if self._known.get(name) != content:
            _log.error("record_unreadable", key=name, error=str(error))
        self._known.pop(name, None)
        self._known[name] = content
        if len(self._known) > _UNREADABLE_KEPT:
            del self._known[next(iter(self._known))]

    def forget(self, name: str) -> None:
        """It was read, or is there no more."""
        self._known.pop(name, None)


@dataclass(frozen=True)
class RedisClients:
    """The clients: for what answers at once, and for what waits until something comes.

    ``unreadable``: what all that read by these clients could not read.
    """

    reads: Redis
    writes: Redis
    facts: Redis
    wakes: Redis
    streams: Redis
    unreadable: Unreadable = field(default_factory=Unreadable)


@contextlib.asynccontextmanager
async def connected(url: str, max_streams: int = MAX_STREAMS) -> AsyncIterator[RedisClients]:
    """Clients for ``url`` until the block ends. They connect when they are first used.

    Args:
        url: Of the Redis.
        max_streams: How many may follow logs at a time.
    """
    once = Retry(NoBackoff(), 0)
    again = Retry(ConstantBackoff(_READ_BACKOFF_S), _READ_RETRIES)

    def client(connections: int, retry: Retry, patience_s: float) -> Redis:
        pool: BlockingConnectionPool = BlockingConnectionPool.from_url(
            url,
            max_connections=connections,
            timeout=_ANSWER_S,
            retry=retry,
            socket_timeout=patience_s,
            socket_connect_timeout=_ANSWER_S,
            decode_responses=True,
        )
        return Redis.from_pool(pool)

    clients = RedisClients(
        reads=client(_CONNECTIONS, again, _ANSWER_S),
        writes=client(_CONNECTIONS, once, _ANSWER_S),
        facts=client(_LOOP_CONNECTIONS, once, MAX_BLOCK_S + _ANSWER_S),
        wakes=client(_LOOP_CONNECTIONS, once, MAX_BLOCK_S + _ANSWER_S),
        streams=client(max_streams, once, MAX_BLOCK_S + _ANSWER_S),
    )
    everyone = (clients.reads, clients.writes, clients.facts, clients.wakes, clients.streams)
    try:
        yield clients
    finally:
        for one in everyone:
            await one.aclose()


@contextlib.contextmanager
def answering() -> Iterator[None]:
    """Redis's absence, in the words of the ports."""
    try:
        yield
    except (RedisConnectionError, RedisTimeoutError, ReadOnlyError, OSError) as error:
        raise StoreUnavailableError(f"Redis does not answer: {error}") from error
