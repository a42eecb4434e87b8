"""Reads streams that agents append to as often and as much as they like: no more of them than is kept of a job."""

from collections.abc import Sequence
from typing import Any, Final, NamedTuple

from redis.asyncio import Redis

from services.contract.redis import redis_keys as keys
from services.controller.adapters.redis import record_scripts
from services.controller.adapters.redis.connection import RedisClients, answering
from services.controller.ports.machines import Entry

_BYTES_AT_ONCE: Final = 16 << 20


class Bounds(NamedTuple):
    """What is read of a stream: entries of up to ``longest`` bytes, and up to ``most`` of them.

    ``most`` is twice what is kept, for what agents append is trimmed now and then.
    """

    longest: int
    most: int


STEPS: Final = Bounds(4 << 10, 2 * keys.STEPS_KEPT)
METRICS: Final = Bounds(32 << 10, 2 * keys.METRICS_KEPT)
OUTPUT: Final = Bounds(128 << 10, 2 * keys.LOGS_KEPT)
OLDER_EVENTS: Final = Bounds(1 << 20, 2 * keys.EVENTS_KEPT)


class RecordStreams:
    """Reads within bounds: what is beyond them is removed. Of a longer entry the id is answered, with an empty body.

    Args:
        clients: Redis.
    """

    def __init__(self, clients: RedisClients) -> None:
        self._clients = clients
        self._read = clients.reads.register_script(record_scripts.READ_RECORDS)

    async def last(self, names: Sequence[str], bounds: Bounds, count: int) -> list[list[Entry]]:
        """The last ``count`` entries of each, oldest first; none of a key of another type.

        Raises:
            StoreUnavailableError: Redis does not answer, or refuses.
        """
        with answering():
            async with self._clients.reads.pipeline(transaction=False) as pipe:
                for name in names:
                    await self._ask(pipe, name, bounds, count, "XREVRANGE", "+")
                rows = await pipe.execute(raise_on_error=False)
            told = self._clients.unreadable.of_their_type(names, rows)
        return [_entries(row)[::-1] for row in told]

    async def rows(
        self, name: str, bounds: Bounds, after: str | None, count: int
    ) -> tuple[list[Entry], list[Entry]]:
        """Up to ``count`` entries behind ``after`` (None: from the first on), and the first of all, of one moment.

        Raises:
            StoreUnavailableError: Redis does not answer, or refuses.
        """
        start = "-" if after is None else f"({after}"
        with answering():
            async with self._clients.reads.pipeline(transaction=True) as pipe:
                await self._ask(pipe, name, bounds, count, "XRANGE", start)
                await self._ask(pipe, name, bounds, 1, "XRANGE", "-")
                rows = await pipe.execute(raise_on_error=False)
            found, first = self._clients.unreadable.of_their_type([name] * 2, rows)
        return _entries(found), _entries(first)

    async def _ask(
        self, pipe: Redis, name: str, bounds: Bounds, count: int, command: str, start: str
    ) -> None:
        arguments = (command, start, count, keys.MESSAGE_FIELD, *bounds, _BYTES_AT_ONCE)
        await self._read(keys=[name], args=arguments, client=pipe)


def _entries(rows: Any) -> list[Entry]:  # noqa: ANN401 an answer of Redis
    return [Entry(name, body) for name, body in rows or []]
