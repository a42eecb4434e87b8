"""Nodes, reservations, facts and telemetry in memory."""

from collections.abc import Iterable, Mapping, Sequence

from services.contract.messages.commands import RecallRecords
from services.contract.messages.probing import DeviceType
from services.contract.messages.telemetry import (
    MetricRecord,
    RankProgress,
    RankSample,
    RankStacks,
    StepRecord,
)
from services.contract.redis import redis_keys as keys
from services.controller.adapters.memory.server import MemoryServer
from services.controller.domain.errors import CursorExpiredError, StaleWriteError, no_node
from services.controller.domain.job.effects import Send
from services.controller.domain.scheduling.node import Drain, Lease, Measurement, Node
from services.controller.domain.scheduling.reservations import Reservation
from services.controller.ports.machines import Entry, FactEntry, Log
from services.controller.ports.pools import ENDED_KEPT


class MemoryNodes:
    """The port ``NodeStore``."""

    def __init__(self, server: MemoryServer) -> None:
        self._server = server

    async def nodes(self) -> list[Node]:
        """See ``NodeStore.nodes``."""
        return [
            self._server.nodes[name].model_copy(
                update={
                    "drain": self._server.drains.get(name),
                    "measured": {
                        device: found
                        for (node_id, device), found in self._server.measured.items()
                        if node_id == name
                    },
                }
            )
            for name in sorted(self._server.nodes)
        ]

    async def node(self, node_id: str) -> Node | None:
        """See ``NodeStore.node``."""
        return next((node for node in await self.nodes() if node.id == node_id), None)

    async def put(self, node: Node, epoch: int, before: Node | None) -> None:
        """See ``NodeStore.put``."""
        self._server.refuse_deposed(epoch)
        known = self._server.nodes.get(node.id)
        if before is not None and (known is None or known.fact_id != before.fact_id):
            raise StaleWriteError(f"node {node.id} changed meanwhile")
        self._server.nodes[node.id] = node
        await self._server.wake()

    async def forget(self, node: Node, epoch: int | None) -> None:
        """See ``NodeStore.forget``."""
        self._server.refuse_deposed(epoch)
        known = self._server.nodes.get(node.id)
        if known is None or known.fact_id != node.fact_id or node.id in self._server.leases:
            raise StaleWriteError(f"node {node.id} changed meanwhile, or its agent is alive")
        del self._server.nodes[node.id]
        self._server.drains.pop(node.id, None)
        self._server.inboxes.pop(node.id, None)
        for key in [key for key in self._server.measured if key[0] == node.id]:
            del self._server.measured[key]
        await self._server.wake()

    async def drain(self, node_id: str, drain: Drain | None) -> None:
        """See ``NodeStore.drain``."""
        if node_id not in self._server.nodes:
            raise no_node(node_id)
        if drain is None:
            self._server.drains.pop(node_id, None)
        else:
            self._server.drains[node_id] = drain
        await self._server.wake()

    async def keep_measured(
        self, node_id: str, device_type: DeviceType, found: Measurement, epoch: int
    ) -> None:
        """See ``NodeStore.keep_measured``."""
        self._server.refuse_deposed(epoch)
        self._server.measured[node_id, device_type] = found
        self._server.asked.pop(keys.measuring(node_id, device_type), None)
        await self._server.wake()

    async def leases(self, node_ids: Iterable[str]) -> dict[str, Lease]:
        """See ``NodeStore.leases``."""
        return {name: self._server.leases[name] for name in node_ids if name in self._server.leases}


class MemoryReservations:
    """The port ``ReservationStore``."""

    def __init__(self, server: MemoryServer) -> None:
        self._server = server

    async def reservations(self) -> list[Reservation]:
        """See ``ReservationStore.reservations``."""
        return [self._server.reservations[name] for name in sorted(self._server.reservations)]

    async def put(self, reservation: Reservation, epoch: int, before: Reservation | None) -> None:
        """See ``ReservationStore.put``."""
        self._refuse(reservation.id, epoch, before)
        self._server.reservations[reservation.id] = reservation
        await self._server.wake()

    async def ended(self) -> list[Reservation]:
        """See ``ReservationStore.ended``."""
        return list(self._server.ended_reservations)

    async def end(self, reservation: Reservation, now_ms: int, epoch: int) -> None:
        """See ``ReservationStore.end``."""
        self._refuse(reservation.id, epoch, reservation)
        del self._server.reservations[reservation.id]
        self._server.ended_reservations.insert(0, reservation.ended(now_ms))
        del self._server.ended_reservations[ENDED_KEPT:]
        await self._server.wake()

    def _refuse(self, name: str, epoch: int, before: Reservation | None) -> None:
        self._server.refuse_deposed(epoch)
        known = self._server.reservations.get(name)
        if (known and known.state) != (before and before.state):
            raise StaleWriteError(f"reservation {name} changed meanwhile")


