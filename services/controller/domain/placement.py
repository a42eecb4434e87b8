"""Gang placement: all ranks of an attempt on one node, or none.

Three outcomes: there is room; there is none now, and why; there can never be any, and why.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from services.contract.plans import RankPlacement
from services.contract.specs import ResourceSpec
from services.contract.states import NodeState
from services.controller.domain.job import Job
from services.controller.domain.node import Lease, Node

DeviceType = Literal["cpu", "cuda"]


@dataclass(frozen=True)
class Standing:
    """A node, what of it is taken (CPU slots, indices of accelerators), and by which jobs.

    ``has_lease``: the life of its agent that is on record holds the node's lease. Without one the
    node may be dead: its record stays ``READY`` until that is certain.
    """

    node: Node
    cpu_taken: int = 0
    accelerators_taken: frozenset[int] = frozenset()
    jobs: tuple[str, ...] = ()
    has_lease: bool = True

    @property
    def is_open(self) -> bool:
        """Whether a gang may be sent there now."""
        return self.node.state == NodeState.READY and self.has_lease and self.node.drain is None

    def capacity(self, device: DeviceType) -> int:
        """How many ranks the node takes when idle."""
        inventory = self.node.inventory
        return len(inventory.accelerators) if device == "cuda" else inventory.cpu_slots

    def free(self, device: DeviceType) -> int:
        """How many ranks the node takes now."""
        if not self.is_open:
            return 0
        taken = len(self.accelerators_taken) if device == "cuda" else self.cpu_taken
        return max(self.capacity(device) - taken, 0)


@dataclass(frozen=True)
class Seated:
    """There is room: one seat a rank."""

    device: DeviceType
    ranks: tuple[RankPlacement, ...]
    node: Node


@dataclass(frozen=True)
class NotNow:
    """There is no room now. ``blocks``: idle, a node that is ready would have it."""

    device: DeviceType
    reason: str
    blocks: bool


@dataclass(frozen=True)
class Never:
    """No known node could ever take the gang."""

    reason: str


def stand(
    nodes: Iterable[Node], jobs: Iterable[Job], leases: Mapping[str, Lease]
) -> tuple[Standing, ...]:
    """The nodes with what the living attempts of ``jobs`` take of them, by node id."""
    standings = {
        node.id: Standing(node, has_lease=_holds(leases.get(node.id), node)) for node in nodes
    }
    for job in jobs:
        attempt = job.attempt
        if attempt is None or job.plan is None:
            continue
        for node_id in attempt.live_nodes:
            if node_id in standings:
                seats = [seat for seat in job.plan.ranks if seat.node_id == node_id]
                standings[node_id] = _take(standings[node_id], seats, job.id)
    return tuple(standings[name] for name in sorted(standings))


def place(resources: ResourceSpec, standings: Sequence[Standing]) -> Seated | NotNow | Never:
    """Seats for a gang: on the node that it fills best.

    ``device: auto`` means GPUs where a node has enough of them for the gang, else CPUs; it waits
    for busy GPUs rather than train on CPUs by surprise.
    """
    ranks = resources.ranks
    if not standings:
        device: DeviceType = "cuda" if resources.device == "cuda" else "cpu"
        return NotNow(device, "no node has joined yet", blocks=False)
    device = _device(resources, standings)
    largest = max(standing.capacity(device) for standing in standings)
    if largest < ranks:
        return Never(_why_never(device, ranks, largest))
    fitting = [standing for standing in standings if standing.free(device) >= ranks]
    if not fitting:
        return _why_not_now(device, ranks, standings)
    best = min(fitting, key=lambda s: (s.free(device) - ranks, s.node.id))
    return Seated(device, _seats(best, device, ranks), best.node)


def occupy(standings: Sequence[Standing], seated: Seated, job_id: str) -> tuple[Standing, ...]:
    """The standings once the gang sits."""
    return tuple(
        _take(standing, seated.ranks, job_id) if standing.node.id == seated.node.id else standing
        for standing in standings
    )


def _device(resources: ResourceSpec, standings: Sequence[Standing]) -> DeviceType:
    if resources.device != "auto":
        return resources.device
    ready = [s for s in standings if s.node.state == NodeState.READY]
    has_room = any(s.capacity("cuda") >= resources.ranks for s in ready or standings)
    return "cuda" if has_room else "cpu"


def _seats(standing: Standing, device: DeviceType, ranks: int) -> tuple[RankPlacement, ...]:
    if device == "cuda":
        indices = [a.index for a in standing.node.inventory.accelerators]
        free = [index for index in indices if index not in standing.accelerators_taken]
        names = [f"cuda:{index}" for index in free[:ranks]]
    else:
        names = ["cpu"] * ranks
    return tuple(
        RankPlacement(rank=rank, node_id=standing.node.id, local_rank=rank, device=name)
        for rank, name in enumerate(names)
    )


def _holds(lease: Lease | None, node: Node) -> bool:
    return lease is not None and lease.incarnation == node.incarnation


def _take(standing: Standing, seats: Sequence[RankPlacement], job_id: str) -> Standing:
    on_gpu = {int(s.device.removeprefix("cuda:")) for s in seats if s.device != "cpu"}
    return replace(
        standing,
        cpu_taken=standing.cpu_taken + sum(1 for s in seats if s.device == "cpu"),
        accelerators_taken=standing.accelerators_taken | on_gpu,
        jobs=(*standing.jobs, job_id),
    )


def _why_never(device: DeviceType, ranks: int, largest: int) -> str:
    if device == "cuda" and largest == 0:
        return f"{ranks} CUDA ranks are asked for, but no known node has a GPU"
    word = "GPUs" if device == "cuda" else "CPU slots"
    return (
        f"{ranks} ranks need {ranks} {word} on one node, but the largest known node has {largest}"
    )


def _why_not_now(device: DeviceType, ranks: int, standings: Sequence[Standing]) -> NotNow:
    ready = [s for s in standings if s.is_open]
    word = "GPUs" if device == "cuda" else "CPU slots"
    able = [s for s in standings if s.capacity(device) >= ranks]
    if not any(s.is_open for s in able):
        return NotNow(device, _why_closed(ranks, able), blocks=False)
    free = max(s.free(device) for s in ready)
    busy = ", ".join(sorted({job for s in ready for job in s.jobs})) or "nothing"
    return NotNow(
        device,
        f"{ranks} {word} on one node are needed, at most {free} are free; running: {busy}",
        blocks=True,
    )


def _why_closed(ranks: int, able: Sequence[Standing]) -> str:
    draining = [s.node.id for s in able if s.node.shown_state == NodeState.DRAINING]
    absent = [s.node.id for s in able if s.node.id not in draining]
    why = [
        f"{words}: {', '.join(names)}"
        for words, names in (("lost or silent", absent), ("draining", draining))
        if names
    ]
    return f"the nodes that could take {ranks} ranks are {'; '.join(why)}"
