"""Tokens, rates and the audit trail in Redis."""

from typing import Any, Final

from services.contract.redis import redis_keys as keys
from services.controller.adapters.redis.connection import RedisClients, answering
from services.controller.domain.access.rate import Rate
from services.controller.domain.access.token import Token
from services.controller.ports.access import AuditRecord
from services.controller.ports.machines import Entry

# As ``domain.rate.take``, by Redis's clock, so that all controllers draw from one bucket.
_TAKE: Final = """
-- KEYS: bucket; ARGV: requests a second, burst, ms after which the bucket is full
local rate, burst = tonumber(ARGV[1]), tonumber(ARGV[2])
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local known = redis.call('HMGET', KEYS[1], 'left', 'at')
local left = tonumber(known[1] or '') or burst
local gained = math.max(0, now - (tonumber(known[2] or '') or now)) * rate / 1000
left = math.min(burst, left + gained)
local wait = 0
if left >= 1 then left = left - 1 else wait = math.ceil((1 - left) * 1000 / rate) end
redis.call('HSET', KEYS[1], 'left', string.format('%.6f', left), 'at', string.format('%.0f', now))
redis.call('PEXPIRE', KEYS[1], ARGV[3])
return wait
"""


class RedisTokens:
    """The port ``TokenStore``."""

    def __init__(self, clients: RedisClients) -> None:
        self._clients = clients

    async def put(self, token: Token) -> None:
        """See ``TokenStore.put``."""
        with self._clients.answering(keys.TOKENS):
            await self._clients.writes.hset(keys.TOKENS, token.id, token.model_dump_json())

    async def get(self, token_id: str) -> Token | None:
        """See ``TokenStore.get``."""
        with self._clients.answering(keys.TOKENS):
            text = await self._clients.reads.hget(keys.TOKENS, token_id)
        return None if text is None else self._token(token_id, str(text))

    async def every(self) -> list[Token]:
        """See ``TokenStore.every``."""
        with self._clients.answering(keys.TOKENS):
            records: Any = await self._clients.reads.hgetall(keys.TOKENS)
        read = (self._token(name, records[name]) for name in sorted(records))
        return [token for token in read if token is not None]

    async def remove(self, token_id: str) -> bool:
        """See ``TokenStore.remove``."""
        with self._clients.answering(keys.TOKENS):
            is_gone = bool(await self._clients.writes.hdel(keys.TOKENS, token_id))
        self._clients.unreadable.forget(_named(token_id))
        return is_gone

    def _token(self, token_id: str, text: str) -> Token | None:
        # One that cannot be read opens nothing; the rest of the list must not be lost with it.
        return self._clients.unreadable.read(_named(token_id), Token.model_validate_json, text)


class RedisLimiter:
    """The port ``RateLimiter``."""

    def __init__(self, clients: RedisClients) -> None:
        self._take = clients.writes.register_script(_TAKE)

    async def take(self, name: str, rate: Rate) -> int:
        """See ``RateLimiter.take``."""
        with answering():
            wait = await self._take(
                keys=[keys.rate(name)], args=[rate.per_s, rate.burst, rate.full_after_ms]
            )
        return int(wait)


class RedisAudit:
    """The port ``AuditLog``."""

    def __init__(self, clients: RedisClients) -> None:
        self._clients = clients

    async def append(self, record: AuditRecord) -> None:
        """See ``AuditLog.append``."""
        with self._clients.answering(keys.AUDIT):
            await self._clients.writes.xadd(
                keys.AUDIT,
                {keys.MESSAGE_FIELD: record.model_dump_json()},
                maxlen=keys.AUDIT_KEPT,
                approximate=True,
            )

    async def newest(self, before: str | None, limit: int) -> list[Entry]:
        """See ``AuditLog.newest``."""
        start = "+" if before is None else f"({before}"
        with self._clients.answering(keys.AUDIT):
            rows: Any = await self._clients.reads.xrevrange(keys.AUDIT, start, "-", count=limit)
        return [Entry(name, fields.get(keys.MESSAGE_FIELD, "")) for name, fields in rows]


def _named(token_id: str) -> str:
    return f"{keys.TOKENS} {token_id}"
