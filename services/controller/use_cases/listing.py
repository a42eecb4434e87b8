"""Which jobs a list shows, in which order, and from where on."""

import heapq
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal

from services.contract.system.long_work import GiveWay, at_once
from services.contract.words.states import JobState
from services.controller.ports.coordination import Ports
from services.controller.ports.jobs import Among, JobSummary, Place, Stored
from services.controller.use_cases import cursors

JobOrder = Literal["created", "-created", "updated", "-updated", "priority", "-priority"]
"""By what jobs are sorted, and then by id; ``-`` begins with the highest."""
NEWEST_FIRST: Final[JobOrder] = "-created"
# Of a spec of 64 KiB each may take a twentieth of a second.
_READ: Final = 20
_CHUNK: Final = 200
_KEYS: Final[Mapping[str, Callable[[JobSummary], int]]] = {
    "created": lambda job: job.created_ms,
    "updated": lambda job: job.updated_ms,
    "priority": lambda job: job.priority,
}


@dataclass(frozen=True)
class JobFilter:
    """Which jobs are asked for. ``labels`` as ``key=value`` or ``key``; ``text`` in id or name."""

    states: frozenset[JobState] = frozenset()
    labels: tuple[str, ...] = ()
    text: str | None = None
    owner: str | None = None

    @property
    def among(self) -> Among:
        """What of it the store has indexes for."""
        return Among(self.states, self.owner, self.labels)

    def matches(self, job: JobSummary) -> bool:
        """Whether the job is among them."""
        if self.states and job.state not in self.states:
            return False
        if self.owner is not None and job.owner != self.owner:
            return False
        if self.text and self.text.lower() not in f"{job.id} {job.name}".lower():
            return False
        return self.has_labels(job.labels)

    def matches_gone(self, owner: str | None, labels: Mapping[str, str]) -> bool:
        """Whether a job is among them of which only these are known: it is deleted."""
        if self.states or self.text or (self.owner is not None and owner != self.owner):
            return False
        return self.has_labels(labels)

    def has_labels(self, labels: Mapping[str, str]) -> bool:
        """Whether all that are asked for are among these."""
        return all(_has_label(labels, label) for label in self.labels)


async def page(
    ports: Ports,
    wanted: JobFilter,
    order: JobOrder,
    cursor: str | None,
    limit: int,
    give_way: GiveWay = at_once,
) -> tuple[Sequence[Stored], str | None]:
    """At most ``limit`` jobs behind ``cursor``, and the cursor behind them if there are more.

    A cursor is the place of a job, so jobs that come meanwhile move nothing. One whose own place
    changes (``updated``, and ``priority`` by a person's hand) may be met again or passed over.

    ``give_way`` is called after each few hundred jobs: to look through tens of thousands takes seconds.

    Raises:
        InvalidRequestError: The cursor is none of ours, or of a list in another order.
    """
    if order == NEWEST_FIRST:
        return await _newest(ports, wanted, cursor, limit, give_way)
    key = _KEYS[order.removeprefix("-")]
    falls = order.startswith("-")
    after = cursors.to_order(cursor, order)

    def place(job: JobSummary) -> tuple[int, str]:
        return key(job), job.id

    def is_behind(job: JobSummary) -> bool:
        return after is None or (place(job) < after if falls else place(job) > after)

    best = heapq.nlargest if falls else heapq.nsmallest
    found: list[JobSummary] = []
    async for chunk in _chunks(ports, wanted, None, give_way):
        found = best(limit + 1, [*found, *filter(is_behind, chunk)], key=place)
    items = found[:limit]
    more = cursors.from_order(order, *place(items[-1])) if len(found) > limit else None
    return await _records(ports, wanted, items, give_way), more


async def _newest(
    ports: Ports, wanted: JobFilter, cursor: str | None, limit: int, give_way: GiveWay
) -> tuple[Sequence[Stored], str | None]:
    # As the store keeps them: what lies behind the page need not be read.
    found: list[JobSummary] = []
    async for chunk in _chunks(ports, wanted, cursors.to_place(cursor), give_way):
        found += chunk
        if len(found) > limit:
            last = found[limit - 1]
            more = cursors.from_place(Place(last.created_ms, last.id))
            return await _records(ports, wanted, found[:limit], give_way), more
    return await _records(ports, wanted, found, give_way), None


async def _records(
    ports: Ports, wanted: JobFilter, found: Sequence[JobSummary], give_way: GiveWay
) -> Sequence[Stored]:
    """The jobs themselves: those of one page alone are read."""
    stored: list[Stored] = []
    for place in range(0, len(found), _READ):
        if place:
            await give_way()
        stored += await ports.jobs.several([job.id for job in found[place : place + _READ]])
    return [s for s in stored if wanted.matches(JobSummary.of(s.job))]  # it may have changed since


async def _chunks(
    ports: Ports, wanted: JobFilter, place: Place | None, give_way: GiveWay
) -> AsyncIterator[list[JobSummary]]:
    """Summaries of all wanted jobs behind ``place``, newest first."""
    while True:
        chunk = await ports.jobs.summaries(wanted.among, place, _CHUNK)
        yield [job for job in chunk if wanted.matches(job)]
        if len(chunk) < _CHUNK:
            return
        place = Place(chunk[-1].created_ms, chunk[-1].id)
        await give_way()


def _has_label(labels: Mapping[str, str], wanted: str) -> bool:
    key, equals, value = wanted.partition("=")
    return key in labels and (not equals or labels[key] == value)
