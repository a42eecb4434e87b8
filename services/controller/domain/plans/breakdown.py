"""From a layout and its estimates to what a plan shows."""

from collections.abc import Iterable
from math import prod
from typing import Final

from fsdp_core.plan.model import (
    Estimate,
    Memory,
    ModelProfile,
    ShardingPlan,
    Training,
    estimate,
)
from fsdp_core.plan.model.shares import UnitShare, shares_of
from services.contract.api.plan_views import (
    AxisTraffic,
    MemoryView,
    PlanUnit,
    RankMemory,
    StepTimeView,
)
from services.contract.messages.rank_pipe import ThroughputUnit

# Beyond so many ranks along dp_shard the fullest one speaks for all.
_LOOKED_AT: Final = 16
_BINARY: Final = 1024
_AXES: Final = ("dp_replicate", "dp_shard", "tp")


def memory_view(memory: Memory) -> MemoryView:
    """The bytes of a moment, with their sum."""
    kinds = {name: getattr(memory, name) for name in MemoryView.model_fields if name != "total"}
    return MemoryView(**kinds, total=memory.total)


def memory_of_ranks(
    profile: ModelProfile, plan: ShardingPlan, training: Training
) -> tuple[RankMemory, ...]:
    """What each rank needs; those that need the same stand together, the fullest first."""
    mesh = plan.mesh
    alike: dict[RankMemory, list[int]] = {}
    shards = range(mesh.dp_shard if mesh.dp_shard <= _LOOKED_AT else 1)
    for shard in shards:
        found = estimate(profile, plan, training, shard_rank=shard)
        every = [shard] if len(shards) == mesh.dp_shard else range(mesh.dp_shard)
        ranks = [rank for each in every for rank in _at(plan, each)]
        alike.setdefault(_needs(found), []).extend(ranks)
    kinds = [needs.model_copy(update={"ranks": tuple(sorted(r))}) for needs, r in alike.items()]
    return tuple(sorted(kinds, key=lambda kind: -kind.peak.total))


def _needs(found: Estimate) -> RankMemory:
    return RankMemory(
        ranks=(),
        peak=memory_view(found.peak.memory),
        where=found.peak.where,
        unit=found.peak.unit,
        resting=memory_view(found.resting),
        host_bytes=found.host_bytes,
    )


def _at(plan: ShardingPlan, shard: int) -> Iterable[int]:
    """Ranks at one place along dp_shard: tp is innermost, dp_replicate outermost."""
    mesh = plan.mesh
    for copy in range(mesh.dp_replicate):
        first = (copy * mesh.dp_shard + shard) * mesh.tp
        yield from range(first, first + mesh.tp)


def units_of(profile: ModelProfile, plan: ShardingPlan) -> tuple[PlanUnit, ...]:
    """The units in the order of the model's modules, the root first."""
    return tuple(
        PlanUnit(
            modules=share.unit.names,
            parameters=sum(prod(each.facts.shape) for each in share.own),
            rank_bytes=sum(profile.rounded(each.slice_bytes) for each in share.own),
            reshard_after_forward=_reshards(share),
            param_dtype=share.unit.plan.param_dtype or plan.param_dtype,
            reduce_dtype=share.unit.plan.reduce_dtype or plan.reduce_dtype,
            recompute=share.unit.plan.recompute,
            offload=share.unit.plan.offload,
            prefetch=share.unit.plan.prefetch,
            compile=share.unit.plan.compile,
            shared_memory=None if share.shared == "none" else share.shared,
        )
        for share in shares_of(profile, plan)
    )


def _reshards(share: UnitShare) -> bool | int:
    said = share.unit.plan.reshard_after_forward
    return not share.unit.is_root if said is None else said


def traffic_of(found: Estimate, plan: ShardingPlan) -> tuple[AxisTraffic, ...]:
    """What a rank sends in a step, by axis of more than one rank."""
    seconds = {} if found.time is None else found.time.communication
    return tuple(
        AxisTraffic(
            axis=axis,
            ranks=getattr(plan.mesh, axis),
            bytes_sent=found.sent[axis],
            collectives=found.collectives[axis],
            seconds=seconds.get(axis),
        )
        for axis in _AXES
        if getattr(plan.mesh, axis) > 1
    )


def step_time_of(
    found: Estimate, counted: int, unit: ThroughputUnit, scale: float
) -> StepTimeView | None:
    """Seconds of a step of so many tokens or samples over all ranks, if the node is known.

    ``scale`` is in the estimate already.
    """
    if found.time is None:
        return None
    return StepTimeView(
        compute_s=found.time.compute,
        optimizer_s=found.time.optimizer,
        total_s=found.time.total,
        tokens_per_s=counted / found.time.total if found.time.total else 0.0,
        throughput_unit=unit,
        scale=scale,
    )


def size(number: float) -> str:
    """Bytes for people."""
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if number < _BINARY:
            return f"{number:.0f} {unit}" if unit == "bytes" else f"{number:.1f} {unit}"
        number /= _BINARY
    return f"{number:.1f} TiB"
