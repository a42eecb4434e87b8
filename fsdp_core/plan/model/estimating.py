"""What a plan will cost each rank: memory and where it peaks, traffic, time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod

from fsdp_core.errors import PlanError
from fsdp_core.plan.model.ledger import Ledger, Memory, Peak
from fsdp_core.plan.model.optimizer import SGD, OptimizerFacts
from fsdp_core.plan.model.profile import Conditions, ModelProfile, Segment
from fsdp_core.plan.model.sharding import ShardingPlan
from fsdp_core.plan.model.shares import Placement, UnitShare, shares_of
from fsdp_core.plan.model.step_time import NodeFacts, StepTime, StepWork, step_time
from fsdp_core.plan.model.timeline import Timeline
from fsdp_core.plan.model.traffic import Moved, Traffic

# The first step does not predict the order of forward; all others are alike.
_STEPS = 2


@dataclass(frozen=True)
class Training:
    """How a job trains, as far as memory and time depend on it.

    Attributes:
        micro_batch: Samples of one forward.
        accumulation: Forwards for each step; only the last one's backward reduces.
        optimizer: What it keeps and needs.
    """

    micro_batch: int
    accumulation: int = 1
    optimizer: OptimizerFacts = SGD


@dataclass(frozen=True)
class Estimate:
    """What a rank needs for a plan.

    Attributes:
        peak: The most device memory at once, what it consists of, and where in the step.
        resting: Device memory between two steps.
        host_bytes: Memory of the host for what is offloaded.
        sent: Bytes that a rank sends in a step, by mesh axis.
        collectives: How many it starts in a step, by mesh axis.
        flops: Floating-point operations of a rank in a step.
        time: Seconds of a step, if the node is known.
        sent_in_groups: Of what is sent over `dp_shard`, bytes by size of the group, for those
            that `reshard_after_forward` makes.
    """

    peak: Peak
    resting: Memory
    host_bytes: int
    sent: Mapping[str, int]
    collectives: Mapping[str, int]
    flops: int
    time: StepTime | None = None
    sent_in_groups: Mapping[int, int] = field(default_factory=dict)


def estimate(
    profile: ModelProfile,
    plan: ShardingPlan,
    training: Training,
    node: NodeFacts | None = None,
    *,
    shard_rank: int = 0,
    only_tensors: bool = False,
) -> Estimate:
    """Follows a step of one rank, as the engine would make it, without making it.

    Args:
        profile: Of the model, for the job's sequence length and device.
        plan: For any number of ranks.
        training: The optimizer and sizes.
        node: For the time; None leaves that out.
        shard_rank: The rank's place along `dp_shard`: the first has most.
        only_tensors: Leave out what operators and the communication library take for themselves.

    Raises:
        PlanError: The plan does not fit the model, or the profile lacks what it needs.
    """
    shares = shares_of(profile, plan, shard_rank)
    _check_stops(profile, shares)
    mesh, micro_batch = plan.mesh, training.micro_batch
    is_host = profile.device_type == "cpu"
    held = _Held.of(profile, shares, training.optimizer, is_host=is_host)
    ledger = Ledger(profile.granularity)
    ledger.shift("buffers", sum(profile.rounded(each.nbytes) for each in profile.buffers))
    ledger.shift("parameters", held.parameters)
    ledger.shift("optimizer", held.state)
    before = ledger.peak.memory
    placement = Placement(
        mesh.dp_shard,
        mesh.dp_replicate,
        is_host=is_host,
        splits=mesh.tp > 1,
        has_gloo=is_host and not only_tensors,
        shard_rank=shard_rank,
    )
    segments = steps_of(profile, plan, shares)
    if only_tensors:
        segments = [replace(step, segment=replace(step.segment, within=None)) for step in segments]
    traffic = Traffic(mesh.dp_shard, mesh.dp_replicate)
    timeline = Timeline(shares, placement, ledger, traffic)
    for _ in range(_STEPS):
        ledger.forget_peak()
        traffic.clear()
        if training.accumulation > 1:
            # All passes that do not reduce are alike but the first, which holds less.
            traffic.times = training.accumulation - 1
            _pass(timeline, ledger, segments, micro_batch, reduces=False)
            traffic.times = 1
        _pass(timeline, ledger, segments, micro_batch, reduces=True)
        ledger.enter("optimizer step", "")
        ledger.shift("optimizer", 0, peak=held.temporary)
        ledger.reset("gradients")
    resting = replace(before, communication=timeline.segments.nbytes)
    trace = profile.trace(_conditions(plan, shares[0]))
    traffic.split_matrices(trace.tp_bytes.at(micro_batch), training.accumulation)
    flops = flops_of(profile, plan, shares, training)
    time = None
    if node is not None:
        work = work_of(profile, plan, shares, training, (traffic.moved, held.updated))
        time = step_time(node, mesh, work)
    building = _building(profile, shares) if is_host and profile.built_whole else Peak.none()
    return Estimate(
        max(ledger.peak, building, key=lambda peak: peak.memory.total),
        resting,
        held.host,
        traffic.sent,
        traffic.collectives,
        flops,
        time,
        traffic.sent_in_groups,
    )


@dataclass(frozen=True)
class _Held:
    """What is there in every phase of a step, and what the optimizer needs besides.

    Attributes:
        parameters: Slices on the device.
        state: The optimizer's, on the device.
        temporary: What a step of the optimizer takes on the device.
        host: All that is offloaded, gradients included.
        updated: What the optimizer goes through.
    """

    parameters: int
    state: int
    temporary: int
    host: int
    updated: int

    @classmethod
    def of(
        cls,
        profile: ModelProfile,
        shares: Sequence[UnitShare],
        optimizer: OptimizerFacts,
        *,
        is_host: bool,
    ) -> _Held:
        parameters = state = host = updated = 0
        copies = [0]
        for unit in shares:
            for param in unit.own:
                slices = profile.rounded(param.slice_bytes)
                local = profile.rounded(param.state_numel * param.facts.itemsize)
                mine = 0
                if param.facts.requires_grad:
                    mine = optimizer.state_of(param.state_shape, local)
                    updated += slices + local + mine
                if unit.unit.plan.offload and not is_host:
                    host += slices + mine + (slices if param.facts.requires_grad else 0)
                    continue
                parameters += slices
                state += mine
                if param.facts.requires_grad:
                    copies.append(local)
        temporary = optimizer.step_copies_of_all * sum(
            copies
        ) + optimizer.step_copies_of_largest * max(copies)
        return cls(parameters, state, temporary, host, updated)


def _building(profile: ModelProfile, shares: Sequence[UnitShare]) -> Peak:
    """Of a model that is whole until it is sharded, a parameter at a time."""
    params = [param for share in shares for param in share.own]
    whole = sum(profile.rounded(prod(each.shape) * each.itemsize) for each in profile.parameters)
    slices = max((profile.rounded(param.slice_bytes) for param in params), default=0)
    buffers = sum(profile.rounded(each.nbytes) for each in profile.buffers)
    return Peak(Memory(parameters=slices, buffers=buffers, unsharded=whole), "building", "")


@dataclass(frozen=True)
class UnitStep:
    """A segment, and the unit at work in it."""

    segment: Segment
    unit: str


def _pass(
    timeline: Timeline,
    ledger: Ledger,
    steps: Sequence[UnitStep],
    micro_batch: int,
    *,
    reduces: bool,
) -> None:
    """Forward and backward of one micro-batch."""
    timeline.reduces = reduces
    for step in steps:
        segment = step.segment
        ledger.enter(_PHASES[segment.begins], step.unit)
        if timeline.owns(segment.module):
            match segment.begins:
                case "forward":
                    timeline.enter_forward(segment.module)
                case "forward_end":
                    timeline.leave_forward(segment.module)
                case "again":
                    timeline.enter_again(segment.module)
                case "backward":
                    timeline.enter_backward(segment.module)
                case "backward_end":
                    timeline.leave_backward(segment.module)
        ledger.shift(
            "activations",
            segment.change.at(micro_batch),
            peak=segment.peak.at(micro_batch),
            within=0 if segment.within is None else segment.within.at(micro_batch),
        )
        timeline.add_grads(segment.grads)
    ledger.enter("end of backward", "")
    timeline.end_backward()
    ledger.reset("activations")


_PHASES: Mapping[str, str] = {
    "start": "loading",
    "forward": "forward",
    "forward_end": "forward",
    "again": "backward",
    "again_end": "backward",
    "loss_backward": "backward",
    "backward": "backward",
    "backward_end": "backward",
}


def work_of(
    profile: ModelProfile,
    plan: ShardingPlan,
    shares: Sequence[UnitShare],
    training: Training,
    counted: tuple[Moved, int],
) -> StepWork:
    """What a rank does in a step.

    Args:
        profile: Of the model.
        plan: For any number of ranks.
        shares: Of the plan.
        training: Sizes.
        counted: What is sent, and bytes that the optimizer goes through.
    """
    moved, updated_bytes = counted
    flops = flops_of(profile, plan, shares, training)
    once = profile.flops.at(training.micro_batch) * training.accumulation // plan.mesh.tp
    trace = profile.trace(_conditions(plan, shares[0]))
    return StepWork(
        micro_batch=training.micro_batch,
        passes=training.accumulation,
        flops=flops,
        # A forward is a third of forward and backward.
        again=3 * (flops - once) / once if once else float(flops > once),
        operators=trace.operators.at(training.micro_batch),
        precision=plan.param_dtype or "fp32",
        units=sum(1 for share in shares if share.own),
        parameters=len(profile.parameters),
        updated=sum(1 for each in profile.parameters if each.requires_grad),
        updated_bytes=updated_bytes,
        moved=moved,
        timed=profile.timed,
        runs_ahead=profile.device_type != "cpu",
    )


def _conditions(plan: ShardingPlan, share: UnitShare) -> Conditions:
    return Conditions(
        share.unit.plan.param_dtype or plan.param_dtype,
        plan.output_dtype,
        share.unit.plan.recompute,
        plan.mesh.tp,
    )


def steps_of(
    profile: ModelProfile, plan: ShardingPlan, shares: Sequence[UnitShare]
) -> list[UnitStep]:
    """Each segment under the conditions of the unit that is at work in it."""
    holders = {name: share for share in shares for name in share.unit.names}
    traces = {share.index: profile.trace(_conditions(plan, share)).segments for share in shares}
    root = traces[0]
    if len({len(trace) for trace in traces.values()}) > 1:
        raise PlanError(
            "The model runs other modules if activations are recomputed or dtypes change, so "
            "units cannot differ in that. Give all units the same."
        )
    steps = []
    for place, boundary in enumerate(root):
        at_work = _holder(boundary.module, holders)
        # What a module leaves behind until its caller goes on depends on how itself ran.
        segment = traces[at_work.index][place]
        if boundary.begins.endswith("_end"):
            at_work = _holder(boundary.module.rpartition(".")[0], holders)
        steps.append(UnitStep(segment, at_work.name))
    return steps


def _holder(module: str, holders: Mapping[str, UnitShare]) -> UnitShare:
    """The unit of the innermost module around `module`."""
    while module not in holders:
        module = module.rpartition(".")[0]
    return holders[module]


def _check_stops(profile: ModelProfile, shares: Sequence[UnitShare]) -> None:
    known = set(profile.stops)
    missing = [name for share in shares for name in share.unit.names if name not in known]
    if missing:
        raise PlanError(
            f"The model was not followed at {missing}, so they cannot be units of an estimate. "
            "Profile it again with these as stops."
        )


def flops_of(
    profile: ModelProfile,
    plan: ShardingPlan,
    shares: Sequence[UnitShare],
    training: Training,
) -> int:
    """Floating-point operations of a rank in a step."""
    again = {name for share in shares if share.unit.plan.recompute for name in share.unit.names}
    total = profile.flops.at(training.micro_batch)
    # A forward is a third of forward and backward.
    total += sum(
        unit.flops.at(training.micro_batch) // 3 for unit in profile.units if unit.module in again
    )
    return total * training.accumulation // plan.mesh.tp
