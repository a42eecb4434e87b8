"""The nodes and who holds which of their seats, as it is while the queue is gone through."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from services.contract.ids import NodeId
from services.contract.messages.probing import DeviceType
from services.contract.plans import RankPlacement, Taken, taken_by
from services.controller.domain.job.job import Job
from services.controller.domain.scheduling.placement import (
    Gang,
    Room,
    Seated,
    Standing,
    occupy,
    rooms,
)
from services.controller.domain.scheduling.preemption import Holder, vacate


@dataclass(frozen=True)
class Head:
    """The first that waits for a kind of device, and where and when it is to have room."""

    job: Job
    room: str | None
    start_ms: int | None


@dataclass(frozen=True)
class Hall:
    """A moment of it.

    Attributes:
        standings: The nodes with what is taken of them.
        jobs: All that are active, by id.
        remaining_ms: How long they are expected to run yet, where that is known.
        now_ms: The present.
        seated: Those that have just been given their seats.
    """

    standings: tuple[Standing, ...]
    jobs: Mapping[str, Job]
    remaining_ms: Mapping[str, int]
    now_ms: int
    seated: Mapping[str, Seated] = field(default_factory=dict)

    def with_seated(self, job: Job, seated: Seated) -> "Hall":
        """The hall once the job sits there."""
        standings = occupy(self.standings, seated, job.id)
        return replace(self, standings=standings, seated={**self.seated, job.id: seated})

    def without(self, job: Job) -> "Hall":
        """The hall once the job has left its seats."""
        others = {name: seated for name, seated in self.seated.items() if name != job.id}
        standings = vacate(self.standings, self._seats(job), job.id)
        return replace(self, standings=standings, seated=others)

    def rooms(self, gang: Gang, device: DeviceType) -> tuple[Room, ...]:
        """Where the gang could sit now if nobody else did."""
        return rooms(gang, [s for s in self.standings if s.is_open], device)

    def holders(self, room: Room, device: DeviceType) -> tuple[Holder, ...]:
        """Who sits there."""
        found = (self._holder(self.jobs[name], room, device) for name in room.jobs)
        return tuple(holder for holder in found if holder.seats)

    def harmless(
        self, job: Job, ranks: int, device: DeviceType, head: Head
    ) -> tuple[Standing, ...]:
        """The nodes where ``head`` starts no later if ``job`` sits there with so many ranks."""
        wishes = Gang.of(head.job.spec)
        wanted = self.rooms(wishes, device)
        harmed = {
            standing.node.id
            for room in wanted
            if not self._is_harmless(job, ranks, room, device, head)
            for standing in room.standings
        }
        return tuple(s for s in self.standings if s.node.id not in harmed)

    def _is_harmless(
        self, job: Job, ranks: int, room: Room, device: DeviceType, head: Head
    ) -> bool:
        wishes = Gang.of(head.job.spec)
        # Over several nodes ranks that stay together need whole groups of seats: in the worst case
        # each rank of another job leaves one of them broken.
        group = wishes.together if len(room.standings) > 1 else 1
        taken = ranks * group
        capacity = room.capacity(device, wishes.together)
        holders = self.holders(room, device)
        if head.start_ms is None:
            spare = capacity - wishes.ranks
            return taken <= spare - _largest_sum([_whole(h, group) for h in holders], spare)
        if room.name != head.room:
            return True
        remaining = self.remaining_ms.get(job.id)
        if remaining is not None and self.now_ms + remaining <= head.start_ms:
            return True
        stay = [h for h in holders if h.end_ms is None or h.end_ms > head.start_ms]
        return taken <= capacity - sum(_whole(h, group) for h in stay) - wishes.ranks

    def _holder(self, job: Job, room: Room, device: DeviceType) -> Holder:
        # Not those on nodes where the job has ended: they are free already.
        nodes = {standing.node.id for standing in room.standings if job.id in standing.jobs}
        on_device = {
            node: taken.cpu_slots if device == "cpu" else len(taken.accelerators)
            for node, taken in self._taken(job).items()
            if node in nodes
        }
        remaining = self.remaining_ms.get(job.id)
        end_ms = None if remaining is None else self.now_ms + remaining
        return Holder(job, on_device, end_ms)

    def _taken(self, job: Job) -> Mapping[NodeId, Taken]:
        seated = self.seated.get(job.id)
        if seated is not None:
            return taken_by(seated.ranks)
        return job.plan.taken if job.plan else {}

    def _seats(self, job: Job) -> Sequence[RankPlacement]:
        seated = self.seated.get(job.id)
        return seated.ranks if seated is not None else job.plan.ranks if job.plan else ()


def _whole(holder: Holder, group: int) -> int:
    """The seats of all groups of so many on one node of which it has any."""
    return sum(-(-seats // group) * group for seats in holder.taken.values())


def _largest_sum(sizes: Iterable[int], bound: int) -> int:
    """The largest sum of some of ``sizes`` that is not above ``bound``."""
    sums = {0}
    for size in sizes:
        sums |= {total + size for total in sums if total + size <= bound}
    return max(sums)
