"""Nodes, the queue and free capacity as tables."""

from datetime import UTC, datetime

from services.cli.figures import duration, plural, short_age, size, state_text
from services.cli.layout import Column, Columns, FittedTable
from services.contract.api.queue import (
    CapacityView,
    NodeCapacity,
    PoolList,
    PoolView,
    QueueEntry,
    QueueView,
    ReservationView,
)
from services.contract.api.views import NodeList, NodeView


def nodes_table(nodes: NodeList, *, name_jobs: bool = True) -> FittedTable[NodeView]:
    """One row a node; ``name_jobs``: with the ids of its jobs."""
    columns: list[Column[NodeView]] = [
        Column("node", lambda node: node.id),
        Column("state", lambda node: state_text(node.state)),
        Column(
            "CPU slots", lambda node: f"{node.cpu_slots_used}/{node.inventory.cpu_slots}", drop=1
        ),
        Column(
            "GPUs",
            lambda node: f"{node.accelerators_used}/{len(node.inventory.accelerators)}",
            drop=2,
        ),
        Column("memory", lambda node: size(node.inventory.memory_bytes), drop=4),
        Column("jobs", lambda node: plural(len(node.jobs), "job") if node.jobs else "", drop=3),
    ]
    if name_jobs:
        columns.append(Column("ids", lambda node: "  ".join(node.jobs), fit="note"))
    return FittedTable(columns, nodes.items)


def queue_table(queue: QueueView) -> FittedTable[QueueEntry]:
    """One row a waiting job, the next one first."""
    columns: Columns[QueueEntry] = (
        Column("#", lambda entry: str(entry.position)),
        Column("job", lambda entry: entry.job_id),
        Column("name", lambda entry: entry.name, drop=1, fit="cut", least=8),
        Column("priority", lambda entry: str(entry.priority), drop=5),
        Column("ranks", lambda entry: f"{_needed(entry)} {entry.device}", drop=3),
        Column("waits", lambda entry: short_age(entry.waiting_since), drop=2),
        Column("starts in", _starts_in, drop=4),
        Column("why", lambda entry: entry.reason, fit="note"),
    )
    return FittedTable(columns, queue.items)


def pools_table(pools: PoolList) -> FittedTable[tuple[PoolView, ReservationView | None]]:
    """One row a reservation, then those that ended; a pool of which nothing is reserved has a row, too."""
    rows = [
        (pool, reserved)
        for pool in pools.items
        for reserved in (*(pool.reservations or (None,)), *pool.ended)
    ]
    columns: Columns[tuple[PoolView, ReservationView | None]] = (
        Column("pool", lambda row: row[0].name),
        Column("kind", lambda row: row[0].kind, drop=5),
        Column("nodes", _pool_nodes, drop=1),
        Column("state", lambda row: row[1].state.value if row[1] else "", drop=2),
        Column("since", _pool_since, drop=4),
        Column("why", _pool_reason, fit="note"),
    )
    return FittedTable(columns, rows)


def _pool_nodes(row: tuple[PoolView, ReservationView | None]) -> str:
    pool, reserved = row
    return f"{len(reserved.node_ids) if reserved else 0} of {pool.max_nodes}"


def _pool_since(row: tuple[PoolView, ReservationView | None]) -> str:
    return "" if row[1] is None else short_age(row[1].ended_at or row[1].requested_at)


def _pool_reason(row: tuple[PoolView, ReservationView | None]) -> str:
    pool, reserved = row
    is_over = reserved is not None and reserved.ended_at is not None
    trouble = f"the pool does not answer: {pool.trouble}" if pool.trouble and not is_over else ""
    if reserved is None:
        return trouble
    job = f"for {reserved.job_id}" if reserved.job_id else ""
    return "; ".join(filter(None, [job, reserved.reason, trouble]))


def capacity_table(capacity: CapacityView) -> FittedTable[NodeCapacity | CapacityView]:
    """One row a node, and the sum."""
    columns: Columns[NodeCapacity | CapacityView] = (
        Column("node", lambda each: each.node_id if isinstance(each, NodeCapacity) else "all"),
        Column(
            "state",
            lambda each: state_text(each.state) if isinstance(each, NodeCapacity) else "",
            drop=2,
        ),
        Column("free CPU slots", lambda each: f"{each.cpu_slots_free} of {each.cpu_slots}"),
        Column(
            "free GPUs", lambda each: f"{each.accelerators_free} of {each.accelerators}", drop=1
        ),
    )
    return FittedTable(columns, [*capacity.nodes, capacity])


def _needed(entry: QueueEntry) -> str:
    return str(entry.ranks) if entry.world is None else f"{entry.ranks} to {entry.world.max}"


def _starts_in(entry: QueueEntry) -> str:
    if entry.expected_start_at is None:
        return "-"
    return duration(max((entry.expected_start_at - datetime.now(UTC)).total_seconds(), 0))
