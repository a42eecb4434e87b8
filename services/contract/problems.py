"""Problem details for HTTP APIs (RFC 9457), with a stable ``code`` and every fault at once."""

from pydantic import BaseModel, ConfigDict, Field

PROBLEM_MEDIA_TYPE = "application/problem+json"
PROBLEM_TYPE_BASE = "https://meshloom.dev/problems/"


class Fault(BaseModel):
    """One fault of a request: where (a JSON pointer, RFC 6901, into the body) and what."""

    model_config = ConfigDict(frozen=True)

    pointer: str
    detail: str
    code: str


class Problem(BaseModel):
    """The body of every error answer. Clients branch on ``code``, people read ``detail``."""

    model_config = ConfigDict(frozen=True)

    type: str
    title: str
    status: int = Field(ge=400, le=599)
    code: str
    detail: str
    instance: str | None = None
    request_id: str | None = None
    errors: tuple[Fault, ...] = ()
