"""Who asks, whose things are whose, and what was asked: tokens, owners, the audit trail."""

from dataclasses import dataclass
from typing import Final

from pydantic import ValidationError

from services.contract.api.access import (
    AuditEntryView,
    AuditPage,
    Scope,
    TokenCreated,
    TokenList,
    TokenRequest,
    TokenView,
)
from services.contract.system.long_work import in_turns
from services.contract.words.ids import new_token_id
from services.controller.domain.access.token import (
    BOOTSTRAP,
    SECRET_BYTES,
    Principal,
    Token,
    digest_of,
    parts_of,
    token_text,
)
from services.controller.domain.errors import (
    ForbiddenError,
    NotFoundError,
    StateConflictError,
)
from services.controller.ports.access import AuditRecord
from services.controller.ports.coordination import Ports
from services.controller.ports.jobs import Actor
from services.controller.ports.machines import Entry
from services.controller.use_cases.present import maybe_moment, moment

MOST_TOKENS: Final = 10_000
_RANDOM_BYTES = 10
_EXPIRED = "this token has expired; ask an operator for a new one"
_REFUSED_FROM = 400
_FAILED_FROM = 500


@dataclass(frozen=True)
class Refusal:
    """Why what somebody showed opens nothing."""

    reason: str


async def identify(ports: Ports, shown: str) -> Principal | Refusal:
    """Whose token this is."""
    parts = parts_of(shown)
    if parts is None:
        return Refusal("unrecognised token")
    token_id, secret = parts
    token = await ports.tokens.get(token_id)
    if token is None or not token.is_shown_by(secret):
        return Refusal("this token is not known; it may have been revoked")
    if token.expires_ms is not None and token.has_expired(await ports.clock.now_ms()):
        return Refusal(_EXPIRED)
    return token.principal


async def refused_since(ports: Ports, asks: Principal) -> str | None:
    """Why somebody who was admitted would not be now; None while they would."""
    if asks.token_id is None or asks == BOOTSTRAP:
        return None
    token = await ports.tokens.get(asks.token_id)
    if token is None:
        return "this token was revoked"
    if token.expires_ms is not None and token.has_expired(await ports.clock.now_ms()):
        return _EXPIRED
    return None


async def check_owner(ports: Ports, job_id: str, asks: Principal, may: str = "change it") -> None:
    """Let operators pass, and the owner of the job. ``may``: what it is that only they may.

    Raises:
        NotFoundError: There is no such job.
        RecordUnreadableError: Whose job it is cannot be read, and who asks is no operator.
        ForbiddenError: It is somebody else's.
    """
    if asks.scope.includes(Scope.OPERATOR):
        return
    stored = await ports.jobs.load(job_id)
    if stored.job.owner != asks.subject:
        raise ForbiddenError(
            f"job {job_id} is {stored.job.owner}'s, not {asks.subject}'s: only the owner and "
            f"operators may {may}",
            code="not_the_owner",
        )


async def create_token(ports: Ports, wanted: TokenRequest, actor: Actor) -> TokenCreated:
    """Make a token. Its secret is in the answer, and nowhere else.

    Raises:
        StateConflictError: There are as many as there may be.
    """
    now_ms = await ports.clock.now_ms()
    token_id = new_token_id(now_ms, ports.entropy(_RANDOM_BYTES))
    text, secret = token_text(token_id, ports.entropy(SECRET_BYTES))
    lives_ms = None if wanted.expires_in_s is None else wanted.expires_in_s * 1000
    token = Token(
        id=token_id,
        subject=wanted.subject,
        scope=wanted.scope,
        label=wanted.label,
        digest=digest_of(secret),
        created_ms=now_ms,
        created_by=actor.name,
        expires_ms=None if lives_ms is None else now_ms + lives_ms,
    )
    if not await ports.tokens.put(token, MOST_TOKENS):
        await _forget_expired(ports, now_ms)
        if not await ports.tokens.put(token, MOST_TOKENS):
            raise StateConflictError(
                f"there may be {MOST_TOKENS} tokens, and none of them has expired: revoke some first",
                code="too_many_tokens",
            )
    return TokenCreated(**_view(token, now_ms).model_dump(), token=text)


async def list_tokens(ports: Ports) -> TokenList:
    """All tokens, oldest first, expired ones too."""
    now_ms = await ports.clock.now_ms()
    tokens = await ports.tokens.every()
    return TokenList(items=tuple([_view(token, now_ms) async for token in in_turns(tokens)]))


async def _forget_expired(ports: Ports, now_ms: int) -> None:
    """Programs may make one for each run: without end, a list of all would take seconds."""
    expired = [token.id for token in await ports.tokens.every() if token.has_expired(now_ms)]
    if expired:
        await ports.tokens.remove(*expired)


async def revoke_token(ports: Ports, token_id: str) -> None:
    """Revoke a token.

    Raises:
        NotFoundError: There is no such token.
    """
    if not await ports.tokens.remove(token_id):
        raise NotFoundError(f"there is no token {token_id}")


async def page_of_audit(ports: Ports, before: str | None, limit: int) -> AuditPage:
    """The audit trail, newest first."""
    entries = await ports.audit.newest(before, limit + 1)
    items = tuple(_audit_view(ports, entry) for entry in entries[:limit])
    return AuditPage(items=items, next_cursor=items[-1].id if len(entries) > limit else None)


def _view(token: Token, now_ms: int) -> TokenView:
    return TokenView(
        id=token.id,
        subject=token.subject,
        scope=token.scope,
        label=token.label,
        created_at=moment(token.created_ms),
        created_by=token.created_by,
        expires_at=maybe_moment(token.expires_ms),
        expired=token.has_expired(now_ms),
    )


def _audit_view(ports: Ports, entry: Entry) -> AuditEntryView:
    try:
        record = AuditRecord.model_validate_json(entry.body)
    except ValidationError as error:
        ports.note_unreadable("audit", error)
        # One that this version cannot read is shown as such: an audit trail has no gaps.
        record = AuditRecord(
            actor=None, scope=None, request_id="", method="?", path="(unreadable)", status=0
        )
    return AuditEntryView(
        id=entry.id,
        at=moment(entry.time_ms),
        outcome=_outcome(record.status),
        **record.model_dump(),
    )


def _outcome(status: int) -> str:
    if status >= _FAILED_FROM:
        return "failed"
    return "refused" if status >= _REFUSED_FROM else "done"
