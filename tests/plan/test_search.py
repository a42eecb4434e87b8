"""A search against all layouts estimated one by one, and what must hold of every answer."""

from __future__ import annotations

from dataclasses import replace
from functools import cache, partial
from itertools import product

from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.llama import Llama, Shape, next_token_loss
from benchmarks.scale_on_paper import SPLIT
from fsdp_core.plan.model import (
    ADAMW_FUSED,
    Candidate,
    Conditions,
    Fixed,
    FixedUnit,
    LayoutQuestion,
    ModelProfile,
    NodeFacts,
    Seats,
    UnitPlan,
    Workload,
    estimate,
    search_layout,
)
from fsdp_core.plan.model.floors import Floors
from fsdp_core.plan.model.score import Spent, score
from fsdp_core.plan.model.space import Layout, LayoutSpace
from fsdp_core.plan.profiling import ModelUnderStudy, profile_model

SHAPE = Shape(dim=64, layers=3, heads=4, kv_heads=2, hidden=160, vocab=700)
STUDY = ModelUnderStudy(
    partial(Llama, SHAPE), partial(next_token_loss, length=32), tensor_parallel=SPLIT
)
MIB = 1 << 20


@cache
def profile_of(param_dtypes: tuple[str | None, ...] = (None, "bf16")) -> ModelProfile:
    return profile_model(
        STUDY,
        tuple(
            Conditions(dtype, recompute=again, tp=tp)  # type: ignore[arg-type]  # two words
            for dtype in param_dtypes
            for tp in (1, 2)
            for again in (False, True)
        ),
    )


def node_of(flops: float, link: float, network: float, latency: float) -> NodeFacts:
    return NodeFacts({"fp32": flops, "bf16": 4 * flops}, 1e10, link, network, latency, ranks=4)


NODE = node_of(1e10, 1e9, 1e8, 1e-5)

questions = st.builds(
    LayoutQuestion,
    st.builds(
        Seats,
        st.sampled_from([1, 2, 4, 8, 12, 16]),
        st.sampled_from([1, 2, 4]),
        st.integers(min_value=MIB // 2, max_value=24 * MIB),
        st.none()
        | st.builds(
            node_of,
            st.sampled_from([1e9, 1e11]),
            st.sampled_from([1e8, 1e10]),
            st.sampled_from([1e7, 1e9]),
            st.sampled_from([0.0, 1e-4]),
        ),
    ),
    st.builds(
        Workload,
        st.sampled_from([16, 48, 96]),
        st.just(ADAMW_FUSED),
        st.sampled_from([None, None, 1, 2]),
        st.sampled_from([None, "bf16"]),
        st.sampled_from([None, "fp32"]),
    ),
    st.sampled_from(
        [
            Fixed(),
            Fixed(),
            Fixed(tensor_parallel=()),
            Fixed(tensor_parallel=SPLIT),
            Fixed(units=(FixedUnit(UnitPlan(("blocks.*",)), ("recompute", "offload")),)),
            Fixed(
                units=(
                    FixedUnit(UnitPlan(("norm", "head"), reshard_after_forward=False)),
                    FixedUnit(
                        UnitPlan(("blocks.*",), prefetch=2), ("reshard_after_forward", "recompute")
                    ),
                )
            ),
        ]
    ),
    st.sampled_from([SPLIT, ()]),
)


def everything(space: LayoutSpace) -> list[Layout]:
    """Also what the search leaves out because it cannot win."""
    return [
        replace(layout, prefetch=prefetch)
        for layout, prefetch in product(space.layouts(), (None, 1, 2))
        if prefetch is None or layout.units != "one"
    ]


def estimated(space: LayoutSpace, layout: Layout) -> Candidate:
    plan, training = space.plan(layout), space.training(layout)
    seats = space.question.seats
    cost = estimate(space.profile, plan, training, seats.node)
    fits = cost.peak.memory.total <= seats.memory
    return Candidate(plan, training.micro_batch, training.accumulation, cost, fits)


def rank(candidate: Candidate, seats: Seats) -> tuple[object, ...]:
    cost = candidate.estimate
    spent = Spent(cost.flops, cost.sent, cost.time, cost.sent_in_groups)
    return score(spent, candidate.plan.mesh, seats), cost.peak.memory.total


@settings(max_examples=60, deadline=None)
@given(questions)
def test_the_best_is_what_estimating_every_layout_finds(question: LayoutQuestion) -> None:
    space = LayoutSpace(profile_of(), question)
    candidates = [estimated(space, layout) for layout in everything(space)]
    if not candidates:
        return
    found = search_layout(profile_of(), question)
    fitting = [rank(each, question.seats) for each in candidates if each.fits]
    assert found.exhaustive
    assert found.feasible == bool(fitting)
    assert found.best is not None
    if fitting:
        assert rank(found.best, question.seats) == min(fitting)
    else:
        least = min(each.estimate.peak.memory.total for each in candidates)
        assert found.best.estimate.peak.memory.total == least


@settings(max_examples=60, deadline=None)
@given(questions)
def test_bounds_are_below_estimates(question: LayoutQuestion) -> None:
    space = LayoutSpace(profile_of(), question)
    floors = Floors(space)
    for layout in space.layouts():
        floor, candidate = floors.of(layout), estimated(space, layout)
        time, memory = rank(candidate, question.seats)
        assert floor.score <= time  # type: ignore[operator]  # both are scores
        assert floor.memory <= memory  # type: ignore[operator]  # both are bytes
