"""Gang placement: slots for all ranks of an attempt, or for none.

A gang runs on one node if any is large enough, for nothing is as fast between nodes; else on as few
as possible. Ranks that share a matrix multiplication (tp) are never parted, and those that share
one copy of the parameters (dp_shard) only where no node has room for a copy.

Three outcomes: there is room; there is none now, and why; there can never be any, and why.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Final, Literal

from services.contract.jobs.plans import RankPlacement, Taken, taken_by
from services.contract.jobs.specs import JobSpec
from services.contract.messages.probing import DeviceType
from services.contract.words.ids import NodeId
from services.contract.words.states import NodeState
from services.controller.domain.job.job import Job
from services.controller.domain.scheduling.node import Lease, Node

_WORDS: Final[Mapping[DeviceType, str]] = {"cpu": "CPU slots", "cuda": "GPUs"}
_NOTHING: Final[Mapping[NodeId, int]] = {}
_NO_SLOTS: Final = Taken(0, frozenset())
# A reason is worked out for each of thousands that wait, on a hundred nodes with hundreds of jobs.
_NAMED: Final = 8


@dataclass(frozen=True)
class Reserved:
    """A node is of this pool. Until it is ready, and once it is given back, it takes no gangs."""

    pool: str
    is_ready: bool


_NO_POOLS: Final[Mapping[NodeId, Reserved]] = {}


@dataclass(frozen=True)
class NodeUsage:
    """A node, what of it is taken (CPU slots, indices of accelerators), and by which jobs.

    ``has_lease``: the life of its agent that is on record holds the node's lease. Without one the
    node may be dead: its record stays ``READY`` until that is certain.
    ``reserved``: of which pool it is; None: it joined by itself.
    """

    node: Node
    cpu_taken: int = 0
    accelerators_taken: frozenset[int] = frozenset()
    jobs: tuple[str, ...] = ()
    has_lease: bool = True
    reserved: Reserved | None = None

    # Asked again for each of thousands of jobs, of which one moves at a time.
    @cached_property
    def is_open(self) -> bool:
        """Whether a gang may be sent there now."""
        is_ready = self.node.state == NodeState.READY and self.has_lease
        is_closed = self.reserved is not None and not self.reserved.is_ready
        return is_ready and self.node.emptying is None and not is_closed

    @cached_property
    def is_here(self) -> bool:
        """Whether it is neither lost nor drained, but may be silent."""
        return self.node.shown_state == NodeState.READY

    @property
    def pool(self) -> str:
        """Of which pool it is; empty: it joined by itself."""
        return "" if self.reserved is None else self.reserved.pool

    def capacity(self, device: DeviceType) -> int:
        """How many ranks the node takes when idle."""
        inventory = self.node.inventory
        return len(inventory.accelerators) if device == "cuda" else inventory.cpu_slots

    def free(self, device: DeviceType, freed: int = 0) -> int:
        """How many ranks the node takes now, or once ``freed`` slots of it are given up."""
        if not freed:
            return self._free[device]
        return self._free_without(device, freed)

    @cached_property
    def _free(self) -> Mapping[DeviceType, int]:
        return {"cpu": self._free_without("cpu", 0), "cuda": self._free_without("cuda", 0)}

    def _free_without(self, device: DeviceType, freed: int) -> int:
        if not self.is_open:
            return 0
        taken = len(self.accelerators_taken) if device == "cuda" else self.cpu_taken
        return max(self.capacity(device) - max(taken - freed, 0), 0)


@dataclass(frozen=True)
class GangRequest:
    """What is asked for: ``ranks`` on a kind of device, ``together`` of them always on one node.

    ``close``: so many are on one node wherever they can be; a multiple of ``together``.
    ``last_resort``: nodes that were just lost. One that is back already is cold, or sick.
    ``spreads``: over several nodes, too, where a single one could take it but has no room now.
    """

    ranks: int
    device: Literal["auto", "cpu", "cuda"] = "auto"
    together: int = 1
    close: int = 1
    last_resort: tuple[NodeId, ...] = ()
    spreads: bool = False

    @classmethod
    def of(cls, spec: JobSpec, ranks: int | None = None) -> "GangRequest":
        """The gang of a job: of an elastic one with so many ranks, or else the smallest."""
        ranks = spec.fewest_ranks if ranks is None else ranks
        share = spec.share
        copy, tp = share.copy, share.tp
        close = copy if ranks > copy else tp
        spreads = spec.resources.world is not None
        return cls(ranks, spec.resources.device, tp, close, spreads=spreads)


@dataclass(frozen=True)
class NodeSet:
    """Nodes on which a gang can run: one, or several where no single one is large enough."""

    usages: tuple[NodeUsage, ...]

    @property
    def name(self) -> str:
        """Its nodes."""
        return ", ".join(usage.node.id for usage in self.usages)

    @cached_property
    def by_node(self) -> Mapping[NodeId, NodeUsage]:
        """The same by the node's id."""
        return {usage.node.id: usage for usage in self.usages}

    def has_any(self, names: Collection[NodeId]) -> bool:
        """Whether one of them is among its nodes."""
        return any(usage.node.id in names for usage in self.usages)

    @property
    def jobs(self) -> tuple[str, ...]:
        """Who is there."""
        return tuple(dict.fromkeys(job for s in self.usages for job in s.jobs))

    def capacity(self, device: DeviceType, together: int) -> int:
        """How many ranks it takes when idle."""
        return sum(s.capacity(device) // together * together for s in self.usages)

    def free(
        self, device: DeviceType, together: int, freed: Mapping[NodeId, int] = _NOTHING
    ) -> int:
        """How many ranks it takes now, or once so many slots are given up on these nodes."""
        if len(self.usages) == 1 and not freed:
            return self.usages[0].free(device) // together * together
        frees = (s.free(device, freed.get(s.node.id, 0)) for s in self.usages)
        return sum(free // together * together for free in frees)


@dataclass(frozen=True)
class Placed:
    """There is room: one slot a rank, on ``nodes`` in the order of their ranks."""

    device: DeviceType
    ranks: tuple[RankPlacement, ...]
    nodes: tuple[Node, ...]

    @property
    def incarnations(self) -> dict[str, str]:
        """The lives of the agents that are to launch it, by node."""
        return {node.id: node.incarnation for node in self.nodes}


@dataclass(frozen=True)
class NotNow:
    """There is no room now. ``blocks``: idle, nodes that are ready would have it."""

    device: DeviceType
    reason: str
    blocks: bool


@dataclass(frozen=True)
class Never:
    """No known node could ever take the gang."""

    reason: str


def usages_of(
    nodes: Iterable[Node],
    jobs: Iterable[Job],
    leases: Mapping[str, Lease],
    reserved: Mapping[NodeId, Reserved] = _NO_POOLS,
) -> tuple[NodeUsage, ...]:
    """The nodes with what the living attempts of ``jobs`` take of them, by node id."""
    usages = {
        node.id: NodeUsage(
            node, has_lease=_holds(leases.get(node.id), node), reserved=reserved.get(node.id)
        )
        for node in nodes
    }
    for job in jobs:
        attempt = job.attempt
        if attempt is None or job.plan is None:
            continue
        for node_id in attempt.live_nodes:
            if node_id in usages:
                taken = job.plan.taken.get(node_id, _NO_SLOTS)
                usages[node_id] = _take(usages[node_id], taken, job.id)
    return tuple(usages[name] for name in sorted(usages))


def place(gang: GangRequest, usages: Sequence[NodeUsage]) -> Placed | NotNow | Never:
    """Seats for a gang: on the node that it fills best, or on as few nodes as possible.

    ``device: auto`` means GPUs where there are enough of them for the gang, else CPUs; it waits
    for busy GPUs rather than train on CPUs by surprise.
    """
    if not usages:
        device: DeviceType = "cuda" if gang.device == "cuda" else "cpu"
        return NotNow(device, "no node has joined yet", blocks=False)
    seats = seats_for(gang, usages)
    if seats is not None:
        return seats
    device = device_of(gang, usages)
    if not node_sets(gang, usages, device):
        return Never(_why_never(gang, device, usages))
    return _why_not_now(gang, device, usages)


def seats_for(gang: GangRequest, usages: Sequence[NodeUsage]) -> Placed | None:
    """The same; None where there is no room now: why not takes longer to work out, of many jobs on many nodes."""
    device = device_of(gang, usages)
    # A node that is silent may come back in a moment; one that is lost or drained is not waited for.
    here = [s for s in usages if s.is_here]
    fitting = [
        (free, room)
        for room in node_sets(gang, here, device)
        if (free := room.free(device, gang.together)) >= gang.ranks
    ]
    if not fitting:
        return None
    shunned = set(gang.last_resort)
    _, best = min(
        fitting,
        key=lambda found: (bool(shunned) and found[1].has_any(shunned), found[0], found[1].name),
    )
    return _assign(best, gang, device)


def node_sets(
    gang: GangRequest, usages: Sequence[NodeUsage], device: DeviceType
) -> tuple[NodeSet, ...]:
    """Where the gang could run if nobody else did: each single node, or else all of one pool together.

    One that spreads has both. Nodes of different pools need not even reach each other.
    """
    # A node has enough whole groups where it has as many slots as they have.
    ranks = -(-gang.ranks // gang.together) * gang.together
    single = tuple(NodeSet((usage,)) for usage in usages if usage.capacity(device) >= ranks)
    if single and (len(usages) == 1 or not gang.spreads):
        return single
    wide = (room for room in _by_pool(usages) if room.capacity(device, gang.together) >= gang.ranks)
    return (*single, *(room for room in wide if len(room.usages) > 1))


def _by_pool(usages: Sequence[NodeUsage]) -> list[NodeSet]:
    members: dict[str, list[NodeUsage]] = {}
    for usage in usages:
        members.setdefault(usage.pool, []).append(usage)
    return [NodeSet(tuple(each)) for each in members.values()]


def occupy(usages: Sequence[NodeUsage], placed: Placed, job_id: str) -> tuple[NodeUsage, ...]:
    """The usages once the gang runs."""
    taken = taken_by(placed.ranks)
    return tuple(_take(s, taken[s.node.id], job_id) if s.node.id in taken else s for s in usages)


def device_of(gang: GangRequest, usages: Sequence[NodeUsage]) -> DeviceType:
    """On which type of device the gang would run."""
    if gang.device != "auto":
        return gang.device
    ready = [s for s in usages if s.node.state == NodeState.READY]
    return "cuda" if node_sets(gang, ready or usages, "cuda") else "cpu"


def some(names: Sequence[str]) -> str:
    """The first eight, and how many more there are."""
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return ", ".join(names[:_NAMED]) + more


def _assign(room: NodeSet, gang: GangRequest, device: DeviceType) -> Placed:
    """Rank after rank on the nodes with most room; whole groups of ``close`` ranks first."""
    left = gang.ranks
    shares: dict[str, int] = {}
    for size in (gang.close, gang.together):
        for usage in sorted(room.usages, key=lambda s: (-s.free(device), s.node.id)):
            taken = shares.get(usage.node.id, 0)
            more = min((usage.free(device) - taken) // size * size, left // size * size)
            if more:
                shares[usage.node.id] = taken + more
                left -= more
    chosen = [s for name in shares for s in room.usages if s.node.id == name]
    slots: list[RankPlacement] = []
    for usage in chosen:
        slots += _slots(usage, device, len(slots), shares[usage.node.id])
    return Placed(device, tuple(slots), tuple(usage.node for usage in chosen))


def _slots(
    usage: NodeUsage, device: DeviceType, first: int, count: int
) -> tuple[RankPlacement, ...]:
    if device == "cuda":
        indices = [a.index for a in usage.node.inventory.accelerators]
        free = [index for index in indices if index not in usage.accelerators_taken]
        names = [f"cuda:{index}" for index in free[:count]]
    else:
        names = ["cpu"] * count
    return tuple(
        RankPlacement(rank=first + place, node_id=usage.node.id, local_rank=place, device=name)
        for place, name in enumerate(names)
    )


def _holds(lease: Lease | None, node: Node) -> bool:
    return lease is not None and lease.incarnation == node.incarnation


def _take(usage: NodeUsage, taken: Taken, job_id: str) -> NodeUsage:
    return replace(
        usage,
        cpu_taken=usage.cpu_taken + taken.cpu_slots,
        accelerators_taken=usage.accelerators_taken | taken.accelerators,
        jobs=(*usage.jobs, job_id),
    )


def _why_never(gang: GangRequest, device: DeviceType, usages: Sequence[NodeUsage]) -> str:
    total = max(room.capacity(device, gang.together) for room in _by_pool(usages))
    if device == "cuda" and total == 0:
        return f"{gang.ranks} CUDA ranks are requested, but no known node has a GPU"
    parted = f" in groups of {gang.together} on one node" if gang.together > 1 else ""
    return (
        f"{gang.ranks} ranks need {gang.ranks} {_WORDS[device]}{parted}, but all known nodes "
        f"together have {total}"
    )


def _why_not_now(gang: GangRequest, device: DeviceType, usages: Sequence[NodeUsage]) -> NotNow:
    able = node_sets(gang, usages, device)
    ready = node_sets(gang, [s for s in usages if s.is_open], device)
    here = node_sets(gang, [s for s in usages if s.is_here], device)
    if all(len(room.usages) == 1 for room in here):
        # It is not given several nodes, however many slots others free there for it.
        ready = tuple(room for room in ready if len(room.usages) == 1)
    free = max((room.free(device, gang.together) for room in ready), default=None)
    if free is None or free >= gang.ranks:  # room on several nodes, while a single one is silent
        reason = _why_closed(gang.ranks, [s for room in able for s in room.usages])
        return NotNow(device, reason, blocks=False)
    last = ready[-1].usages
    where = "on one node" if len(last) == 1 else f"on {some([s.node.id for s in last])}"
    busy = some(sorted({job for room in ready for job in room.jobs})) or "nothing"
    return NotNow(
        device,
        f"{gang.ranks} {_WORDS[device]} {where} are needed, at most {free} are free; "
        f"running: {busy}",
        blocks=True,
    )


def _why_closed(ranks: int, able: Sequence[NodeUsage]) -> str:
    closed = {s.node.id: s for s in able if not s.is_open}.values()
    draining = [s.node.id for s in closed if s.node.shown_state == NodeState.DRAINING]
    ready = [s.node.id for s in closed if s.reserved is None or s.reserved.is_ready]
    reserved = [s.node.id for s in closed if s.node.id not in [*draining, *ready]]
    absent = [s.node.id for s in closed if s.node.id not in [*draining, *reserved]]
    parts = (
        ("lost or silent", absent),
        ("draining", draining),
        ("provisioned or given back", reserved),
    )
    why = [f"{words}: {some(names)}" for words, names in parts if names]
    return f"the nodes that could take {ranks} ranks are {'; '.join(why)}"
