"""Nodes that pools bring for jobs that fit no free node, and when they are given back.

A reservation is a number of nodes of one pool, all or none of them. Its record says what is wanted, and is
written before the pool is asked; the loop that talks to the pool makes it true, so that a controller that is
restarted in any state goes on where the last one was. Until all of its nodes have joined, and once it is
given back, no gang is placed on any of them.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from services.contract.messages.probing import DeviceType
from services.contract.words.ids import NodeId
from services.contract.words.states import NodeState, PoolKind, ReservationState
from services.controller.domain.record import Record
from services.controller.domain.scheduling.node import Node
from services.controller.domain.scheduling.placement import GangRequest, Reserved

REFUSED_MS: Final = 60_000
"""So long a pool is not asked again for a job for which it has brought no nodes."""


class PoolLimits(Record):
    """What a pool can bring.

    Attributes:
        name: Of the pool; its nodes are ``<name>-1`` to ``<name>-<max_nodes>``.
        kind: By which of the adapters.
        cpu_slots: Of each node.
        accelerators: Of each node.
        max_nodes: At a time.
        ready_timeout_s: So long all nodes of a reservation have to join.
        idle_timeout_s: So long nodes on which nothing runs are kept.
    """

    name: str
    kind: PoolKind
    cpu_slots: int
    accelerators: int
    max_nodes: int
    ready_timeout_s: float
    idle_timeout_s: float

    @property
    def node_ids(self) -> tuple[NodeId, ...]:
        """All that it can have."""
        return tuple(f"{self.name}-{number}" for number in range(1, self.max_nodes + 1))

    def fit(self, gang: GangRequest) -> "Fit | None":
        """What a gang takes of it if nothing else runs there; None: it can never take the gang."""
        devices: tuple[DeviceType, ...] = (
            ("cuda", "cpu") if gang.device == "auto" else (gang.device,)
        )
        for device in devices:
            slots = self.accelerators if device == "cuda" else self.cpu_slots
            each = slots // gang.together * gang.together
            if each and -(-gang.ranks // each) <= self.max_nodes:
                return Fit(device, -(-gang.ranks // each))
        return None


@dataclass(frozen=True)
class Fit:
    """So many nodes hold a gang, on this type of device."""

    device: DeviceType
    nodes: int


class Reservation(Record):
    """Nodes that a pool was asked for.

    Attributes:
        id: Its name at the pool, too.
        pool: Which.
        node_ids: The names of its nodes.
        state: What is wanted of it, and how far that is.
        job_id: For which job; None: found at the pool, without a record.
        reason: What the pool said last, or why it is given back.
        requested_ms: When it was made.
        ready_ms: When all nodes had joined.
        is_lost: Its nodes had joined, and one was lost, or the pool took them back.
        said: What the pool said of that.
        ended_ms: When its nodes were gone.
    """

    id: str
    pool: str
    node_ids: tuple[NodeId, ...]
    state: ReservationState
    job_id: str | None
    reason: str
    requested_ms: int
    ready_ms: int | None = None
    is_lost: bool = False
    said: str = ""
    ended_ms: int | None = None

    def released(self, reason: str, *, is_lost: bool = False, said: str = "") -> "Reservation":
        """The same, to be given back."""
        change = {"reason": reason, "is_lost": is_lost, "said": said}
        return self.model_copy(update={"state": ReservationState.RELEASING, **change})

    def ended(self, now_ms: int) -> "Reservation":
        """The same once its nodes are gone."""
        state = ReservationState.LOST if self.is_lost else ReservationState.RELEASED
        return self.model_copy(update={"state": state, "ended_ms": now_ms})

    @property
    def why(self) -> str:
        """Its reason, with the pool's own words."""
        return f"{self.reason}: {self.said}" if self.said else self.reason


@dataclass(frozen=True)
class Want:
    """A job that fits no free node, and the gang for which it needs some."""

    job_id: str
    gang: GangRequest


@dataclass(frozen=True)
class Sighting:
    """What a pool says of a reservation.

    Attributes:
        id: Of the reservation.
        node_ids: The nodes that it was made for.
        is_held: Whether the pool keeps nodes for it, or still tries to.
        reason: Why it has none yet, or none any more; empty if that is because it was released.
        is_whole: Whether it has all that was asked for: not if asking was interrupted, or some of it ended.
    """

    id: str
    node_ids: tuple[NodeId, ...]
    is_held: bool
    reason: str
    is_whole: bool = True


