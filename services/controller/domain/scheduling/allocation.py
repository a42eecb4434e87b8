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
    """The first that waits for a kind of device, and where and when it is to have room."""

    job: Job
    room: str | None
    start_ms: int | None


@dataclass(frozen=True)
class Allocation:
    """A moment of it.

    Attributes:
        usages: The nodes with what is taken of them.
        jobs: All that are active, by id.
        remaining_ms: How long they are expected to run yet, where that is known.
        now_ms: The present.
        placed: Those that have just been given their slots.
    """

    usages: tuple[NodeUsage, ...]
    jobs: Mapping[str, Job]
    remaining_ms: Mapping[str, int]
    now_ms: int
    placed: Mapping[str, Placed] = field(default_factory=dict)

    def with_placed(self, job: Job, placed: Placed) -> "Allocation":
        """The allocation once the job runs there."""
        usages = occupy(self.usages, placed, job.id)
        return replace(self, usages=usages, placed={**self.placed, job.id: placed})

    def without(self, job: Job) -> "Allocation":
        """The allocation once the job has left its slots."""
        others = {name: placed for name, placed in self.placed.items() if name != job.id}
        usages = released(self.usages, self._slots(job), job.id)
        return replace(self, usages=usages, placed=others)

    def node_sets(self, gang: GangRequest, device: DeviceType) -> tuple[NodeSet, ...]:
        """Where the gang could run now if nobody else did."""
        return node_sets(gang, [s for s in self.usages if s.is_open], device)

    def occupants(self, room: NodeSet, device: DeviceType) -> tuple[Occupant, ...]:
        """Who runs there."""
        found = (self._occupant(self.jobs[name], room, device) for name in room.jobs)
        return tuple(occupant for occupant in found if occupant.slots)

    def harmless(
        self, job: Job, ranks: int, device: DeviceType, head: QueueHead
    ) -> tuple[NodeUsage, ...]:
        """The nodes where ``head`` starts no later if ``job`` runs there with so many ranks."""
        request = GangRequest.of(head.job.spec)
        wanted = self.node_sets(request, device)
        harmed = {
            usage.node.id
            for room in wanted
            if not self._is_harmless(job, ranks, room, device, head)
            for usage in room.usages
        }
        return tuple(s for s in self.usages if s.node.id not in harmed)

    def _is_harmless(
        self, job: Job, ranks: int, room: NodeSet, device: DeviceType, head: QueueHead
    ) -> bool:
        request = GangRequest.of(head.job.spec)
        # Over several nodes ranks that stay together need whole groups of slots: in the worst case
        # each rank of another job leaves one of them broken.
        group = request.together if len(room.usages) > 1 else 1
        taken = ranks * group
        capacity = room.capacity(device, request.together)
        occupants = self.occupants(room, device)
        if head.start_ms is None:
            spare = capacity - request.ranks
            return taken <= spare - _largest_sum([_whole(h, group) for h in occupants], spare)
        if room.name != head.room:
            return True
        remaining = self.remaining_ms.get(job.id)
        if remaining is not None and self.now_ms + remaining <= head.start_ms:
            return True
        stay = [h for h in occupants if h.end_ms is None or h.end_ms > head.start_ms]
        return taken <= capacity - sum(_whole(h, group) for h in stay) - request.ranks

    def _occupant(self, job: Job, room: NodeSet, device: DeviceType) -> Occupant:
        # Not those on nodes where the job has ended: they are free already.
        on_device = {
            node: taken.cpu_slots if device == "cpu" else len(taken.accelerators)
            for node, taken in self._taken(job).items()
            if (usage := room.by_node.get(node)) is not None and job.id in usage.jobs
        }
        remaining = self.remaining_ms.get(job.id)
        end_ms = None if remaining is None else self.now_ms + remaining
        return Occupant(job, on_device, end_ms)

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
    return sum(-(-slots // group) * group for slots in occupant.taken.values())


def _largest_sum(sizes: Iterable[int], bound: int) -> int:
    """The largest sum of some of ``sizes`` that is not above ``bound``."""
    sums = {0}
    for size in sizes:
        sums |= {total + size for total in sums if total + size <= bound}
    return max(sums)
