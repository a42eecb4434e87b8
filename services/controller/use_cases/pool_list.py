"""Pools and what is reserved of them, for people."""

from collections.abc import Mapping

from services.contract.api.pools import PoolList, PoolView, ReservationView
from services.controller.domain.scheduling.reservations import PoolLimits, Reservation
from services.controller.ports.coordination import Ports
from services.controller.use_cases.present import maybe_moment, moment
from services.controller.use_cases.waiting import reservations_now


async def list_pools(ports: Ports, silent: Mapping[str, str]) -> PoolList:
    """All pools, in the order in which they are asked.

    Args:
        ports: The world.
        silent: Why pools do not answer, by name.
    """
    reservations = await reservations_now(ports)
    return PoolList(
        items=tuple(
            _pool(pool, [r for r in reservations if r.pool == pool.name], silent.get(pool.name))
            for pool in ports.pools
        )
    )


def _pool(limits: PoolLimits, reservations: list[Reservation], trouble: str | None) -> PoolView:
    return PoolView(
        name=limits.name,
        kind=limits.kind,
        max_nodes=limits.max_nodes,
        cpu_slots=limits.cpu_slots,
        accelerators=limits.accelerators,
        ready_timeout_s=limits.ready_timeout_s,
        idle_timeout_s=limits.idle_timeout_s,
        trouble=trouble,
        reservations=tuple(
            ReservationView(
                id=each.id,
                state=each.state,
                node_ids=each.node_ids,
                job_id=each.job_id,
                reason=each.reason,
                requested_at=moment(each.requested_ms),
                ready_at=maybe_moment(each.ready_ms),
            )
            for each in reservations
        ),
    )
