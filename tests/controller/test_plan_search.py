"""What a node is asked about a model, and how its answer becomes a plan."""

import hashlib
import json
from dataclasses import replace

import pytest

from fsdp_core.plan.model import ADAMW_FUSED, PROFILE_VERSION, Conditions, MeshPlan, NodeFacts
from services.contract.api.plan_views import PlanOutcome
from services.contract.jobs.plans import SHARDING_PLAN
from services.contract.jobs.specs import JobSpec
from services.contract.messages.probing import ProbeModel
from services.controller.domain.plans import default_plan, search
from services.controller.domain.plans.plan import Profiled
from services.controller.domain.plans.search import RankRoom, Study
from services.controller.domain.scheduling.node import Measurement
from services.controller.domain.scheduling.placement import NodeUsage
from tests.controller.histories import NODE, node, spec
from tests.controller.profiles import ARGS, FACTS, profile

SMALL = {"factory": "decoder", "args": ARGS}


def asked(**changes: object) -> ProbeModel:
    there = node()
    return search.ask(spec(**changes), RankRoom.on(there, "cpu"), there, 120)


def asked_of_gpus(**changes: object) -> ProbeModel:
    there = node(gpus=4)
    wanted = spec(**{"resources": {"ranks": 2, "device": "cuda"}, **changes})
    return search.ask(wanted, RankRoom.on(there, "cuda"), there, 120)


def plan(wanted: JobSpec, memory: int = 1 << 30, facts: NodeFacts | None = FACTS) -> PlanOutcome:
    found = Profiled(NODE, 1.0, profile(), ADAMW_FUSED, 32)
    room = RankRoom("cpu", 4, memory, facts)
    return search.work_out(Study(wanted, found, room, (NodeUsage(node()),)))


def test_of_a_built_in_model_both_ways_to_split_are_measured_where_there_are_gpus() -> None:
    assert {each.tp for each in asked(model=SMALL).conditions} == {1}, "never faster on CPUs"
    question = asked_of_gpus(model=SMALL)
    assert {(c.tp, c.recompute) for c in question.conditions} == {
        (tp, again) for tp in (1, 2) for again in (False, True)
    }
    assert question.tensor_parallel == default_plan.splits_of(spec())
    assert question.stops == ("blocks.*",)


@pytest.mark.parametrize(
    ("changes", "sizes"),
    [
        ({"model": {"factory": "decoder", "args": {"dim": 30, "heads": 3}}}, {1}),
        ({"model": {"factory": "mine.models:Net"}}, {1}),
        ({"mesh": {"dp_shard": 1, "tp": 2}}, {2}),
        ({"mesh": {"dp_shard": 2}}, {1}),
        ({"resources": {"ranks": 1, "device": "cuda"}}, {1}),
    ],
    ids=["heads", "own", "tp", "no-tp", "one"],
)
def test_a_model_is_split_only_where_it_can_be_or_is_to_be(
    changes: dict[str, object], sizes: set[int]
) -> None:
    question = asked_of_gpus(**changes)
    assert {each.tp for each in question.conditions} == sizes
    assert bool(question.tensor_parallel) == (max(sizes) > 1)


def test_on_cpus_a_model_is_split_if_the_spec_says_so() -> None:
    assert {each.tp for each in asked(mesh={"dp_shard": 1, "tp": 2}).conditions} == {2}


def test_what_the_spec_names_beside_the_model_names_a_question_only_if_it_is_set() -> None:
    plain = asked(model=SMALL)
    # The name that version 0.1 gave; a spec that says nothing new is the question that it was.
    old = json.dumps(
        {
            "profile": PROFILE_VERSION,
            "versions": {},
            "spec": {
                "model": {"factory": "decoder", "args": SMALL["args"]},
                "data": {"factory": "stdlib_bytes", "args": {}},
                "optimizer": {"factory": "adamw", "args": {}},
            },
            "train": {"precision": {"params": "fp32", "reduce": "fp32"}},
            "question": plain.model_dump(
                mode="json", exclude={"probe_id", "spec", "timeout_s", "memory_bytes", "owner"}
            ),
        },
        sort_keys=True,
    )
    assert plain.probe_id == f"probe_{hashlib.sha256(old.encode()).hexdigest()[:32]}"
    train = {"steps": 100, "global_batch": 12}
    differing: tuple[dict[str, object], ...] = (
        {"loss": {"factory": "mse"}},
        {"code": "sha256:" + "0" * 64},
        {"trainable": {"factory": "mine:T"}, "model": None},
        {"train": {**train, "ema": {"decay": 0.9}}},
        {"optimizer": {"factory": "adamw", "groups": [{"match": "*bias", "weight_decay": 0}]}},
    )
    names = {asked(**{"model": SMALL, **each}).probe_id for each in differing}
    assert len(names | {plain.probe_id}) == len(differing) + 1


