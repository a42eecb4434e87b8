"""A schedule of the queue with what it was made of: while that stays the same, so does the schedule.

To go through thousands of waiting jobs takes a while, and all who ask want to know the same.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final

from services.contract.words.ids import NodeId
from services.controller.domain.job.job import WAITING_STATES, Job
from services.controller.domain.scheduling.node import Lease, Node
from services.controller.domain.scheduling.placement import NodeUsage, Reserved, usages_of
from services.controller.domain.scheduling.queue import Schedule, Turn, schedule

KEPT_MS: Final = 5_000
"""So long a schedule stands although nothing changed: estimates of when jobs end move."""


@dataclass(frozen=True)
class Snapshot:
    """What a schedule is made of, but for the clock and how fast jobs train.

    ``jobs``: all that are active. ``leases``: who holds them, by node. ``reserved``: nodes that are on
    their way from a pool, or back.
    """

    jobs: tuple[Job, ...]
    nodes: tuple[Node, ...]
    leases: Mapping[NodeId, Lease]
    reserved: Mapping[NodeId, Reserved]

    @cached_property
    def usages(self) -> tuple[NodeUsage, ...]:
        """The nodes with what the jobs take of them."""
        return usages_of(self.nodes, self.jobs, self.leases, self.reserved)

    @cached_property
    def holders(self) -> Mapping[NodeId, str]:
        """The agents that hold the leases: how long these last yet changes all the time."""
        return {node_id: lease.incarnation for node_id, lease in self.leases.items()}

    def is_same(self, other: "Snapshot") -> bool:
        """Whether nothing changed."""
        return (
            self.holders == other.holders
            and self.reserved == other.reserved
            and _are_same(self.jobs, other.jobs)
            and _are_same(self.nodes, other.nodes)
        )


@dataclass(frozen=True)
class Survey:
    """A schedule and its origin.

    Attributes:
        snapshot: What it was made of.
        schedule: What is to become of whom.
        at_ms: When that was.
        due_ms: When the next job has waited out its back-off; None: none has one.
    """

    snapshot: Snapshot
    schedule: Schedule
    at_ms: int
    due_ms: int | None

    @classmethod
    def of(cls, snapshot: Snapshot, remaining_ms: Mapping[str, int], now_ms: int) -> "Survey":
        """The schedule as it is now; ``remaining_ms``: how long jobs are expected to run yet."""
        found = schedule(snapshot.jobs, snapshot.usages, remaining_ms, now_ms)
        return cls(snapshot, found, now_ms, next_due(snapshot.jobs, now_ms))

    @cached_property
    def turns(self) -> Mapping[str, Turn]:
        """What is to become of each job that has a turn, by its id."""
        return {turn.job.id: turn for turn in self.schedule.turns}

    def holds(self, snapshot: Snapshot, now_ms: int) -> bool:
        """Whether a schedule now would find the same, or nearly: jobs train at a steady pace."""
        is_fresh = 0 <= now_ms - self.at_ms < KEPT_MS
        is_due = self.due_ms is not None and now_ms >= self.due_ms
        return is_fresh and not is_due and self.snapshot.is_same(snapshot)


def next_due(jobs: Iterable[Job], now_ms: int) -> int | None:
    """When the next job that backs off has its turn."""
    due = (j.not_before_ms for j in jobs if j.not_before_ms > now_ms and j.state in WAITING_STATES)
    return min(due, default=None)


def _are_same(some: Sequence[object], others: Sequence[object]) -> bool:
    # Nearly all are the same objects; one that two requests read at once may be two.
    return len(some) == len(others) and all(
        a is b or a == b for a, b in zip(some, others, strict=True)
    )
