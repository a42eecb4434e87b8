"""The nodes and who holds which of their slots, as it is while the queue is gone through."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from services.contract.jobs.plans import RankPlacement, Taken, taken_by
from services.contract.messages.probing import DeviceType
from services.contract.words.ids import NodeId
from services.controller.domain.job.job import Job
from services.controller.domain.scheduling.placement import (
    GangRequest,
    NodeSet,
    NodeUsage,
    Placed,
    node_sets,
    occupy,
)
from services.controller.domain.scheduling.preemption import Occupant, released


@dataclass(frozen=True)
class QueueHead:
    """The first that waits for a kind of device, and where and when it is to have room.

    ``leaving``: jobs that are stopping there, and whose slots it takes; all others stay, whenever they end.
    """

    job: Job
    room: str | None
    start_ms: int | None
    leaving: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Backfill:
    """Where jobs may run that go behind the head of a queue.

    Attributes:
        usages: All nodes with what is taken of them.
        limits: With more ranks than these a job on the node would delay the head; no limit on others.
        start_ms: When the head is expected to start, if known. A job that is over by then has no limit.
    """

    usages: tuple[NodeUsage, ...]
    limits: Mapping[NodeId, int]
    start_ms: int | None

    def is_over_by(self, end_ms: int | None) -> bool:
        """Whether a job that is expected to end then, if that is known, has ended when the head starts."""
        return self.start_ms is not None and end_ms is not None and end_ms <= self.start_ms

    def nodes(self, ranks: int, *, is_over: bool) -> tuple[NodeUsage, ...]:
        """Those for a job with so many ranks; ``is_over``: it has ended when the head starts."""
        if is_over:
            return self.usages
        return tuple(s for s in self.usages if ranks <= self.limits.get(s.node.id, ranks))


_Occupied = dict[tuple[str, DeviceType], dict[str, tuple[Placed | None, Occupant]]]
"""By room and kind of device, and by job, with what it was placed on."""


_Left = tuple[tuple[NodeId, int, frozenset[int]], ...]
KnownLimits = dict[tuple[DeviceType, bool, _Left], Mapping[NodeId, int]]
"""By kind of device, whether the job that left would have been there when the head starts, and what it left."""


@dataclass(frozen=True)
class Allocation:
    """A moment of it.

    Attributes:
        usages: The nodes with what is taken of them.
        jobs: All that are active, by id.
        remaining_ms: How long they are expected to run yet, where that is known.
        now_ms: The present.
        placed: Those that have just been given their slots.
        occupied: What was found of who has which slots of a room; shared with the moments before and after.
    """

    usages: tuple[NodeUsage, ...]
    jobs: Mapping[str, Job]
    remaining_ms: Mapping[str, int]
    now_ms: int
    placed: Mapping[str, Placed] = field(default_factory=dict)
    occupied: _Occupied = field(default_factory=dict, compare=False, repr=False)

    def with_placed(self, job: Job, placed: Placed) -> "Allocation":
        """The allocation once the job runs there."""
        usages = occupy(self.usages, placed, job.id)
        return replace(self, usages=usages, placed={**self.placed, job.id: placed})

    def without(self, job: Job) -> "Allocation":
        """The allocation once the job has left its slots."""
        placed = self.placed
        if job.id in placed:
            placed = {name: where for name, where in placed.items() if name != job.id}
        usages = released(self.usages, self._slots(job), job.id)
        return replace(self, usages=usages, placed=placed)

    def end_ms(self, job: Job) -> int | None:
        """When the job would end if it began now, where that is known."""
        remaining = self.remaining_ms.get(job.id)
        return None if remaining is None else self.now_ms + remaining

    def node_sets(self, gang: GangRequest, device: DeviceType) -> tuple[NodeSet, ...]:
        """Where the gang could run now if nobody else did."""
        return node_sets(gang, [s for s in self.usages if s.is_open], device)

    def occupants(self, room: NodeSet, device: DeviceType) -> tuple[Occupant, ...]:
        """Who runs there."""
        # Of thousands of jobs one moves at a time: what the others have stays the same.
        known = self.occupied.setdefault((room.name, device), {})
        found = []
        for name in room.jobs:
            placed = self.placed.get(name)
            entry = known.get(name)
            if entry is None or entry[0] is not placed:
                entry = known[name] = placed, self._occupant(self.jobs[name], room, device)
            if entry[1].slots:
                found.append(entry[1])
        return tuple(found)

    def backfill(self, device: DeviceType, head: QueueHead) -> Backfill:
        """Where jobs may run that go behind ``head``, for it starts no later if they do."""
        return Backfill(self.usages, self.limits(device, head), head.start_ms)

    def backfill_without(
        self, job: Job, device: DeviceType, head: QueueHead, known: KnownLimits
    ) -> Backfill:
        """The same once ``job`` has left its slots.

        ``known``: the limits that were found so of this moment and ``head``. They follow from what the
        job has: few of thousands differ in that.
        """
        left = self.without(job)
        end_ms = self.end_ms(job)
        stays = head.start_ms is not None and (end_ms is None or end_ms > head.start_ms)
        moved = tuple(
            (
                was.node.id,
                was.cpu_taken - now.cpu_taken,
                was.accelerators_taken - now.accelerators_taken,
            )
            for was, now in zip(self.usages, left.usages, strict=True)
            if was is not now
        )
        like = device, stays, moved
        if like not in known:
            known[like] = left.limits(device, head)
        return Backfill(left.usages, known[like], head.start_ms)

    def limits(self, device: DeviceType, head: QueueHead) -> Mapping[NodeId, int]:
        """The most ranks that another job may have on a node without ``head`` starting later; none: any number."""
        request = GangRequest.of(head.job.spec)
        limits: dict[NodeId, int] = {}
        for room in self.node_sets(request, device):
            limit = self._limit(room, device, head, request)
            if limit is not None:
                for usage in room.usages:
                    limits[usage.node.id] = min(limits.get(usage.node.id, limit), limit)
        return limits

    def _limit(
        self, room: NodeSet, device: DeviceType, head: QueueHead, request: GangRequest
    ) -> int | None:
        """The most ranks of another job there with which ``head`` starts no later; None: any number."""
        if head.start_ms is not None and room.name != head.room:
            return None
        # Over several nodes ranks that stay together need whole groups of slots: in the worst case
        # each rank of another job leaves one of them broken.
        group = request.together if len(room.usages) > 1 else 1
        spare = room.capacity(device, request.together) - request.ranks
        occupants = self.occupants(room, device)
        if head.start_ms is None:
            taken = _largest_sum((_whole(h, group) for h in occupants), spare)
        else:
            stay = [
                h
                for h in occupants
                if h.job.id not in head.leaving and (h.end_ms is None or h.end_ms > head.start_ms)
            ]
            taken = sum(_whole(h, group) for h in stay)
        return (spare - taken) // group

    def _occupant(self, job: Job, room: NodeSet, device: DeviceType) -> Occupant:
        # Not those on nodes where the job has ended: they are free already.
        on_device = {
            node: taken.cpu_slots if device == "cpu" else len(taken.accelerators)
            for node, taken in self._taken(job).items()
            if (usage := room.by_node.get(node)) is not None and job.id in usage.jobs
        }
        return Occupant(job, on_device, self.end_ms(job))

    def _taken(self, job: Job) -> Mapping[NodeId, Taken]:
        placed = self.placed.get(job.id)
        if placed is not None:
            return taken_by(placed.ranks)
        return job.plan.taken if job.plan else {}

    def _slots(self, job: Job) -> Sequence[RankPlacement]:
        placed = self.placed.get(job.id)
        return placed.ranks if placed is not None else job.plan.ranks if job.plan else ()


def _whole(occupant: Occupant, group: int) -> int:
    """The slots of all groups of so many on one node of which it has any."""
    if group == 1:
        return occupant.slots
    return sum(-(-slots // group) * group for slots in occupant.taken.values())


def _largest_sum(sizes: Iterable[int], bound: int) -> int:
    """The largest sum of some of ``sizes`` that is not above ``bound``."""
    # The bit n says that there is a sum of n: hundreds of jobs are added up in microseconds.
    within = (1 << bound + 1) - 1
    sums = 1
    for size in sizes:
        sums |= sums << size & within
    return sums.bit_length() - 1