def reserved_nodes(reservations: Iterable[Reservation]) -> Mapping[NodeId, Reserved]:
    """The nodes of pools, by id: until all of a reservation are there, no gang is placed on any.

    Two can name one node if Redis lost the record of one: the agent that came first has its lease, so the
    reservation that is ready speaks for it.
    """
    return {
        node_id: Reserved(each.pool, each.state == ReservationState.READY)
        for each in sorted(reservations, key=lambda each: each.state == ReservationState.READY)
        for node_id in each.node_ids
    }


def able_pool(gang: GangRequest, pools: Iterable[PoolLimits]) -> tuple[PoolLimits, Fit] | None:
    """The first pool that could take a gang, and what it takes there."""
    fits = ((pool, pool.fit(gang)) for pool in pools)
    return next(((pool, fit) for pool, fit in fits if fit is not None), None)


@dataclass(frozen=True)
class Moment:
    """What decisions on reservations rest on.

    Attributes:
        pools: In the order in which they are asked.
        reservations: All that there are.
        nodes: By id.
        alive: Nodes whose agents hold their leases.
        busy: Nodes on which ranks run, or may.
        waiting: Jobs that wait for slots.
        refused: Until when a pool is not asked again for a job, by the names of both.
        now_ms: The present.
    """

    pools: Sequence[PoolLimits]
    reservations: Sequence[Reservation]
    nodes: Mapping[NodeId, Node]
    alive: Collection[NodeId]
    busy: Collection[NodeId]
    waiting: Collection[str]
    refused: Mapping[tuple[str, str], int]
    now_ms: int


def reviewed(reservation: Reservation, moment: Moment, idle_since_ms: int | None) -> Reservation:
    """The reservation in the light of its nodes; the same if nothing is to change.

    Args:
        reservation: As it is.
        moment: The present.
        idle_since_ms: Since when nothing runs on any of its nodes; None: something does.
    """
    limits = next((pool for pool in moment.pools if pool.name == reservation.pool), None)
    if limits is None or reservation.state == ReservationState.RELEASING:
        return reservation  # a pool that is no longer named cannot be asked for anything
    if reservation.state == ReservationState.READY:
        if lost := [name for name in reservation.node_ids if _is_lost(name, moment)]:
            return reservation.released(f"{', '.join(lost)} was lost", is_lost=True)
        reason = _why_given_back(limits, moment, idle_since_ms)
    elif all(_has_joined(reservation, name, moment) for name in reservation.node_ids):
        ready = {"state": ReservationState.READY, "reason": "", "ready_ms": moment.now_ms}
        return reservation.model_copy(update=ready)
    else:
        reason = _why_given_up(reservation, limits, moment)
    return reservation if reason is None else reservation.released(reason)


def _why_given_back(limits: PoolLimits, moment: Moment, idle_since_ms: int | None) -> str | None:
    if idle_since_ms is None or not _passed(moment.now_ms, idle_since_ms, limits.idle_timeout_s):
        return None
    return f"nothing ran there for {limits.idle_timeout_s:g} s"


def _why_given_up(reservation: Reservation, limits: PoolLimits, moment: Moment) -> str | None:
    if reservation.job_id is not None and reservation.job_id not in moment.waiting:
        return f"{reservation.job_id} no longer waits for it"
    if not _passed(moment.now_ms, reservation.requested_ms, limits.ready_timeout_s):
        return None
    said = f": {reservation.reason}" if reservation.reason else ""
    return f"not ready within {limits.ready_timeout_s:g} s{said}"


def requests(wants: Iterable[Want], moment: Moment, new_id: str) -> tuple[Reservation, ...]:
    """Reservations to make for jobs that fit no free node, in the order of the queue.

    A job behind one that no pool can serve now does not overtake it for the same pool: it would take the
    nodes for which the other waits.

    Args:
        wants: In the order of the queue.
        moment: The present.
        new_id: A name that no reservation had before; several get a number behind it.
    """
    taken = {node_id for each in moment.reservations for node_id in each.node_ids}
    served = {each.job_id for each in moment.reservations if _may_serve(each, moment)}
    full: set[str] = set()
    made: list[Reservation] = []
    for want in wants:
        if want.job_id in served:
            continue
        for pool in moment.pools:
            fit = pool.fit(want.gang)
            if fit is None or moment.now_ms < moment.refused.get((pool.name, want.job_id), 0):
                continue
            if pool.name in full:
                continue
            free = [node_id for node_id in pool.node_ids if node_id not in taken]
            if len(free) < fit.nodes:
                full.add(pool.name)
                continue
            taken.update(free[: fit.nodes])
            made.append(
                Reservation(
                    id=f"{new_id}-{len(made) + 1}",
                    pool=pool.name,
                    node_ids=tuple(free[: fit.nodes]),
                    state=ReservationState.REQUESTED,
                    job_id=want.job_id,
                    reason="",
                    requested_ms=moment.now_ms,
                )
            )
            break
    return tuple(made)