class MemoryFacts:
    """The port ``FactQueue``."""

    def __init__(self, server: MemoryServer) -> None:
        self._server = server

    async def prepare(self) -> None:
        """See ``FactQueue.prepare``."""

    async def unacknowledged(self, limit: int) -> list[FactEntry]:
        """See ``FactQueue.unacknowledged``."""
        return list(self._server.delivered.values())[:limit]

    async def next(self, limit: int, timeout_s: float) -> list[FactEntry]:
        """See ``FactQueue.next``."""
        await self._server.wait(timeout_s, lambda: bool(self._server.facts))
        taken, self._server.facts = self._server.facts[:limit], self._server.facts[limit:]
        self._server.delivered |= {entry.id: entry for entry in taken}
        return taken

    async def acknowledge(self, ids: Sequence[str]) -> None:
        """See ``FactQueue.acknowledge``."""
        for name in ids:
            self._server.delivered.pop(name, None)


class MemoryTelemetry:
    """The port ``Telemetry``."""

    def __init__(self, server: MemoryServer) -> None:
        self._server = server

    async def samples(self, job_ids: Sequence[str]) -> Mapping[str, dict[int, RankSample]]:
        """See ``Telemetry.samples``."""
        return {name: dict(self._server.samples.get(name, {})) for name in job_ids}

    async def progress(self, job_ids: Sequence[str]) -> Mapping[str, dict[int, RankProgress]]:
        """See ``Telemetry.progress``."""
        return {name: {**found} for name, found in (await self.samples(job_ids)).items()}

    async def last_steps(
        self, job_ids: Sequence[str], count: int
    ) -> Mapping[str, list[StepRecord]]:
        """See ``Telemetry.last_steps``."""
        return {name: self._server.steps.get(name, [])[-count:] for name in job_ids}

    async def recent_steps(
        self, job_ids: Sequence[str], count: int
    ) -> Mapping[str, list[StepRecord]]:
        """See ``Telemetry.recent_steps``."""
        return await self.last_steps(job_ids, count)

    async def steps(self, job_id: str) -> list[StepRecord]:
        """See ``Telemetry.steps``."""
        return list(self._server.steps.get(job_id, []))

    async def last_metrics(
        self, job_ids: Sequence[str], count: int
    ) -> Mapping[str, list[MetricRecord]]:
        """See ``Telemetry.last_metrics``."""
        return {name: self._server.metrics.get(name, [])[-count:] for name in job_ids}

    async def metrics(self, job_id: str) -> list[MetricRecord]:
        """See ``Telemetry.metrics``."""
        return list(self._server.metrics.get(job_id, []))

    async def keep_stacks(self, job_id: str, stacks: Sequence[RankStacks]) -> None:
        """See ``Telemetry.keep_stacks``."""
        self._server.stacks[job_id] |= {entry.rank: entry for entry in stacks}

    async def stacks(self, job_id: str) -> list[RankStacks]:
        """See ``Telemetry.stacks``."""
        kept = self._server.stacks.get(job_id, {})
        return [kept[rank] for rank in sorted(kept)]

    async def whole(self, job_id: str) -> str | None:
        """See ``Telemetry.whole``: nothing of a job goes before the job."""
        return None if job_id in self._server.deleted else "1"

    async def is_empty(self, job_id: str) -> bool:
        """See ``Telemetry.is_empty``."""
        kept = self._server.steps, self._server.metrics
        has_lines = bool(self._server.logs.get((job_id, Log.OUTPUT)))
        return not (has_lines or any(records.get(job_id) for records in kept))

    async def ask_back(self, job_id: str, fence: int, node_id: str) -> bool:
        """See ``Telemetry.ask_back``."""
        command = RecallRecords(job_id=job_id, fence=fence, asked=f"{fence:016x}")
        self._server.deliver((Send(node_id, command),))
        return True

    async def put_together(self, job_id: str, *, has_ended: bool) -> bool:  # noqa: ARG002 nothing goes before its job
        """See ``Telemetry.put_together``."""
        return await self.whole(job_id) is not None

    async def lacks_events(self, job_id: str) -> bool:
        """See ``Telemetry.lacks_events``."""
        return await self.whole(job_id) is None

    async def closed(self, job_id: str, fence: int, events_to: str | None) -> None:
        """See ``Telemetry.closed``: all of them stay, and the last few with them."""

    async def read(self, job_id: str, log: Log, after: str | None, limit: int) -> list[Entry]:
        """See ``Telemetry.read``."""
        entries = self._server.logs.get((job_id, log), [])
        if after is None:
            return entries[:limit]
        if entries and (0, 0) < _order(after) < _order(entries[0].id):
            raise CursorExpiredError(f"what follows {after} was trimmed")
        return [entry for entry in entries if _order(entry.id) > _order(after)][:limit]

    async def wait(self, job_id: str, log: Log, after: str | None, timeout_s: float) -> None:
        """See ``Telemetry.wait``."""
        seen = (0, 0) if after is None else _order(after)

        def has_more() -> bool:
            entries = self._server.logs.get((job_id, log), [])
            return bool(entries) and _order(entries[-1].id) > seen

        await self._server.wait(timeout_s, has_more)


def _order(entry_id: str) -> tuple[int, int]:
    time_ms, _, number = entry_id.partition("-")
    return int(time_ms), int(number or 0)
