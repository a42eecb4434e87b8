"""Gang placement, planning, and the judgement on nodes."""

from typing import Literal

import pytest

from services.contract.messages.facts import NodeJoined, NodeLeaving, NodeLeft
from services.contract.redis.redis_keys import NODE_LEASE_MS
from services.contract.words.states import NodeState
from services.controller.domain.errors import InvalidRequestError
from services.controller.domain.plans import default_plan
from services.controller.domain.scheduling.node import Drain, Lease, join, judge, leave, set_out
from services.controller.domain.scheduling.placement import (
    GangRequest,
    Never,
    NodeUsage,
    NotNow,
    Placed,
    occupy,
    place,
    usages_of,
)
from tests.controller.histories import NODE, NOW, finished, node, play, running, spec


def ask(
    ranks: int,
    device: Literal["auto", "cpu", "cuda"] = "auto",
    together: int = 1,
    close: int | None = None,
) -> GangRequest:
    return GangRequest(ranks, device, together, close or together)


def test_a_gang_sits_on_one_node_which_it_fills_best() -> None:
    outcome = place(ask(2), [NodeUsage(node("big", slots=8)), NodeUsage(node("small", slots=2))])
    assert isinstance(outcome, Placed)
    assert {seat.node_id for seat in outcome.ranks} == {"small"}
    assert [seat.local_rank for seat in outcome.ranks] == [0, 1]


def test_two_half_free_nodes_do_not_make_a_gang() -> None:
    usages = [NodeUsage(node("a", slots=2), cpu_taken=1), NodeUsage(node("b", slots=2), 1)]
    outcome = place(ask(2), usages)
    assert isinstance(outcome, NotNow)
    assert outcome.blocks
    assert "at most 1 are free" in outcome.reason


@pytest.mark.parametrize("leases", [{}, {NODE: Lease("life-0", 5000)}])
def test_a_gang_is_not_sent_to_an_agent_that_may_be_dead(leases: dict[str, Lease]) -> None:
    outcome = place(ask(2), usages_of([node()], [], leases))
    assert isinstance(outcome, NotNow)
    assert not outcome.blocks
    assert f"silent: {NODE}" in outcome.reason
    assert isinstance(place(ask(2), usages_of([node()], [], {NODE: Lease("life-1", 1)})), Placed)


def test_a_node_that_left_comes_back_only_by_joining() -> None:
    left = leave(node(), NodeLeft(node_id=NODE, incarnation="life-1"), "60-0")
    for lease, now_ms in (
        (Lease("life-1", 5000), 60_060),
        (Lease("life-2", 5000), NOW),
        (None, NOW),
    ):
        assert judge(left, lease, NODE_LEASE_MS, now_ms) == left
    again = NodeJoined(node_id=NODE, incarnation="life-2", inventory=left.inventory)
    assert join(left, again, "61-0").state is NodeState.READY


def test_a_node_whose_agent_is_to_end_takes_no_gang_until_another_life_of_it_joins() -> None:
    known = node()
    told = NodeLeaving(node_id=NODE, incarnation="life-1", grace_s=50)
    leaving = set_out(known, told, "60-0")
    assert leaving.leaving == Drain(grace_s=50, asked_ms=60)
    assert leaving.shown_state is NodeState.DRAINING
    assert isinstance(place(ask(2), [NodeUsage(leaving)]), NotNow)
    assert set_out(leaving, told, "60-0") == leaving
    assert set_out(known, told.model_copy(update={"incarnation": "life-0"}), "60-0") == known
    again = NodeJoined(node_id=NODE, incarnation="life-1", number=2, inventory=known.inventory)
    assert join(leaving, again, "61-0").leaving == leaving.leaving
    next_life = again.model_copy(update={"incarnation": "life-2"})
    assert join(leaving, next_life, "61-0").leaving is None


def test_no_node_yet_is_not_never() -> None:
    assert isinstance(place(ask(2), []), NotNow)


