"""A pool on the virtual time of ``VirtualCluster``: it has so many machines, and each takes a while to boot."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from services.contract.words.ids import NodeId
from services.contract.words.states import PoolKind
from services.controller.domain.scheduling.reservations import PoolLimits, Sighting
from services.controller.ports.pools import (
    AgentProcess,
    PoolError,
    PoolRefusedError,
    RunnablePool,
)
from services.controller.use_cases.provision import PoolRounds
from tests.controller.virtual_cluster import VirtualCluster


@dataclass
class _Held:
    nodes: tuple[NodeId, ...]
    up: list[NodeId] = field(default_factory=list)
    booted: int = 0
    seconds: int = 0
    ended: str = ""


class VirtualPool:
    """The port ``NodePool``: boots one machine of a reservation after the other, once all are there.

    Attributes:
        machines: That it has; no more than the limits say.
        boots_within_s: So long each takes.
        trouble: Why it does not answer; None: it does.
        refuses: Why it takes no request; None: it does.
        asked: How often it was asked for nodes.
    """

    def __init__(self, cluster: VirtualCluster, limits: PoolLimits, machines: int) -> None:
        self._cluster = cluster
        self._limits = limits
        self.machines = machines
        self.boots_within_s = 2
        self.trouble: str | None = None
        self.refuses: str | None = None
        self.asked = 0
        self.held: dict[str, _Held] = {}

    @property
    def limits(self) -> PoolLimits:
        return self._limits

    async def provision(self, reservation_id: str, agents: Mapping[NodeId, AgentProcess]) -> None:
        self._answer()
        if self.refuses is not None:
            raise PoolRefusedError(self.refuses)
        if reservation_id not in self.held:
            self.asked += 1
            self.held[reservation_id] = _Held(tuple(agents))

    async def release(self, reservation_id: str) -> None:
        self._answer()
        for name in self.held.pop(reservation_id).up:
            self._cluster.lose(name)

    async def sightings(self) -> Sequence[Sighting]:
        self._answer()
        return [
            Sighting(name, held.nodes, is_held=not held.ended, reason=self._reason(held))
            for name, held in self.held.items()
        ]

    async def close(self) -> None:
        pass

    def lose(self, node_id: NodeId) -> None:
        """A machine burns; what else there is of its reservation stays."""
        self._of(node_id).up.remove(node_id)
        self._cluster.lose(node_id)

    def end(self, node_id: NodeId, why: str) -> None:
        """Take back all nodes of the reservation that has this one."""
        held = self._of(node_id)
        held.ended = why
        for name in held.up:
            self._cluster.lose(name)

    def _of(self, node_id: NodeId) -> _Held:
        return next(held for held in self.held.values() if node_id in held.up)

    def second(self) -> None:
        """Let a second pass: machines boot."""
        used = 0
        for held in self.held.values():
            used += len(held.nodes)
            if used > self.machines:
                continue
            held.seconds += 1
            if held.seconds % self.boots_within_s == 0 and held.booted < len(held.nodes):
                name = held.nodes[held.booted]
                held.booted += 1
                held.up.append(name)
                self._cluster.join(name, self._limits.cpu_slots)

    def _reason(self, held: _Held) -> str:
        return held.ended or ("" if held.seconds else "Resources")

    def _answer(self) -> None:
        if self.trouble is not None:
            raise PoolError(self.trouble)


class PooledCluster(VirtualCluster):
    """A virtual cluster with pools, whose rounds are made each second."""

    def __init__(self, slots: Mapping[str, int], *pools: PoolLimits, machines: int = 100) -> None:
        super().__init__(slots)
        self.pools = [VirtualPool(self, limits, machines) for limits in pools]
        self.use_pools(pools)
        self.new_leader()

    def new_leader(self) -> None:
        super().new_leader()
        process = AgentProcess(("agent",), {})
        agents = [
            RunnablePool(pool, dict.fromkeys(pool.limits.node_ids, process))
            for pool in getattr(self, "pools", [])
        ]
        self._rounds = [PoolRounds(self.ports, 1, each.pool, each.agents) for each in agents]

    async def seconds(self, count: int) -> None:
        for _ in range(count):
            await super().seconds(1)
            for rounds, pool in zip(self._rounds, self.pools, strict=True):
                if pool.trouble is None:
                    await rounds.once()
                pool.second()


def limits(name: str = "burst", **changes: object) -> PoolLimits:
    """A pool of nodes of two CPU slots."""
    fields: dict[str, object] = {
        "name": name,
        "kind": PoolKind.SLURM,
        "cpu_slots": 2,
        "accelerators": 0,
        "max_nodes": 4,
        "ready_timeout_s": 60,
        "idle_timeout_s": 20,
    }
    return PoolLimits.model_validate(fields | changes)
