"""The events of all jobs in Redis: one stream, which the scripts that write jobs append to."""

import asyncio
from typing import Any, Final

from redis.exceptions import ResponseError

from services.contract.redis import redis_keys as keys
from services.controller.adapters.redis.connection import (
    MAX_BLOCK_S,
    RedisClients,
    answering,
    is_mistyped,
)
from services.controller.domain.errors import CursorExpiredError
from services.controller.ports.event_feed import FeedEntry

_BEGINNING: Final = "0-0"


class RedisEventFeed:
    """The port ``EventFeed``.

    Args:
        clients: Redis.
    """

    def __init__(self, clients: RedisClients) -> None:
        self._clients = clients

    async def read(self, after: str | None, limit: int) -> list[FeedEntry]:
        """See ``EventFeed.read``."""
        begin = "-" if after is None else f"({after}"
        with answering():
            # One transaction: what is trimmed between two reads would be passed over in silence.
            async with self._clients.reads.pipeline(transaction=True) as pipe:
                pipe.xrange(keys.EVENT_FEED, begin, "+", limit)
                pipe.xrange(keys.EVENT_FEED, "-", "+", 1)
                answers = await pipe.execute(raise_on_error=False)
            rows, first = self._clients.unreadable.of_their_type([keys.EVENT_FEED] * 2, answers)
        oldest = _entries(first)
        if after not in {None, _BEGINNING} and oldest:
            seen = FeedEntry(str(after), "", "")
            if seen.place < oldest[0].place:
                raise CursorExpiredError(
                    f"what follows {after} was trimmed; the oldest entry kept is {oldest[0].id}"
                )
        return _entries(rows)

    async def newest(self) -> str:
        """See ``EventFeed.newest``."""
        with self._clients.answering(keys.EVENT_FEED):
            rows: Any = await self._clients.reads.xrevrange(keys.EVENT_FEED, count=1)
        return str(rows[0][0]) if rows else _BEGINNING

    async def wait(self, after: str, timeout_s: float) -> None:
        """See ``EventFeed.wait``."""
        block_ms = max(int(min(timeout_s, MAX_BLOCK_S) * 1000), 1)
        with answering():
            try:
                await self._clients.streams.xread({keys.EVENT_FEED: after}, count=1, block=block_ms)
            except ResponseError as error:
                if not is_mistyped(error):
                    raise
                await asyncio.sleep(block_ms / 1000)  # whoever reads it reports its type


def _entries(rows: Any) -> list[FeedEntry]:  # noqa: ANN401 an answer of Redis
    return [
        FeedEntry(str(entry_id), fields[keys.MESSAGE_FIELD], fields[keys.JOB_FIELD])
        for entry_id, fields in rows or []
        if keys.MESSAGE_FIELD in fields and keys.JOB_FIELD in fields
    ]
