"""Elastic jobs on virtual time: they take what is there, shrink, grow back, and starve nobody."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from services.contract.jobs.specs import JobSpec
from services.contract.words.states import ExitReason, JobState
from services.controller.domain.job.job import Job
from services.controller.domain.plans import default_plan
from services.controller.domain.scheduling.allocation import Allocation, QueueHead
from services.controller.domain.scheduling.elastic import enlarged, place_most
from services.controller.domain.scheduling.placement import (
    GangRequest,
    NodeUsage,
    NotNow,
    Placed,
    place,
    seats_for,
)
from services.controller.ports.machines import Log
from tests.controller.histories import new_job, node, spec
from tests.controller.virtual_cluster import VirtualCluster

ELASTIC = {"world": {"min": 2, "max": 6}}
LONG = {"steps": 5_000, "global_batch": 12}
SAVES = {"every_steps": 10, "keep_last": 1}


def play(slots: dict[str, int], course: Callable[[VirtualCluster], Awaitable[None]]) -> None:
    asyncio.run(_run(VirtualCluster(slots), course))


async def _run(
    cluster: VirtualCluster, course: Callable[[VirtualCluster], Awaitable[None]]
) -> None:
    await course(cluster)


async def elastic(cluster: VirtualCluster, **changes: object) -> str:
    fields: dict[str, object] = {"resources": ELASTIC, "train": LONG, "checkpoint": SAVES}
    return await cluster.submit(**fields | changes)


def told(cluster: VirtualCluster, job_id: str, kind: str) -> list[str]:
    entries = cluster.server.logs[job_id, Log.EVENTS]
    return [entry.body for entry in entries if f'"{kind}"' in entry.body]


def sizes(job: Job) -> list[int]:
    return [attempt.world_size for attempt in job.attempts]


SCRIPT = {"entrypoint": {"script": "a.py"}, "resources": {"world": {"min": 1, "max": 65_536}}}


def test_seats_are_looked_for_a_few_times_for_any_number_of_ranks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And not for each number for which there are slots: for hundreds of elastic jobs that takes seconds."""
    tried: list[int] = []

    def counted(gang: GangRequest, usages: Sequence[NodeUsage]) -> Placed | None:
        tried.append(gang.ranks)
        return seats_for(gang, usages)

    monkeypatch.setattr("services.controller.domain.scheduling.elastic.seats_for", counted)
    free = (NodeUsage(node("a", slots=500)), NodeUsage(node("b", slots=500)))
    wanted = JobSpec.model_validate(SCRIPT)
    found = place_most(wanted, free)
    assert isinstance(found, Placed)
    assert len(found.ranks) == 1_000
    assert len(tried) <= 12
    tried.clear()
    job = new_job().model_copy(update={"spec": wanted})
    placed = place(GangRequest.of(wanted), free)
    assert isinstance(placed, Placed)
    allocation = Allocation(free, {job.id: job}, {}, 1).with_placed(job, placed)
    head = QueueHead(
        new_job(train=LONG | {"global_batch": 400}, resources={"ranks": 400}), None, None
    )
    _, larger = enlarged(allocation, {"cpu": head}, [job])
    assert len(larger[job.id].ranks) == 100
    assert len(tried) <= 12


@settings(max_examples=100, derandomize=True)
@given(
    slots=st.lists(st.tuples(st.integers(1, 9), st.integers(0, 9)), min_size=1, max_size=4),
    tp=st.sampled_from([1, 2]),
    heads=st.integers(0, 12),
    bounds=st.tuples(st.integers(1, 6), st.integers(0, 30)),
)
def test_the_most_ranks_are_found_for_which_there_is_room(
    *, slots: list[tuple[int, int]], tp: int, heads: int, bounds: tuple[int, int]
) -> None:
    """By trying each number, from the most to the fewest."""
    nodes = [node(name, slots=count) for name, (count, _) in zip("abcd", slots, strict=False)]
    free = tuple(
        NodeUsage(each, cpu_taken=min(taken, count))
        for each, (count, taken) in zip(nodes, slots, strict=True)
    )
    least, more = bounds[0] * tp, bounds[1]
    resources = {"world": {"min": least, "max": least + more}}
    job = new_job(mesh={"tp": tp}, resources=resources, train=LONG | {"global_batch": 5_040})
    placed = place(GangRequest.of(job.spec), free)
    assume(isinstance(placed, Placed))
    assert isinstance(placed, Placed)
    allocation = Allocation(free, {job.id: job}, {}, 1).with_placed(job, placed)
    head = (
        QueueHead(
            new_job(train=LONG | {"global_batch": heads}, resources={"ranks": heads}), None, None
        )
        if heads
        else None
    )

    def has_room(ranks: int) -> bool:
        left = allocation.without(job)
        there = left.usages
        if head is not None:
            there = left.backfill("cpu", head).nodes(ranks, is_over=False)
        gang = replace(GangRequest.of(job.spec, ranks), device="cpu")
        return isinstance(place(gang, there), Placed)

    most = max((n for n in job.spec.worlds if n > len(placed.ranks) and has_room(n)), default=None)
    _, larger = enlarged(allocation, {} if head is None else {"cpu": head}, [job])
    assert (len(larger[job.id].ranks) if job.id in larger else None) == most


