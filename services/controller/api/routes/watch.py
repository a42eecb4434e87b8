"""A job's events and logs: JSON by cursor, or a stream of server-sent events."""

import functools
from typing import Annotated, Any, Final, Literal

from fastapi import APIRouter, Header, Query, Request, Response
from pydantic import AwareDatetime

from services.contract.api.views import EventPage, LogPage
from services.controller.api import sse
from services.controller.api.conditional import answer_page, next_link
from services.controller.api.context import Context, WithContext, WithPrincipal
from services.controller.api.scopes import READS
from services.controller.domain.access.token import Principal
from services.controller.use_cases import watch as use_cases
from services.controller.use_cases.access import refused_since
from services.controller.use_cases.cursors import to_entry_id
from services.controller.use_cases.records import await_events, await_records

router = APIRouter(prefix="/v1/jobs", tags=["watch"])

Accept = Annotated[str, Header()]
LastEventId = Annotated[str | None, Header(description="Continues after this entry")]
Limit = Annotated[int, Query(ge=1, le=1000)]
Cursor = Annotated[str | None, Query(description="`next_cursor`, or the id of an entry")]

STREAM: Final[dict[int | str, dict[str, Any]]] = {
    200: {
        "description": "A page, or with `Accept: text/event-stream` a stream",
        "content": {sse.MEDIA_TYPE: {"schema": {"type": "string"}}},
    }
}


@router.get("/{job_id}/events", response_model=EventPage, responses=STREAM, dependencies=[READS])
async def events(  # noqa: PLR0913 FastAPI hands in each part of the request by its own parameter
    job_id: str,
    request: Request,
    context: WithContext,
    asks: WithPrincipal,
    *,
    limit: Limit = 200,
    cursor: Cursor = None,
    accept: Accept = "",
    last_event_id: LastEventId = None,
) -> Response:
    """The events of a job, oldest first; as a stream, until the job has ended."""
    after = to_entry_id(last_event_id or cursor)
    if sse.wants_stream(accept):
        await context.ports.jobs.load(job_id)
        turn = functools.partial(context.turns.of, asks.subject)
        entries = use_cases.follow(context.ports, job_id, None, after, to_the_end=True, turn=turn)
        return await sse.stream(
            entries, context.stopping, context.streams, viewer_of(context, asks)
        )
    await await_events(context.ports, job_id)
    async with context.turns.of(asks.subject):
        page = await use_cases.page_of_events(context.ports, job_id, after, limit)
    return await answer_page(request, page, headers=next_link(request, page.next_cursor))


@router.get("/{job_id}/logs", response_model=LogPage, responses=STREAM, dependencies=[READS])
async def logs(  # noqa: PLR0913 FastAPI hands in each part of the request by its own parameter
    job_id: str,
    request: Request,
    context: WithContext,
    asks: WithPrincipal,
    *,
    rank: Annotated[int | None, Query(ge=0)] = None,
    stream: Literal["stdout", "stderr"] | None = None,
    level: Annotated[
        use_cases.Level | None, Query(description="this level and more severe ones")
    ] = None,
    text: Annotated[str | None, Query(max_length=200, description="text in the line")] = None,
    since: Annotated[
        AwareDatetime | None, Query(description="lines of this time and later")
    ] = None,
    until: Annotated[AwareDatetime | None, Query(description="lines before this time")] = None,
    tail: Annotated[
        int | None,
        Query(ge=0, le=1000, description="only the last so many of the lines that are there"),
    ] = None,
    follow: Annotated[bool, Query(description="stream until the job has ended")] = False,
    limit: Limit = 500,
    cursor: Cursor = None,
    accept: Accept = "",
    last_event_id: LastEventId = None,
) -> Response:
    """The output of a job's ranks, oldest first."""
    after = to_entry_id(last_event_id or cursor)
    wanted = use_cases.LineFilter(
        rank=rank, stream=stream, level=level, text=text, since=since, until=until
    )
    if sse.wants_stream(accept):
        await context.ports.jobs.load(job_id)
        # A stream that goes on behind an entry has had its last lines: what came since must not be cut.
        last = tail if last_event_id is None else None
        turn = functools.partial(context.turns.of, asks.subject)
        lines = use_cases.follow(
            context.ports, job_id, wanted, after, to_the_end=follow, tail=last, turn=turn
        )
        return await sse.stream(lines, context.stopping, context.streams, viewer_of(context, asks))
    await await_records(context.ports, job_id)
    async with context.turns.of(asks.subject):
        if tail is None:
            page = await use_cases.page_of_lines(context.ports, job_id, wanted, after, limit)
        else:
            page = await use_cases.last_lines(context.ports, job_id, wanted, after, tail)
    return await answer_page(request, page, headers=next_link(request, page.next_cursor))


def viewer_of(context: Context, asks: Principal) -> sse.Viewer:
    """Who follows a stream, and whose share of the open streams it takes."""
    # Without tokens everybody is the same subject.
    subject = None if asks.token_id is None else asks.subject
    return sse.Viewer(subject, functools.partial(refused_since, context.ports, asks))
