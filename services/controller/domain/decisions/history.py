"""A job's history: all that ever happened to it, from which its record can be decided again.

The first entry is the job as it was created. Each that follows is an event (a request, a finding of
the reconciler, an agent's fact) and its moment; those that changed nothing may be missing.
"""

from collections.abc import Iterable
from typing import Any, Final, NamedTuple

from pydantic import JsonValue, TypeAdapter

from services.controller.domain.decisions.dispatch import EVENTS, decide
from services.controller.domain.job.events import JobEvent
from services.controller.domain.job.job import Job
from services.controller.domain.record import Record

_CREATED: Final = "created"
_ADAPTERS: Final[dict[str, TypeAdapter[Any]]] = {
    kind.__name__: TypeAdapter(kind) for kind in EVENTS
}


class Occurrence(NamedTuple):
    """An event and when it happened, in milliseconds of the store's clock."""

    event: JobEvent
    now_ms: int


class HistoryEntry(Record):
    """One entry. ``kind``: an event's name; ``body``: its fields."""

    kind: str
    now_ms: int
    body: dict[str, JsonValue]


class HistoryError(Exception):
    """The entries do not begin with a job's creation, or name an event that is none."""


def creation(job: Job) -> HistoryEntry:
    """The first entry of a job's history."""
    known = {name: c.model_dump(mode="json") for name, c in job.checkpoints.items()}
    body = job.model_dump(mode="json") | {"checkpoints": known}
    return HistoryEntry(kind=_CREATED, now_ms=job.created_ms, body=body)


def entry(occurrence: Occurrence) -> HistoryEntry:
    """The entry that tells of an occurrence."""
    kind = type(occurrence.event).__name__
    # What a patch leaves unset stays as it is; null would be another request.
    body = _ADAPTERS[kind].dump_python(occurrence.event, mode="json", exclude_unset=True)
    return HistoryEntry(kind=kind, now_ms=occurrence.now_ms, body=body)


def replay(entries: Iterable[HistoryEntry]) -> Job:
    """The job, with its checkpoints, as these entries make it.

    Raises:
        HistoryError: They do not begin with the creation, or one of them is unknown.
    """
    job: Job | None = None
    for told in entries:
        if told.kind == _CREATED:
            job = Job.model_validate(told.body)
            continue
        if job is None or told.kind not in _ADAPTERS:
            raise HistoryError(f"a history cannot continue with {told.kind} here")
        event = _ADAPTERS[told.kind].validate_python(told.body)
        job = decide(job, event, told.now_ms).job
    if job is None:
        raise HistoryError("the history is empty")
    return job
