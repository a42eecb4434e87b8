"""A search against all layouts estimated one by one, and what must hold of every answer."""

from __future__ import annotations

from dataclasses import asdict, replace
from functools import cache, partial
from typing import Literal, get_args

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter

from benchmarks.llama import Llama, Shape, next_token_loss
from benchmarks.scale_on_paper import SPLIT
from fsdp_core.errors import PlanError
from fsdp_core.plan.model import (
    ADAMW_FUSED,
    Candidate,
    Conditions,
    Fixed,
    FixedUnit,
    Growth,
    Highest,
    LayoutAnswer,
    LayoutQuestion,
    MeshPlan,
    ModelProfile,
    NodeFacts,
    ParameterFacts,
    PassTimes,
    Seats,
    Segment,
    ShardingPlan,
    SharedMemory,
    StepTime,
    Trace,
    Training,
    UnitPlan,
    Workload,
    conditions_for,
    estimate,
    fixed_by,
    search_layout,
)
from fsdp_core.plan.model.best_first import Hunt
from fsdp_core.plan.model.floors import Floors
from fsdp_core.plan.model.score import Score, Spent, score
from fsdp_core.plan.model.space import LayoutSpace
from fsdp_core.plan.model.step_time import Exchange
from fsdp_core.plan.model.traffic import Kind
from fsdp_core.plan.profiling import profile_model
from fsdp_core.plan.study import ModelUnderStudy

STUDY = ModelUnderStudy(
    partial(Llama, Shape(dim=32, layers=2, heads=4, kv_heads=2, hidden=80, vocab=300)),
    partial(next_token_loss, length=16),
    tensor_parallel=SPLIT,
)
KIB, MIB = 1 << 10, 1 << 20


DTYPES: tuple[None, Literal["bf16"]] = (None, "bf16")


@cache
def known() -> ModelProfile:
    ways = [(dtype, tp, again) for dtype in DTYPES for tp in (1, 2) for again in (False, True)]
    return profile_model(
        STUDY,
        [
            Conditions(dtype, recompute=again, tp=tp)
            for dtype, tp, again in ways
            if not dtype or tp == 1
        ],
        sizes=(1, 2),
    )


@pytest.fixture
def profile() -> ModelProfile:
    return known()


def node_of(
    flops: float, link: float, network: float, latency: float, memory: float | None = None
) -> NodeFacts:
    known = NodeFacts({"fp32": flops, "bf16": 4 * flops}, 1e10, link, network, latency, ranks=4)
    if memory is None:
        return known
    kinds: dict[Kind, Exchange] = {
        "all_gather": Exchange(latency / 2, memory),
        "reduce_scatter": Exchange(latency, memory / 3),
    }
    return replace(known, shared_exchanges={"copy": kinds, "storage": kinds})


SLOW = node_of(1e10, 1e9, 1e8, 1e-5)
SETTLED = (
    FixedUnit(UnitPlan(("norm", "head"), reshard_after_forward=False)),
    FixedUnit(UnitPlan(("blocks.*",), prefetch=2), ("reshard_after_forward", "recompute")),
)


def asked(  # noqa: PLR0913 - what most questions differ in
    ranks: int,
    memory: int,
    *,
    per_node: int = 4,
    batch: int = 16,
    micro_batch: int | None = None,
    node: NodeFacts | None = SLOW,
    fixed: Fixed | None = None,
) -> LayoutQuestion:
    return LayoutQuestion(
        Seats(ranks, per_node, memory, node),
        Workload(batch, ADAMW_FUSED, micro_batch),
        fixed or Fixed(),
        SPLIT,
    )


