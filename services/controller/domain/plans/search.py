"""From a spec to what a node is asked about its model, and from the answer to a plan.

Nothing is built here: the node profiles the model, and the search is arithmetic on that.
"""

from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from typing import Final

from fsdp_core.errors import PlanError
from fsdp_core.plan.model import (
    SGD,
    Alternative,
    Candidate,
    Fixed,
    FixedUnit,
    LayoutAnswer,
    LayoutQuestion,
    NodeFacts,
    OptimizerFacts,
    Seats,
    ShardingPlan,
    TensorParallelPlan,
    Training,
    Workload,
    conditions_for,
    fixed_by,
    search_layout,
    tp_sizes,
    within_nodes,
)
from services.contract.api.plan_views import PlanAlternative, PlanOutcome
from services.contract.jobs.plans import default_micro_batch
from services.contract.jobs.spec_parts import MeshSpec
from services.contract.jobs.specs import JobSpec
from services.contract.messages.probe_ids import probe_id
from services.contract.messages.probing import DeviceType, ProbeModel
from services.contract.words.bounds import ERROR_CHARACTERS, shortened
from services.controller.domain.plans import breakdown, default_plan
from services.controller.domain.plans.plan import Profiled
from services.controller.domain.scheduling.node import Node
from services.controller.domain.scheduling.placement import (
    GangRequest,
    Never,
    NodeUsage,
    Placed,
    place,
)

_UNASKED: Final = f"probe_{'0' * 32}"
_DECODER_HEADS: Final = 6
_UNITS_NAMED: Final = 4
# An allocator's fragments and the process itself are not estimated.
_USABLE: Final = 0.9


@dataclass(frozen=True)
class RankRoom:
    """What the nodes have for a job: where it would sit, and what a rank there may use.

    ``node_bytes``: what all ranks of a node have together; 0: each has a device of its own.
    ``reserve_bytes``: what of a device is left to its allocator's fragments and to the process.
    """

    device_type: DeviceType
    ranks_per_node: int
    memory_bytes: int
    facts: NodeFacts | None = None
    node_bytes: int = 0
    reserve_bytes: int | None = None

    @classmethod
    def on(cls, node: Node, device_type: DeviceType) -> "RankRoom":
        """The room on nodes like this one. A CPU rank may use its slot's share of the memory."""
        inventory = node.inventory
        if device_type == "cuda":
            memory = min(each.memory_bytes for each in inventory.accelerators)
            seats = len(inventory.accelerators)
        else:
            memory = inventory.memory_bytes // max(inventory.cpu_slots, 1)
            seats = inventory.cpu_slots
        measured = node.measured.get(device_type)
        facts = None if measured is None else measured.facts
        usable = max(int(memory * _USABLE), 1)
        if device_type == "cuda":
            return cls(device_type, max(seats, 1), usable, facts, reserve_bytes=memory - usable)
        return cls(device_type, max(seats, 1), usable, facts, int(inventory.memory_bytes * _USABLE))

    def alone(self, ranks: int) -> "RankRoom":
        """The same while no other job is there: so many ranks share what the node has."""
        each = self.node_bytes // min(ranks, self.ranks_per_node)
        return replace(self, memory_bytes=max(self.memory_bytes, each))


def ask(spec: JobSpec, room: RankRoom, node: Node, timeout_s: float) -> ProbeModel:
    """What a node is asked about the model of a spec.

    Raises:
        InvalidRequestError: The plan or the mesh cannot be.
    """
    question = _question(spec, room, SGD)
    plan = default_plan.shard(spec)
    wanted = ProbeModel(
        probe_id=_UNASKED,
        spec=spec,
        device_type=room.device_type,
        conditions=conditions_for(question),
        stops=tuple(name for unit in plan.units for name in unit.modules if name),
        tensor_parallel=question.tensor_parallel if max(tp_sizes(question)) > 1 else (),
        timeout_s=timeout_s,
    )
    name = probe_id(wanted, node.inventory.versions)
    return wanted.model_copy(update={"probe_id": name})


@dataclass(frozen=True)
class Study:
    """A spec, what was found of its model, and the nodes on which it may run."""

    spec: JobSpec
    found: Profiled
    room: RankRoom
    usages: tuple[NodeUsage, ...]


def scaled(room: RankRoom, factor: float) -> RankRoom:
    """The room, where steps take so much longer than was estimated."""
    facts = room.facts
    return room if facts is None else replace(room, facts=replace(facts, scale=factor))


def work_out(study: Study) -> PlanOutcome:
    """The plan. Takes a while: not for an event loop.

    Nobody reserves memory for CPU ranks: what does not fit the share of their slots may have what
    other slots do not use, and the plan says so.
    """
    found = _work_out(study)
    alone = study.room.alone(study.spec.fewest_ranks)
    if found.feasible or alone == study.room:
        return found
    found = _work_out(replace(study, room=alone))
    if not found.feasible:
        return found
    share = breakdown.size(study.room.memory_bytes)
    words = f"more than the share of its slot, {share}: other jobs on the node may lack that memory"
    return found.model_copy(update={"reasons": (*found.reasons, words)})


