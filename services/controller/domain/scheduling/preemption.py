"""Who would have to leave for a gang to sit: tried seat by seat, never summed up.

Seats that are free on different nodes do not add up for a gang whose ranks come in groups, so a
sum may promise room that is none, and jobs would be drained in vain.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from services.contract.ids import NodeId
from services.contract.plans import RankPlacement
from services.controller.domain.job.job import Job
from services.controller.domain.scheduling.placement import Standing


@dataclass(frozen=True)
class Holder:
    """A job in a room, its seats there of one kind of device, and when it is expected to end."""

    job: Job
    taken: Mapping[NodeId, int]
    end_ms: int | None

    @property
    def seats(self) -> int:
        """How many seats it has in all."""
        return sum(self.taken.values())


def freed_by(leaving: Iterable[Holder]) -> Mapping[NodeId, int]:
    """How many seats they give up, by node."""
    freed: Counter[NodeId] = Counter()
    for holder in leaving:
        freed.update(holder.taken)
    return freed


def vacate(
    standings: Iterable[Standing], seats: Iterable[RankPlacement], job_id: str
) -> tuple[Standing, ...]:
    """The standings once the job has left these seats, as far as it still had them."""
    devices: dict[NodeId, list[str]] = {}
    for seat in seats:
        devices.setdefault(seat.node_id, []).append(seat.device)
    return tuple(
        _left(standing, devices.get(standing.node.id, []), job_id)
        if job_id in standing.jobs
        else standing
        for standing in standings
    )


def smallest_sufficient(
    holders: Sequence[Holder], suffices: Callable[[Sequence[Holder]], bool]
) -> tuple[Holder, ...]:
    """Few holders whose leaving ``suffices``; the least important, then the youngest.

    Where all seats count alike they are the fewest; in any case none of them leaves in vain. Empty
    if all of them do not suffice, or nobody has to leave.
    """
    largest = sorted(holders, key=lambda h: (-h.seats, h.job.id))
    count = next((n for n in range(len(largest) + 1) if suffices(largest[:n])), 0)
    chosen: list[Holder] = []
    left = sorted(
        holders, key=lambda h: (h.job.spec.priority, -h.job.attempts[-1].started_ms, h.job.id)
    )
    while left and len(chosen) < count:
        first, *left = left
        others = sorted(left, key=lambda h: (-h.seats, h.job.id))[: count - len(chosen) - 1]
        if suffices([*chosen, first, *others]):
            chosen.append(first)
    for holder in reversed(chosen):
        rest = [h for h in chosen if h != holder]
        if suffices(rest):
            chosen = rest
    return tuple(chosen)


def _left(standing: Standing, devices: Sequence[str], job_id: str) -> Standing:
    on_gpu = {int(name.removeprefix("cuda:")) for name in devices if name != "cpu"}
    return replace(
        standing,
        cpu_taken=standing.cpu_taken - devices.count("cpu"),
        accelerators_taken=standing.accelerators_taken - on_gpu,
        jobs=tuple(name for name in standing.jobs if name != job_id),
    )