questions = st.builds(
    LayoutQuestion,
    st.builds(
        Seats,
        st.sampled_from([1, 2, 4, 6, 8]),
        st.sampled_from([1, 2, 4]),
        st.integers(min_value=100 * KIB, max_value=3 * MIB),
        st.none()
        | st.builds(
            node_of,
            st.sampled_from([1e8, 1e10]),
            st.sampled_from([1e8, 1e10]),
            st.sampled_from([1e7, 1e9]),
            st.sampled_from([0.0, 1e-4]),
            st.sampled_from([None, 1e8, 1e11]),
        ),
    ),
    st.builds(
        Workload,
        st.sampled_from([8, 24]),
        st.just(ADAMW_FUSED),
        st.sampled_from([None, None, 1]),
        st.sampled_from(DTYPES),
        st.sampled_from([None, "fp32"]),
        shared_memory=st.sampled_from(get_args(SharedMemory)),
    ),
    st.sampled_from(
        [
            Fixed(),
            Fixed(),
            Fixed(),
            Fixed(tensor_parallel=()),
            Fixed(tensor_parallel=SPLIT),
            Fixed(units=SETTLED),
            Fixed(units=(FixedUnit(UnitPlan(("blocks.*",)), ("recompute", "offload")),)),
        ]
    ),
    st.sampled_from([SPLIT, ()]),
).filter(
    lambda question: not question.fixed.tensor_parallel or question.workload.param_dtype is None
)


def rank(candidate: Candidate, seats: Seats) -> tuple[Score, int]:
    cost = candidate.estimate
    spent = Spent(cost.flops, cost.sent, cost.time, cost.sent_in_groups)
    return score(spent, candidate.plan.mesh, seats), cost.peak.memory.total


def everything(profile: ModelProfile, question: LayoutQuestion) -> list[Candidate]:
    """Each layout's estimate, which its bounds must be below."""
    space = LayoutSpace(profile, question)
    floors, found = Floors(space), []
    for layout in space.layouts():
        plan, training = space.plan(layout), space.training(layout)
        cost = estimate(profile, plan, training, question.seats.node)
        fits = cost.peak.memory.total <= question.seats.memory
        one = Candidate(plan, training.micro_batch, training.accumulation, cost, fits)
        found.append(one)
        assert (floors.score(layout), floors.memory(layout)) <= rank(one, question.seats)
        assert floors.memory(layout) <= cost.peak.memory.total
    return found


@settings(max_examples=12, derandomize=True, phases=[Phase.generate])
@given(question=questions)
def test_the_best_is_what_estimating_every_layout_finds(question: LayoutQuestion) -> None:
    profile = known()
    candidates = everything(profile, question)
    answer = search_layout(profile, question)
    assert answer.considered == len(candidates)
    if not candidates:
        assert answer.best is None
        return
    seats = question.seats
    assert answer.exhaustive
    assert answer.best is not None
    fitting = [rank(each, seats) for each in candidates if each.fits]
    assert answer.feasible == answer.best.fits == bool(fitting)
    if fitting:
        assert rank(answer.best, seats) == min(fitting)
    else:
        assert answer.reasons
        least = min(rank(each, seats)[1] for each in candidates)
        assert rank(answer.best, seats)[1] == least
    _holds_for_all(profile, question, answer)


def _holds_for_all(profile: ModelProfile, question: LayoutQuestion, answer: LayoutAnswer) -> None:
    seats, workload = question.seats, question.workload
    assert answer.best is not None
    shown = [answer.best, *(each.candidate for each in answer.alternatives)]
    for each in shown:
        mesh = each.plan.mesh
        assert mesh.ranks == seats.ranks
        assert mesh.tp <= seats.ranks_per_node
        share = each.micro_batch * each.accumulation
        assert share * mesh.data_ranks == workload.global_batch
        assert workload.micro_batch in (None, each.micro_batch)
        training = Training(each.micro_batch, each.accumulation, workload.optimizer)
        assert each.estimate == estimate(profile, each.plan, training, seats.node)
        assert each.fits == (each.estimate.peak.memory.total <= seats.memory)
        if question.fixed.tensor_parallel is not None:
            assert each.plan.tensor_parallel == question.fixed.tensor_parallel
        for unit, settled in zip(each.plan.units, question.fixed.units or (), strict=False):
            left_open = {name: getattr(settled.plan, name) for name in settled.free}
            assert replace(unit, **left_open) == settled.plan
    for one in answer.alternatives:
        assert one.why
        assert one.candidate.plan != answer.best.plan or (
            one.candidate.micro_batch != answer.best.micro_batch
        )
    order = [rank(each.candidate, seats) for each in answer.alternatives]
    assert order == sorted(order)
    assert not (answer.feasible and answer.advice)


