"""What the reconciler decides about pools, and the rounds that make it true.

Decisions are made in the same look that places gangs, so that no gang is placed on a node that is given
back. The rounds only do what the records say: whatever they were in the middle of when a controller ended,
the next one's begin with what the pool says.
"""

import contextlib
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import structlog

from services.contract.words.ids import NodeId, new_reservation_id
from services.contract.words.states import ReservationState
from services.controller.domain.errors import StaleWriteError
from services.controller.domain.job.job import WAITING_STATES, Job
from services.controller.domain.scheduling.elastic import gang_request_of
from services.controller.domain.scheduling.node import Lease, Node
from services.controller.domain.scheduling.placement import (
    GangRequest,
    NodeUsage,
    Placed,
    seats_for,
)
from services.controller.domain.scheduling.queue import Preempt, Turn
from services.controller.domain.scheduling.reservations import (
    REFUSED_MS,
    Moment,
    Reservation,
    Sighting,
    Want,
    found,
    requests,
    reviewed,
    seen,
)
from services.controller.ports.coordination import Ports
from services.controller.ports.pools import AgentProcess, NodePool, PoolRefusedError

_log = structlog.get_logger()
_RANDOM_BYTES = 10
_NAME: Final = re.compile(r"[A-Za-z0-9._-]{1,200}")
_NUMBER: Final = re.compile(r"[0-9]{1,5}")


@dataclass(frozen=True)
class World:
    """A moment of the cluster: active jobs, nodes and leases by the node's id, and the time."""

    jobs: Sequence[Job]
    nodes: Mapping[NodeId, Node]
    leases: Mapping[NodeId, Lease]
    now_ms: int


def wants_of(
    jobs: Iterable[Job], turns: Iterable[Turn], usages: Sequence[NodeUsage]
) -> tuple[Want, ...]:
    """Jobs that fit no free node, in the order of the queue.

    Those for which others make room are not among them, and neither are those that would fit and only
    wait for their turn. A job whose layout is open needs any node on which its model can be profiled.
    """
    wants: list[Want] = []
    # Of thousands that wait, few differ in what they ask for.
    would_fit: dict[GangRequest, bool] = {}
    for turn in turns:
        gang = gang_request_of(turn.job)
        if isinstance(turn.outcome, Placed | Preempt):
            continue
        if gang not in would_fit:
            would_fit[gang] = seats_for(gang, usages) is not None
        if not would_fit[gang]:
            wants.append(Want(turn.job.id, gang))
    for job in jobs:
        if job.planning is not None and job.state in WAITING_STATES:
            probe = GangRequest(1, job.spec.resources.device)
            if not any(_could_probe(usage, probe) for usage in usages):
                wants.append(Want(job.id, probe))
    return tuple(wants)


def _could_probe(usage: NodeUsage, probe: GangRequest) -> bool:
    if not usage.is_open:
        return False
    if probe.device == "auto":
        return usage.capacity("cuda") > 0 or usage.capacity("cpu") > 0
    return usage.capacity(probe.device) > 0


class Provisioning:
    """The reconciler's part: reviews reservations and makes new ones, in records alone.

    Args:
        ports: The world.
        epoch: The term in whose name it writes.
    """

    def __init__(self, ports: Ports, epoch: int) -> None:
        self._ports = ports
        self._epoch = epoch
        self._idle_since: dict[str, int] = {}
        self._refused: dict[tuple[str, str], int] = {}

    async def review(
        self, reservations: Sequence[Reservation], world: World
    ) -> Sequence[Reservation]:
        """The reservations after what their nodes, their jobs and the clock have done to them."""
        if not reservations:
            return ()
        moment = self._moment(reservations, world)
        self._note_idle(moment)
        return [await self._reviewed(each, moment) for each in reservations]

    async def request(
        self, reservations: Sequence[Reservation], wants: Sequence[Want], world: World
    ) -> None:
        """Make reservations for jobs that fit no free node."""
        if not wants:
            return
        moment = self._moment(reservations, world)
        new_id = new_reservation_id(world.now_ms, self._ports.entropy(_RANDOM_BYTES))
        for made in requests(wants, moment, new_id):
            with contextlib.suppress(StaleWriteError):
                await self._ports.reservations.put(made, self._epoch, None)
                _log.info("nodes_requested", pool=made.pool, job_id=made.job_id, id=made.id)

    async def _reviewed(self, reservation: Reservation, moment: Moment) -> Reservation:
        after = reviewed(reservation, moment, self._idle_since.get(reservation.id))
        if after is reservation:
            return reservation
        try:
            await self._ports.reservations.put(after, self._epoch, reservation)
        except StaleWriteError:  # its pool was heard of meanwhile: reviewed again at the next look
            return reservation
        _log.info("reservation_reviewed", id=after.id, state=after.state, reason=after.why)
        return after

    def _note_idle(self, moment: Moment) -> None:
        ready = (each for each in moment.reservations if each.state == ReservationState.READY)
        idle = [each.id for each in ready if not set(each.node_ids) & set(moment.busy)]
        self._idle_since = {name: self._idle_since.get(name, moment.now_ms) for name in idle}

    def _moment(self, reservations: Sequence[Reservation], world: World) -> Moment:
        for each in reservations:
            has_failed = each.state == ReservationState.RELEASING and each.ready_ms is None
            if has_failed and each.job_id is not None:
                self._refused[each.pool, each.job_id] = world.now_ms + REFUSED_MS
        waiting = frozenset(
            job.id for job in world.jobs if job.state in WAITING_STATES and job.attempt is None
        )
        self._refused = {
            (pool, job_id): until_ms
            for (pool, job_id), until_ms in self._refused.items()
            if job_id in waiting and until_ms > world.now_ms
        }
        attempts = (job.attempt for job in world.jobs)
        return Moment(
            pools=self._ports.pools,
            reservations=reservations,
            nodes=world.nodes,
            alive=frozenset(
                name
                for name, lease in world.leases.items()
                if name in world.nodes and lease.incarnation == world.nodes[name].incarnation
            ),
            busy=frozenset(
                name for attempt in attempts if attempt is not None for name in attempt.live_nodes
            ),
            waiting=waiting,
            refused=self._refused,
            now_ms=world.now_ms,
        )