def _work_out(study: Study) -> PlanOutcome:
    room = study.room
    try:
        answer = _search(study)
    except PlanError as error:
        return PlanOutcome(
            feasible=False,
            reasons=_cut((str(error),)),
            advice=("name other modules in plan.units, or leave the plan to the search",),
            device_type=room.device_type,
            memory_limit_bytes=room.memory_bytes,
            memory_reserve_bytes=room.reserve_bytes,
        )
    return _outcome(study, answer)


def _search(study: Study) -> LayoutAnswer:
    profile = study.found.profile
    question = _question(study.spec, study.room, study.found.optimizer)
    default = _default(study.spec, study.found.sequence_tokens, study.room.ranks_per_node)
    question = replace(question, default=default)
    answer = search_layout(profile, question)
    best, ranks = answer.best, study.spec.fewest_ranks
    if question.fixed.mesh is not None or best is None or best.plan.mesh.tp == 1:
        return answer
    seats = place(GangRequest.of(_with_mesh(study.spec, best), ranks), study.usages)
    if not isinstance(seats, Never):
        return answer
    # Other nodes have fewer seats than that of the room: a choice of ours must not rule them out.
    return search_layout(profile, replace(question, splits=()))


def _question(spec: JobSpec, room: RankRoom, optimizer: OptimizerFacts) -> LayoutQuestion:
    plan = default_plan.shard(spec)
    question = LayoutQuestion(
        seats=Seats(spec.fewest_ranks, room.ranks_per_node, room.memory_bytes, room.facts),
        workload=Workload(
            global_batch=spec.train.global_batch,
            optimizer=optimizer,
            micro_batch=_micro_batch(spec, plan),
            common_share=None if spec.resources.world is None else default_plan.common_share(spec),
            param_dtype=plan.param_dtype,
            reduce_dtype=plan.reduce_dtype,
            output_dtype=plan.output_dtype,
            shared_memory=plan.shared_memory,
        ),
        fixed=_fixed(spec, plan),
        splits=_splits(spec, room),
        groups=spec.resources.world is None or spec.mesh != "auto",
    )
    return question if _can_split(spec, question) else replace(question, splits=())


def _default(spec: JobSpec, sequence_tokens: int, ranks_per_node: int) -> tuple[ShardingPlan, int]:
    """As it would run if nothing were chosen."""
    plan, asked = within_nodes(default_plan.shard(spec), ranks_per_node), spec.train.micro_batch
    per_rank = spec.train.global_batch // plan.mesh.data_ranks
    return plan, default_micro_batch(per_rank, sequence_tokens) if asked == "auto" else asked


def _micro_batch(spec: JobSpec, plan: ShardingPlan) -> int | None:
    asked = spec.train.micro_batch
    if asked != "auto":
        return asked
    # As a rank takes it that is told nothing: its whole share at once.
    whole = spec.train.global_batch // plan.mesh.data_ranks
    return whole if spec.plan == "default" else None


def _fixed(spec: JobSpec, plan: ShardingPlan) -> Fixed:
    if spec.plan == "default":
        units = tuple(FixedUnit(unit) for unit in plan.units)
        return Fixed(plan.mesh, units, plan.tensor_parallel or None)
    said = fixed_by(plan, default_plan.said(spec))
    has_mesh = spec.mesh != "auto" or spec.resources.world is not None
    return replace(said, mesh=plan.mesh) if has_mesh else said


def _splits(spec: JobSpec, room: RankRoom) -> tuple[TensorParallelPlan, ...]:
    """What may be split over tp.

    On CPUs nothing unless the mesh is set: by estimates a split model is never clearly faster there,
    as sums of activations go through sockets, and following it takes two thirds of a probe.
    """
    is_open = room.device_type == "cpu" and spec.mesh == "auto"
    return () if is_open else default_plan.splits_of(spec)


def _can_split(spec: JobSpec, question: LayoutQuestion) -> bool:
    """Whether the built-in model's heads divide; a mesh that people chose is theirs to answer for."""
    if spec.mesh != "auto" or spec.model is None or spec.model.factory != "decoder":
        return True
    heads = spec.model.args.get("heads", _DECODER_HEADS)
    return isinstance(heads, int) and heads % max(tp_sizes(question)) == 0


