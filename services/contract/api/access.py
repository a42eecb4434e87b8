"""Who may ask for what, as it travels: scopes, tokens and the trail of what was asked."""

from datetime import datetime
from enum import StrEnum
from typing import Annotated, Final

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, field_validator

from services.contract.words.ids import TokenId

RESERVED_SUBJECTS: Final = frozenset({"local", "bootstrap", "controller"})
_TEN_YEARS_S: Final = 10 * 366 * 86_400

Subject = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._@-]{0,62}$")]


class Scope(StrEnum):
    """The rights of a token. Each of the first three includes those before it."""

    VIEWER = "viewer"
    """Looks at everything, changes nothing."""
    SUBMITTER = "submitter"
    """Submits jobs and changes the course of its own."""
    OPERATOR = "operator"
    """Everything: all jobs, nodes, tokens, the audit trail."""
    AGENT = "agent"
    """Speaks for the one node that its subject names, and for nothing else."""

    def includes(self, wanted: "Scope") -> bool:
        """Whether a token of this scope may do what ``wanted`` may."""
        return wanted in _INCLUDED[self]


_INCLUDED: Final = {
    Scope.VIEWER: frozenset({Scope.VIEWER}),
    Scope.SUBMITTER: frozenset({Scope.VIEWER, Scope.SUBMITTER}),
    Scope.OPERATOR: frozenset({Scope.VIEWER, Scope.SUBMITTER, Scope.OPERATOR}),
    Scope.AGENT: frozenset({Scope.AGENT}),
}


class _View(BaseModel):
    model_config = ConfigDict(frozen=True, json_schema_serialization_defaults_required=True)


class TokenRequest(_View):
    """A token to create. ``subject``: its holder, who owns the jobs that it submits."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    subject: Subject
    scope: Scope
    label: Annotated[str, StringConstraints(max_length=200, pattern=r"^[^\x00-\x1f]*$")] = ""
    expires_in_s: Annotated[int, Field(ge=1, le=_TEN_YEARS_S)] | None = None

    @field_validator("subject")
    @classmethod
    def _is_no_name_of_ours(cls, value: str) -> str:
        if value in RESERVED_SUBJECTS:
            raise ValueError(f"{value!r} is reserved for the controller; choose another name")
        return value


class TokenView(_View):
    """A token without its secret, which is not stored."""

    id: TokenId
    subject: str
    scope: Scope
    label: str = ""
    created_at: datetime
    created_by: str
    expires_at: datetime | None = None
    expired: bool = False


class TokenCreated(TokenView):
    """A new token. ``token`` is the secret itself, shown here and never again."""

    token: str


class TokenList(_View):
    """All tokens, oldest first."""

    items: tuple[TokenView, ...]


class AuditEntryView(_View):
    """A request that changed something or was refused, and its outcome."""

    id: str
    at: datetime
    actor: str | None = Field(None, description="null: the caller did not authenticate")
    scope: Scope | None = None
    request_id: str
    method: str
    path: str
    status: int
    outcome: str = Field(description="done, refused or failed")
    left_out: int = Field(
        0, description="earlier refusals like it that were not recorded: there were too many"
    )


class AuditPage(_View):
    """The audit trail, newest first."""

    items: tuple[AuditEntryView, ...]
    next_cursor: str | None = None