def test_it_begins_with_what_is_there_and_sits_on_several_nodes_if_it_must() -> None:
    async def course(cluster: VirtualCluster) -> None:
        small = await cluster.at_size(await elastic(cluster), 3)
        assert cluster.nodes_of(small) == ["a", "a", "b"]
        assert small.attempts[0].mesh is not None
        assert small.attempts[0].mesh.dp_shard == 3

    play({"a": 2, "b": 1}, course)


def test_it_shrinks_when_a_node_is_lost_and_grows_back_after_a_commit() -> None:
    async def course(cluster: VirtualCluster) -> None:
        job_id = await elastic(cluster)
        await cluster.at_size(job_id, 6)
        await cluster.seconds(15)
        cluster.lose("b")
        job = await cluster.at_size(job_id, 4, within_s=8)
        assert (job.attempts[0].exit_reason, job.restarts) == (ExitReason.NODE_LOST, 1)
        assert job.attempts[1].resumed_step == job.resume_point.step == 10
        cluster.join("b", 2)
        # Twice as long as before any restart, and then the next commit.
        await cluster.seconds(60)
        assert await cluster.present(job_id) == 4
        job = await cluster.at_size(job_id, 6, within_s=20)
        (_, before, after) = job.attempts
        assert (before.exit_reason, before.lost_steps) == (ExitReason.RESIZED, 0)
        assert after.resumed_step == before.last_step
        assert before.last_step % 10 in {0, 1}, "right after a commit"
        assert job.restarts == 1
        resized = told(cluster, job_id, "job.resized")
        assert "from 6 to 4 ranks" in resized[0]
        assert "node_lost" in resized[0]
        assert "from 4 to 6 ranks" in resized[1]
        (asked,) = told(cluster, job_id, "job.resizing")
        assert "grows from 4 to 6 ranks: for " in asked
        assert "on a, b" in asked

    play({"a": 4, "b": 2}, course)


def test_it_never_goes_below_its_minimum_and_waits_for_no_more() -> None:
    async def course(cluster: VirtualCluster) -> None:
        job_id = await elastic(cluster, resources={"world": {"min": 3, "max": 6}})
        await cluster.at_size(job_id, 4)
        cluster.lose("b")
        await cluster.seconds(120)
        job = await cluster.job(job_id)
        assert (job.state, sizes(job)) == (JobState.RESTARTING, [4])
        cluster.join("c", 1)
        assert sizes(await cluster.at_size(job_id, 3)) == [4, 3]

    play({"a": 2, "b": 2}, course)


def test_whoever_waits_is_served_before_anybody_gets_more_than_needed() -> None:
    async def course(cluster: VirtualCluster) -> None:
        first = await elastic(cluster)
        fixed = await cluster.submit(train={"steps": 20, "global_batch": 12})
        second = await elastic(cluster)
        await cluster.seconds(1)
        assert [await cluster.present(name) for name in (first, fixed, second)] == [2, 2, 2]
        job = await cluster.at_size(first, 4, within_s=90)
        assert (await cluster.job(fixed)).state is JobState.SUCCEEDED
        assert job.restarts == 0
        assert await cluster.present(second) == 2

    play({"a": 6}, course)


