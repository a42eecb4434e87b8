"""Estimates as arithmetic: sizes, order, and what changes what."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest

from fsdp_core.errors import PlanError
from fsdp_core.plan.model import (
    ADAMW_FUSED,
    SGD,
    Conditions,
    Estimate,
    Exchange,
    MeshPlan,
    ModelProfile,
    NodeFacts,
    OptimizerFacts,
    PassTimes,
    ShardDim,
    ShardingPlan,
    StepTime,
    Training,
    UnitPlan,
    estimate,
)
from fsdp_core.plan.model.shares import shares_of
from fsdp_core.plan.model.traffic import Kind, SharedWay
from fsdp_core.plan.profiling import profile_model
from fsdp_core.plan.study import ModelUnderStudy
from tests.plan.suite import Mlp, vector_loss

WIDTH, HIDDEN, LAYERS = 256, 96, 4
LAYER_UNITS = (UnitPlan(("layers.*",)),)


@pytest.fixture(scope="module")
def profile() -> ModelProfile:
    study = ModelUnderStudy(partial(Mlp, WIDTH, HIDDEN, LAYERS), vector_loss)
    return profile_model(study, (Conditions(), Conditions("bf16"), Conditions(recompute=True)))


def of(
    profile: ModelProfile,
    *units: UnitPlan,
    mesh: MeshPlan | None = None,
    training: Training | None = None,
    **how: object,
) -> Estimate:
    plan = ShardingPlan(mesh or MeshPlan(dp_shard=4), units or LAYER_UNITS, **how)  # type: ignore[arg-type]  # passed on
    return estimate(profile, plan, training or Training(8, optimizer=ADAMW_FUSED))


@pytest.mark.parametrize("ranks", [1, 3, 8, 100, 4096])
def test_each_rank_holds_padded_slices_and_state_without_padding(
    profile: ModelProfile, ranks: int
) -> None:
    rows = [(p.shape[0], sum(p.shape[1:]) or 1) for p in profile.parameters]
    mesh = MeshPlan(dp_shard=ranks)
    first = of(profile, mesh=mesh).resting
    assert first.parameters == sum(4 * -(-length // ranks) * rest for length, rest in rows)
    assert first.optimizer == 2 * first.parameters + 4 * len(rows)
    plan = ShardingPlan(mesh, LAYER_UNITS)
    last = estimate(profile, plan, Training(8, optimizer=ADAMW_FUSED), shard_rank=ranks - 1).resting
    assert last.parameters == first.parameters
    held = [
        max(0, min(width, length - (ranks - 1) * width)) * rest
        for length, rest, width in ((length, rest, -(-length // ranks)) for length, rest in rows)
    ]
    assert last.optimizer == 8 * sum(held) + 4 * len(rows)


def test_replicas_hold_the_same_and_average_between_them(profile: ModelProfile) -> None:
    alone = of(profile, mesh=MeshPlan(dp_shard=4))
    copied = of(profile, mesh=MeshPlan(dp_replicate=2, dp_shard=4))
    assert copied.resting == alone.resting
    assert copied.sent["dp_shard"] == alone.sent["dp_shard"]
    assert alone.sent["dp_replicate"] == 0
    assert copied.collectives["dp_replicate"] == LAYERS + 1


def test_traffic_is_two_gathers_and_a_reduction(profile: ModelProfile) -> None:
    whole = 4 * sum(_numel(p.shape) for p in profile.parameters)
    root = 4 * sum(_numel(p.shape) for p in profile.parameters if "head" in p.name)
    kept = of(
        profile, UnitPlan(("layers.*",), reshard_after_forward=False), mesh=MeshPlan(dp_shard=2)
    )
    twice = of(profile, mesh=MeshPlan(dp_shard=2))
    flags = 4 * len(profile.parameters)
    # All dims divide by two, so a rank sends half of everything once for each collective.
    assert kept.sent["dp_shard"] == 2 * whole // 2 + flags
    assert twice.sent["dp_shard"] == kept.sent["dp_shard"] + (whole - root) // 2
    assert twice.collectives["dp_shard"] == 3 * LAYERS + 2


def test_what_costs_memory_and_what_saves_it(profile: ModelProfile) -> None:
    # What a communication library holds depends on how often it gathers.
    profile = replace(profile, device_type="cuda")
    base = of(profile).peak.memory
    assert (
        of(profile, UnitPlan(("layers.*",), reshard_after_forward=False)).peak.memory.total
        > base.total
    )
    assert (
        of(profile, UnitPlan(("layers.*",), recompute=True)).peak.memory.activations
        < base.activations
    )
    assert of(profile, mesh=MeshPlan(dp_shard=8)).peak.memory.total < base.total
    assert of(profile, param_dtype="bf16").peak.memory.activations < base.activations
    assert of(profile, training=Training(8, 4, ADAMW_FUSED)).peak.memory.total > base.total
    deeper = of(profile, UnitPlan(("layers.*",), prefetch=3)).peak.memory
    assert deeper.total > base.total


def test_the_peak_is_told_with_its_place(profile: ModelProfile) -> None:
    assert of(profile).peak.where == "backward"
    assert of(profile).peak.unit.startswith("layers.")
    greedy = OptimizerFacts(state_copies=2, step_copies_of_all=50)
    assert of(profile, training=Training(1, optimizer=greedy)).peak.where == "optimizer step"


def test_gloo_holds_a_copy_of_what_it_reduces_and_nccl_does_not(profile: ModelProfile) -> None:
    one = ShardingPlan(MeshPlan(dp_shard=2))
    training = Training(1, optimizer=SGD)
    there = replace(profile, device_type="cuda")
    tensors = estimate(profile, one, training, only_tensors=True).peak.memory
    assert estimate(there, one, training).peak.memory == tensors
    held = estimate(profile, one, training).peak.memory
    whole = 4 * sum(_numel(p.shape) for p in profile.parameters)
    # What is reduced and its copy, besides the result.
    assert held.communication > 2 * whole > tensors.communication
    alone = ShardingPlan(MeshPlan())
    without = estimate(profile, alone, training, only_tensors=True)
    assert estimate(profile, alone, training).peak == without.peak


def test_ranks_that_share_memory_hold_less_and_with_one_copy_nothing_whole(
    profile: ModelProfile,
) -> None:
    mesh = MeshPlan(dp_shard=2)
    by_gloo, copied, one_copy = (
        of(profile, mesh=mesh, shared_memory=way) for way in ("none", "copy", "storage")
    )
    assert one_copy.peak.memory.unsharded == 0 < copied.peak.memory.unsharded
    assert one_copy.peak.memory.total < copied.peak.memory.total < by_gloo.peak.memory.total
    assert by_gloo.resting.communication == 0
    # In one of the boxes there is the part of the other rank of the largest unit's gradients.
    part = 4 * (2 * WIDTH * HIDDEN + WIDTH + HIDDEN) // 2
    assert part < one_copy.resting.communication == copied.resting.communication
    for each in (copied, one_copy):
        assert replace(each.resting, communication=0) == by_gloo.resting
        assert (each.sent, each.collectives) == (by_gloo.sent, by_gloo.collectives)


def test_what_cannot_be_shared_is_estimated_as_before(profile: ModelProfile) -> None:
    there = replace(profile, device_type="cuda")
    parts = UnitPlan(("layers.*",), reshard_after_forward=2)
    assert of(there, shared_memory="auto") == of(there)
    assert of(profile, mesh=MeshPlan(), shared_memory="auto") == of(profile, mesh=MeshPlan())
    root = UnitPlan(("",), reshard_after_forward=2)
    assert of(profile, parts, root, shared_memory="auto") == of(profile, parts, root)


def test_auto_copies_what_is_cast_or_written_in_forward_and_has_one_copy_of_the_rest(
    profile: ModelProfile,
) -> None:
    assert of(profile, shared_memory="auto") == of(profile, shared_memory="storage")
    cast = of(profile, param_dtype="bf16", shared_memory="auto")
    assert cast == of(profile, param_dtype="bf16", shared_memory="copy")
    # Slices in bf16 stay beside those in fp32.
    assert cast.resting.communication > 2 * sum(_numel(p.shape) for p in profile.parameters) // 4
    first, *others = profile.parameters
    written = replace(profile, parameters=(replace(first, is_written=True), *others))
    units = {
        share.name: share.shared
        for share in shares_of(
            written, ShardingPlan(MeshPlan(dp_shard=2), LAYER_UNITS, shared_memory="auto")
        )
    }
    assert units.pop("layers.0") == "copy"
    assert set(units.values()) == {"storage"}


def test_building_counts_where_each_rank_builds_the_whole() -> None:
    study = ModelUnderStudy(partial(Mlp, WIDTH, HIDDEN, 16), vector_loss)
    profile = profile_model(study, sizes=(1,))
    many, training = ShardingPlan(MeshPlan(dp_shard=64), LAYER_UNITS), Training(1, optimizer=SGD)
    built = estimate(replace(profile, built_whole=True), many, training).peak
    whole = 4 * sum(_numel(p.shape) for p in profile.parameters)
    assert (built.where, built.memory.unsharded) == ("building", whole)
    assert estimate(profile, many, training).peak.memory.total < built.memory.total


def test_offloading_moves_memory_to_the_host_of_a_device(profile: ModelProfile) -> None:
    there = replace(profile, device_type="cuda")
    offloaded = of(there, UnitPlan(("layers.*",), offload=True))
    assert offloaded.host_bytes > 0
    assert offloaded.resting.parameters < of(there).resting.parameters / 10
    assert of(profile, UnitPlan(("layers.*",), offload=True)).host_bytes == 0


def test_memory_comes_in_blocks_where_the_allocator_gives_such(profile: ModelProfile) -> None:
    coarse = of(replace(profile, granularity=512))
    assert coarse.resting.parameters % 512 == 0
    for units in ((UnitPlan(("layers.*",), reshard_after_forward=2),), LAYER_UNITS):
        exact, rounded = of(profile, *units), of(replace(profile, granularity=512), *units)
        assert exact.peak.memory.total < rounded.peak.memory.total
        assert rounded.peak.memory.total < exact.peak.memory.total + 512 * 100


def test_accumulation_gathers_for_each_micro_batch_and_reduces_once(profile: ModelProfile) -> None:
    once, thrice = (of(profile, training=Training(8, k, SGD)) for k in (1, 3))
    gathers, reduces = 2 * LAYERS + 1, LAYERS + 1
    assert once.collectives["dp_shard"] == gathers + reduces
    assert thrice.collectives["dp_shard"] == 3 * gathers + reduces
    assert thrice.flops == 3 * once.flops


NODE = NodeFacts({"fp32": 1e12, "bf16": 4e12}, 1e11, 1e10, 1e9, 1e-5, ranks=4)


def test_time_follows_the_node(profile: ModelProfile) -> None:
    def seconds(node: NodeFacts, ranks: int = 4) -> float:
        plan = ShardingPlan(MeshPlan(dp_shard=ranks), LAYER_UNITS)
        time = estimate(profile, plan, Training(8), node).time
        assert time is not None
        return time.total

    assert seconds(replace(NODE, matmul_flops={"fp32": 1e9})) > seconds(NODE)
    assert seconds(replace(NODE, link_bandwidth=1e8)) > seconds(NODE)
    assert seconds(replace(NODE, network_bandwidth=1e6)) == seconds(NODE)
    assert seconds(replace(NODE, network_bandwidth=1e6), ranks=8) > seconds(NODE, ranks=8)
    assert seconds(replace(NODE, overlap=0.0)) > seconds(NODE)


def test_each_kind_of_collective_goes_at_its_own_pace(profile: ModelProfile) -> None:
    slow, quick = Exchange(1.0, 1e12), Exchange(1e-9, 1e12)
    plans = {
        "sharded": ShardingPlan(MeshPlan(dp_shard=4), LAYER_UNITS),
        "replicated": ShardingPlan(MeshPlan(dp_replicate=4), LAYER_UNITS),
    }

    def started(kind: Kind, mesh: str) -> int:
        kinds: tuple[Kind, ...] = ("all_gather", "reduce_scatter", "all_reduce")
        exchanges = {each: slow if each == kind else quick for each in kinds}
        node = replace(NODE, exchanges=exchanges, overlap=0.0)
        time = estimate(profile, plans[mesh], Training(8), node).time
        assert time is not None
        return round(sum(time.communication.values()))

    gathers, reduces = 2 * LAYERS + 1, LAYERS + 1
    assert started("all_gather", "sharded") == gathers
    assert started("reduce_scatter", "sharded") == started("all_reduce", "replicated") == reduces
    assert started("all_reduce", "sharded") == started("all_gather", "replicated") == 0


@pytest.mark.parametrize("way", ["copy", "storage"])
def test_what_goes_through_shared_memory_goes_at_its_own_pace(
    profile: ModelProfile, way: SharedWay
) -> None:
    kinds: tuple[Kind, ...] = ("all_gather", "reduce_scatter")
    group = {kind: Exchange(100.0, 1e12) for kind in kinds}
    plan = ShardingPlan(MeshPlan(dp_shard=4), LAYER_UNITS, shared_memory=way)

    def started(kind: Kind, ranks: int = 4) -> int:
        own = {each: Exchange(float(each == kind), 1e12) for each in kinds}
        node = replace(NODE, ranks=ranks, exchanges=group, shared_exchanges={way: own})
        time = estimate(profile, plan, Training(8), node).time
        assert time is not None
        return round(time.communication["dp_shard"])

    assert started("all_gather") == 2 * LAYERS + 1
    assert started("reduce_scatter") == LAYERS + 1
    assert started("all_gather", ranks=2) == 100 * (3 * LAYERS + 2)  # on several nodes


def test_one_copy_for_all_ranks_is_not_copied(profile: ModelProfile) -> None:
    def communication(way: SharedWay) -> float:
        slow: dict[Kind, Exchange] = {"all_gather": Exchange(0.0, 1.0)}
        node = replace(NODE, shared_exchanges={way: slow | {"reduce_scatter": Exchange(0.0, 1e12)}})
        plan = ShardingPlan(MeshPlan(dp_shard=4), LAYER_UNITS, shared_memory=way)
        time = estimate(profile, plan, Training(8), node).time
        assert time is not None
        assert time.total >= time.communication["dp_shard"], "hidden though the rank copies itself"
        return time.communication["dp_shard"]

    assert communication("storage") < 1 < communication("copy")


def test_every_pass_costs_what_does_not_shrink_with_the_micro_batch(profile: ModelProfile) -> None:
    def of_passes(node: NodeFacts, passes: int, timed: PassTimes | None = None) -> StepTime:
        plan = ShardingPlan(MeshPlan(dp_replicate=4), LAYER_UNITS)
        training = Training(8 // passes, passes)
        time = estimate(replace(profile, timed=timed), plan, training, node).time
        assert time is not None
        return time

    hooked = replace(NODE, unit_s=1.0, parameter_s=0.1)
    parameters = len(profile.parameters)
    assert of_passes(hooked, 1).engine == pytest.approx(LAYERS + 1 + 0.1 * parameters)
    assert of_passes(hooked, 4).engine == pytest.approx(4 * of_passes(hooked, 1).engine)
    launching = replace(NODE, dispatch_s=1.0)
    assert of_passes(launching, 4).compute == 4 * of_passes(launching, 1).compute
    timed = PassTimes(((1, 0.3, 0.3), (4, 0.6, 0.6)), 1e12)  # 0.4 s and 0.2 s a sample
    assert of_passes(NODE, 1, timed).compute == pytest.approx(0.4 + 8 * 0.2)
    assert of_passes(NODE, 8, timed).compute == pytest.approx(8 * (0.4 + 0.2))
    disturbed = PassTimes(((1, 0.3, 0.3), (2, 9.0, 9.0), (4, 0.6, 0.6)), 1e12)
    assert of_passes(NODE, 4, disturbed).compute == pytest.approx(4 * 1.2)
    twice_as_fast = replace(NODE, matmul_flops={"fp32": 2e12})
    assert of_passes(twice_as_fast, 1, timed).compute == pytest.approx(0.4 + 8 * 0.1)


def test_of_a_device_and_the_host_that_launches_its_work_the_slower_one_counts(
    profile: ModelProfile,
) -> None:
    def on(device_type: str, node: NodeFacts) -> StepTime:
        there = replace(profile, device_type=device_type)
        plan = ShardingPlan(MeshPlan(dp_replicate=4), LAYER_UNITS)
        time = estimate(there, plan, Training(2, 4), node).time
        assert time is not None
        return time

    def at(speed: float, node: NodeFacts) -> NodeFacts:
        return replace(node, matmul_flops={"fp32": speed}, memory_bandwidth=speed)

    costly = replace(NODE, dispatch_s=1e-4, unit_s=1e-2, parameter_s=1e-3, update_s=1e-3)
    host, added = on("cuda", at(1e30, costly)), on("cpu", at(1e30, costly))
    assert host.compute + host.engine == pytest.approx(added.compute + added.engine)
    assert host.optimizer == pytest.approx(1e-3 * len(profile.parameters))
    device = on("cuda", at(1.0, costly))
    assert device == on("cuda", at(1.0, NODE))
    assert device.engine == 0
    assert on("cpu", at(1.0, costly)).total > device.total


def test_gathers_in_groups_within_a_node_go_at_its_links_rate(profile: ModelProfile) -> None:
    def of_group(ranks: int, node: NodeFacts) -> Estimate:
        units = (UnitPlan(("layers.*",), reshard_after_forward=ranks),)
        return estimate(profile, ShardingPlan(MeshPlan(dp_shard=8), units), Training(8), node)

    def seconds(found: Estimate) -> float:
        assert found.time is not None
        return found.time.communication["dp_shard"]

    node = replace(NODE, network_bandwidth=1e7)
    found, wide = of_group(4, node), replace(node, ranks=2)
    assert set(found.sent_in_groups) == {4}
    assert 0 < found.sent_in_groups[4] < found.sent["dp_shard"]
    saved = found.sent_in_groups[4] * (1 / node.network_bandwidth - 1 / node.link_bandwidth)
    assert seconds(of_group(4, wide)) == pytest.approx(seconds(found) + saved)
    one_node = replace(node, ranks=8)
    assert seconds(of_group(4, one_node)) < seconds(found)


def test_plans_that_do_not_divide_are_refused(profile: ModelProfile) -> None:
    with pytest.raises(PlanError, match="does not divide"):
        of(profile, UnitPlan(("layers.*",), reshard_after_forward=3))
    with pytest.raises(PlanError, match="no dim 2"):
        of(profile, UnitPlan(("layers.*",), shard_dims=(ShardDim("*.weight", 2),)))


def _numel(shape: tuple[int, ...]) -> int:
    numel = 1
    for size in shape:
        numel *= size
    return numel