def _could_be_ours(sighting: Sighting, pool: str) -> bool:
    """Whether names are such as are given here: other users of a scheduler may name theirs as they like."""
    numbers = (name.removeprefix(f"{pool}-") for name in sighting.node_ids)
    return _NAME.fullmatch(sighting.id) is not None and all(map(_NUMBER.fullmatch, numbers))


class PoolRounds:
    """The rounds of one pool: they make true what the records of its reservations say.

    Args:
        ports: The world.
        epoch: The term in whose name they write.
        pool: The pool.
        agents: How the agent of each of its nodes is started.
    """

    def __init__(
        self, ports: Ports, epoch: int, pool: NodePool, agents: Mapping[NodeId, AgentProcess]
    ) -> None:
        self._ports = ports
        self._epoch = epoch
        self._pool = pool
        self._agents = agents

    async def once(self) -> None:
        """Ask the pool what it has, then ask for what is missing and give back what is to go.

        Raises:
            PoolError: It does not answer.
            DeposedError: The term is over.
            StoreUnavailableError: Redis does not answer.
            StaleWriteError: A record changed meanwhile; the next round sees it.
        """
        name = self._pool.limits.name
        sightings = await self._pool.sightings()
        told = {each.id: each for each in sightings if _could_be_ours(each, name)}
        # Read after the pool was asked: a reservation that was made meanwhile is not taken for a found one.
        known = await self._ports.reservations.reservations()
        mine = {each.id: each for each in known if each.pool == name}
        now_ms = await self._ports.clock.now_ms()
        for sighting in told.values():
            if sighting.id not in mine and sighting.is_held:
                record = found(name, sighting, now_ms)
                await self._ports.reservations.put(record, self._epoch, None)
                _log.warning("reservation_found", pool=name, id=sighting.id)
        for reservation in mine.values():
            said = told.get(reservation.id)
            after = seen(reservation, said)
            if after is not reservation:
                await self._ports.reservations.put(after, self._epoch, reservation)
            if after.state == ReservationState.REQUESTED:
                await self._provision(after)
            elif after.state == ReservationState.RELEASING:
                if said is not None and said.is_held:
                    await self._pool.release(after.id)
                else:
                    others = {n for each in known if each.id != after.id for n in each.node_ids}
                    await self._end(after, others, now_ms)

    async def _provision(self, reservation: Reservation) -> None:
        agents = {name: self._agents[name] for name in reservation.node_ids if name in self._agents}
        if len(agents) < len(reservation.node_ids):
            after = reservation.released("the file of pools allows fewer nodes by now")
        else:
            try:
                await self._pool.provision(reservation.id, agents)
            except PoolRefusedError as error:
                after = reservation.released(str(error))
            else:
                after = reservation.model_copy(update={"state": ReservationState.PROVISIONING})
        await self._ports.reservations.put(after, self._epoch, reservation)

    async def _end(
        self, reservation: Reservation, of_others: Collection[NodeId], now_ms: int
    ) -> None:
        """Remove the records of nodes that are gone, and of their reservation once all are.

        Nodes that another reservation names, too, are that one's.
        """
        own = [node_id for node_id in reservation.node_ids if node_id not in of_others]
        if await self._ports.nodes.leases(own):
            return  # for a few seconds: their names are given to other nodes only then
        for node in await self._ports.nodes.nodes():
            if node.id in own:
                await self._ports.nodes.forget(node, self._epoch)
        await self._ports.reservations.end(reservation, now_ms, self._epoch)
        _log.info("reservation_ended", id=reservation.id, reason=reservation.why)
