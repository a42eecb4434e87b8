"""Problem details for HTTP APIs (RFC 9457), with a stable ``code`` and every fault at once."""

from collections.abc import Iterable, Sequence
from itertools import islice
from typing import Final

from pydantic import BaseModel, ConfigDict, Field

PROBLEM_MEDIA_TYPE = "application/problem+json"
PROBLEM_TYPE_BASE = "https://meshloom.dev/problems/"
MOST_FAULTS: Final = 100
"""So many faults of one request are listed: a request may have one in every ten bytes."""
_MORE: Final = "more_faults"


class Fault(BaseModel):
    """One error of a request: where (a JSON pointer, RFC 6901, into the body) and what."""

    model_config = ConfigDict(frozen=True, json_schema_serialization_defaults_required=True)

    pointer: str
    detail: str
    code: str


def first_faults(faults: Iterable[Fault], unseen: int = 0) -> list[Fault]:
    """The first ``MOST_FAULTS`` of them, then one entry that says that there are more.

    Args:
        faults: Only one more than are listed is taken from it.
        unseen: How many there are beside these, as far as that is known.
    """
    seen = list(islice(faults, MOST_FAULTS + 1))
    if len(seen) <= MOST_FAULTS and not unseen:
        return seen
    count = f"at least {unseen} more faults are" if unseen else "further faults are"
    more = Fault(pointer="", detail=f"{count} not listed", code=_MORE)
    return [*(fault for fault in seen[:MOST_FAULTS] if fault.code != _MORE), more]


def in_a_line(fault: Fault) -> str:
    """Where, and what is wrong; the place only once."""
    if not fault.pointer:
        return fault.detail
    dotted = fault.pointer.removeprefix("/").replace("/", ".")
    return f"{fault.pointer}: {fault.detail.removeprefix(f'{dotted}: ')}"


def listed(faults: Sequence[Fault]) -> str:
    """Faults as text: one as it is, several a line each."""
    lines = [in_a_line(fault) for fault in faults]
    return lines[0] if len(lines) == 1 else "".join(f"\n  {line}" for line in lines)


class Problem(BaseModel):
    """The body of every error answer. Clients branch on ``code``, people read ``detail``."""

    model_config = ConfigDict(frozen=True, json_schema_serialization_defaults_required=True)

    type: str
    title: str
    status: int = Field(ge=400, le=599)
    code: str
    detail: str
    instance: str | None = None
    request_id: str | None = None
    errors: tuple[Fault, ...] = ()
