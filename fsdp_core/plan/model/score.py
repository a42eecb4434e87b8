"""By what one layout is better than another."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from fsdp_core.plan.model.question import Seats
from fsdp_core.plan.model.sharding import MeshPlan
from fsdp_core.plan.model.step_time import StepTime

Score = tuple[float, ...]
"""Less is better. Only scores for the same `Seats` compare."""

_DIGITS = 4


@dataclass(frozen=True)
class Spent:
    """What a step of a rank takes.

    Attributes:
        flops: Floating-point operations.
        sent: Bytes, by axis.
        time: Seconds, if the node is known.
        sent_in_groups: As of an estimate.
    """

    flops: int
    sent: Mapping[str, int]
    time: StepTime | None = None
    sent_in_groups: Mapping[int, int] = field(default_factory=dict)


def score(spent: Spent, mesh: MeshPlan, seats: Seats) -> Score:
    """Seconds of a step; without a node first operations, then bytes between nodes, then others.

    Counts to four digits: no prediction is better than that, and what is equal by then is decided
    by memory.
    """
    if spent.time is not None:
        return (_rounded(spent.time.total),)
    near, far = near_and_far(spent, mesh, seats.ranks_per_node)
    return (_rounded(spent.flops), _rounded(far), _rounded(near))


def near_and_far(spent: Spent, mesh: MeshPlan, ranks_per_node: int) -> tuple[int, int]:
    """Bytes sent within a node and between nodes; an axis that leaves a node counts as far."""
    spans = {
        "tp": mesh.tp,
        "dp_shard": mesh.tp * mesh.dp_shard,
        "dp_replicate": mesh.ranks,
    }
    far = sum(sent for axis, sent in spent.sent.items() if spans[axis] > ranks_per_node)
    if spans["dp_shard"] > ranks_per_node:
        groups = spent.sent_in_groups.items()
        far -= sum(sent for size, sent in groups if mesh.tp * size <= ranks_per_node)
    return sum(spent.sent.values()) - far, far


def _rounded(number: float) -> float:
    return float(f"{number:.{_DIGITS}g}")
