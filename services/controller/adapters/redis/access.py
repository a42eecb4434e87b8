"""Tokens and the audit trail in Redis."""

from typing import Any

from services.contract.redis import redis_keys as keys
from services.controller.adapters.redis.connection import RedisClients
from services.controller.domain.access.token import Token
from services.controller.ports.access import AuditRecord
from services.controller.ports.machines import Entry


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
