"""What would make a model fit that does not: the same search with one thing changed at a time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from fsdp_core.errors import PlanError
from fsdp_core.plan.model.answer import Advice, Candidate, Change
from fsdp_core.plan.model.best_first import Hunt
from fsdp_core.plan.model.floors import Divided
from fsdp_core.plan.model.profile import ModelProfile
from fsdp_core.plan.model.question import Fixed, FixedUnit, LayoutQuestion, UnitOption, Workload
from fsdp_core.plan.model.reasons import gib
from fsdp_core.plan.model.space import LayoutSpace

MOST_TIMES = 64
"""Up to so many times as many ranks are tried."""

_HALVES = 8


@dataclass(frozen=True)
class _Changed:
    change: Change
    words: str
    question: LayoutQuestion


def advise(profile: ModelProfile, question: LayoutQuestion, divided: Divided) -> tuple[Advice, ...]:
    """Everything that by itself makes the model fit; else all that could be let go, together.

    Args:
        profile: Of the model.
        question: To which no layout was an answer.
        divided: What the search knows already.
    """
    study = _Study(profile, divided)
    found = study.tried(_changes(profile, question))
    if not found:
        workload = replace(question.workload, micro_batch=None)
        loose = replace(question, workload=workload, fixed=Fixed())
        if loose != question:
            words = "leave mesh, units and micro-batch to the search"
            found = study.tried([_Changed("mesh", words, loose)])
    for steps in (_smaller_batches(question), _more_ranks(question)):
        first = next((one for each in steps for one in study.tried([each])), None)
        found += [] if first is None else [first]
    return tuple(found)


@dataclass(frozen=True)
class _Study:
    profile: ModelProfile
    divided: Divided

    def tried(self, changes: Iterable[_Changed]) -> list[Advice]:
        """Of those that make something fit."""
        return [
            Advice(each.change, f"{each.words}: {_needs(fitting, each.question)}", fitting)
            for each in changes
            if (fitting := self._fitting(each.question)) is not None
        ]

    def _fitting(self, question: LayoutQuestion) -> Candidate | None:
        space = LayoutSpace(self.profile, question)
        hunt = Hunt(space, self.divided)
        try:
            found = hunt.best(space.layouts())
            if found is None and space.offloads:
                found = hunt.best(space.layouts(offload=True))
        except PlanError:
            return None
        return None if found is None else found.candidate


def _changes(profile: ModelProfile, question: LayoutQuestion) -> Iterator[_Changed]:
    workload, fixed = question.workload, question.fixed
    if workload.micro_batch is not None:
        free = replace(question, workload=replace(workload, micro_batch=None))
        yield _Changed("micro_batch", "leave the micro-batch to the search", free)
    if fixed.units is not None:
        if opened := _opened(fixed.units, "recompute"):
            free = replace(question, fixed=replace(fixed, units=opened))
            yield _Changed("recompute", "recompute the activations of units", free)
        opened = _opened(fixed.units, "offload")
        if opened and profile.device_type != "cpu":
            free = replace(question, fixed=replace(fixed, units=opened))
            yield _Changed("offload", "keep slices and optimizer state on the host", free)
        free = replace(question, fixed=replace(fixed, units=None))
        yield _Changed("units", "leave the units to the search", free)
    if fixed.mesh is not None:
        free = replace(question, fixed=replace(fixed, mesh=None))
        yield _Changed("mesh", "leave the mesh to the search", free)
    if fixed.tensor_parallel is not None:
        free = replace(question, fixed=replace(fixed, tensor_parallel=None))
        yield _Changed("tensor_parallel", "leave the size of tp to the search", free)
    measured = {trace.conditions.param_dtype for trace in profile.traces}
    if workload.param_dtype in (None, "fp32", "fp64") and "bf16" in measured:
        halved = replace(workload, param_dtype="bf16", reduce_dtype="fp32")
        free = replace(question, workload=halved)
        yield _Changed("param_dtype", "compute in bf16, reduce in fp32", free)


def _opened(units: tuple[FixedUnit, ...], option: UnitOption) -> tuple[FixedUnit, ...]:
    """The units with an option left open; none if it is already."""
    if all(option in unit.free for unit in units):
        return ()
    return tuple(replace(unit, free=tuple({*unit.free, option})) for unit in units)


def _smaller_batches(question: LayoutQuestion) -> Iterator[_Changed]:
    """Half, a quarter, and so on: what is summed over micro-batches stays whole till the last."""
    batch = question.workload.global_batch
    for _ in range(_HALVES):
        batch, rest = divmod(batch, 2)
        if rest:
            return
        changed = replace(question, workload=replace(question.workload, global_batch=batch))
        yield _Changed("global_batch", f"a global batch of {batch}", changed)


def _more_ranks(question: LayoutQuestion) -> Iterator[_Changed]:
    """Half as many again, twice as many, and so on; a batch that is too small for them grows."""
    seats, mesh = question.seats, question.fixed.mesh
    tried: list[int] = []
    for halves in (part << power for power in range(MOST_TIMES.bit_length()) for part in (3, 4)):
        ranks, rest = divmod(seats.ranks * halves, 2)
        shards, uneven = (0, 0) if mesh is None else divmod(mesh.dp_shard * halves, 2)
        whole_nodes = ranks < seats.ranks_per_node or ranks % seats.ranks_per_node == 0
        if rest or uneven or ranks > seats.ranks * MOST_TIMES or not whole_nodes:
            continue
        wider = None if mesh is None else replace(mesh, dp_shard=shards)
        workload = _enlarged(question.workload, ranks if wider is None else wider.data_ranks)
        words = f"{ranks} ranks"
        if tried:
            words += f" ({', '.join(map(str, tried))} do not suffice)"
        tried.append(ranks)
        if workload != question.workload:
            words += f", with a global batch of {workload.global_batch}"
        yield _Changed(
            "ranks",
            words,
            replace(
                question,
                seats=replace(seats, ranks=ranks),
                workload=workload,
                fixed=replace(question.fixed, mesh=wider),
            ),
        )


def _enlarged(workload: Workload, data_ranks: int) -> Workload:
    """With the next batch that divides by the data-parallel ranks."""
    step = data_ranks * (workload.micro_batch or 1)
    return replace(workload, global_batch=-(-workload.global_batch // step) * step)


def _needs(candidate: Candidate, question: LayoutQuestion) -> str:
    plan, mesh = candidate.plan, candidate.plan.mesh
    ways = [f"mesh {mesh.dp_replicate} x {mesh.dp_shard} x {mesh.tp}"]
    ways.append(f"micro-batch {candidate.micro_batch}")
    if any(unit.recompute for unit in plan.units):
        ways.append("recomputed")
    if any(unit.offload for unit in plan.units):
        ways.append("offloaded")
    total = candidate.estimate.peak.memory.total
    return f"needs {gib(total)} of {gib(question.seats.memory)} ({', '.join(ways)})"
