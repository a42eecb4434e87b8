"""Who runs next: by priority, then first come; whole gangs only; nobody delays who goes before.

The first job that finds no room heads the queue of its kind of device. A job behind it is placed
only where that cannot delay the head (EASY back-filling: D. Lifka, "The ANL/IBM SP scheduling
system", 1995): on seats that the head will not need at the time when the jobs in its way are
expected to end, or until then. While nobody can say when they end, only seats count that the head
needs in no order of their ends. A head of higher priority than jobs in its way has the smallest
sufficient set of them drained.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Final

from services.controller.domain.job import WAITING_STATES, Job
from services.controller.domain.moves import is_movable
from services.controller.domain.placement import (
    DeviceType,
    Gang,
    Never,
    NotNow,
    Room,
    Seated,
    Standing,
    occupy,
    place,
    rooms,
)
from services.controller.domain.vacating import Holder, freed_by, smallest_sufficient

PREEMPTION_GRACE_S: Final = 60.0


@dataclass(frozen=True)
class Waits:
    """No seats yet. ``blocked_by``: jobs. ``start_ms``: when it is expected to begin, if known."""

    reason: str
    blocked_by: tuple[str, ...] = ()
    start_ms: int | None = None


@dataclass(frozen=True)
class MakeRoom:
    """Have ``victims`` drained: then there is room on ``nodes``."""

    nodes: str
    victims: tuple[Job, ...]
    reason: str


@dataclass(frozen=True)
class Turn:
    """A waiting job and what is to become of it."""

    job: Job
    outcome: Seated | Waits | MakeRoom


@dataclass(frozen=True)
class _Head:
    """The first that waits for a kind of device, and where and when it is to have room."""

    job: Job
    room: str | None
    start_ms: int | None


def in_order(jobs: Iterable[Job]) -> list[Job]:
    """The jobs that wait for seats, the next one first."""
    waiting = (j for j in jobs if j.state in WAITING_STATES and j.attempt is None)
    return sorted(waiting, key=lambda j: (-j.spec.priority, j.created_ms, j.id))


def turns(
    jobs: Sequence[Job],
    standings: Sequence[Standing],
    remaining_ms: Mapping[str, int],
    now_ms: int,
) -> tuple[Turn, ...]:
    """What is to become of each waiting job, in the order of the queue.

    Args:
        jobs: All that are active.
        standings: The nodes with what these jobs take of them.
        remaining_ms: How long jobs are expected to run yet, by id, where that is known.
        now_ms: The present. Jobs that still back off are passed over.
    """
    hall = _Hall(tuple(standings), {job.id: job for job in jobs}, remaining_ms, now_ms)
    return tuple(hall.turn(job) for job in in_order(jobs) if job.not_before_ms <= now_ms)


class _Hall:
    """The nodes while one job after the other is looked at."""

    def __init__(
        self,
        standings: tuple[Standing, ...],
        jobs: Mapping[str, Job],
        remaining_ms: Mapping[str, int],
        now_ms: int,
    ) -> None:
        self._standings = standings
        self._jobs = jobs
        self._remaining_ms = remaining_ms
        self._now_ms = now_ms
        self._heads: dict[DeviceType, _Head] = {}
        self._seated: dict[str, Seated] = {}

    def turn(self, job: Job) -> Turn:
        outcome = place(_gang(job), self._standings)
        if isinstance(outcome, Seated):
            head = self._heads.get(outcome.device)
            if head is not None:
                return self._behind(job, outcome.device, head)
            return self._seat(job, outcome)
        if isinstance(outcome, Never):
            return Turn(job, Waits(outcome.reason))
        if not outcome.blocks:
            return Turn(job, Waits(outcome.reason))
        head = self._heads.get(outcome.device)
        if head is None:
            return self._lead(job, outcome)
        return Turn(job, Waits(outcome.reason, (head.job.id,)))

    def _seat(self, job: Job, seated: Seated) -> Turn:
        self._standings = occupy(self._standings, seated, job.id)
        self._seated[job.id] = seated
        return Turn(job, seated)

    def _behind(self, job: Job, device: DeviceType, head: _Head) -> Turn:
        harmless = [s for s in self._standings if self._is_harmless(job, s, device, head)]
        gang = replace(_gang(job), device=device)
        outcome = place(gang, harmless) if harmless else None
        if isinstance(outcome, Seated):
            return self._seat(job, outcome)
        return Turn(job, Waits(f"waiting behind {head.job.id}, which goes first", (head.job.id,)))

    def _is_harmless(self, job: Job, standing: Standing, device: DeviceType, head: _Head) -> bool:
        """Whether the head starts no later if ``job`` sits there."""
        wishes = Gang.of(head.job.spec)
        return all(
            self._is_harmless_in(job, room, wishes, device, head)
            for room in self._rooms(wishes, device)
            if standing in room.standings
        )

    def _is_harmless_in(
        self, job: Job, room: Room, wishes: Gang, device: DeviceType, head: _Head
    ) -> bool:
        seats = job.spec.worlds[0]
        capacity = room.capacity(device, wishes.together)
        holders = self._holders(room, device)
        if head.start_ms is None:
            spare = capacity - wishes.ranks
            return seats <= spare - _largest_sum([h.seats for h in holders], spare)
        if room.name != head.room:
            return True
        remaining = self._remaining_ms.get(job.id)
        if remaining is not None and self._now_ms + remaining <= head.start_ms:
            return True
        staying = sum(h.seats for h in holders if h.end_ms is None or h.end_ms > head.start_ms)
        return seats <= capacity - staying - wishes.ranks

    def _rooms(self, gang: Gang, device: DeviceType) -> tuple[Room, ...]:
        return rooms(gang, [s for s in self._standings if s.is_open], device)

    def _lead(self, job: Job, outcome: NotNow) -> Turn:
        device, gang = outcome.device, Gang.of(job.spec)
        able = self._rooms(gang, device)
        leaving = self._leaving(able, device, gang)
        if leaving is not None:
            return self._wait_for_leaving(job, device, *leaving)
        chosen = self._victims(job, able, device, gang)
        if chosen is not None:
            nodes, victims = chosen
            start_ms = self._now_ms + int(PREEMPTION_GRACE_S * 1000)
            self._heads[device] = _Head(job, nodes, start_ms)
            names = ", ".join(v.id for v in victims)
            reason = f"waiting until {names}, of lower priority, made room on {nodes}"
            return Turn(job, MakeRoom(nodes, victims, reason))
        starts = [
            (at, room.name) for room in able if (at := self._start(room, device, gang)) is not None
        ]
        expected = min(starts)[0] if starts else None
        self._heads[device] = _Head(job, min(starts)[1] if starts else None, expected)
        in_the_way = {h.job.id for room in able for h in self._holders(room, device)}
        return Turn(job, Waits(outcome.reason, tuple(sorted(in_the_way)), expected))

    def _leaving(
        self, able: Sequence[Room], device: DeviceType, gang: Gang
    ) -> tuple[Room, tuple[Holder, ...]] | None:
        """Where there are seats once those have ended that are stopping anyway."""
        for room in able:
            stopping = tuple(h for h in self._holders(room, device) if h.job.stop is not None)
            if stopping and _has_room(room, device, gang, stopping):
                return room, stopping
        return None

    def _wait_for_leaving(
        self, job: Job, device: DeviceType, room: Room, stopping: tuple[Holder, ...]
    ) -> Turn:
        ends = [h.end_ms for h in stopping if h.end_ms is not None]
        start_ms = max(ends) if len(ends) == len(stopping) else None
        self._heads[device] = _Head(job, room.name, start_ms)
        names = tuple(sorted(h.job.id for h in stopping))
        reason = f"waiting until {', '.join(names)} ended on {room.name}"
        return Turn(job, Waits(reason, names, start_ms))

    def _victims(
        self, job: Job, able: Sequence[Room], device: DeviceType, gang: Gang
    ) -> tuple[str, tuple[Job, ...]] | None:
        """Where the fewest jobs of lower priority have to go, and which."""
        found = []
        for room in able:
            holders = self._holders(room, device)
            stopping = [h for h in holders if h.job.stop is not None]
            weaker = [
                h for h in holders if h.job.spec.priority < job.spec.priority and is_movable(h.job)
            ]
            suffices = partial(_has_room, room, device, gang, stopping=stopping)
            chosen = smallest_sufficient(weaker, suffices)
            if chosen:
                priorities = sorted((h.job.spec.priority for h in chosen), reverse=True)
                found.append((len(chosen), priorities, room.name, chosen))
        if not found:
            return None
        _, _, nodes, chosen = min(found, key=lambda f: f[:3])
        return nodes, tuple(h.job for h in chosen)

    def _start(self, room: Room, device: DeviceType, gang: Gang) -> int | None:
        """When so many seats are expected to be free there; None: nobody can say."""
        known = [h for h in self._holders(room, device) if h.end_ms is not None]
        known.sort(key=lambda h: (h.end_ms, h.seats))
        for count, last in enumerate(known, 1):
            if last.end_ms is not None and _has_room(room, device, gang, known[:count]):
                return max(last.end_ms, self._now_ms)
        return None

    def _holders(self, room: Room, device: DeviceType) -> tuple[Holder, ...]:
        return tuple(
            holder
            for name in room.jobs
            if (holder := self._holder(self._jobs[name], room, device)).seats
        )

    def _holder(self, job: Job, room: Room, device: DeviceType) -> Holder:
        seated = self._seated.get(job.id)
        ranks = seated.ranks if seated is not None else job.plan.ranks if job.plan else ()
        # Not those on nodes where the job has ended: they are free already.
        nodes = {standing.node.id for standing in room.standings if job.id in standing.jobs}
        seats = [r for r in ranks if r.node_id in nodes]
        on_device = Counter(r.node_id for r in seats if (r.device == "cpu") == (device == "cpu"))
        remaining = self._remaining_ms.get(job.id)
        end_ms = None if remaining is None else self._now_ms + remaining
        return Holder(job, on_device, end_ms)


def _gang(job: Job) -> Gang:
    """The job's gang; it rather does without the nodes that its last attempt lost."""
    lost = job.attempts[-1].lost_nodes if job.attempts else ()
    return replace(Gang.of(job.spec), last_resort=lost)


def _has_room(
    room: Room,
    device: DeviceType,
    gang: Gang,
    leaving: Sequence[Holder],
    stopping: Sequence[Holder] = (),
) -> bool:
    """Whether the gang could sit there once those have left."""
    freed = freed_by([*stopping, *leaving])
    return room.free(device, gang.together, freed) >= gang.ranks


def _largest_sum(sizes: Iterable[int], bound: int) -> int:
    """The largest sum of some of ``sizes`` that is not above ``bound``."""
    sums = {0}
    for size in sizes:
        sums |= {total + size for total in sums if total + size <= bound}
    return max(sums)
