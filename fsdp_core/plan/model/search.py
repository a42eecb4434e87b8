"""Finds the fastest layout that fits, and says what speaks against the others."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import islice

from fsdp_core.errors import PlanError
from fsdp_core.plan.model.advice import advise
from fsdp_core.plan.model.answer import Advice, Alternative, LayoutAnswer, RankedBy
from fsdp_core.plan.model.best_first import Found, Hunt
from fsdp_core.plan.model.floors import Divided
from fsdp_core.plan.model.profile import ModelProfile
from fsdp_core.plan.model.question import LayoutQuestion, tp_sizes
from fsdp_core.plan.model.reasons import does_not_fit, why_lost
from fsdp_core.plan.model.space import Layout, LayoutSpace

# How many alternatives of each kind are shown.
_MESHES = 6
_FLIPPED = 3
_DEEPER = 2
# What another layout's seconds must be below, as a part of the default's: what a node measures of its
# collectives within seconds varies by as much, and a layout that is not the default must not be slower.
_CLEARLY_FASTER = 0.9


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
    divided: Divided = {}
    hunt = Hunt(space, divided)
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
    looked = islice(_rivals(space, hunt, layouts, best), hunt.at_most)
    rivals = [found for layout in looked if (found := hunt.look(layout))]
    best, others = _sorted_out(best, [*rivals, *hunt.found.values()], feasible=feasible)
    usual = _default(space, hunt, layouts) if feasible else None
    if usual is not None:
        kept = _closest(best, usual, hunt.found.values())
        others = sorted((each for each in (best, *others) if each != kept), key=lambda e: e.key)
        best = kept
    seats = question.seats
    return LayoutAnswer(
        feasible=feasible,
        best=best.candidate,
        alternatives=tuple(
            Alternative(each.candidate, why_lost(each, best, seats)) for each in others
        ),
        advice=() if feasible else advise(profile, question, divided),
        reasons=() if feasible else (does_not_fit(best.candidate, seats),),
        ranked_by=_ranked_by(question),
        considered=len(layouts),
        estimated=len(hunt.found),
        exhaustive=hunt.exhaustive and space.is_whole,
        by_default=usual is not None and best == usual,
    )


def _default(space: LayoutSpace, hunt: Hunt, layouts: list[Layout]) -> Found | None:
    """The layout that needs no search, if it is among those searched and fits."""
    if space.question.default is None:
        return None
    plan, micro_batch = space.question.default
    found = next(
        (
            hunt.look(each)
            for each in layouts
            if (each.mesh, each.micro_batch) == (plan.mesh, micro_batch)
            and space.plan(each) == plan
        ),
        None,
    )
    return found if found is not None and found.candidate.fits else None


def _closest(best: Found, usual: Found, known: Iterable[Found]) -> Found:
    """The default, unless another layout is clearly faster; its micro-batch, unless the best is."""
    alike = (each for each in known if each.candidate.fits and not each.layout.offload)
    alike = (each for each in alike if each.layout.micro_batch == usual.layout.micro_batch)
    other = min(alike, key=lambda each: each.key, default=usual)
    kept = other if _is_below(other, usual) else usual
    return best if _is_below(best, kept) else kept


def _is_below(one: Found, other: Found) -> bool:
    """By seconds; where these are not known, bytes say too little of what a pass costs."""
    mine, its = one.candidate.estimate.time, other.candidate.estimate.time
    return mine is not None and its is not None and mine.total < _CLEARLY_FASTER * its.total


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


def _rivals(space: LayoutSpace, hunt: Hunt, layouts: list[Layout], best: Found) -> Iterator[Layout]:
    """Layouts that a reader would ask about: faster ones, other meshes, one choice flipped."""
    mine = best.layout
    allowed = [each for each in hunt.allowed(layouts) if each.offload == mine.offload]
    allowed.sort(key=lambda each: (hunt.best_score(each), each.complexity))
    if best.candidate.fits:
        faster = [each for each in allowed if hunt.best_score(each) < best.score]
        # The fastest of all, and the one that comes closest to fitting.
        yield from faster[:1]
        yield from sorted(faster, key=hunt.least_memory)[:1]
    yield from _other_meshes(hunt, allowed, mine)
    if space.leaves_open("prefetch", mine.units):
        yield replace(mine, prefetch=_DEEPER)
    for name in ("units", "reshard", "recompute", "micro_batch"):
        same = [
            each
            for each in allowed
            if getattr(each, name) != getattr(mine, name)
            and replace(each, **{name: getattr(mine, name)}) == mine
        ]
        yield from same[:_FLIPPED]


def _other_meshes(hunt: Hunt, allowed: list[Layout], mine: Layout) -> Iterator[Layout]:
    """The fastest layout of each mesh that seems to fit; of one without any, the smallest."""
    chosen: dict[object, Layout] = {}
    for layout in allowed:
        known = chosen.get(layout.mesh)
        if layout.mesh != mine.mesh and (
            known is None
            or (
                hunt.memory < hunt.least_memory(known)
                and hunt.least_memory(layout) < hunt.least_memory(known)
            )
        ):
            chosen[layout.mesh] = layout
    by_time = sorted(chosen.values(), key=lambda each: (hunt.best_score(each), each.complexity))
    fitting = [each for each in by_time if hunt.least_memory(each) <= hunt.memory]
    yield from [*fitting, *(each for each in by_time if each not in fitting)][:_MESHES]


def _no_candidate(space: LayoutSpace) -> LayoutAnswer:
    """Ranks or batch do not divide; a missing trace is an error of the caller."""
    question, workload = space.question, space.question.workload
    seats, mesh = question.seats, question.fixed.mesh
    must_split = question.fixed.tensor_parallel and tp_sizes(question) == (1,)
    if space.meshes or (mesh is None and not space.tp_sizes and not must_split):
        raise PlanError(
            "The profile lacks steps under the conditions that this search needs; profile the "
            "model under those that conditions_for names."
        )
    if mesh is not None and mesh.ranks != seats.ranks:
        reason = f"the mesh has {mesh.ranks} ranks, and the job has {seats.ranks}"
        text = f"give axes whose product is {seats.ranks}, or leave the mesh open"
        advice = Advice("mesh", text)
    elif must_split and mesh is None:
        reason = (
            "modules are to be split over tp, and no number of ranks above 1 divides both all "
            f"{seats.ranks} and the {seats.ranks_per_node} of a node"
        )
        advice = Advice("tensor_parallel", "split nothing, or place more ranks on a node")
    else:
        micro = workload.micro_batch or 1
        least = min(space.tp_sizes, default=1)
        data_ranks = seats.ranks // least if mesh is None else mesh.data_ranks
        step = data_ranks * micro
        reason = (
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
        reasons=(reason,),
        ranked_by=_ranked_by(question),
        considered=0,
        estimated=0,
        exhaustive=True,
    )


def _ranked_by(question: LayoutQuestion) -> RankedBy:
    return "recomputation and bytes" if question.seats.node is None else "seconds"