def test_more_ranks_than_all_nodes_have_can_never_be() -> None:
    outcome = place(ask(9), [NodeUsage(node(slots=4), cpu_taken=4), NodeUsage(node("b", slots=4))])
    assert isinstance(outcome, Never)
    assert "all known nodes together have 8" in outcome.reason
    no_gpu = place(ask(1, "cuda"), [NodeUsage(node())])
    assert isinstance(no_gpu, Never)
    assert "no known node has a GPU" in no_gpu.reason


def test_auto_takes_gpus_where_they_suffice_and_waits_for_busy_ones() -> None:
    gpus = NodeUsage(node("g", gpus=2))
    placed = place(ask(2), [NodeUsage(node("c")), gpus])
    assert isinstance(placed, Placed)
    assert [seat.device for seat in placed.ranks] == ["cuda:0", "cuda:1"]
    busy = place(ask(2), [NodeUsage(node("c")), NodeUsage(gpus.node, 0, frozenset({0}))])
    assert isinstance(busy, NotNow)
    assert busy.device == "cuda"
    too_many = place(ask(3), [NodeUsage(node("c")), gpus])
    assert isinstance(too_many, Placed)
    assert too_many.device == "cpu"


def test_a_taken_gpu_is_not_given_twice() -> None:
    usage = NodeUsage(node("g", gpus=2))
    first = place(ask(1), [usage])
    assert isinstance(first, Placed)
    second = place(ask(1), occupy([usage], first, "job"))
    assert isinstance(second, Placed)
    assert second.ranks[0].device == "cuda:1"


def test_a_lost_node_takes_nobody_but_proves_nothing_impossible() -> None:
    outcome = place(ask(2), [NodeUsage(node(state=NodeState.LOST))])
    assert isinstance(outcome, NotNow)
    assert not outcome.blocks


def test_a_living_attempt_takes_its_seats_until_it_has_ended() -> None:
    job = running()
    (usage,) = usages_of([node()], [job], {NODE: Lease("life-1", 5000)})
    assert (usage.cpu_taken, usage.jobs) == (2, (job.id,))
    (usage,) = usages_of([node()], [play(job, [finished(job)]).job], {})
    assert usage.cpu_taken == 0


def test_the_plan_shards_over_all_ranks_by_blocks() -> None:
    plan = default_plan.shard(spec())
    assert plan.mesh.dp_shard == 2
    assert [unit.modules for unit in plan.units] == [("blocks.*",)]
    assert (plan.param_dtype, plan.reduce_dtype) == (None, None)
    mixed = default_plan.shard(
        spec(
            train={"steps": 1, "precision": {"params": "bf16"}},
            plan={"units": [{"modules": ["layers.*"], "reshard_after_forward": False}]},
        )
    )
    assert (mixed.param_dtype, mixed.reduce_dtype) == ("bf16", "fp32")
    assert mixed.units[0].modules == ("layers.*",)


def test_an_elastic_jobs_mesh_follows_from_its_number_of_ranks() -> None:
    free = spec(resources={"world": {"min": 2, "max": 6}})
    assert GangRequest.of(free).ranks == default_plan.shard(free).mesh.dp_shard == 2
    assert default_plan.shard(free, 6).mesh.dp_shard == 6
    copies = spec(resources={"world": {"min": 3, "max": 12}}, mesh={"dp_shard": 2, "tp": 2})
    assert GangRequest.of(copies) == GangRequest(4, "auto", together=2, close=2, spreads=True)
    mesh = default_plan.shard(copies, 12).mesh
    assert (mesh.dp_replicate, mesh.dp_shard, mesh.tp) == (3, 2, 2)
    named = spec(resources={"world": {"max": 6}}, plan={"mesh": {"dp_shard": 1}})
    with pytest.raises(InvalidRequestError, match="changes with its number of ranks"):
        default_plan.shard(named)