@settings(max_examples=12, derandomize=True, phases=[Phase.generate])
@given(question=questions, more=st.integers(min_value=0, max_value=2 * MIB))
def test_more_memory_never_makes_it_slower(question: LayoutQuestion, more: int) -> None:
    profile = known()
    roomier = replace(question, seats=replace(question.seats, memory=question.seats.memory + more))
    before, after = (search_layout(profile, each) for each in (question, roomier))
    if before.feasible:
        assert before.best is not None
        assert after.best is not None
        assert after.feasible
        assert rank(after.best, question.seats)[0] <= rank(before.best, question.seats)[0]


def test_prefetching_deeper_costs_memory_and_no_estimate_sees_a_gain(
    profile: ModelProfile,
) -> None:
    question = asked(4, 3 * MIB)
    space = LayoutSpace(profile, question)
    for layout in space.layouts():
        if layout.units == "one":
            continue
        usual, *deeper = (
            estimate(
                profile,
                space.plan(replace(layout, prefetch=depth)),
                space.training(layout),
                question.seats.node,
            )
            for depth in (None, 1, 2)
        )
        for each in deeper:
            assert each.time == usual.time
            assert each.peak.memory.total >= usual.peak.memory.total


def test_the_same_question_has_the_same_answer_also_over_a_wire(profile: ModelProfile) -> None:
    answer = search_layout(profile, asked(8, MIB))
    assert search_layout(profile, asked(8, MIB)) == answer
    wire = TypeAdapter(LayoutAnswer)
    assert wire.validate_json(wire.dump_json(answer)) == answer
    assert asdict(answer)["feasible"]


def test_the_probe_measures_what_the_search_needs_and_no_more() -> None:
    free = asked(8, MIB, per_node=2)
    assert conditions_for(free) == (
        Conditions(),
        Conditions(recompute=True),
        Conditions(tp=2),
        Conditions(recompute=True, tp=2),
    )
    traces = tuple(map(known().trace, conditions_for(free)))
    assert search_layout(replace(known(), traces=traces), free).exhaustive
    whole = Fixed(mesh=MeshPlan(dp_shard=8), units=(FixedUnit(UnitPlan(("blocks.*",))),))
    assert conditions_for(asked(8, MIB, fixed=whole)) == (Conditions(),)
    assert {each.tp for each in conditions_for(asked(6, MIB, per_node=4))} == {1, 2}
    assert {each.tp for each in conditions_for(replace(free, splits=()))} == {1}
    mixed = (FixedUnit(UnitPlan(("blocks.*",), param_dtype="bf16"), ("recompute",)),)
    assert conditions_for(asked(1, MIB, fixed=Fixed(units=mixed))) == (
        Conditions(),
        Conditions("bf16"),
        Conditions("bf16", recompute=True),
    )


def test_a_profile_without_the_traces_is_refused(profile: ModelProfile) -> None:
    with pytest.raises(PlanError, match="conditions_for"):
        search_layout(replace(profile, traces=()), asked(4, MIB))
    with pytest.raises(PlanError, match="conditions_for"):
        search_layout(replace(profile, traces=()), replace(asked(4, MIB), splits=()))
    alone = replace(profile, traces=profile.traces[:1])
    assert search_layout(alone, asked(4, MIB)).feasible


def test_what_a_document_says_is_settled_and_the_rest_open() -> None:
    plan = ShardingPlan(MeshPlan(dp_shard=4), (UnitPlan(("blocks.*",), recompute=False),))
    said: dict[str, object] = {
        "units": [{"modules": ["blocks.*"], "recompute": False, "prefetch": None}]
    }
    assert fixed_by(plan, said) == Fixed(
        units=(FixedUnit(plan.units[0], ("reshard_after_forward", "prefetch", "offload")),)
    )
    assert fixed_by(plan, {"mesh": {}, "tensor_parallel": []}) == Fixed(
        mesh=plan.mesh, tensor_parallel=()
    )


# -- Why, and what then


def test_alternatives_say_what_they_lack(profile: ModelProfile) -> None:
    reasons = [each.why for each in search_layout(profile, asked(8, 500 * KIB)).alternatives]
    assert any(why.startswith("does not fit: needs ") for why in reasons)
    assert any(" x slower: " in why for why in reasons)
    assert any(why.startswith("equal time") for why in reasons)


