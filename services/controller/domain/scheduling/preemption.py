"""Which jobs to preempt so that a gang can run: found by placing it, not by counting free slots.

Free slots on different nodes do not add up for a gang whose ranks must be placed in groups. A count
could promise a place that does not exist, and jobs would be preempted for nothing.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from services.contract.jobs.plans import RankPlacement
from services.contract.words.ids import NodeId
from services.controller.domain.job.job import Job
from services.controller.domain.scheduling.placement import NodeUsage


@dataclass(frozen=True)
class Occupant:
    """A job in a room, its slots there of one kind of device, and when it is expected to end."""

    job: Job
    taken: Mapping[NodeId, int]
    end_ms: int | None

    @property
    def slots(self) -> int:
        """How many slots it has in all."""
        return sum(self.taken.values())


def freed_by(leaving: Iterable[Occupant]) -> Mapping[NodeId, int]:
    """How many slots they give up, by node."""
    freed: Counter[NodeId] = Counter()
    for occupant in leaving:
        freed.update(occupant.taken)
    return freed


def released(
    usages: Iterable[NodeUsage], slots: Iterable[RankPlacement], job_id: str
) -> tuple[NodeUsage, ...]:
    """The usages once the job has left these slots, as far as it still had them."""
    devices: dict[NodeId, list[str]] = {}
    for slot in slots:
        devices.setdefault(slot.node_id, []).append(slot.device)
    return tuple(
        _left(usage, devices.get(usage.node.id, []), job_id) if job_id in usage.jobs else usage
        for usage in usages
    )


def smallest_sufficient(
    occupants: Sequence[Occupant], suffices: Callable[[Sequence[Occupant]], bool]
) -> tuple[Occupant, ...]:
    """Few occupants whose leaving ``suffices``; the least important, then the youngest.

    If all slots are alike, no smaller set suffices. Without any one of those returned, the rest would
    not suffice. Empty if all occupants together do not suffice, or if nobody has to leave.
    """
    largest = sorted(occupants, key=lambda h: (-h.slots, h.job.id))
    count = next((n for n in range(len(largest) + 1) if suffices(largest[:n])), 0)
    chosen: list[Occupant] = []
    left = sorted(
        occupants, key=lambda h: (h.job.spec.priority, -h.job.attempts[-1].started_ms, h.job.id)
    )
    while left and len(chosen) < count:
        first, *left = left
        others = sorted(left, key=lambda h: (-h.slots, h.job.id))[: count - len(chosen) - 1]
        if suffices([*chosen, first, *others]):
            chosen.append(first)
    for occupant in reversed(chosen):
        rest = [h for h in chosen if h != occupant]
        if suffices(rest):
            chosen = rest
    return tuple(chosen)


def _left(usage: NodeUsage, devices: Sequence[str], job_id: str) -> NodeUsage:
    on_gpu = {int(name.removeprefix("cuda:")) for name in devices if name != "cpu"}
    return replace(
        usage,
        cpu_taken=usage.cpu_taken - devices.count("cpu"),
        accelerators_taken=usage.accelerators_taken - on_gpu,
        jobs=tuple(name for name in usage.jobs if name != job_id),
    )