def test_only_what_decides_the_answer_names_a_question() -> None:
    same = {"name": "x", "priority": 5, "train": {"steps": 7, "global_batch": 4}}
    assert asked(**same).probe_id == asked().probe_id
    bf16 = {"steps": 100, "global_batch": 12, "precision": {"params": "bf16"}}
    mixed = asked(train=bf16)
    assert mixed.probe_id != asked().probe_id
    assert {each.param_dtype for each in mixed.conditions} == {"bf16"}
    named = asked(
        plan={
            "units": [
                {
                    "modules": [
                        "blocks.*",
                    ]
                },
                {"modules": ["norm", "head"]},
            ]
        }
    )
    assert named.stops == ("blocks.*", "norm", "head")
    assert named.probe_id != asked().probe_id
    assert Conditions() in named.conditions


def test_a_planned_spec_means_exactly_the_layout_that_was_shown() -> None:
    for ranks in (1, 2, 4):
        wanted = spec(model=SMALL, resources={"ranks": ranks})
        made = plan(wanted)
        assert made.feasible
        assert made.sharding is not None
        assert made.micro_batch is not None
        settled = default_plan.planned(wanted, made.sharding, made.micro_batch)
        assert default_plan.shard(settled) == made.sharding
        assert SHARDING_PLAN.validate_python(settled.plan) == made.sharding
        assert settled.train.micro_batch == made.micro_batch
        assert settled.model_copy(update={"mesh": "auto", "plan": "auto"}).resources == (
            wanted.resources
        )


def test_a_plan_says_that_it_does_not_follow_compilation() -> None:
    units = [{"modules": ["blocks.*"], "compile": True}]
    made = plan(spec(model=SMALL, plan={"units": units}))
    plain = plan(spec(model=SMALL, plan={"units": [{"modules": ["blocks.*"]}]}))
    said = [each for each in made.reasons if each not in plain.reasons]
    assert len(said) == 1
    assert said[0].startswith("units are compiled (plan.units[].compile)")
    assert made.memory == plain.memory


def test_what_a_spec_settles_is_kept() -> None:
    wanted = spec(
        model=SMALL,
        resources={"ranks": 4},
        mesh={"dp_replicate": 2, "dp_shard": 2},
        plan={"units": [{"modules": ["blocks.*"], "recompute": True}]},
        train={"steps": 5, "global_batch": 8, "micro_batch": 2},
    )
    made = plan(wanted)
    assert made.mesh == default_plan.shard(wanted).mesh
    assert made.micro_batch == 2
    assert [unit.modules for unit in made.units if unit.recompute] == [("blocks.0",), ("blocks.1",)]


def test_ranks_that_need_different_amounts_stand_apart_the_fullest_first() -> None:
    made = plan(spec(model=SMALL, resources={"ranks": 3}, mesh={"dp_shard": 3}))
    totals = [kind.peak.total for kind in made.memory]
    assert totals == sorted(totals, reverse=True)
    assert len(totals) > 1
    assert made.memory[0].ranks[0] == 0
    assert sorted(rank for kind in made.memory for rank in kind.ranks) == [0, 1, 2]


def test_a_plan_without_a_nodes_facts_has_no_seconds() -> None:
    made = plan(spec(model=SMALL), facts=None)
    assert made.feasible
    assert made.step_time is None
    assert all(other.step_time_s is None for other in made.alternatives)


def test_what_does_not_fit_is_told_with_figures_and_what_would() -> None:
    made = plan(spec(model=SMALL), memory=400_000)
    assert made.feasible is False
    assert "does not fit" in made.reasons[0]
    assert made.advice
    assert made.memory[0].peak.total > 400_000


def test_units_that_the_model_does_not_have_are_told() -> None:
    made = plan(spec(model=SMALL, plan={"units": [{"modules": ["encoder.*"]}]}))
    assert made.feasible is False
    assert "encoder.*" in made.reasons[0]
    assert made.advice


