"""The events of all jobs: by pages, and as they come."""

import contextlib
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Final

from pydantic import ValidationError

from services.contract.api.views import EventPage, EventView
from services.contract.redis.redis_keys import EVENT_FEED
from services.contract.system.long_work import GiveWay, at_once, in_turns
from services.controller.ports.coordination import Ports
from services.controller.ports.event_feed import FeedEntry
from services.controller.ports.jobs import EventRecord
from services.controller.use_cases.listing import JobFilter
from services.controller.use_cases.present import moment
from services.controller.use_cases.watch import Turn

_CHUNK: Final = 500
_LOOK_EVERY_S: Final = 1.0
_BEGINNING: Final = "0-0"
_ANY_SUFFIX: Final = ".*"


@dataclass(frozen=True)
class EventFilter:
    """Which events are asked for.

    ``kinds``: any of these, each a kind or, as ``checkpoint.*``, all that begin so; none: all.
    ``job_ids``: of any of these; none: all. ``owner`` and ``labels`` are those of the job as it is
    when the event is read; of a deleted job as they were when the event was written.
    """

    kinds: tuple[str, ...] = ()
    job_ids: frozenset[str] = frozenset()
    owner: str | None = None
    labels: tuple[str, ...] = ()

    def has_kind(self, kind: str) -> bool:
        """Whether events of this kind are asked for."""
        return not self.kinds or any(_is_of(kind, wanted) for wanted in self.kinds)

    @property
    def jobs(self) -> JobFilter | None:
        """What a job must be; None: any."""
        if self.owner is None and not self.labels:
            return None
        return JobFilter(labels=self.labels, owner=self.owner)


def _is_of(kind: str, wanted: str) -> bool:
    if wanted.endswith(_ANY_SUFFIX):
        return kind.startswith(wanted.removesuffix("*"))
    return kind == wanted


async def page_of_feed(
    ports: Ports,
    wanted: EventFilter,
    after: str | None,
    limit: int,
    give_way: GiveWay = at_once,
) -> EventPage:
    """Events of all jobs behind ``after``, oldest first.

    ``give_way`` is called after each few hundred: to look through all of them, and their jobs' summaries, takes seconds.

    Raises:
        CursorExpiredError: They may have been trimmed.
    """
    found: list[EventView] = []
    while len(found) <= limit:
        entries = await ports.events.read(after, _CHUNK)
        found += await chosen(ports, wanted, entries)
        if len(entries) < _CHUNK:
            break
        after = entries[-1].id
        await give_way()
    items = tuple(found[:limit])
    return EventPage(items=items, next_cursor=items[-1].id if len(found) > limit else None)


async def follow_feed(
    ports: Ports,
    wanted: EventFilter,
    after: str | None,
    *,
    replay: bool = False,
    turn: Turn = contextlib.nullcontext,
) -> AsyncIterator[EventView | None]:
    """Events of all jobs behind ``after`` as they come; it does not end.

    Without ``after`` it begins with what comes from now on, or, to ``replay``, with the oldest that is kept.
    ``turn``: of whoever follows; what is there already is read and searched by turns.

    None each second in which nothing comes.

    Raises:
        CursorExpiredError: Events behind ``after`` may have been trimmed.
    """
    if after is None:
        after = _BEGINNING if replay else await ports.events.newest()
    seen = after
    is_behind = True
    while True:
        async with turn() if is_behind else contextlib.nullcontext():
            entries = await ports.events.read(seen, _CHUNK)
            events = await chosen(ports, wanted, entries)
        is_behind = len(entries) == _CHUNK
        for event in events:
            yield event
        if entries:
            seen = entries[-1].id
        yield None
        if not is_behind:
            await ports.events.wait(seen, _LOOK_EVERY_S)


async def chosen(
    ports: Ports, wanted: EventFilter, entries: Sequence[FeedEntry]
) -> list[EventView]:
    """The events of these entries that are asked for; one that cannot be read is left out."""
    of_jobs = [e for e in entries if not wanted.job_ids or e.job_id in wanted.job_ids]
    read = [(entry, _record(ports, entry)) async for entry in in_turns(of_jobs)]
    found = [(entry, known) for entry, known in read if known and wanted.has_kind(known.kind)]
    if wanted.jobs is not None and found:
        # Of up to 500 jobs: their whole records take seconds, for each webhook and each page.
        jobs = await ports.jobs.summaries_of(list(dict.fromkeys(e.job_id for e, _ in found)))
        fit = {job.id: wanted.jobs.matches(job) for job in jobs}
        found = [
            (entry, known)
            for entry, known in found
            if fit.get(entry.job_id, wanted.jobs.matches_gone(known.owner, known.labels or {}))
        ]
    return [_view(entry, known) for entry, known in found]


def _record(ports: Ports, entry: FeedEntry) -> EventRecord | None:
    try:
        return EventRecord.model_validate_json(entry.body)
    except ValidationError as error:
        ports.note_unreadable(EVENT_FEED, error)
        return None


def _view(entry: FeedEntry, record: EventRecord) -> EventView:
    return EventView(
        id=entry.id,
        at=moment(entry.time_ms),
        job_id=entry.job_id,
        **record.model_dump(exclude={"owner", "labels"}),
    )
