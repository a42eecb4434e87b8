"""What would make a model fit that does not: the same search with one thing changed at a time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from fsdp_core.errors import PlanError
from fsdp_core.plan.model.answer import Advice, Candidate, Change
from fsdp_core.plan.model.best_first import Hunt
from fsdp_core.plan.model.profile import ModelProfile
from fsdp_core.plan.model.question import Fixed, FixedUnit, LayoutQuestion, UnitOption
from fsdp_core.plan.model.reasons import gib
from fsdp_core.plan.model.space import LayoutSpace

MOST_TIMES = 64
"""Up to so many times as many ranks are tried."""


@dataclass(frozen=True)
class _Changed:
    change: Change
    words: str
    question: LayoutQuestion


def advise(profile: ModelProfile, question: LayoutQuestion) -> tuple[Advice, ...]:
    """Everything that by itself makes the model fit; else all that could be let go, together."""
    found = _tried(profile, _changes(profile, question))
    if not found:
        workload = replace(question.workload, micro_batch=None)
        loose = replace(question, workload=workload, fixed=Fixed())
        if loose != question:
            words = "leave mesh, units and micro-batch to the search"
            found = _tried(profile, [_Changed("mesh", words, loose)])
    more = (_tried(profile, [each]) for each in _more_ranks(question))
    return (*found, *next((each for each in more if each), ()))


def _tried(profile: ModelProfile, changes: Iterator[_Changed] | list[_Changed]) -> list[Advice]:
    return [
        Advice(each.change, f"{each.words}: {_needs(fitting, each.question)}", fitting)
        for each in changes
        if (fitting := _fitting(profile, each.question)) is not None
    ]


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


def _more_ranks(question: LayoutQuestion) -> Iterator[_Changed]:
    """Twice as many, four times, and so on; a batch that is too small for them grows."""
    times = 2
    while times <= MOST_TIMES:
        seats, workload, fixed = question.seats, question.workload, question.fixed
        ranks = seats.ranks * times
        mesh = fixed.mesh
        data_ranks = ranks if mesh is None else mesh.data_ranks * times
        words = f"{ranks} ranks, the fewest of {seats.ranks} doubled again and again"
        if workload.global_batch % data_ranks:
            batch = -(-workload.global_batch // data_ranks) * data_ranks
            workload = replace(workload, global_batch=batch)
            words += f", with a global batch of {batch}"
        changed = replace(
            question,
            seats=replace(seats, ranks=ranks),
            workload=workload,
            fixed=replace(
                fixed, mesh=None if mesh is None else replace(mesh, dp_shard=mesh.dp_shard * times)
            ),
        )
        yield _Changed("ranks", words, changed)
        times *= 2


def _fitting(profile: ModelProfile, question: LayoutQuestion) -> Candidate | None:
    space = LayoutSpace(profile, question)
    hunt = Hunt(space)
    try:
        found = hunt.best(space.layouts())
        if found is None and space.offloads:
            found = hunt.best(space.layouts(offload=True))
    except PlanError:
        return None
    return None if found is None else found.candidate


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