def test_without_a_node_layouts_are_compared_by_bytes(profile: ModelProfile) -> None:
    answer = search_layout(profile, asked(8, 3 * MIB, node=None))
    assert answer.ranked_by == "recomputation and bytes"
    assert answer.best is not None
    assert answer.best.estimate.time is None
    reasons = [each.why for each in answer.alternatives]
    assert any("more operations: activations are computed again" in why for why in reasons)
    assert any("between nodes, not" in why for why in reasons)


def test_what_does_not_fit_is_told_what_would(profile: ModelProfile) -> None:
    settled = Fixed(MeshPlan(dp_replicate=8), (FixedUnit(UnitPlan(("blocks.*",))),))
    least = search_layout(profile, asked(8, KIB)).best
    assert least is not None
    tight = least.estimate.peak.memory.total
    everything_settled = asked(8, tight, micro_batch=2, fixed=settled)
    answer = search_layout(profile, everything_settled)
    assert not answer.feasible
    assert answer.reasons[0].startswith("does not fit: needs ")
    assert {each.change for each in answer.advice} <= {"mesh", "ranks"}
    roomier = asked(8, 2 * tight, micro_batch=2, fixed=settled)
    found = {each.change: each for each in search_layout(profile, roomier).advice}
    assert {"mesh", "ranks"} <= set(found)
    for each in found.values():
        assert each.candidate is not None
        assert each.candidate.fits
        assert each.candidate.estimate.peak.memory.total <= 2 * tight
        assert " of " in each.text


def test_each_single_change_that_would_do_is_found(profile: ModelProfile) -> None:
    def changes(question: LayoutQuestion) -> set[str]:
        answer = search_layout(profile, question)
        assert not answer.feasible
        return {each.change for each in answer.advice}

    mesh = MeshPlan(dp_shard=4)
    blocks = UnitPlan(("blocks.*",))

    def peak(unit: UnitPlan = blocks, dtype: Literal["bf16"] | None = None) -> int:
        plan = ShardingPlan(mesh, (unit,), dtype, "fp32" if dtype else None)
        cost = estimate(profile, plan, Training(8, 1, ADAMW_FUSED))
        return cost.peak.memory.total

    settled = Fixed(mesh, (FixedUnit(blocks),))
    assert "micro_batch" in changes(asked(4, peak() - 1, batch=32, micro_batch=8, fixed=settled))
    for change, enough in {
        "recompute": peak(replace(blocks, recompute=True)),
        "param_dtype": peak(dtype="bf16"),
    }.items():
        assert enough < peak()
        assert change in changes(asked(4, enough, batch=32, micro_batch=8, fixed=settled))


def test_a_smaller_batch_is_advised_where_sums_over_micro_batches_are_too_large(
    profile: ModelProfile,
) -> None:
    mesh = MeshPlan(dp_shard=4)
    fixed = Fixed(mesh, (FixedUnit(UnitPlan(("blocks.*",))),))
    once = search_layout(profile, asked(4, MIB, batch=4, micro_batch=1, fixed=fixed)).best
    assert once is not None
    enough = once.estimate.peak.memory.total
    answer = search_layout(profile, asked(4, enough, batch=32, micro_batch=1, fixed=fixed))
    assert not answer.feasible
    (smaller,) = (each for each in answer.advice if each.change == "global_batch")
    assert smaller.candidate is not None
    assert smaller.candidate.accumulation == 1
    assert smaller.text.startswith("a global batch of 4: needs ")


def test_many_ranks_take_few_estimates(profile: ModelProfile) -> None:
    answer = search_layout(profile, asked(4096, MIB, per_node=8, batch=16_384))
    assert answer.exhaustive
    assert answer.considered > 400
    assert answer.estimated < 40


@pytest.mark.parametrize("ranks", [1, 720])
def test_a_batch_that_a_thousand_sizes_divide_takes_no_longer_than_others(
    profile: ModelProfile, ranks: int
) -> None:
    """735 134 400 is the number below a billion with the most divisors."""
    usual = ShardingPlan(MeshPlan(dp_shard=ranks)), 221
    question = replace(asked(ranks, 100 * MIB, batch=735_134_400), default=usual)
    space = LayoutSpace(profile, question)
    layouts = list(space.layouts())
    assert len(layouts) < 10_000
    assert not space.is_whole
    for mesh in space.meshes:
        sizes = {each.micro_batch for each in layouts if each.mesh == mesh}
        every = space.micro_batches(mesh)
        assert {every[0], every[-1], 221} <= sizes < set(every)
    assert LayoutSpace(profile, asked(4, 100 * MIB, batch=4_096)).is_whole


