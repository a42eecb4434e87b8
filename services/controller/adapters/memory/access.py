"""Tokens and the audit trail in memory."""

from services.controller.adapters.memory.server import MemoryServer
from services.controller.domain.access.token import Token
from services.controller.ports.access import AuditRecord
from services.controller.ports.machines import Entry


class MemoryTokens:
    """The port ``TokenStore``."""

    def __init__(self, server: MemoryServer) -> None:
        self._server = server

    async def put(self, token: Token, most: int) -> bool:
        """See ``TokenStore.put``."""
        if len(self._server.tokens) >= most:
            return False
        self._server.tokens[token.id] = token
        return True

    async def get(self, token_id: str) -> Token | None:
        """See ``TokenStore.get``."""
        return self._server.tokens.get(token_id)

    async def every(self) -> list[Token]:
        """See ``TokenStore.every``."""
        return [self._server.tokens[name] for name in sorted(self._server.tokens)]

    async def remove(self, *token_ids: str) -> bool:
        """See ``TokenStore.remove``."""
        found = [self._server.tokens.pop(token_id, None) for token_id in token_ids]
        return any(found)


class MemoryAudit:
    """The port ``AuditLog``."""

    def __init__(self, server: MemoryServer) -> None:
        self._server = server

    async def append(self, record: AuditRecord) -> None:
        """See ``AuditLog.append``."""
        self._server.audit.append(self._server.entry(record.model_dump_json()))

    async def newest(self, before: str | None, limit: int) -> list[Entry]:
        """See ``AuditLog.newest``."""
        older = [
            e for e in self._server.audit if before is None or e.place < Entry(before, "").place
        ]
        return older[::-1][:limit]
