"""The queue, the room there is, and pools; nodes that are to be emptied."""

from collections.abc import Mapping, Sequence
from typing import Final

from services.contract.api.queue import (
    CapacityView,
    NodeCapacity,
    PoolList,
    PoolView,
    QueueEntry,
    QueueView,
    ReservationView,
)
from services.contract.api.views import NodeView
from services.contract.system.long_work import in_turns
from services.contract.words.states import NodeState
from services.controller.domain.errors import StaleWriteError, StateConflictError, no_node
from services.controller.domain.job.job import Job
from services.controller.domain.scheduling.node import Drain
from services.controller.domain.scheduling.placement import NodeUsage
from services.controller.domain.scheduling.queue import Preempt, Turn, Waiting, in_order
from services.controller.domain.scheduling.reservations import PoolLimits, Reservation
from services.controller.ports.coordination import Ports
from services.controller.use_cases.inspect import get_node
from services.controller.use_cases.present import maybe_moment, moment
from services.controller.use_cases.waiting import (
    current_usages,
    reason_of,
    reservations_now,
    turns_now,
)

_ENDED_SHOWN: Final = 5


async def get_queue(ports: Ports) -> QueueView:
    """Who waits, in which order, why, and behind whom."""
    jobs = [stored.job for stored in await ports.jobs.active()]
    known = await turns_now(ports, jobs)
    coming = await reservations_now(ports)
    numbered = in_turns(enumerate(in_order(jobs), 1))
    items = [_entry(number, job, known.get(job.id), coming) async for number, job in numbered]
    return QueueView(items=tuple(items))


async def get_capacity(ports: Ports) -> CapacityView:
    """Used and free slots, node by node."""
    jobs = [stored.job for stored in await ports.jobs.active()]
    usages = await current_usages(ports, jobs)
    nodes = tuple(_capacity(usage) for usage in usages)
    return CapacityView(
        nodes=nodes,
        cpu_slots=sum(n.cpu_slots for n in nodes),
        cpu_slots_free=sum(n.cpu_slots_free for n in nodes),
        accelerators=sum(n.accelerators for n in nodes),
        accelerators_free=sum(n.accelerators_free for n in nodes),
        largest_cpu_gang=max((n.cpu_slots_free for n in nodes), default=0),
        largest_cuda_gang=max((n.accelerators_free for n in nodes), default=0),
    )


async def list_pools(ports: Ports, silent: Mapping[str, str]) -> PoolList:
    """All pools, in the order in which they are asked, with their newest reservations that ended.

    Args:
        ports: The world.
        silent: Why pools do not answer, by name.
    """
    known = await reservations_now(ports)
    ended = await ports.reservations.ended() if ports.pools else ()
    return PoolList(
        items=tuple(
            _pool(
                pool,
                [r for r in known if r.pool == pool.name],
                [r for r in ended if r.pool == pool.name][:_ENDED_SHOWN],
                silent.get(pool.name),
            )
            for pool in ports.pools
        )
    )


async def drain_node(ports: Ports, node_id: str, grace_s: float) -> NodeView:
    """Have no more gangs placed there, and those that run there checkpoint and move.

    Raises:
        NotFoundError: There is no such node.
    """
    drain = Drain(grace_s=grace_s, asked_ms=await ports.clock.now_ms())
    await ports.nodes.drain(node_id, drain)
    return await get_node(ports, node_id)


async def undrain_node(ports: Ports, node_id: str) -> NodeView:
    """Have gangs placed there again.

    Raises:
        NotFoundError: There is no such node.
    """
    await ports.nodes.drain(node_id, None)
    return await get_node(ports, node_id)


async def forget_node(ports: Ports, node_id: str) -> None:
    """Remove a lost node's record, its drain and what it measured; its agent may join again.

    Raises:
        NotFoundError: There is no such node.
        StateConflictError: It is not lost, or ranks of a job may live there.
    """
    node = await ports.nodes.node(node_id)
    if node is None:
        raise no_node(node_id)
    attempts = [(s.job.id, s.job.attempt) for s in await ports.jobs.active()]
    busy = sorted(name for name, attempt in attempts if attempt and node_id in attempt.live_nodes)
    if busy:
        raise StateConflictError(f"ranks of {', '.join(busy)} may still run on {node_id}")
    if node.state != NodeState.LOST:
        raise StateConflictError(
            f"{node_id} is {node.shown_state}: drain it, and stop its agent before it is deleted"
        )
    try:
        await ports.nodes.forget(node, None)
    except StaleWriteError as error:
        raise StateConflictError(f"the agent of {node_id} is alive: stop it first") from error


def _entry(position: int, job: Job, turn: Turn | None, coming: Sequence[Reservation]) -> QueueEntry:
    reason = (job.reason or "queued") if turn is None else reason_of(turn, coming)
    blocked_by, start_ms = tuple[str, ...](), None
    match turn:
        case None:
            start_ms = job.not_before_ms if job.planning is None else None
        case Turn(outcome=Waiting() as waits):
            blocked_by, start_ms = waits.blocked_by, waits.start_ms
        case Turn(outcome=Preempt() as room):
            blocked_by = tuple(v.id for v in room.victims)
    return QueueEntry(
        position=position,
        job_id=job.id,
        name=job.spec.name,
        state=job.state,
        priority=job.spec.priority,
        ranks=job.spec.fewest_ranks,
        world=job.spec.resources.world,
        device=job.spec.resources.device,
        reason=reason,
        blocked_by=blocked_by,
        waiting_since=moment(waits_since_ms(job)),
        expected_start_at=maybe_moment(start_ms),
    )


def waits_since_ms(job: Job) -> int:
    """When it joined the queue: at its submission, or when its last attempt ended."""
    ended = [a.ended_ms for a in job.attempts if a.ended_ms is not None]
    return max([job.created_ms, *ended])


def _capacity(usage: NodeUsage) -> NodeCapacity:
    return NodeCapacity(
        node_id=usage.node.id,
        state=usage.node.shown_state,
        cpu_slots=usage.capacity("cpu"),
        cpu_slots_free=usage.free("cpu"),
        accelerators=usage.capacity("cuda"),
        accelerators_free=usage.free("cuda"),
    )


def _pool(
    limits: PoolLimits,
    reservations: Sequence[Reservation],
    ended: Sequence[Reservation],
    trouble: str | None,
) -> PoolView:
    return PoolView(
        name=limits.name,
        kind=limits.kind,
        max_nodes=limits.max_nodes,
        cpu_slots=limits.cpu_slots,
        accelerators=limits.accelerators,
        ready_timeout_s=limits.ready_timeout_s,
        idle_timeout_s=limits.idle_timeout_s,
        trouble=trouble,
        reservations=tuple(map(_reservation, reservations)),
        ended=tuple(map(_reservation, ended)),
    )


def _reservation(reservation: Reservation) -> ReservationView:
    return ReservationView(
        id=reservation.id,
        state=reservation.state,
        node_ids=reservation.node_ids,
        job_id=reservation.job_id,
        reason=reservation.why,
        requested_at=moment(reservation.requested_ms),
        ready_at=maybe_moment(reservation.ready_ms),
        ended_at=maybe_moment(reservation.ended_ms),
    )