def test_a_built_in_model_is_split_over_tp_ranks_and_any_other_as_its_plan_says() -> None:
    built_in = default_plan.shard(spec(resources={"ranks": 4}, mesh={"dp_shard": 2, "tp": 2}))
    assert {entry.style for entry in built_in.tensor_parallel} == {"colwise", "rowwise"}
    assert default_plan.shard(spec()).tensor_parallel == ()
    wide = {"resources": {"ranks": 2}, "mesh": {"tp": 2}, "model": {"factory": "a.b:c"}}
    with pytest.raises(InvalidRequestError, match="names no modules to split"):
        default_plan.shard(spec(**wide))
    split = [{"modules": ["up"], "style": "colwise"}]
    own = default_plan.shard(spec(**wide, plan={"tensor_parallel": split}))
    assert own.tensor_parallel[0].modules == ("up",)
    with pytest.raises(InvalidRequestError, match="nothing to split over"):
        default_plan.shard(spec(plan={"tensor_parallel": split}))


def test_every_fault_of_a_plan_is_told_with_its_pointer() -> None:
    bad = spec(
        resources={"ranks": 4},
        mesh={"dp_replicate": 2, "tp": 2},
        plan={
            "units": [{"modules": [], "shard": 1}],
            "tensor_parallel": [{"modules": ["head"], "style": "colwise", "bias": True}],
            "param_dtype": "int4",
            "shared_memory": "always",
            "colour": "red",
        },
    )
    with pytest.raises(InvalidRequestError) as refused:
        default_plan.shard(bad)
    pointers = {fault.pointer for fault in refused.value.faults}
    unknown = {"/plan/colour", "/plan/units/0/shard", "/plan/tensor_parallel/0/bias"}
    assert unknown <= pointers
    assert any(pointer.startswith("/plan/units/0") for pointer in pointers)
    assert any(pointer.startswith("/plan/param_dtype") for pointer in pointers)
    assert "/plan/shared_memory" in pointers


def test_a_node_that_others_said_has_left_or_leaves_is_one_again_by_its_lease() -> None:
    lives = Lease("life-1", 5000)
    left = leave(node(), NodeLeft(node_id=NODE, incarnation="life-1"), "60-0")
    leaves = NodeLeaving(node_id=NODE, incarnation="life-1", grace_s=30)
    leaving = set_out(node(), leaves, "60-0")
    for gone, its_ms in ((left, 60_060), (leaving, 90_060)):
        assert judge(gone, lives, NODE_LEASE_MS, its_ms) == gone
        again = judge(gone, lives, NODE_LEASE_MS, its_ms + 1)
        assert again == node().model_copy(update={"fact_id": "60-0"})
    assert judge(set_out(left, leaves, "61-0"), lives, NODE_LEASE_MS, 60_061).left is False


def test_a_lease_that_ran_out_while_redis_was_away_proves_nothing() -> None:
    assert judge(node(), None, NODE_LEASE_MS - 1, NOW).state is NodeState.READY
    assert judge(node(), None, NODE_LEASE_MS, NOW).state is NodeState.LOST
    assert judge(node(), Lease("life-1", 10), NODE_LEASE_MS, NOW).state is NodeState.READY
    lost = node(state=NodeState.LOST)
    assert judge(lost, Lease("life-1", 10), 0, NOW).state is NodeState.READY
    assert judge(lost, Lease("life-2", 10), 0, NOW).state is NodeState.LOST


def test_an_old_join_or_leave_told_again_is_void() -> None:
    known = node()
    fact = NodeJoined(node_id=NODE, incarnation="life-2", inventory=known.inventory)
    second = join(known, fact, "50-0")
    assert (second.incarnation, second.joined_ms) == ("life-2", 50)
    first_again = NodeJoined(node_id=NODE, incarnation="life-1", inventory=known.inventory)
    assert join(second, first_again, "40-0") == second
    assert leave(second, NodeLeft(node_id=NODE, incarnation="life-1"), "60-0") == second
    left = leave(second, NodeLeft(node_id=NODE, incarnation="life-2"), "60-0")
    assert left.state is NodeState.LOST


