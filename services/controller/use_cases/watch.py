"""A job's events and output: by pages, and as they come."""

import contextlib
from collections import deque
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from datetime import datetime
from typing import Final, Literal

from pydantic import ValidationError

from services.contract.api.views import EventPage, EventView, LogPage, LogView
from services.contract.messages.telemetry import LogLine
from services.contract.system.long_work import in_turns
from services.controller.domain.errors import NotFoundError
from services.controller.ports.coordination import Ports
from services.controller.ports.jobs import EventRecord
from services.controller.ports.machines import Entry, Log
from services.controller.use_cases.present import moment
from services.controller.use_cases.records import (
    bring_back,
    bring_events_back,
    brought_back,
    refuse_gone,
)

Level = Literal["debug", "info", "warning", "error"]
_LEVELS: Final[tuple[Level, ...]] = ("debug", "info", "warning", "error")
_CHUNK: Final = 500
_LOOK_EVERY_S: Final = 1.0


@dataclass(frozen=True)
class LineFilter:
    """Which lines are asked for: ``level`` means that one and worse.

    ``since`` and before ``until``: by the time that a line shows, its node's.
    """

    rank: int | None = None
    stream: Literal["stdout", "stderr"] | None = None
    level: Level | None = None
    text: str | None = None
    since: datetime | None = None
    until: datetime | None = None

    def matches(self, line: LogLine) -> bool:
        """Whether the line is among them."""
        return (
            self.rank in {None, line.rank}
            and self.stream in {None, line.stream}
            and (self.level is None or _LEVELS.index(line.level) >= _LEVELS.index(self.level))
            and (self.text is None or self.text.lower() in line.text.lower())
            and (self.since is None or moment(line.time_ms) >= self.since)
            and (self.until is None or moment(line.time_ms) < self.until)
        )


Turn = Callable[[], contextlib.AbstractAsyncContextManager[None]]
"""Within, no other long read is worked on."""
Selection = LineFilter | None
"""Which log is meant: output with a filter, or (None) events."""


async def page_of_events(ports: Ports, job_id: str, after: str | None, limit: int) -> EventPage:
    """Events behind ``after``, oldest first.

    Raises:
        NotFoundError: There is no such job.
        CursorExpiredError: They may have been trimmed.
        RecordsAwayError: Some are in storage, and no agent has brought them back.
    """
    await bring_events_back(ports, (await ports.jobs.load(job_id)).job)
    entries = await ports.telemetry.read(job_id, Log.EVENTS, after, limit + 1)
    told = [_event(ports, job_id, entry) async for entry in in_turns(entries[:limit])]
    cursor = entries[limit - 1].id if len(entries) > limit else None
    return EventPage(items=tuple(e for e in told if e is not None), next_cursor=cursor)


async def page_of_lines(
    ports: Ports, job_id: str, wanted: LineFilter, after: str | None, limit: int
) -> LogPage:
    """Lines of output behind ``after``, oldest first.

    Raises:
        NotFoundError: There is no such job.
        CursorExpiredError: They may have been trimmed.
        RecordsAwayError: They are in storage, and no agent has brought them back.
    """
    found: list[LogView] = []
    async with brought_back(ports, (await ports.jobs.load(job_id)).job):
        while len(found) <= limit:
            entries = await ports.telemetry.read(job_id, Log.OUTPUT, after, _CHUNK)
            lines = (_line(ports, job_id, entry) for entry in entries)
            found += [line for line in lines if line is not None and wanted.matches(line)]
            if len(entries) < _CHUNK:
                break
            after = entries[-1].id
    items = tuple(found[:limit])
    return LogPage(items=items, next_cursor=items[-1].id if len(found) > limit else None)


async def last_lines(
    ports: Ports, job_id: str, wanted: LineFilter, after: str | None, count: int
) -> LogPage:
    """The last ``count`` lines of output behind ``after``, oldest first; all errors as ``page_of_lines``."""
    async with brought_back(ports, (await ports.jobs.load(job_id)).job):
        lines, _ = await _last_of(ports, job_id, wanted, after, count)
    return LogPage(items=tuple(lines))


