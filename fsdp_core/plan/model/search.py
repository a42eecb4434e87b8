"""Finds the fastest layout that fits, and says what speaks against the others."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from fsdp_core.errors import PlanError
from fsdp_core.plan.model.advice import advise
from fsdp_core.plan.model.answer import Advice, Alternative, LayoutAnswer
from fsdp_core.plan.model.best_first import Found, Hunt
from fsdp_core.plan.model.profile import ModelProfile
from fsdp_core.plan.model.question import LayoutQuestion
from fsdp_core.plan.model.reasons import does_not_fit, why_lost
from fsdp_core.plan.model.space import Layout, LayoutSpace

_MESHES = 6
_TRIES = 3
_DEEPER = 2


def search_layout(profile: ModelProfile, question: LayoutQuestion) -> LayoutAnswer:
    """The layout that a job should train with.

    Every candidate's estimate is what `estimate` says of its plan. Layouts that no estimate was
    made for are ruled out by bounds (`fsdp_core.plan.model.floors`). Offloading is tried only
    where nothing else fits, since estimates do not know what it costs in time.

    Args:
        profile: Of the model, with the traces that `conditions_for` names.
        question: What is settled, what is open, and where it will run.

    Raises:
        PlanError: What the user settled does not suit the model, or traces are missing.
    """
    space = LayoutSpace(profile, question)
    hunt = Hunt(space)
    layouts = list(space.layouts())
    if not layouts:
        return _no_candidate(space)
    best = hunt.best(layouts)
    if best is None and space.offloads:
        layouts += (offloaded := list(space.layouts(offload=True)))
        best = hunt.best(offloaded)
    feasible = best is not None
    best = best or hunt.least(layouts)
    if best is None:
        raise PlanError(next(iter(hunt.refused.values())))
    rivals = [found for layout in _rivals(hunt, layouts, best) if (found := hunt.look(layout))]
    best, others = _sorted_out(best, [*rivals, *hunt.found.values()], feasible=feasible)
    seats = question.seats
    return LayoutAnswer(
        feasible=feasible,
        best=best.candidate,
        alternatives=tuple(
            Alternative(each.candidate, why_lost(each, best, seats)) for each in others
        ),
        advice=() if feasible else advise(profile, question),
        reasons=() if feasible else (does_not_fit(best.candidate, seats),),
        ranked_by="recomputation and bytes" if seats.node is None else "seconds",
        considered=len(layouts),
        estimated=len(hunt.found),
        exhaustive=hunt.exhaustive,
    )


def _sorted_out(
    best: Found, others: Iterable[Found], *, feasible: bool
) -> tuple[Found, list[Found]]:
    """The best of all that was estimated, and the others by predicted time."""
    known = {each.layout: each for each in (best, *others)}
    if feasible:
        fitting = [each for each in known.values() if each.candidate.fits]
        best = min(fitting, key=lambda each: (each.layout.offload, each.key))
    del known[best.layout]
    return best, sorted(known.values(), key=lambda each: each.key)


def _rivals(hunt: Hunt, layouts: list[Layout], best: Found) -> Iterator[Layout]:
    """Layouts that a reader would ask about: faster ones, other meshes, one choice flipped."""
    allowed = hunt.allowed(layouts)
    allowed.sort(key=lambda each: (hunt.floor(each).score, each.complexity))
    if best.candidate.fits:
        yield from [each for each in allowed if hunt.floor(each).score < best.score][:_TRIES]
    yield from _other_meshes(hunt, allowed, best.layout)
    mine = best.layout
    if mine.units != "one" and not mine.offload:
        yield replace(mine, prefetch=_DEEPER)
    for name in ("units", "reshard", "recompute", "micro_batch"):
        same = [
            each
            for each in allowed
            if getattr(each, name) != getattr(mine, name)
            and replace(each, **{name: getattr(mine, name)}) == mine
        ]
        yield from same[:_TRIES]


def _other_meshes(hunt: Hunt, allowed: list[Layout], mine: Layout) -> Iterator[Layout]:
    """The fastest layout of each mesh that seems to fit; of those without any, the fastest."""
    memory = hunt.memory
    chosen: dict[object, Layout] = {}
    for layout in allowed:
        if layout.mesh == mine.mesh or layout.offload != mine.offload:
            continue
        known = chosen.get(layout.mesh)
        if known is None or (
            hunt.floor(known).memory > memory and hunt.floor(layout).memory <= memory
        ):
            chosen[layout.mesh] = layout
    by_time = sorted(chosen.values(), key=lambda each: (hunt.floor(each).score, each.complexity))
    yield from by_time[:_MESHES]


def _no_candidate(space: LayoutSpace) -> LayoutAnswer:
    """Ranks or batch do not divide; a missing trace is an error of the caller."""
    question, workload = space.question, space.question.workload
    ranks = question.seats.ranks
    mesh = question.fixed.mesh
    if space.meshes:
        raise PlanError(
            "The profile lacks steps under the conditions that this search needs; profile the "
            "model under those that conditions_for names."
        )
    data_ranks = ranks if mesh is None else mesh.data_ranks
    if mesh is not None and mesh.ranks != ranks:
        text = f"the mesh has {mesh.ranks} ranks, and there are {ranks}"
        advice = Advice("mesh", f"give axes whose product is {ranks}, or leave the mesh open")
    else:
        micro = workload.micro_batch or 1
        step = data_ranks * micro
        text = (
            f"a global batch of {workload.global_batch} does not divide by {step}: "
            f"{data_ranks} data-parallel ranks, {micro} at a time"
        )
        nearest = max(1, round(workload.global_batch / step)) * step
        advice = Advice("global_batch", f"the nearest global batch that divides is {nearest}")
    return LayoutAnswer(
        feasible=False,
        best=None,
        alternatives=(),
        advice=(advice,),
        reasons=(text,),
        ranked_by="recomputation and bytes" if question.seats.node is None else "seconds",
        considered=0,
        estimated=0,
        exhaustive=True,
    )
