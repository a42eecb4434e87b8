"""How long a step will take, from what is known of a node and of the model's passes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from fsdp_core.plan.model.sharding import MeshPlan
from fsdp_core.plan.model.traffic import AXES, Kind, Moved, SharedWay, Through

# Operators on DTensors go through DTensor's own dispatch in Python first.
_SPLIT_DISPATCH = 4


@dataclass(frozen=True)
class Exchange:
    """What one kind of collective takes within the engine, its copies and hooks included.

    Attributes:
        latency: Seconds of the smallest.
        bandwidth: Bytes a second beyond that, of those that a rank sends in a ring.
    """

    latency: float
    bandwidth: float


@dataclass(frozen=True)
class NodeFacts:
    """What a node's self-test measured: for each rank, while the others work too.

    Attributes:
        matmul_flops: Floating-point operations a second of large matrix products, by dtype word.
        memory_bandwidth: Bytes a second of its memory.
        link_bandwidth: Bytes a second that a rank sends to another one of the node.
        network_bandwidth: Bytes a second that it sends to other nodes.
        collective_latency: Seconds that a collective takes at least.
        ranks: Ranks that the node seats.
        overlap: Part of communication, 0 to 1, that computation can hide.
        dispatch_s: Seconds that the host takes to launch an operator.
        exchanges: By kind of collective; a kind that is missing goes at `link_bandwidth`.
        shared_exchanges: The same through memory that ranks of the node share, where they do; what is
            missing is taken from `exchanges`.
        unit_s: Seconds of the engine in a pass for each unit, without collectives.
        parameter_s: The same for each parameter.
        sharded_parameter_s: The same where there are several ranks along dp_shard.
        update_s: Seconds of a step for each parameter that is clipped and updated.
        norm_s: Seconds of a step until ranks along dp_shard know the norm of all gradients.
        scale: By which all seconds are multiplied: what steps were seen to take longer.
    """

    matmul_flops: Mapping[str, float]
    memory_bandwidth: float
    link_bandwidth: float
    network_bandwidth: float
    collective_latency: float
    ranks: int
    overlap: float = 0.9
    dispatch_s: float = 0.0
    exchanges: Mapping[Kind, Exchange] = field(default_factory=dict)
    shared_exchanges: Mapping[SharedWay, Mapping[Kind, Exchange]] = field(default_factory=dict)
    unit_s: float = 0.0
    parameter_s: float = 0.0
    sharded_parameter_s: float = 0.0
    update_s: float = 0.0
    norm_s: float = 0.0
    scale: float = 1.0

    def rate(self, precision: str) -> float:
        """Operations a second in a dtype; of one that was not measured, the highest that was."""
        return self.matmul_flops.get(precision) or max(self.matmul_flops.values())


@dataclass(frozen=True)
class PassTimes:
    """Forward and backward of the whole model, timed on one thread of the node that profiled it.

    Attributes:
        seconds: (micro-batch, forward, backward), ascending by micro-batch.
        flops: Operations a second of a large product in fp32 on that thread.
    """

    seconds: tuple[tuple[int, float, float], ...]
    flops: float


@dataclass(frozen=True)
class StepWork:
    """What a rank does in a step.

    Attributes:
        micro_batch: Samples of a pass.
        passes: Forwards, each with its backward.
        flops: Floating-point operations of all passes.
        again: Of the model's operations those that recomputation adds, as a part of forward.
        operators: Operators of a pass.
        precision: Dtype of the matrices.
        units: Units that have parameters.
        parameters: Of the model.
        updated: Of these those that are trained.
        updated_bytes: Parameters, gradients and state that the optimizer goes through.
        moved: What is sent.
        timed: Passes that were timed; None: there are none.
        runs_ahead: Whether the host launches work that a device does later, and each hides the other.
    """

    micro_batch: int
    passes: int
    flops: int
    again: float
    operators: int
    precision: str
    units: int
    parameters: int
    updated: int
    updated_bytes: int
    moved: Moved
    timed: PassTimes | None = None
    runs_ahead: bool = False


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step.

    Attributes:
        compute: Forward, backward and recomputation, launching operators included.
        communication: By axis, as if nothing else ran.
        optimizer: Clipping, reading and writing what it updates.
        total: With what overlaps hidden.
        engine: Hooks of the units, in all passes; what a device's computation hides is not counted.
    """

    compute: float
    communication: Mapping[str, float]
    optimizer: float
    total: float
    engine: float = 0.0


