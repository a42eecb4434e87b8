"""Tokens and the audit trail in Redis."""

import heapq
import itertools
from collections.abc import Mapping
from http import HTTPStatus
from types import MappingProxyType
from typing import Any, Final

from services.contract.api.access import Scope
from services.contract.redis import redis_keys as keys
from services.contract.system.long_work import in_turns
from services.controller.adapters.redis.connection import RedisClients
from services.controller.domain.access.token import Token
from services.controller.ports.access import AuditRecord
from services.controller.ports.machines import Entry

# The sequence numbers of each stream begin elsewhere, so that ids are unique in all of them together.
_FIRST_NUMBERS: Final[Mapping[str, int]] = MappingProxyType(
    {keys.AUDIT: 0, keys.AUDIT_OF_OTHERS: 1 << 30, keys.AUDIT_OF_REFUSALS: 2 << 30}
)
_REFUSED: Final = range(HTTPStatus.BAD_REQUEST, HTTPStatus.INTERNAL_SERVER_ERROR)
_APPEND: Final = """
-- KEYS: stream; ARGV: how many are kept, field, entry, the first sequence number of this stream
local time = redis.call('TIME')
local ms, number = time[1] * 1000 + math.floor(time[2] / 1000), tonumber(ARGV[4])
local last = redis.call('XREVRANGE', KEYS[1], '+', '-', 'COUNT', 1)[1]
if last then
  local last_ms, last_number = string.match(last[1], '(%d+)-(%d+)')
  if tonumber(last_ms) >= ms then ms, number = tonumber(last_ms), tonumber(last_number) + 1 end
end
local id = string.format('%.0f-%.0f', ms, number)
redis.call('XADD', KEYS[1], 'MAXLEN', '~', ARGV[1], id, ARGV[2], ARGV[3])
"""
_PUT: Final = """
-- KEYS: tokens; ARGV: id, token, how many there may be
if redis.call('HLEN', KEYS[1]) >= tonumber(ARGV[3]) then return 'full' end
redis.call('HSET', KEYS[1], ARGV[1], ARGV[2])
return 'ok'
"""


class RedisTokens:
    """The port ``TokenStore``."""

    def __init__(self, clients: RedisClients) -> None:
        self._clients = clients
        self._put = clients.script(_PUT)

    async def put(self, token: Token, most: int) -> bool:
        """See ``TokenStore.put``."""
        with self._clients.answering(keys.TOKENS):
            status = await self._put(
                keys=[keys.TOKENS], args=[token.id, token.model_dump_json(), most]
            )
        return bool(status == "ok")

    async def get(self, token_id: str) -> Token | None:
        """See ``TokenStore.get``."""
        with self._clients.answering(keys.TOKENS):
            text = await self._clients.reads.hget(keys.TOKENS, token_id)
        return None if text is None else self._token(token_id, str(text))

    async def every(self) -> list[Token]:
        """See ``TokenStore.every``."""
        with self._clients.answering(keys.TOKENS):
            records: Any = await self._clients.reads.hgetall(keys.TOKENS)
        read = [self._token(name, records[name]) async for name in in_turns(sorted(records))]
        return [token for token in read if token is not None]

    async def remove(self, *token_ids: str) -> bool:
        """See ``TokenStore.remove``."""
        with self._clients.answering(keys.TOKENS):
            is_gone = bool(await self._clients.writes.hdel(keys.TOKENS, *token_ids))
        for token_id in token_ids:
            self._clients.unreadable.forget(_named(token_id))
        return is_gone

    def _token(self, token_id: str, text: str) -> Token | None:
        # One that cannot be read opens nothing; the rest of the list must not be lost with it.
        return self._clients.unreadable.read(_named(token_id), Token.model_validate_json, text)


class RedisAudit:
    """The port ``AuditLog``."""

    def __init__(self, clients: RedisClients) -> None:
        self._clients = clients
        self._append = clients.script(_APPEND)

    async def append(self, record: AuditRecord) -> None:
        """See ``AuditLog.append``."""
        name = _stream_of(record)
        with self._clients.answering(name):
            await self._append(
                keys=[name],
                args=[
                    keys.AUDIT_KEPT,
                    keys.MESSAGE_FIELD,
                    record.model_dump_json(),
                    _FIRST_NUMBERS[name],
                ],
            )

    async def newest(self, before: str | None, limit: int) -> list[Entry]:
        """See ``AuditLog.newest``."""
        start = "+" if before is None else f"({before}"
        found: list[list[Entry]] = []
        for stream in _FIRST_NUMBERS:
            with self._clients.answering(stream):
                rows: Any = await self._clients.reads.xrevrange(stream, start, "-", count=limit)
            found.append([Entry(name, f.get(keys.MESSAGE_FIELD, "")) for name, f in rows])
        merged = heapq.merge(*found, key=lambda entry: entry.place, reverse=True)
        return list(itertools.islice(merged, limit))


def _stream_of(record: AuditRecord) -> str:
    if record.actor is None or record.status in _REFUSED:
        return keys.AUDIT_OF_REFUSALS
    return keys.AUDIT if record.scope is Scope.OPERATOR else keys.AUDIT_OF_OTHERS


def _named(token_id: str) -> str:
    return f"{keys.TOKENS} {token_id}"
