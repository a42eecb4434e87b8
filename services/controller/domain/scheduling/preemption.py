"""Which jobs to preempt so that a gang can run: found by placing it, not by counting free slots.

Free slots on different nodes do not add up for a gang whose ranks must be placed in groups. A count
could promise a place that does not exist, and jobs would be preempted for nothing.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from services.contract.jobs.plans import RankPlacement
from services.contract.messages.probing import DeviceType
from services.contract.words.ids import NodeId
from services.controller.domain.job.job import Job
from services.controller.domain.scheduling.placement import GangRequest, NodeSet, NodeUsage


@dataclass(frozen=True)
class Occupant:
    """A job in a room, its slots there of one kind of device, and when it is expected to end."""

    job: Job
    taken: Mapping[NodeId, int]
    end_ms: int | None

    @cached_property
    def slots(self) -> int:
        """How many slots it has in all."""
        return sum(self.taken.values())


class Vacating:
    """A room while one occupant after the other leaves it.

    Thousands may run there: who leaves changes the sums of its own nodes, and nothing is added up again.

    Args:
        room: The nodes.
        device: Of which kind the slots are.
        gang: Who is to have room there.
        gone: Who has left already.
    """

    def __init__(
        self, room: NodeSet, device: DeviceType, gang: GangRequest, gone: Iterable[Occupant] = ()
    ) -> None:
        self._room = room
        self._device = device
        self._gang = gang
        self._freed: dict[NodeId, int] = {}
        self._free = room.free(device, gang.together)
        for occupant in gone:
            self.leave(occupant)

    @property
    def is_enough(self) -> bool:
        """Whether the gang could run there now."""
        return self._free >= self._gang.ranks

    def leave(self, occupant: Occupant) -> None:
        """It gives up its slots."""
        for node_id, slots in occupant.taken.items():
            self._free_more(node_id, slots)

    def stay(self, occupant: Occupant) -> None:
        """One that had left has its slots after all."""
        for node_id, slots in occupant.taken.items():
            self._free_more(node_id, -slots)

    def _free_more(self, node_id: NodeId, slots: int) -> None:
        freed = self._freed.get(node_id, 0)
        self._free += self._whole(node_id, freed + slots) - self._whole(node_id, freed)
        self._freed[node_id] = freed + slots

    def _whole(self, node_id: NodeId, freed: int) -> int:
        """The slots there that make whole groups, once so many are given up."""
        together = self._gang.together
        return self._room.by_node[node_id].free(self._device, freed) // together * together


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


def smallest_sufficient(occupants: Sequence[Occupant], room: Vacating) -> tuple[Occupant, ...]:
    """Few occupants whose leaving ``room`` is enough; the least important, then the youngest.

    If all slots are alike, no smaller set is enough. Without any one of those returned, the rest would
    not be enough. Empty if all occupants together are not enough, or if nobody has to leave.
    """
    largest: list[Occupant] = []
    for occupant in sorted(occupants, key=lambda h: (-h.slots, h.job.id)):
        if room.is_enough:
            break
        room.leave(occupant)
        largest.append(occupant)
    if not room.is_enough:
        return ()
    # From here on as many have left, and that is enough: those that are chosen, and the largest others.
    chosen: list[Occupant] = []
    others = {h.job.id: h for h in largest}
    for occupant in sorted(
        occupants, key=lambda h: (h.job.spec.priority, -h.job.attempts[-1].started_ms, h.job.id)
    ):
        if not others:
            break
        if occupant.job.id in others:
            del others[occupant.job.id]
            chosen.append(occupant)
            continue
        name, smallest = others.popitem()
        room.leave(occupant)
        room.stay(smallest)
        if room.is_enough:
            chosen.append(occupant)
        else:
            room.stay(occupant)
            room.leave(smallest)
            others[name] = smallest
    return _none_in_vain(chosen, room)


def _none_in_vain(chosen: Sequence[Occupant], room: Vacating) -> tuple[Occupant, ...]:
    """Those of ``chosen``, who have left, without whom the room would not be enough; the last chosen stay first."""
    in_vain = set()
    for occupant in reversed(chosen):
        room.stay(occupant)
        if room.is_enough:
            in_vain.add(occupant.job.id)
        else:
            room.leave(occupant)
    return tuple(h for h in chosen if h.job.id not in in_vain)


def _left(usage: NodeUsage, devices: Sequence[str], job_id: str) -> NodeUsage:
    on_gpu = {int(name.removeprefix("cuda:")) for name in devices if name != "cpu"}
    return replace(
        usage,
        cpu_taken=usage.cpu_taken - devices.count("cpu"),
        accelerators_taken=usage.accelerators_taken - on_gpu,
        jobs=tuple(name for name in usage.jobs if name != job_id),
    )