async def follow(  # noqa: PLR0913 what to follow, from where to where, and whose turns it takes
    ports: Ports,
    job_id: str,
    selection: Selection,
    after: str | None,
    *,
    to_the_end: bool,
    tail: int | None = None,
    turn: Turn = contextlib.nullcontext,
) -> AsyncIterator[EventView | LogView | None]:
    """Entries behind ``after`` as they come; None each second in which nothing comes.

    Ends when the job has ended and all was told, or, unless ``to_the_end``, when all was told. ``tail``: of
    the lines that are there, only the last so many. ``turn``: of whoever follows; what is there already is
    read and searched by turns.

    Raises:
        NotFoundError: There is no such job.
        CursorExpiredError: Entries behind ``after`` may have been trimmed.
        RecordsAwayError: They are in storage, and no agent has brought them back.
    """
    log = Log.EVENTS if selection is None else Log.OUTPUT
    job = (await ports.jobs.load(job_id)).job
    await (bring_events_back if selection is None else bring_back)(ports, job)
    # Events are told though the server that has telemetry is away.
    whole = None if selection is None else await ports.telemetry.whole(job_id)
    if selection is not None and tail is not None:
        last, after = await _last_of(ports, job_id, selection, after, tail, turn)
        for known in last:
            yield known
    is_behind = True
    while True:
        # Before the read: what a job said before it ended is then surely in what is read.
        may_say_more = to_the_end and await _lives(ports, job_id)
        async with turn() if is_behind else contextlib.nullcontext():
            entries = await ports.telemetry.read(job_id, log, after, _CHUNK)
            found = [_told(ports, job_id, selection, entry) for entry in entries]
        is_behind = len(entries) == _CHUNK
        for told in found:
            if told is not None:
                yield told
        if entries:
            after = entries[-1].id
            continue
        if not may_say_more:
            await refuse_gone(ports, job_id, whole)
            return
        yield None
        await ports.telemetry.wait(job_id, log, after, _LOOK_EVERY_S)


async def _last_of(
    ports: Ports,
    job_id: str,
    wanted: LineFilter,
    after: str | None,
    count: int,
    turn: Turn = contextlib.nullcontext,
) -> tuple[deque[LogView], str | None]:
    """The last lines, and behind which entry the next ones are."""
    found: deque[LogView] = deque(maxlen=count)
    while True:
        async with turn():
            entries = await ports.telemetry.read(job_id, Log.OUTPUT, after, _CHUNK)
            lines = (_line(ports, job_id, entry) for entry in entries)
            found.extend(line for line in lines if line is not None and wanted.matches(line))
        if entries:
            after = entries[-1].id
        if len(entries) < _CHUNK:
            return found, after


async def _lives(ports: Ports, job_id: str) -> bool:
    try:
        return not (await ports.jobs.load(job_id)).job.is_terminal
    except NotFoundError:
        return False


def _told(
    ports: Ports, job_id: str, selection: Selection, entry: Entry
) -> EventView | LogView | None:
    """What an entry tells; None where it was not asked for, or cannot be read."""
    if selection is None:
        return _event(ports, job_id, entry)
    line = _line(ports, job_id, entry)
    return line if line is not None and selection.matches(line) else None


def _event(ports: Ports, job_id: str, entry: Entry) -> EventView | None:
    """The event of an entry; None for one that this version cannot read."""
    try:
        record = EventRecord.model_validate_json(entry.body)
    except ValidationError as error:
        ports.note_unreadable(f"{job_id}:{Log.EVENTS}", error)
        return None
    return EventView(
        id=entry.id,
        at=moment(entry.time_ms),
        job_id=job_id,
        kind=record.kind,
        message=record.message,
        actor=record.actor,
        request_id=record.request_id,
        data=record.data,
    )


def _line(ports: Ports, job_id: str, entry: Entry) -> LogView | None:
    """The line of an entry; None for one that this version cannot read."""
    try:
        line = LogLine.model_validate_json(entry.body)
        return LogView(id=entry.id, **line.model_dump())
    except ValidationError as error:
        ports.note_unreadable(f"{job_id}:{Log.OUTPUT}", error)
        return None
