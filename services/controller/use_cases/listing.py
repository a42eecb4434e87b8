"""Which jobs a list shows, in which order, and from where on."""

import heapq
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal

from services.contract.states import JobState
from services.controller.domain.job import Job
from services.controller.ports.jobs import Place, Stored
from services.controller.ports.office import Ports
from services.controller.use_cases import cursors

JobOrder = Literal["created", "-created", "updated", "-updated", "priority", "-priority"]
"""By what jobs are sorted, and then by id; ``-`` begins with the highest."""
NEWEST_FIRST: Final[JobOrder] = "-created"
_CHUNK: Final = 200
_KEYS: Final[Mapping[str, Callable[[Job], int]]] = {
    "created": lambda job: job.created_ms,
    "updated": lambda job: job.updated_ms,
    "priority": lambda job: job.spec.priority,
}


@dataclass(frozen=True)
class JobFilter:
    """Which jobs are asked for. ``labels`` as ``key=value`` or ``key``; ``text`` in id or name."""

    states: frozenset[JobState] = frozenset()
    labels: tuple[str, ...] = ()
    text: str | None = None
    owner: str | None = None

    def matches(self, job: Job) -> bool:
        """Whether the job is among them."""
        if self.states and job.state not in self.states:
            return False
        if self.owner is not None and job.owner != self.owner:
            return False
        if self.text and self.text.lower() not in f"{job.id} {job.spec.name}".lower():
            return False
        return all(_has_label(job, label) for label in self.labels)


async def page(
    ports: Ports, wanted: JobFilter, order: JobOrder, cursor: str | None, limit: int
) -> tuple[Sequence[Stored], str | None]:
    """At most ``limit`` jobs behind ``cursor``, and the cursor behind them if there are more.

    A cursor is the place of a job, so jobs that come meanwhile move nothing. One whose own place
    changes (``updated``, and ``priority`` by a person's hand) may be met again or passed over.

    Raises:
        InvalidRequestError: The cursor is none of ours, or of a list in another order.
    """
    if order == NEWEST_FIRST:
        return await _newest(ports, wanted, cursor, limit)
    key = _KEYS[order.removeprefix("-")]
    falls = order.startswith("-")
    after = cursors.to_order(cursor, order)

    def place(stored: Stored) -> tuple[int, str]:
        return key(stored.job), stored.job.id

    def is_behind(stored: Stored) -> bool:
        return after is None or (place(stored) < after if falls else place(stored) > after)

    best = heapq.nlargest if falls else heapq.nsmallest
    found: list[Stored] = []
    async for chunk in _chunks(ports, None):
        fitting = [s for s in chunk if wanted.matches(s.job) and is_behind(s)]
        found = best(limit + 1, [*found, *fitting], key=place)
    items = found[:limit]
    return items, cursors.from_order(order, *place(items[-1])) if len(found) > limit else None


async def _newest(
    ports: Ports, wanted: JobFilter, cursor: str | None, limit: int
) -> tuple[Sequence[Stored], str | None]:
    # As the store keeps them: what lies behind the page need not be read.
    found: list[Stored] = []
    async for chunk in _chunks(ports, cursors.to_place(cursor)):
        found += [stored for stored in chunk if wanted.matches(stored.job)]
        if len(found) > limit:
            last = found[limit - 1].job
            return found[:limit], cursors.from_place(Place(last.created_ms, last.id))
    return found, None


async def _chunks(ports: Ports, place: Place | None) -> AsyncIterator[list[Stored]]:
    """All jobs behind ``place``, newest first."""
    while True:
        chunk = await ports.jobs.page(place, _CHUNK)
        yield chunk
        if len(chunk) < _CHUNK:
            return
        place = Place(chunk[-1].job.created_ms, chunk[-1].job.id)


def _has_label(job: Job, wanted: str) -> bool:
    key, equals, value = wanted.partition("=")
    return key in job.spec.labels and (not equals or job.spec.labels[key] == value)
