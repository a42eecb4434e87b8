"""How long a step will take, from what is known of a node."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from fsdp_core.plan.model.sharding import MeshPlan


@dataclass(frozen=True)
class NodeFacts:
    """What a node's self-test measured; for each rank, with its fellows at work.

    Attributes:
        matmul_flops: Floating-point operations a second of large matrix products, by dtype word.
        memory_bandwidth: Bytes a second of its memory.
        link_bandwidth: Bytes a second that a rank sends to another one of the node.
        network_bandwidth: Bytes a second that it sends to other nodes.
        collective_latency: Seconds that a collective takes at least.
        ranks: Ranks that the node seats.
        overlap: Part of communication, 0 to 1, that computation can hide.
    """

    matmul_flops: Mapping[str, float]
    memory_bandwidth: float
    link_bandwidth: float
    network_bandwidth: float
    collective_latency: float
    ranks: int
    overlap: float = 0.9


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step.

    Attributes:
        compute: Forward, backward and recomputation.
        communication: By axis, as if nothing else ran.
        optimizer: Reading and writing what it updates.
        total: With what overlaps hidden.
    """

    compute: float
    communication: Mapping[str, float]
    optimizer: float
    total: float


def step_time(
    node: NodeFacts,
    mesh: MeshPlan,
    work: tuple[int, str],
    traffic: tuple[Mapping[str, int], Mapping[str, int]],
    updated_bytes: int,
    in_groups: Mapping[int, int] | None = None,
) -> StepTime:
    """The time of a step.

    An axis whose ranks do not all fit on one node communicates at the network's rate. Of the
    data-parallel axes computation hides what it can; tp waits for its sums.

    Args:
        node: Any; all are taken to be alike.
        mesh: Sizes of the axes; tp is the innermost.
        work: Floating-point operations of a rank, and the dtype of its matrices.
        traffic: Bytes that a rank sends, and collectives, by axis.
        updated_bytes: Parameters, gradients and state that the optimizer goes through.
        in_groups: Of what is sent over `dp_shard`, bytes by size of the group; those that fit
            on a node travel at its links' rate.
    """
    flops, precision = work
    rate = node.matmul_flops.get(precision) or max(node.matmul_flops.values())
    compute = flops / rate
    spans = {
        "tp": mesh.tp,
        "dp_shard": mesh.tp * mesh.dp_shard,
        "dp_replicate": mesh.tp * mesh.dp_shard * mesh.dp_replicate,
    }
    sent, collectives = traffic
    communication = {
        axis: sent[axis] / (node.link_bandwidth if span <= node.ranks else node.network_bandwidth)
        + collectives[axis] * node.collective_latency
        for axis, span in spans.items()
    }
    if spans["dp_shard"] > node.ranks:
        near = sum(n for size, n in (in_groups or {}).items() if mesh.tp * size <= node.ranks)
        communication["dp_shard"] += near / node.link_bandwidth - near / node.network_bandwidth
    data = communication["dp_shard"] + communication["dp_replicate"]
    hidden = min(data * node.overlap, compute)
    # Each element is read, and parameter and state are written.
    optimizer = 2 * updated_bytes / node.memory_bandwidth
    total = compute + communication["tp"] + data - hidden + optimizer
    return StepTime(compute, communication, optimizer, total)
