"""Answers with an ETag: who polls and has the present state gets 304 and no body.

A job's tag begins with its revision (``"3.9f…"``), which only changes by people's hands. That part
alone is compared with ``If-Match``: progress that goes on does not make an edit stale.
"""

import hashlib
import re
from http import HTTPStatus
from typing import Final

from fastapi import Request, Response
from pydantic import BaseModel
from pydantic_core import to_json

from services.contract.api.access import TokenList
from services.contract.api.queue import QueueView
from services.contract.api.views import (
    CheckpointList,
    DiagnosisView,
    EventPage,
    JobPage,
    JobView,
    LogPage,
    MetricsPart,
    MetricsView,
)
from services.contract.system.long_work import in_turns
from services.controller.domain.errors import PreconditionRequiredError

_DIGEST_BYTES: Final = 12
_LONG: Final = ("items", "user_metrics", "stacks")
# A weak tag (``W/"…"``) never matches a change.
_REVISION: Final = re.compile(r'(?:^|,)\s*"([0-9]{1,9})\.[0-9a-f]*"')


def answer(
    request: Request,
    view: BaseModel,
    *,
    status: int = HTTPStatus.OK,
    headers: dict[str, str] | None = None,
) -> Response:
    """``view`` as JSON with its ETag; 304 if a GET shows that the client has it."""
    revision = f"{view.revision}." if isinstance(view, JobView) else ""
    body = _text(view).encode()
    return _answer(request, body, revision=revision, status=status, headers=headers)


def _answer(
    request: Request,
    body: bytes,
    *,
    revision: str = "",
    status: int = HTTPStatus.OK,
    headers: dict[str, str] | None = None,
) -> Response:
    tag = f'"{revision}{hashlib.blake2b(body, digest_size=_DIGEST_BYTES).hexdigest()}"'
    sent = {"ETag": tag, "Cache-Control": "no-cache", **(headers or {})}
    if request.method in {"GET", "HEAD"} and _has(request, tag):
        return Response(status_code=HTTPStatus.NOT_MODIFIED, headers=sent)
    return Response(body, status_code=status, media_type="application/json", headers=sent)


async def answer_page(
    request: Request,
    page: JobPage
    | CheckpointList
    | DiagnosisView
    | QueueView
    | TokenList
    | EventPage
    | LogPage
    | MetricsView
    | MetricsPart,
    *,
    headers: dict[str, str] | None = None,
    fields: set[str] | None = None,
) -> Response:
    """As ``answer``, of a list of many or large items: others have their turn between them.

    ``fields``: only these of each item; None: all.
    """

    def text(item: BaseModel | dict[str, int | float | None]) -> str:
        if not isinstance(item, BaseModel):
            return to_json(item).decode()
        return _text(item) if fields is None else item.model_dump_json(include=fields)

    parts = []
    for name in _LONG:
        if name in type(page).model_fields:
            items = [text(item) async for item in in_turns(getattr(page, name))]
            parts.append(f'"{name}":[{",".join(items)}]')
    rest = page.model_dump_json(exclude=set(_LONG))[1:-1]
    body = f"{{{','.join([*parts, rest] if rest else parts)}}}".encode()
    return _answer(request, body, headers=headers)


def _text(view: BaseModel) -> str:
    """As JSON; what a job's view shares with all earlier ones is not written again."""
    if not isinstance(view, JobView) or view.plan is None:
        return view.model_dump_json()
    rest = view.model_dump_json(exclude={"plan"})
    return f'{rest[:-1]},"plan":{view.plan.text}}}'


def revisions_matched(if_match: str | None) -> frozenset[int] | None:
    """The revisions that an ``If-Match`` names; None for ``*``, which matches any.

    Raises:
        PreconditionRequiredError: There is no such header.
    """
    if if_match is None:
        raise PreconditionRequiredError(
            "send the ETag from GET as If-Match, so that no other change is overwritten (If-Match: "
            "* changes the job in any case)"
        )
    if if_match.strip() == "*":
        return None
    return frozenset(int(found) for found in _REVISION.findall(if_match))


def _has(request: Request, tag: str) -> bool:
    shown = request.headers.get("if-none-match", "")
    tags = {part.strip().removeprefix("W/") for part in shown.split(",")}
    return tag in tags or "*" in tags


def next_link(request: Request, cursor: str | None) -> dict[str, str]:
    """The header that names the next page, if there is one."""
    if cursor is None:
        return {}
    url = request.url.include_query_params(cursor=cursor)
    return {"Link": f'<{url.path}?{url.query}>; rel="next"'}