def why_waiting(job_id: str, reservations: Iterable[Reservation]) -> str | None:
    """What a job's nodes wait for, in a sentence; None: it has no reservation that is not ready."""
    for each in reservations:
        if each.job_id == job_id and each.state in _COMING:
            nodes = "1 node" if len(each.node_ids) == 1 else f"{len(each.node_ids)} nodes"
            said = f": {each.reason}" if each.reason else ""
            return f"waiting for {nodes} of pool {each.pool}{said}"
    return None


_COMING: Final = frozenset({ReservationState.REQUESTED, ReservationState.PROVISIONING})


def seen(reservation: Reservation, sighting: Sighting | None) -> Reservation:
    """The reservation after its pool was asked; the same if that changes nothing.

    One that is still to be requested may be there already: its controller ended before it said so.
    """
    if reservation.state == ReservationState.RELEASING:
        return _explained(reservation, sighting)
    is_new = reservation.state == ReservationState.REQUESTED
    if sighting is None:
        return reservation if is_new else _taken(reservation, "the pool has no such nodes any more")
    if not sighting.is_held:
        return _taken(reservation, "the pool took its nodes back", sighting.reason)
    if not sighting.is_whole:
        ended = "some of its nodes ended"
        return reservation if is_new else _taken(reservation, ended, sighting.reason)
    known = reservation
    if known.state == ReservationState.REQUESTED:
        known = known.model_copy(update={"state": ReservationState.PROVISIONING})
    if known.state == ReservationState.PROVISIONING and known.reason != sighting.reason:
        known = known.model_copy(update={"reason": sighting.reason})
    return known


def _explained(reservation: Reservation, sighting: Sighting | None) -> Reservation:
    """One that was lost, with what its pool says of that."""
    said = sighting.reason if reservation.is_lost and sighting is not None else ""
    if said in ("", reservation.said):
        return reservation
    return reservation.model_copy(update={"said": said})


def _taken(reservation: Reservation, reason: str, said: str = "") -> Reservation:
    """What its pool ended; of nodes that never joined the pool's words are all there is to say."""
    if reservation.state == ReservationState.READY:
        return reservation.released(reason, is_lost=True, said=said)
    return reservation.released(said or reason)


def found(pool: str, sighting: Sighting, now_ms: int) -> Reservation:
    """The record of nodes that a pool holds for us and of which nothing is known: Redis lost it.

    Jobs may run there, so they are kept until they are idle.
    """
    return Reservation(
        id=sighting.id,
        pool=pool,
        node_ids=sighting.node_ids,
        state=ReservationState.PROVISIONING,
        job_id=None,
        reason=sighting.reason,
        requested_ms=now_ms,
    )


def _has_joined(reservation: Reservation, node_id: NodeId, moment: Moment) -> bool:
    """Whether the agent that was started for it is there, not one of an earlier reservation."""
    node = moment.nodes.get(node_id)
    if node is None or node.state != NodeState.READY or node_id not in moment.alive:
        return False
    return reservation.job_id is None or node.joined_ms >= reservation.requested_ms


def _may_serve(reservation: Reservation, moment: Moment) -> bool:
    """Whether its nodes are still to come, or there and nobody's yet."""
    if reservation.state == ReservationState.READY:
        known = [moment.nodes[name] for name in reservation.node_ids if name in moment.nodes]
        is_free = not set(reservation.node_ids) & set(moment.busy)
        return is_free and all(node.emptying is None for node in known)
    return reservation.state in _COMING


def _is_lost(node_id: NodeId, moment: Moment) -> bool:
    node = moment.nodes.get(node_id)
    return node is None or node.state == NodeState.LOST


def _passed(now_ms: int, since_ms: int, seconds: float) -> bool:
    return now_ms - since_ms >= seconds * 1000
