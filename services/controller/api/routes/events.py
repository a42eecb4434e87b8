"""The events of all jobs: JSON by cursor, or a stream of server-sent events."""

import functools
from typing import Annotated

from fastapi import APIRouter, Query, Request, Response
from pydantic import StringConstraints

from services.contract.api.views import EventPage
from services.contract.words.ids import JobId
from services.controller.api import sse
from services.controller.api.conditional import answer_page, next_link
from services.controller.api.context import WithContext, WithPrincipal
from services.controller.api.routes.watch import (
    STREAM,
    Accept,
    Cursor,
    LastEventId,
    Limit,
    viewer_of,
)
from services.controller.api.scopes import READS
from services.controller.use_cases import event_feed as use_cases
from services.controller.use_cases.cursors import to_entry_id

router = APIRouter(prefix="/v1", tags=["watch"])

Kind = Annotated[str, StringConstraints(max_length=64)]
Label = Annotated[str, StringConstraints(max_length=320)]


@router.get("/events", response_model=EventPage, responses=STREAM, dependencies=[READS])
async def all_events(  # noqa: PLR0913 one parameter a filter
    request: Request,
    context: WithContext,
    asks: WithPrincipal,
    *,
    kind: Annotated[
        list[Kind] | None,
        Query(max_length=64, description="any of these; `checkpoint.*` means all that begin so"),
    ] = None,
    job_id: Annotated[list[JobId] | None, Query(max_length=64, description="any of these")] = None,
    owner: Annotated[str | None, Query(max_length=200, description="whose jobs', exactly")] = None,
    label: Annotated[
        list[Label] | None,
        Query(max_length=16, description="`key=value` or `key` of the job; all"),
    ] = None,
    replay: Annotated[
        bool, Query(description="Begin a stream with the oldest event that is kept")
    ] = False,
    limit: Limit = 200,
    cursor: Cursor = None,
    accept: Accept = "",
    last_event_id: LastEventId = None,
) -> Response:
    """The newest 20 000 events of all jobs, oldest first.

    With `Accept: text/event-stream` a stream without end: of what comes from now on, or of what is behind
    `Last-Event-ID` or `cursor`. Ids are those of this list, not those of a job's own events.
    """
    after = to_entry_id(last_event_id or cursor)
    wanted = use_cases.EventFilter(
        kinds=tuple(kind or ()),
        job_ids=frozenset(job_id or ()),
        owner=owner,
        labels=tuple(label or ()),
    )
    if sse.wants_stream(accept):
        turn = functools.partial(context.turns.of, asks.subject)
        entries = use_cases.follow_feed(context.ports, wanted, after, replay=replay, turn=turn)
        viewer = viewer_of(context, asks)
        return await sse.stream(entries, context.stopping, context.streams, viewer)
    async with context.turns.in_parts(asks.subject) as give_way:
        page = await use_cases.page_of_feed(context.ports, wanted, after, limit, give_way)
    return await answer_page(request, page, headers=next_link(request, page.next_cursor))