def test_a_gang_that_no_node_can_take_alone_sits_on_the_fewest() -> None:
    nodes = [
        NodeUsage(node("a", slots=2)),
        NodeUsage(node("b", slots=4)),
        NodeUsage(node("c", slots=3)),
    ]
    outcome = place(ask(6), nodes)
    assert isinstance(outcome, Placed)
    assert [(s.rank, s.node_id, s.local_rank) for s in outcome.ranks] == [
        (0, "b", 0),
        (1, "b", 1),
        (2, "b", 2),
        (3, "b", 3),
        (4, "c", 0),
        (5, "c", 1),
    ]
    assert outcome.incarnations == {"b": "life-1", "c": "life-1"}
    after = occupy(nodes, outcome, "job")
    assert [usage.cpu_taken for usage in after] == [0, 4, 2]


def test_a_gang_that_one_node_could_take_waits_for_it_rather_than_be_parted() -> None:
    nodes = [NodeUsage(node("a", slots=4), cpu_taken=2), NodeUsage(node("b", slots=2))]
    outcome = place(ask(4), nodes)
    assert isinstance(outcome, NotNow)
    assert outcome.blocks
    assert "4 CPU slots on one node are needed, at most 2 are free" in outcome.reason


def test_all_ranks_of_a_wide_gang_find_room_or_none() -> None:
    nodes = [NodeUsage(node("a", slots=4), cpu_taken=1), NodeUsage(node("b", slots=4))]
    outcome = place(ask(8), nodes)
    assert isinstance(outcome, NotNow)
    assert "8 CPU slots on a, b are needed, at most 7 are free" in outcome.reason


def test_ranks_that_share_a_multiplication_are_never_parted() -> None:
    nodes = [NodeUsage(node("a", slots=3)), NodeUsage(node("b", slots=3))]
    assert isinstance(place(ask(6, together=2), nodes), Never)
    outcome = place(ask(4, together=2), nodes)
    assert isinstance(outcome, Placed)
    assert [seat.node_id for seat in outcome.ranks] == ["a", "a", "b", "b"]


def test_a_copy_of_the_parameters_stays_on_a_node_where_one_has_room_for_it() -> None:
    nodes = [
        NodeUsage(node("a", slots=5)),
        NodeUsage(node("b", slots=6)),
        NodeUsage(node("c", slots=4)),
    ]
    outcome = place(ask(12, close=4), nodes)
    assert isinstance(outcome, Placed)
    assert [seat.node_id for seat in outcome.ranks] == ["b"] * 4 + ["a"] * 4 + ["c"] * 4
    parted = place(ask(8, close=4), [NodeUsage(node("a", slots=6)), NodeUsage(node("b", slots=2))])
    assert isinstance(parted, Placed)
    assert [seat.node_id for seat in parted.ranks] == ["a"] * 6 + ["b"] * 2


def test_a_gang_that_one_node_could_take_is_parted_once_that_node_is_drained_or_lost() -> None:
    small = [NodeUsage(node("a", slots=2)), NodeUsage(node("b", slots=2))]
    drained = node("large").model_copy(update={"drain": Drain(asked_ms=1)})
    for large in (drained, node("large", state=NodeState.LOST)):
        outcome = place(ask(4), [*small, NodeUsage(large)])
        assert isinstance(outcome, Placed)
        assert [seat.node_id for seat in outcome.ranks] == ["a", "a", "b", "b"]


def test_a_gang_that_waits_for_a_silent_node_says_so_though_others_have_room_together() -> None:
    small = [NodeUsage(node("a", slots=2)), NodeUsage(node("b", slots=2))]
    outcome = place(ask(4), [*small, NodeUsage(node("large"), has_lease=False)])
    assert isinstance(outcome, NotNow)
    assert "silent: large" in outcome.reason


def test_a_gang_goes_elsewhere_than_to_a_node_that_it_just_lost_where_it_can() -> None:
    lost, other = NodeUsage(node("a", slots=2)), NodeUsage(node("b", slots=8))
    gang = GangRequest(2, last_resort=("a",))
    for usages, expected in (([lost, other], "b"), ([lost], "a")):
        outcome = place(gang, usages)
        assert isinstance(outcome, Placed)
        assert {seat.node_id for seat in outcome.ranks} == {expected}