def test_nothing_grows_onto_seats_that_somebody_waits_for() -> None:
    def lasting(steps: int, ranks: int = 2) -> dict[str, object]:
        return {"train": {"steps": steps, "global_batch": 12}, "resources": {"ranks": ranks}}

    async def course(cluster: VirtualCluster) -> None:
        job_id = await elastic(cluster)
        long, short = await cluster.submit(**lasting(150)), await cluster.submit(**lasting(20))
        await cluster.at_size(job_id, 2)
        waits = await cluster.submit(**lasting(50, ranks=4))
        await cluster.seconds(140)
        assert (await cluster.job(short)).state is JobState.SUCCEEDED
        assert (await cluster.job(waits)).state is JobState.QUEUED
        assert sizes(await cluster.job(job_id)) == [2]
        await cluster.at_size(waits, 4)
        assert (await cluster.job(long)).state is JobState.SUCCEEDED
        assert sizes(await cluster.at_size(job_id, 6, within_s=120)) == [2, 6]
        # Who can only begin once it has ended would gain nothing from what is left beside it.
        cluster.join("b", 6)
        whole = await cluster.submit(**lasting(50, ranks=12))
        await cluster.patch(job_id, resources={"world": {"max": 12}})
        await cluster.at_size(job_id, 12, within_s=60)
        assert (await cluster.job(whole)).state is JobState.QUEUED

    play({"a": 6}, course)


def test_a_job_that_backs_off_finds_its_seats_again() -> None:
    async def course(cluster: VirtualCluster) -> None:
        fixed = await cluster.submit(resources={"ranks": 2}, train=LONG, faults={"max_restarts": 9})
        job_id = await elastic(cluster)
        await cluster.at_size(job_id, 2)
        for _ in range(6):
            await cluster.at_size(fixed, 2, within_s=70)
            await cluster.crash(fixed)
        job = await cluster.job(fixed)
        assert job.state is JobState.RESTARTING
        assert job.not_before_ms - cluster.now == 60_000
        await cluster.at_size(fixed, 2, within_s=70)
        assert sizes(await cluster.job(job_id)) == [2]

    play({"a": 4}, course)


def test_a_job_of_higher_priority_makes_it_smaller_and_not_more() -> None:
    async def course(cluster: VirtualCluster) -> None:
        job_id = await elastic(cluster)
        await cluster.at_size(job_id, 6)
        urgent = await cluster.submit(
            resources={"ranks": 4}, priority=5, train={"steps": 20, "global_batch": 12}
        )
        await cluster.at_size(urgent, 4)
        job = await cluster.at_size(job_id, 2)
        assert (job.attempts[0].exit_reason, job.restarts) == (ExitReason.PREEMPTED, 0)
        assert sizes(await cluster.at_size(job_id, 6, within_s=90)) == [6, 2, 6]

    play({"a": 6}, course)


def test_lower_bounds_take_effect_at_once_and_higher_ones_when_there_is_room() -> None:
    async def course(cluster: VirtualCluster) -> None:
        job_id = await elastic(cluster)
        await cluster.at_size(job_id, 6)
        await cluster.patch(job_id, resources={"world": {"max": 3}})
        job = await cluster.at_size(job_id, 3, within_s=4)
        (asked,) = told(cluster, job_id, "job.resizing")
        assert "shrinks from 6 to 3 ranks: its bounds allow 3 at most" in asked
        assert (job.restarts, job.attempts[0].exit_reason) == (0, ExitReason.RESIZED)
        await cluster.patch(job_id, resources={"world": {"max": 6}})
        await cluster.seconds(25)
        assert await cluster.present(job_id) == 3
        await cluster.patch(job_id, resources={"world": {"min": 4, "max": 4}})
        assert sizes(await cluster.at_size(job_id, 4, within_s=4)) == [6, 3, 4]
        # More than there is: it trains on as it is, and begins no further attempt below that.
        await cluster.patch(job_id, resources={"world": {"min": 12, "max": 12}})
        await cluster.seconds(100)
        assert await cluster.present(job_id) == 4
        await cluster.crash(job_id)
        await cluster.seconds(20)
        assert (await cluster.job(job_id)).state is JobState.RESTARTING

    play({"a": 6}, course)


@pytest.mark.parametrize(("every_steps", "least_s", "most_s"), [(0, 30, 40), (1_000, 330, 340)])
def test_without_a_commit_to_wait_for_the_move_takes_one(
    every_steps: int, least_s: int, most_s: int
) -> None:
    async def course(cluster: VirtualCluster) -> None:
        job_id = await elastic(cluster, checkpoint={"every_steps": every_steps})
        await cluster.at_size(job_id, 4)
        cluster.join("b", 2)
        await cluster.seconds(least_s)
        assert await cluster.present(job_id) == 4
        job = await cluster.at_size(job_id, 6, within_s=most_s - least_s)
        assert job.attempts[0].lost_steps == 0

    play({"a": 4}, course)


