"""Tokens and the audit trail."""

from typing import Protocol

from services.contract.api.access import Scope
from services.controller.domain.access.token import Token
from services.controller.domain.record import Record
from services.controller.ports.machines import Entry


class TokenStore(Protocol):
    """All bearer tokens, without their secrets."""

    async def put(self, token: Token, most: int) -> bool:
        """Keep a token; False, and nothing is kept, where there are ``most``."""
        ...

    async def get(self, token_id: str) -> Token | None:
        """One token; None if there is none, or none any more."""
        ...

    async def every(self) -> list[Token]:
        """All of them, oldest first."""
        ...

    async def remove(self, *token_ids: str) -> bool:
        """Forget tokens; whether there was any of them."""
        ...


class AuditRecord(Record):
    """A request that changed something or was refused. Its time is that of its place.

    ``left_out``: how many refusals of the same subject, or of strangers, have no entry before it.
    """

    actor: str | None
    scope: Scope | None
    request_id: str
    method: str
    path: str
    status: int
    left_out: int = 0


class AuditLog(Protocol):
    """What was asked, by whom, and what became of it."""

    async def append(self, record: AuditRecord) -> None:
        """Add an entry."""
        ...

    async def newest(self, before: str | None, limit: int) -> list[Entry]:
        """Up to ``limit`` entries older than ``before``, newest first."""
        ...