def _outcome(study: Study, answer: LayoutAnswer) -> PlanOutcome:
    room, best = study.room, answer.best
    spec = study.spec if best is None else _with_mesh(study.spec, best)
    ranks = study.spec.fewest_ranks
    seats = place(GangRequest.of(spec, ranks), study.usages)
    is_elastic = study.spec.resources.world is not None
    least = (f"for {ranks} ranks, the fewest that it may have",) if is_elastic else ()
    never = (seats.reason,) if isinstance(seats, Never) else ()
    shown = PlanOutcome(
        feasible=answer.feasible and not never,
        reasons=_cut((*never, *least, *(answer.reasons or _why(answer, room)), *_compiled(best))),
        advice=_cut(
            (
                *("add nodes with more slots, or use fewer ranks" for _ in never),
                *(each.text for each in answer.advice),
            )
        ),
        device_type=room.device_type,
        memory_limit_bytes=room.memory_bytes,
        memory_reserve_bytes=room.reserve_bytes,
        alternatives=tuple(_alternative(each) for each in answer.alternatives),
        ranks=seats.ranks if isinstance(seats, Placed) else (),
        placement=None if isinstance(seats, Placed) else seats.reason,
    )
    if best is None:
        return shown
    profile = study.found.profile
    training = Training(best.micro_batch, best.accumulation, study.found.optimizer)
    samples = study.spec.train.global_batch
    counted = samples * study.found.sequence_tokens
    return shown.model_copy(
        update={
            "mesh": best.plan.mesh,
            "sharding": best.plan,
            "micro_batch": best.micro_batch,
            "accumulation": best.accumulation,
            "units": breakdown.units_of(profile, best.plan),
            "memory": breakdown.memory_of_ranks(profile, best.plan, training),
            "traffic": breakdown.traffic_of(best.estimate, best.plan),
            "step_time": breakdown.step_time_of(
                best.estimate,
                counted,
                study.found.throughput_unit,
                1.0 if room.facts is None else room.facts.scale,
            ),
            "model_flops": profile.flops.at(best.micro_batch) * samples // best.micro_batch or None,
            "peak_flops": None
            if room.facts is None
            else room.facts.rate(best.plan.param_dtype or "fp32"),
        }
    )


def _cut(words: Iterable[str]) -> tuple[str, ...]:
    """For people: they may name all modules of a model, and stand in its job's record and in lists, too."""
    return tuple(shortened(each, ERROR_CHARACTERS) for each in words)


def _with_mesh(spec: JobSpec, best: Candidate) -> JobSpec:
    return spec.model_copy(update={"mesh": MeshSpec(**asdict(best.plan.mesh))})


def _why(answer: LayoutAnswer, room: RankRoom) -> tuple[str, ...]:
    """Why the chosen one was chosen."""
    if answer.best is None:
        return ()
    need = breakdown.size(answer.best.estimate.peak.memory.total)
    best = "the best" if answer.exhaustive else "the best found"
    which = f"{best} of {answer.considered} layouts by {answer.ranked_by}"
    if answer.by_default:
        which = (
            f"the default layout: of {answer.considered} none is clearly better by "
            f"{answer.ranked_by}"
        )
    return (f"{which}; its fullest rank needs {need} of {breakdown.size(room.memory_bytes)}",)


def _alternative(other: Alternative) -> PlanAlternative:
    candidate = other.candidate
    time = candidate.estimate.time
    return PlanAlternative(
        title=shortened(_title(candidate), ERROR_CHARACTERS),
        mesh=candidate.plan.mesh,
        micro_batch=candidate.micro_batch,
        peak_bytes=candidate.estimate.peak.memory.total,
        step_time_s=None if time is None else time.total,
        fits=candidate.fits,
        lost_because=shortened(other.why, ERROR_CHARACTERS),
    )


def _compiled(candidate: Candidate | None) -> Iterator[str]:
    if candidate is not None and any(unit.compile for unit in candidate.plan.units):
        yield (
            "units are compiled (plan.units[].compile): its effect on memory and time is not "
            "estimated; the figures are those of units that are not compiled"
        )


def _title(candidate: Candidate) -> str:
    """How it is laid out, in a few words."""
    mesh = candidate.plan.mesh
    units = [unit for unit in candidate.plan.units if unit.modules != ("",)]
    words = [f"{mesh.dp_replicate} x {mesh.dp_shard} x {mesh.tp}"]
    named = ["+".join(unit.modules) for unit in units]
    if len(named) > _UNITS_NAMED:
        named = [*named[:_UNITS_NAMED], f"{len(named) - _UNITS_NAMED} more"]
    words.append(f"units {' '.join(named)}" if units else "one unit")
    if any(unit.recompute for unit in units):
        words.append("recomputed")
    kept = {unit.reshard_after_forward for unit in units}
    words += [f"slices over {n}" for n in sorted(kept - {None, True, False}, key=str)]
    if False in kept:
        words.append("kept whole")
    if deep := max((unit.prefetch or 0 for unit in units), default=0):
        words.append(f"prefetch {deep}")
    if any(unit.offload for unit in candidate.plan.units):
        words.append("offloaded")
    return ", ".join(words)