def step_time(node: NodeFacts, mesh: MeshPlan, work: StepWork) -> StepTime:
    """The time of a step.

    An axis whose ranks do not all fit on one node communicates at the network's rate. Of the
    data-parallel axes computation hides what it can, but not what a rank copies itself through shared
    memory; tp waits for its sums.

    Args:
        node: Any; all are taken to be alike.
        mesh: Sizes of the axes; tp is the innermost.
        work: Of one rank.
    """
    compute = work.passes * _pass_s(node, mesh.tp, work)
    spans = {
        "tp": mesh.tp,
        "dp_shard": mesh.tp * mesh.dp_shard,
        "dp_replicate": mesh.tp * mesh.dp_shard * mesh.dp_replicate,
    }
    shared = work.moved.shared if spans["dp_shard"] <= node.ranks else {}
    communication = {
        axis: sum(
            _exchange_s(
                node, kind, *_by_group(work.moved, shared, axis, kind), is_far=span > node.ranks
            )
            for kind in AXES[axis]
        )
        for axis, span in spans.items()
    }
    if spans["dp_shard"] > node.ranks:
        groups = work.moved.in_groups
        near = sum(sent for size, sent in groups.items() if mesh.tp * size <= node.ranks)
        communication["dp_shard"] += near / node.link_bandwidth - near / node.network_bandwidth
    data = communication["dp_shard"] + communication["dp_replicate"]
    hidden = min(data * node.overlap, compute)
    in_memory = sum(_shared_s(node, *way, through) for way, through in shared.items())
    communication["dp_shard"] += in_memory
    is_sharded = mesh.dp_shard > 1
    held = node.sharded_parameter_s if is_sharded else node.parameter_s
    engine = work.passes * (work.units * node.unit_s + work.parameters * held)
    # Each element is read, and parameter and state are written.
    update = 2 * work.updated_bytes / node.memory_bandwidth
    if work.runs_ahead:
        issued = work.passes * _launched_s(node, mesh.tp, work) + engine
        engine = max(0.0, issued - compute)
        optimizer = max(update, work.updated * node.update_s)
    else:
        optimizer = update + work.updated * node.update_s
    optimizer += node.norm_s * is_sharded
    total = compute + engine + communication["tp"] + data - hidden + in_memory + optimizer
    return StepTime(
        compute * node.scale,
        {axis: seconds * node.scale for axis, seconds in communication.items()},
        optimizer * node.scale,
        total * node.scale,
        engine * node.scale,
    )


def _by_group(
    moved: Moved, shared: Mapping[tuple[SharedWay, Kind], Through], axis: str, kind: Kind
) -> tuple[int, int]:
    """Bytes and number of the collectives of process groups."""
    sent, count = moved.of(axis, kind)
    if axis == "dp_shard":
        through = [each for (_, other), each in shared.items() if other == kind]
        sent -= sum(each.sent for each in through)
        count -= sum(each.count for each in through)
    return sent, count


def _shared_s(node: NodeFacts, way: SharedWay, kind: Kind, through: Through) -> float:
    known = node.shared_exchanges.get(way, {}).get(kind)
    if known is None:
        return _exchange_s(node, kind, through.sent, through.count, is_far=False)
    return through.copied / known.bandwidth + through.count * known.latency


def _exchange_s(node: NodeFacts, kind: Kind, sent: int, count: int, *, is_far: bool) -> float:
    known = node.exchanges.get(kind) or Exchange(node.collective_latency, node.link_bandwidth)
    seconds = sent / known.bandwidth + count * known.latency
    if is_far:
        seconds += sent / node.network_bandwidth - sent / node.link_bandwidth
    return max(seconds, 0.0)


def _pass_s(node: NodeFacts, tp: int, work: StepWork) -> float:
    """One forward and backward."""
    products = work.flops / work.passes / node.rate(work.precision)
    if work.timed is None:
        return max(products, _launched_s(node, tp, work))
    launched, seconds = _timed_s(work.timed, work.micro_batch, work.again)
    # Larger operators gain by the threads of a rank, and lose by the other ranks of its node.
    seconds = (seconds - launched) * work.timed.flops / node.rate("fp32") / tp
    return launched * (1 if tp == 1 else _SPLIT_DISPATCH) + seconds


def _launched_s(node: NodeFacts, tp: int, work: StepWork) -> float:
    """Until the host has launched all operators of a pass."""
    return work.operators * node.dispatch_s * (1 if tp == 1 else _SPLIT_DISPATCH)


def _timed_s(timed: PassTimes, micro_batch: int, again: float) -> tuple[float, float]:
    """Seconds of a pass that do not depend on the micro-batch, and all of them."""
    points = _without_noise(
        [(size, (1 + again) * forward + backward) for size, forward, backward in timed.seconds]
    )
    (first, low), *others = points
    launched = low
    for size, seconds in others:
        # The lowest of the lines through the first point: noise must not make it larger.
        launched = min(launched, low - (seconds - low) * first / (size - first))
    launched = max(launched, 0.0)
    before, after = (0, launched), points[0]
    for point in points[1:]:
        if after[0] < micro_batch:
            before, after = after, point
    slope = (after[1] - before[1]) / (after[0] - before[0])
    return launched, before[1] + slope * (micro_batch - before[0])


def _without_noise(points: Sequence[tuple[int, float]]) -> list[tuple[int, float]]:
    """A pass takes no longer than its samples in smaller passes, nor than a larger pass."""
    found: list[tuple[int, float]] = []
    for size, seconds in points:
        whole = min((size / part * took for part, took in found), default=seconds)
        found.append((size, min(seconds, whole)))
    return [(size, min(took for other, took in found if other >= size)) for size, _ in found]
