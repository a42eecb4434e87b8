"""Who runs next: by priority, then first come; whole gangs only; nobody delays who goes before.

The first job that finds no room heads the queue of its kind of device. A job behind it is placed
only where that cannot delay the head (EASY back-filling: D. Lifka, "The ANL/IBM SP scheduling
system", 1995): on slots that the head will not need at the time when the jobs in its way are
expected to end, or until then. While nobody can say when they end, only slots count that the head
needs in no order of their ends. A head of higher priority than jobs in its way has the smallest
sufficient set of them drained; until it starts those behind it have there only what it will not need.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from services.contract.messages.probing import DeviceType
from services.controller.domain.job.job import WAITING_STATES, Job
from services.controller.domain.scheduling.allocation import Allocation, Backfill, QueueHead
from services.controller.domain.scheduling.elastic import (
    GrowthOption,
    enlarged,
    gang_request_of,
    growth_options,
)
from services.controller.domain.scheduling.placement import (
    GangRequest,
    Never,
    NodeSet,
    NodeUsage,
    NotNow,
    Placed,
    place,
    some,
)
from services.controller.domain.scheduling.preemption import Occupant, Vacating, smallest_sufficient

PREEMPTION_GRACE_S: Final = 60.0


@dataclass(frozen=True)
class Waiting:
    """No slots yet. ``blocked_by``: jobs. ``start_ms``: when it is expected to begin, if known."""

    reason: str
    blocked_by: tuple[str, ...] = ()
    start_ms: int | None = None


@dataclass(frozen=True)
class Preempt:
    """Have ``victims`` drained: then there is room on ``nodes``."""

    nodes: str
    victims: tuple[Job, ...]
    reason: str


@dataclass(frozen=True)
class Turn:
    """A waiting job and what is to become of it."""

    job: Job
    outcome: Placed | Waiting | Preempt


@dataclass(frozen=True)
class Schedule:
    """What is to become of each waiting job, in the order of the queue, and of those that run.

    ``growth_options``: elastic jobs that could go on with more ranks, and nobody who waits would mind.
    """

    turns: tuple[Turn, ...]
    growth_options: tuple[GrowthOption, ...]


def in_order(jobs: Iterable[Job]) -> list[Job]:
    """The jobs that wait for slots, the next one first."""
    waiting = (j for j in jobs if j.state in WAITING_STATES and j.attempt is None)
    return sorted(waiting, key=lambda j: (-j.spec.priority, j.created_ms, j.id))


def schedule(
    jobs: Sequence[Job],
    usages: Sequence[NodeUsage],
    remaining_ms: Mapping[str, int],
    now_ms: int,
) -> Schedule:
    """Who is given slots now, who waits and why, who makes room, and who could grow.

    An elastic job counts as what it needs, its smallest gang. What nobody who waits could use is
    shared out among those that are placed, then among those that run, in the same order.

    Args:
        jobs: All that are active.
        usages: The nodes with what these jobs take of them.
        remaining_ms: How long jobs are expected to run yet, by id, where that is known.
        now_ms: The present. Jobs that still back off have no turn, and nothing grows onto the
            slots that they will need.
    """
    allocation = Allocation(tuple(usages), {job.id: job for job in jobs}, remaining_ms, now_ms)
    line = _QueuePass(allocation)
    # Without a layout nobody knows yet which slots a job needs.
    waiting = [job for job in in_order(jobs) if job.planning is None]
    due = [line.turn(job) for job in waiting if job.not_before_ms <= now_ms]
    for job in waiting:
        if job.not_before_ms > now_ms:
            line.turn(job)
    placed = [turn.job for turn in due if isinstance(turn.outcome, Placed)]
    allocation, larger = enlarged(line.allocation, line.heads, placed)
    return Schedule(
        tuple(Turn(t.job, larger[t.job.id]) if t.job.id in larger else t for t in due),
        growth_options(allocation, line.heads, jobs),
    )


class _QueuePass:
    """The queue while one job after the other is looked at.

    Gangs that ask for the same are answered the same until somebody is given slots: of thousands of
    jobs that wait, few differ in that.

    Attributes:
        allocation: The nodes, with those that were given slots.
        heads: Who waits first for each kind of device.
    """

    def __init__(self, allocation: Allocation) -> None:
        self.allocation = allocation
        self.heads: dict[DeviceType, QueueHead] = {}
        self._placed: dict[GangRequest, Placed | NotNow | Never] = {}
        self._backfill: dict[DeviceType, Backfill] = {}
        self._behind_head: dict[tuple[GangRequest, bool], Placed | NotNow | Never] = {}

    def turn(self, job: Job) -> Turn:
        """What is to become of the next one."""
        gang = gang_request_of(job)
        if gang not in self._placed:
            self._placed[gang] = place(gang, self.allocation.usages)
        outcome = self._placed[gang]
        if isinstance(outcome, Placed):
            head = self.heads.get(outcome.device)
            if head is not None:
                return self._behind(job, outcome.device, head)
            return self._assign(job, outcome)
        if isinstance(outcome, Never):
            return Turn(job, Waiting(outcome.reason))
        if not outcome.blocks:
            return Turn(job, Waiting(outcome.reason))
        head = self.heads.get(outcome.device)
        if head is None:
            return self._lead(job, outcome)
        return Turn(job, Waiting(outcome.reason, (head.job.id,)))

    def _assign(self, job: Job, placed: Placed) -> Turn:
        self.allocation = self.allocation.with_placed(job, placed)
        self._placed.clear()
        self._backfill.clear()
        self._behind_head.clear()
        return Turn(job, placed)

    def _behind(self, job: Job, device: DeviceType, head: QueueHead) -> Turn:
        if device not in self._backfill:
            self._backfill[device] = self.allocation.backfill(device, head)
        backfill = self._backfill[device]
        gang = replace(gang_request_of(job), device=device)
        # Of the job itself only this counts beside its gang; the head stays who it is.
        like = gang, backfill.is_over_by(self.allocation.end_ms(job))
        if like not in self._behind_head:
            _, is_over = like
            self._behind_head[like] = place(gang, backfill.nodes(gang.ranks, is_over=is_over))
        outcome = self._behind_head[like]
        if isinstance(outcome, Placed):
            return self._assign(job, outcome)
        return Turn(job, Waiting(f"waiting behind {head.job.id}, which goes first", (head.job.id,)))

    def _lead(self, job: Job, outcome: NotNow) -> Turn:
        device, gang = outcome.device, GangRequest.of(job.spec)
        able = self.allocation.node_sets(gang, device)
        leaving = self._leaving(able, device, gang)
        if leaving is not None:
            return self._wait_for_leaving(job, device, *leaving)
        chosen = self._victims(job, able, device, gang)
        if chosen is not None:
            nodes, victims = chosen
            self._vacate(job, device, nodes)
            names = some([v.id for v in victims])
            reason = f"waiting until {names}, of lower priority, free slots on {nodes}"
            return Turn(job, Preempt(nodes, victims, reason))
        starts = [
            (at, room.name) for room in able if (at := self._start(room, device, gang)) is not None
        ]
        expected = min(starts)[0] if starts else None
        self.heads[device] = QueueHead(job, min(starts)[1] if starts else None, expected)
        in_the_way = {h.job.id for room in able for h in self.allocation.occupants(room, device)}
        return Turn(job, Waiting(outcome.reason, tuple(sorted(in_the_way)), expected))

    def _vacate(
        self, job: Job, device: DeviceType, room: str, leaving: Sequence[Occupant] = ()
    ) -> None:
        """It starts there as soon as others have stopped: others have what it does not need even then.

        Those that were drained first wait again. One that would be over in the time which the last may take
        would be given the slots back, and drained again, look after look. So nobody counts as over before,
        not even a job that has done its last step: it may save its checkpoint for minutes.
        """
        names = frozenset(h.job.id for h in leaving)
        self.heads[device] = QueueHead(job, room, self.allocation.now_ms - 1, names)

    def _leaving(
        self, able: Sequence[NodeSet], device: DeviceType, gang: GangRequest
    ) -> tuple[NodeSet, tuple[Occupant, ...]] | None:
        """Where there are slots once those have ended that are stopping anyway."""
        for room in able:
            stopping = tuple(
                h for h in self.allocation.occupants(room, device) if self._is_leaving(h)
            )
            if stopping and Vacating(room, device, gang, stopping).is_enough:
                return room, stopping
        return None

    def _is_leaving(self, occupant: Occupant) -> bool:
        """Whether it is asked to stop, and may be relied on: a pause may have a grace of a day.

        It has as long to take effect as a job that is drained for the gang. After that others are drained.
        """
        stop = occupant.job.stop
        if stop is None:
            return False
        grace_ms = int(PREEMPTION_GRACE_S * 1000)
        return (
            stop.grace_s <= PREEMPTION_GRACE_S or self.allocation.now_ms < stop.asked_ms + grace_ms
        )

    def _wait_for_leaving(
        self, job: Job, device: DeviceType, room: NodeSet, stopping: tuple[Occupant, ...]
    ) -> Turn:
        ends = [h.end_ms for h in stopping if h.end_ms is not None]
        start_ms = max(ends) if len(ends) == len(stopping) else None
        self._vacate(job, device, room.name, stopping)
        names = tuple(sorted(h.job.id for h in stopping))
        reason = f"waiting until {some(names)} ended on {room.name}"
        return Turn(job, Waiting(reason, names, start_ms))

    def _victims(
        self, job: Job, able: Sequence[NodeSet], device: DeviceType, gang: GangRequest
    ) -> tuple[str, tuple[Job, ...]] | None:
        """Where the fewest jobs of lower priority have to go, and which."""
        found = []
        for room in able:
            occupants = self.allocation.occupants(room, device)
            stopping = [h for h in occupants if self._is_leaving(h)]
            weaker = [
                h
                for h in occupants
                if h.job.spec.priority < job.spec.priority and h.job.can_migrate
            ]
            chosen = smallest_sufficient(weaker, Vacating(room, device, gang, stopping))
            if chosen:
                priorities = sorted((h.job.spec.priority for h in chosen), reverse=True)
                found.append((len(chosen), priorities, room.name, chosen))
        if not found:
            return None
        _, _, nodes, chosen = min(found, key=lambda f: f[:3])
        return nodes, tuple(h.job for h in chosen)

    def _start(self, room: NodeSet, device: DeviceType, gang: GangRequest) -> int | None:
        """When so many slots are expected to be free there; None: nobody can say."""
        known = [h for h in self.allocation.occupants(room, device) if h.end_ms is not None]
        known.sort(key=lambda h: (h.end_ms, h.slots))
        vacating = Vacating(room, device, gang)
        for last in known:
            vacating.leave(last)
            if last.end_ms is not None and vacating.is_enough:
                return max(last.end_ms, self.allocation.now_ms)
        return None