def test_offloading_is_the_last_resort(profile: ModelProfile) -> None:
    # One rank: among more, gloo would hold something on a host that NCCL does not on a device.
    there = replace(profile, device_type="cuda")
    least = search_layout(profile, asked(1, KIB)).best
    assert least is not None
    most = least.estimate.peak.memory.total
    fits = search_layout(there, asked(1, most))
    assert fits.best is not None
    assert fits.best.estimate.host_bytes == 0
    tight = search_layout(there, asked(1, most - 1))
    assert tight.feasible
    assert tight.best is not None
    assert tight.best.estimate.host_bytes > 0
    assert not search_layout(profile, asked(1, most - 1)).feasible


def test_a_batch_or_mesh_that_does_not_divide_has_no_candidate(profile: ModelProfile) -> None:
    odd = search_layout(profile, asked(8, MIB, batch=12, fixed=Fixed(tensor_parallel=())))
    assert not odd.feasible
    assert odd.best is None
    assert odd.advice[0].change == "global_batch"
    split = asked(4, MIB, per_node=1, fixed=Fixed(tensor_parallel=SPLIT))
    assert search_layout(profile, split).advice[0].change == "tensor_parallel"
    wrong = search_layout(profile, asked(8, MIB, fixed=Fixed(mesh=MeshPlan(dp_shard=4))))
    assert wrong.advice[0].change == "mesh"
    units = (FixedUnit(UnitPlan(("nowhere.*",))),)
    with pytest.raises(PlanError, match="matches no module"):
        search_layout(profile, asked(4, MIB, fixed=Fixed(units=units)))


def test_where_ranks_come_and_go_layouts_are_tried_that_every_number_of_them_can_have(
    profile: ModelProfile,
) -> None:
    mesh = MeshPlan(dp_shard=8)
    fixed = asked(8, MIB, batch=48, fixed=Fixed(mesh=mesh))
    known = LayoutSpace(profile, fixed)
    assert known.micro_batches(mesh) == (6, 3, 2, 1)
    assert known.reshards(mesh, "blocks") == (True, False, 4)
    elastic = replace(fixed, workload=replace(fixed.workload, common_share=4), groups=False)
    known = LayoutSpace(profile, elastic)
    assert known.micro_batches(mesh) == (6, 2, 1)
    assert known.reshards(mesh, "blocks") == (True, False)


COSTLY_PASSES = replace(SLOW, dispatch_s=4e-6, unit_s=4e-4, parameter_s=5e-5, ranks=2)


def convnet() -> ModelProfile:
    """As a convnet on images of 8 x 8 was found: a pass of 16 takes little more than one of 1."""
    parameters = tuple(
        ParameterFacts(f"{n}.weight", (32, 32), "float32", 4, is_floating=True, requires_grad=True)
        for n in range(4)
    )
    nothing = Growth(0, 0)
    segments = (
        Segment("start", "", Highest((Growth(0, 256),)), nothing),
        Segment("forward", "", Highest((Growth(0, 9000),)), Growth(0, 9000)),
        Segment("forward_end", "", Highest((nothing,)), nothing),
        Segment("backward", "", Highest((nothing,)), Growth(0, -9000), tuple(range(4))),
        Segment("backward_end", "", Highest((nothing,)), nothing),
    )
    return ModelProfile(
        device_type="cpu",
        modules=("", *(str(n) for n in range(4))),
        stops=("",),
        parameters=parameters,
        buffers=(),
        units=(),
        flops=Growth(0, 500_000),
        traces=(Trace(Conditions(), segments, nothing, Growth(60, 0)),),
    )


