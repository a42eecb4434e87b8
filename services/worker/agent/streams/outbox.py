"""Facts on their way to Redis: in order, kept while Redis is away, at least once."""

import asyncio
import itertools
from collections import deque
from dataclasses import dataclass
from typing import Final

import structlog
from redis.asyncio import Redis

from services.contract.messages.facts import Fact
from services.contract.redis import redis_keys
from services.contract.system.cancellation import end_if_told
from services.worker.agent.streams.redis_clients import while_away

_AT_ONCE: Final = 500
MOST_WAITING: Final = 50_000
"""With so many facts on their way no more are taken from ranks: they would fill the memory."""
_log = structlog.get_logger()


@dataclass(frozen=True)
class Handled:
    """A command of the inbox was carried out and may be forgotten."""

    entry_id: str


class Outbox:
    """Appends facts to the node's own list and acknowledges commands behind the facts they led to.

    Args:
        redis: A client that does not retry.
        node_id: Whose facts they are, and whose inbox is acknowledged.
    """

    def __init__(self, redis: Redis, node_id: str) -> None:
        self._redis = redis
        self._node_id = node_id
        self._facts = redis_keys.node_facts(node_id)
        self._inbox = redis_keys.node_inbox(node_id)
        self._waiting: deque[Fact | Handled] = deque()
        self._filled = asyncio.Event()
        self._empty = asyncio.Event()
        self._empty.set()

    def is_full(self) -> bool:
        """Whether so much waits that ranks should not be heard for a while."""
        return len(self._waiting) >= MOST_WAITING

    def tell(self, fact: Fact) -> None:
        """Append a fact, as soon as Redis takes it."""
        self._put(fact)

    def acknowledge(self, entry_id: str) -> None:
        """Forget a command once all facts that were told before are in Redis."""
        self._put(Handled(entry_id))

    async def run(self) -> None:
        """Write until cancelled."""
        while True:
            end_if_told()
            await self._filled.wait()
            async for attempt in while_away(self._say_away):
                with attempt:
                    end_if_told()
                    await self._write()

    async def emptied(self) -> None:
        """Return once everything is written."""
        await self._empty.wait()

    def _say_away(self, why: str) -> None:
        _log.warning("facts_wait", count=len(self._waiting), why=why)

    def _put(self, item: Fact | Handled) -> None:
        self._waiting.append(item)
        self._filled.set()
        self._empty.clear()

    async def _write(self) -> None:
        batch = list(itertools.islice(self._waiting, _AT_ONCE))
        async with self._redis.pipeline(transaction=True) as pipeline:
            for item in batch:
                if isinstance(item, Handled):
                    pipeline.xack(self._inbox, redis_keys.INBOX_GROUP, item.entry_id)
                    pipeline.xdel(self._inbox, item.entry_id)
                else:
                    pipeline.rpush(self._facts, item.model_dump_json())
                    pipeline.rpush(redis_keys.FACT_SENDERS, self._node_id)
            pipeline.publish(redis_keys.WAKE, "facts")
            await pipeline.execute()
        for _ in batch:
            self._waiting.popleft()
        if not self._waiting:
            self._filled.clear()
            self._empty.set()