def test_room_that_comes_and_goes_moves_nobody() -> None:
    async def course(cluster: VirtualCluster) -> None:
        job_id = await elastic(cluster)
        await cluster.at_size(job_id, 4)
        for _ in range(6):
            cluster.join("b", 2)
            await cluster.seconds(20)
            cluster.lose("b")
            await cluster.seconds(10)
        cluster.join("b", 2)
        await cluster.seconds(20)
        cluster.new_leader()  # it starts to watch again
        await cluster.seconds(20)
        assert sizes(await cluster.job(job_id)) == [4]
        await cluster.at_size(job_id, 6, within_s=30)

    play({"a": 4}, course)


def test_a_job_that_is_nearly_done_is_left_alone() -> None:
    async def course(cluster: VirtualCluster) -> None:
        job_id = await elastic(cluster, train={"steps": 70, "global_batch": 12})
        await cluster.at_size(job_id, 4)
        await cluster.seconds(15)
        cluster.join("b", 2)
        await cluster.seconds(80)
        job = await cluster.job(job_id)
        assert (job.state, sizes(job)) == (JobState.SUCCEEDED, [4])

    play({"a": 4}, course)


def test_several_grow_in_their_order_and_never_onto_the_same_seats() -> None:
    async def course(cluster: VirtualCluster) -> None:
        first = await elastic(cluster)
        second = await elastic(cluster, priority=1)
        await cluster.seconds(2)
        assert [await cluster.present(name) for name in (first, second)] == [2, 2]
        cluster.join("b", 3)
        await cluster.seconds(60)
        # Four more were asked for by the more important one, and three are there.
        assert [await cluster.present(name) for name in (first, second)] == [3, 4]
        assert (await cluster.job(first)).restarts == (await cluster.job(second)).restarts == 0

    play({"a": 4}, course)


def test_a_gang_that_spreads_does_not_wait_for_the_one_node_that_could_hold_it() -> None:
    ranks = spec(resources={"ranks": 3})
    free = spec(resources={"world": {"min": 3, "max": 3}})
    nodes = [NodeUsage(node("a", slots=4), cpu_taken=3), NodeUsage(node("b", slots=2))]
    assert isinstance(place(GangRequest.of(ranks), nodes), NotNow)
    outcome = place(GangRequest.of(free), nodes)
    assert isinstance(outcome, Placed)
    assert [seat.node_id for seat in outcome.ranks] == ["b", "b", "a"]
    alone = place(GangRequest.of(free), [NodeUsage(node("a", slots=4)), *nodes[1:]])
    assert isinstance(alone, Placed)
    assert {seat.node_id for seat in alone.ranks} == {"a"}
    nowhere = place(GangRequest.of(free), [nodes[0], NodeUsage(node("b", slots=1))])
    assert isinstance(nowhere, NotNow)
    assert "3 CPU slots on a, b are needed, at most 2 are free" in nowhere.reason


def test_a_plan_for_the_fewest_ranks_leaves_the_others_possible() -> None:
    wide = spec(resources={"world": {"min": 2, "max": 6}})
    settled = default_plan.planned(wide, default_plan.shard(wide), 6)
    assert (settled.worlds, settled.mesh) == ((2, 3, 4, 6), "auto")
    assert default_plan.planned(wide, default_plan.shard(wide), 1).train.micro_batch == 1
    few = default_plan.planned(wide, default_plan.shard(wide), 2)
    assert (few.worlds, few.train.micro_batch) == ((2, 3, 4, 6), "auto")
    copies = spec(resources={"world": {"min": 2, "max": 6}}, mesh={"dp_shard": 2})
    assert default_plan.planned(copies, default_plan.shard(copies), 1).worlds == (2, 4, 6)
    fixed = default_plan.planned(spec(), default_plan.shard(spec()), 3)
    assert (fixed.worlds, fixed.train.micro_batch) == ((2,), 3)


def test_whole_copies_of_the_parameters_come_and_go() -> None:
    async def course(cluster: VirtualCluster) -> None:
        mesh = {"dp_shard": 2, "tp": 2}
        job_id = await elastic(cluster, resources={"world": {"max": 12}}, mesh=mesh)
        job = await cluster.at_size(job_id, 4)
        assert cluster.nodes_of(job) == ["a"] * 4
        cluster.join("c", 8)
        job = await cluster.at_size(job_id, 12, within_s=60)
        shape = job.attempts[-1].mesh
        assert shape is not None
        assert (shape.dp_replicate, shape.dp_shard, shape.tp) == (3, 2, 2)

    play({"a": 4, "b": 3}, course)