def test_a_rank_may_use_most_of_its_share_of_a_node() -> None:
    with_gpus = node(slots=4, gpus=2)
    assert RankRoom.on(with_gpus, "cpu").memory_bytes == int((1 << 34) / 4 * 0.9)
    assert RankRoom.on(with_gpus, "cuda").memory_bytes == int((1 << 37) * 0.9)
    # The rest of a GPU is named, for nothing of it is in the estimate.
    assert RankRoom.on(with_gpus, "cuda").reserve_bytes == (1 << 37) - int((1 << 37) * 0.9)
    assert RankRoom.on(with_gpus, "cpu").reserve_bytes is None
    measured = with_gpus.model_copy(update={"measured": {"cpu": Measurement(facts=FACTS, at_ms=1)}})
    assert RankRoom.on(measured, "cpu").facts == FACTS
    assert RankRoom.on(measured, "cuda").facts is None


def test_an_elastic_job_is_planned_so_that_every_number_of_ranks_stays_possible() -> None:
    wanted = spec(model=SMALL, resources={"world": {"min": 2, "max": 6}})
    made = plan(wanted)
    assert made.sharding is not None
    assert made.micro_batch in {1, 6}
    assert made.mesh == MeshPlan(dp_shard=2)
    assert default_plan.planned(wanted, made.sharding, made.micro_batch).worlds == (2, 3, 4, 6)


def test_a_plan_shows_which_units_share_memory_and_estimates_them_so() -> None:
    by_default, by_gloo, copied = (
        plan(spec(model=SMALL, plan={"mesh": {"dp_shard": 2}, **said}))
        for said in ({}, {"shared_memory": "none"}, {"shared_memory": "copy"})
    )
    assert by_default.sharding is not None
    assert by_default.sharding.shared_memory == "auto"
    assert {unit.shared_memory for unit in by_default.units} == {"storage"}
    assert {unit.shared_memory for unit in by_gloo.units} == {None}
    assert {unit.shared_memory for unit in copied.units} == {"copy"}
    unsharded = [made.memory[0].peak.unsharded for made in (by_default, copied)]
    assert unsharded[0] == 0 < unsharded[1]


def test_ranks_of_several_nodes_are_planned_without_shared_memory() -> None:
    wanted = spec(model=SMALL, resources={"ranks": 4}, mesh={"dp_shard": 4})
    found = Profiled(NODE, 1.0, profile(), ADAMW_FUSED, 32)
    room = RankRoom("cpu", 2, 1 << 30, FACTS)
    made = search.work_out(Study(wanted, found, room, (NodeUsage(node()),)))
    assert made.sharding is not None
    assert made.sharding.shared_memory == "none"
    elastic = spec(model=SMALL, resources={"world": {"min": 4, "max": 6}}, mesh="auto")
    # It may have all its ranks on one node another time.
    assert made.micro_batch is not None
    settled = default_plan.planned(elastic, made.sharding, made.micro_batch)
    assert default_plan.shard(settled).shared_memory == "auto"


def test_the_default_layout_is_estimated_as_it_runs() -> None:
    wanted = spec(model=SMALL, plan="default")
    assert not wanted.leaves_layout_open
    assert {each.tp for each in asked(model=SMALL, plan="default").conditions} == {1}
    made = plan(wanted)
    assert (made.sharding, made.micro_batch) == (default_plan.shard(wanted), 6)
    (kind,) = made.memory
    assert kind.peak.total > 0


def test_cpu_ranks_may_have_what_other_slots_do_not_use_and_the_plan_says_so() -> None:
    there = node(slots=64)
    room = RankRoom.on(there, "cpu")
    tight = replace(room, memory_bytes=600_000, node_bytes=64 * 600_000)
    wanted = spec(model=SMALL)
    found = Profiled(NODE, 1.0, profile(), ADAMW_FUSED, 32)
    made = search.work_out(Study(wanted, found, tight, (NodeUsage(there),)))
    assert made.feasible
    assert made.memory_limit_bytes == 32 * 600_000
    assert "more than the share of its slot" in made.reasons[-1]
    roomy = search.work_out(Study(wanted, found, room, (NodeUsage(there),)))
    assert roomy.feasible
    assert len(roomy.reasons) == 1
    assert replace(room, node_bytes=0).alone(2) == replace(room, node_bytes=0)