@pytest.mark.parametrize("is_timed", [True, False])
def test_a_small_convnet_runs_its_share_in_one_pass(*, is_timed: bool) -> None:
    times = PassTimes(((1, 2.7e-4, 2.7e-4), (4, 3.5e-4, 3.3e-4), (16, 6e-4, 5.2e-4)), 1.7e11)
    profile = replace(convnet(), timed=times if is_timed else None)
    question = asked(2, MIB, per_node=2, batch=32, node=COSTLY_PASSES)
    answer = search_layout(profile, question)
    assert answer.best is not None
    assert (answer.best.micro_batch, answer.best.accumulation) == (16, 1)
    slower = {
        each.candidate.micro_batch: each.why
        for each in answer.alternatives
        if each.candidate.plan == answer.best.plan
    }
    assert "passes a step, not 1" in slower[8]


def test_the_default_is_left_only_for_what_is_clearly_faster(profile: ModelProfile) -> None:
    free = asked(4, 3 * MIB)
    best = search_layout(profile, free).best
    assert best is not None
    space = LayoutSpace(profile, free)
    every = {
        (space.plan(each), each.micro_batch): estimate(
            profile, space.plan(each), space.training(each), SLOW
        ).time
        for each in space.layouts()
    }
    by_time = sorted(every.items(), key=lambda each: each[1].total if each[1] else 0.0)
    for default, time in by_time[:: max(len(by_time) // 8, 1)]:  # from the fastest to the slowest
        answer = search_layout(profile, replace(free, default=default))
        assert answer.best is not None
        assert time is not None
        assert best.estimate.time is not None
        chosen = every[answer.best.plan, answer.best.micro_batch]
        assert chosen is not None
        least = best.estimate.time.total
        if answer.by_default:
            assert (answer.best.plan, answer.best.micro_batch) == default
            assert least >= 0.9 * time.total
        elif answer.best.micro_batch == default[1]:
            assert chosen.total < 0.9 * time.total
            assert least >= 0.9 * chosen.total
        else:
            assert chosen.total == least < 0.9 * time.total
        for other in answer.alternatives:
            seconds = other.candidate.estimate.time
            if other.candidate.fits and seconds is not None:
                said = other.why == "not clearly faster"
                assert said == (score_of(seconds) < score_of(chosen))


def score_of(time: StepTime) -> float:
    return float(f"{time.total:.4g}")


def test_a_default_that_does_not_fit_is_not_kept(profile: ModelProfile) -> None:
    space = LayoutSpace(profile, asked(4, 3 * MIB))
    layouts = [(space.plan(each), each.micro_batch) for each in space.layouts()]
    sizes = {
        key: estimate(profile, key[0], Training(key[1], 4 // key[1] or 1, ADAMW_FUSED)).peak
        for key in layouts
    }
    largest = max(sizes, key=lambda key: sizes[key].memory.total)
    tight = asked(4, sizes[largest].memory.total - 1)
    answer = search_layout(profile, replace(tight, default=largest))
    assert answer.feasible
    assert not answer.by_default


def test_without_seconds_the_default_is_taken_if_it_fits(profile: ModelProfile) -> None:
    default = (ShardingPlan(MeshPlan(dp_shard=4)), 4)
    answer = search_layout(profile, replace(asked(4, 3 * MIB, node=None), default=default))
    assert answer.best is not None
    assert (answer.best.plan, answer.best.micro_batch) == default


def test_of_a_model_of_tens_of_thousands_of_parameters_fewer_layouts_are_followed(
    profile: ModelProfile,
) -> None:
    question = asked(8, 100 * MIB, batch=720_720)
    norm = next(each for each in profile.parameters if each.name == "norm.weight")
    more = tuple(replace(norm, name=f"norm.w{number}") for number in range(50_000))
    heavy = LayoutSpace(replace(profile, parameters=(*profile.parameters, *more)), question)
    light = LayoutSpace(profile, question)
    assert light.weight + 50_000 == heavy.weight
    assert len(list(heavy.layouts())) * 4 < len(list(light.layouts()))
    assert Hunt(heavy).at_most * heavy.weight < 2 * 300_000
    assert Hunt(light).at_most == 96
    steep = Highest(tuple(Growth(0, slope) for slope in range(100)))
    trace = profile.traces[0]
    for lined in (
        replace(trace, segments=tuple(replace(s, peak=steep) for s in trace.segments)),
        replace(trace, segments=tuple(replace(s, within=steep) for s in trace.segments)),
    ):
        lines = LayoutSpace(replace(profile, traces=(lined,)), question).weight
        assert lines > 80 * len(trace.segments)
