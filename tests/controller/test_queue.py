"""Who runs next: order, whole gangs, back-filling that delays nobody, preemption."""

from collections.abc import Callable, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.contract.api.views import StopRequest
from services.contract.jobs import worlds
from services.contract.jobs.plans import RankPlacement
from services.contract.words.ids import new_job_id
from services.contract.words.states import JobState
from services.controller.domain.job.events import GangPlaced, JobEvent, MoveAsked, PauseAsked
from services.controller.domain.job.job import Job
from services.controller.domain.plans import default_plan
from services.controller.domain.scheduling.node import Drain, Lease, Node
from services.controller.domain.scheduling.placement import (
    NodeUsage,
    Placed,
    Reserved,
    place,
    usages_of,
)
from services.controller.domain.scheduling.queue import Preempt, Turn, Waiting, schedule
from tests.controller.histories import NODE, NOW, launched, node, play, progressed, spec
from tests.controller.test_placement import ask

_numbers = iter(range(1, 10_000))


def waiting(ranks: int, **changes: object) -> Job:
    number = next(_numbers)
    fields: dict[str, object] = {
        "resources": {"ranks": ranks},
        "train": {"steps": 100, "global_batch": 840},
    }
    return Job(
        id=new_job_id(NOW + number, bytes(10)),
        spec=spec(**fields | changes),
        created_ms=NOW + number,
        updated_ms=NOW + number,
    )


def up_to(most: int, ranks: int) -> dict[str, object]:
    """The resources of an elastic job, or of a fixed one where ``most`` is no more."""
    return {"world": {"min": ranks, "max": most}} if most > ranks else {"ranks": ranks}


def on(where: Node, ranks: int, **changes: object) -> Job:
    """A job that runs on ``where``."""
    job = waiting(ranks, **changes)
    placed = place(ask(ranks), [NodeUsage(where.model_copy(update={"state": "READY"}))])
    assert isinstance(placed, Placed)
    event = GangPlaced(default_plan.gang(job.spec, placed), {where.id: where.incarnation})
    started = launched(job).model_copy(update={"node_id": where.id})
    first = progressed(job).model_copy(update={"node_id": where.id})
    return play(job, [event, started, first], job.created_ms).job


def parted(shares: dict[str, int], **changes: object) -> Job:
    """A job that runs with so many ranks on each of these nodes."""
    seats = [(name, place) for name, count in shares.items() for place in range(count)]
    job = waiting(len(seats), **changes)
    ranks = tuple(
        RankPlacement(rank=rank, node_id=name, local_rank=place, device="cpu")
        for rank, (name, place) in enumerate(seats)
    )
    names = list(dict.fromkeys(name for name, _ in seats))
    plan = default_plan.gang(job.spec, Placed("cpu", ranks, tuple(node(name) for name in names)))
    events: list[JobEvent] = [GangPlaced(plan, dict.fromkeys(names, "life-1"))]
    events += [launched(job).model_copy(update={"node_id": name}) for name in names]
    events.append(progressed(job).model_copy(update={"node_id": names[0]}))
    return play(job, events, job.created_ms).job


def look(jobs: list[Job], nodes: list[Node], **remaining_s: float) -> dict[str, Turn]:
    """The turns by job; ``remaining_s`` by the index of the job in ``jobs``."""
    leases = {n.id: Lease(n.incarnation, 5000) for n in nodes}
    outlook = {jobs[int(i[1:])].id: int(s * 1000) for i, s in remaining_s.items()}
    found = schedule(jobs, usages_of(nodes, jobs, leases), outlook, NOW).turns
    return {turn.job.id: turn for turn in found}


def placed(turn: Turn) -> str:
    assert isinstance(turn.outcome, Placed), turn.outcome
    (where,) = turn.outcome.nodes
    return where.id


def waits(turn: Turn) -> Waiting:
    assert isinstance(turn.outcome, Waiting), turn.outcome
    return turn.outcome


def test_priority_goes_first_then_age() -> None:
    old, young, urgent = waiting(2), waiting(2), waiting(2, priority=1)
    found = look([old, young, urgent], [node(slots=4)])
    assert list(found) == [urgent.id, old.id, young.id]
    assert placed(found[urgent.id]) == placed(found[old.id]) == "loom-1"
    assert set(waits(found[young.id]).blocked_by) == {old.id, urgent.id}


def test_what_an_elastic_job_needs_is_worked_out_once_for_any_number_of_looks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two thousand of one owner with batches of their own had each look take seconds."""
    asked: list[int] = []

    def counted(number: int, found: Callable[[int], Sequence[int]] = worlds._divisors) -> object:
        asked.append(number)
        return found(number)

    train = {"steps": 9, "global_batch": 0}
    jobs = [
        waiting(1, resources=up_to(64, 2), train=train | {"global_batch": 2 * number + 2000})
        for number in range(1100)
    ]
    look(jobs, [node(slots=1)])
    monkeypatch.setattr(worlds, "_divisors", counted)
    assert len(look(jobs, [node(slots=1)])) == len(jobs)
    assert asked == []


def test_who_was_drained_for_a_job_does_not_go_on_before_it() -> None:
    """It would be over before the slowest is drained, and be drained again as soon as it is placed."""
    where = node(slots=4)
    drained, urgent = waiting(2), waiting(4, priority=1)
    asked = MoveAsked("preempted", urgent.id, "words", 60.0)
    slow = play(on(where, 2), [asked]).job
    found = look([slow, drained, urgent], [where], i0=50, i1=30)
    assert waits(found[urgent.id]).blocked_by == (slow.id,)
    assert waits(found[drained.id]).blocked_by == (urgent.id,)


def test_who_was_drained_for_a_job_does_not_go_on_while_it_waits_for_one_that_is_paused() -> None:
    """Until a pause of minutes took effect it was placed and drained again, every other second."""
    where = node(slots=4)
    drained, urgent = waiting(2), waiting(4, priority=1)
    paused = play(on(where, 2), [PauseAsked(StopRequest(grace_s=300))]).job
    found = look([paused, drained, urgent], [where], i0=290, i1=30)
    assert waits(found[urgent.id]).blocked_by == (paused.id,)
    assert waits(found[drained.id]).blocked_by == (urgent.id,)


def test_who_would_be_drained_does_not_run_on_slots_that_others_leave_earlier() -> None:
    """A third job was to end before the paused one: then there was room for both, but not at the next look."""
    where = node(slots=6)
    third, weak, urgent = on(where, 2, priority=1), waiting(2), waiting(4, priority=1)
    paused = play(on(where, 2), [PauseAsked(StopRequest(grace_s=300))]).job
    found = look([third, paused, weak, urgent], [where], i0=100, i1=290)
    assert waits(found[urgent.id]).blocked_by == (paused.id,)
    assert waits(found[weak.id]).blocked_by == (urgent.id,)


def test_who_waits_for_one_that_is_paused_holds_no_more_slots_than_it_needs() -> None:
    """All free ones of a pool of nodes stood idle for the minute that a pause may take."""
    nodes = [node(f"n{n}", slots=4) for n in range(4)]
    runs, wide = on(nodes[3], 1), waiting(8)
    paused = play(parted({"n0": 4, "n1": 4}), [PauseAsked(StopRequest())]).job
    small = [waiting(4), waiting(3), waiting(1)]
    found = look([runs, paused, wide, *small], nodes, i1=60)
    assert waits(found[wide.id]).blocked_by == (paused.id,)
    assert [isinstance(found[job.id].outcome, Placed) for job in small] == [True, True, False]


def test_nobody_runs_where_room_is_made_since_another_has_done_its_last_step() -> None:
    """It may save its checkpoint for minutes, and whoever was given its slots was drained, look after look."""
    where = node(slots=4)
    saves, weaker = on(where, 2, priority=1), on(where, 1)
    urgent, weakest = waiting(2, priority=1), waiting(1)
    found = look([saves, weaker, urgent, weakest], [where], i0=0)
    assert isinstance(found[urgent.id].outcome, Preempt)
    assert waits(found[weakest.id]).blocked_by == (urgent.id,)


def test_a_pause_that_takes_longer_than_a_drain_is_not_waited_for() -> None:
    """Its grace may be a day, for which an urgent job waited beside one of low priority."""
    where = node(slots=4)
    weak, urgent = on(where, 2), waiting(2, priority=1)
    asked = [PauseAsked(StopRequest(grace_s=86_400))]
    paused = play(on(where, 2), asked, NOW - 30_000).job
    assert waits(look([paused, weak, urgent], [where], i0=86_000)[urgent.id]).blocked_by == (
        paused.id,
    )
    paused = play(on(where, 2), asked, NOW - 90_000).job
    room = look([paused, weak, urgent], [where], i0=86_000)[urgent.id].outcome
    assert isinstance(room, Preempt)
    assert [victim.id for victim in room.victims] == [weak.id]
    # Nobody is drained beside it who alone is not enough.
    large = waiting(4, priority=1)
    found = look([paused, weak, large], [where], i0=86_000)
    assert {*waits(found[large.id]).blocked_by} == {paused.id, weak.id}


def test_a_large_job_is_not_starved_by_small_ones_that_come_later() -> None:
    runs, large, small = on(node(slots=4), 2), waiting(4), waiting(2)
    found = look([runs, large, small], [node(slots=4)])
    assert waits(found[large.id]).blocked_by == (runs.id,)
    assert waits(found[large.id]).start_ms is None
    assert waits(found[small.id]).blocked_by == (large.id,)


def test_seats_that_the_head_needs_at_no_time_are_filled() -> None:
    # Of 9 seats the head wants 7, as soon as the one job in its way has ended: two are spare.
    runs, head = on(node(slots=9), 6), waiting(7)
    one, another, third = waiting(1), waiting(1), waiting(1)
    found = look([runs, head, one, another, third], [node(slots=9)])
    assert placed(found[one.id]) == placed(found[another.id]) == "loom-1"
    assert waits(found[third.id]).blocked_by == (head.id,)
    # Two jobs of one seat each are in the way: the head begins as soon as either ends.
    first, second = on(node(slots=4), 1), on(node(slots=4), 1)
    head, one = waiting(3), waiting(1)
    found = look([first, second, head, one], [node(slots=4)])
    assert waits(found[one.id]).blocked_by == (head.id,)


def test_a_short_job_runs_ahead_only_if_it_ends_before_the_head_begins() -> None:
    runs, head = on(node(slots=4), 2), waiting(4)
    short, long = waiting(2), waiting(2)
    jobs = [runs, head, short, long]
    found = look(jobs, [node(slots=4)], _0=60, _2=50, _3=70)
    assert waits(found[head.id]).start_ms == NOW + 60_000
    assert placed(found[short.id]) == "loom-1"
    assert waits(look(jobs, [node(slots=4)], _0=60, _3=70)[long.id]).blocked_by == (head.id,)


def test_a_job_that_lasts_takes_only_what_is_left_beside_the_head() -> None:
    # After 60 s five of eight seats are free: four for the head, one to spare.
    plane = node(slots=8)
    lasting, runs, head = on(plane, 3), on(plane, 3), waiting(4)
    small, large = waiting(1), waiting(2)
    found = look([lasting, runs, head, small], [plane], _1=60)
    assert placed(found[small.id]) == "loom-1"
    found = look([lasting, runs, head, large], [plane], _1=60)
    assert waits(found[large.id]).blocked_by == (head.id,)


def test_another_node_that_the_head_does_not_wait_for_is_filled() -> None:
    a, b = node("a", slots=4), node("b", slots=4)
    on_a, on_b = on(a, 4), on(b, 2)
    head, small = waiting(4), waiting(2)
    found = look([on_a, on_b, head, small], [a, b], _0=60)
    assert waits(found[head.id]).start_ms == NOW + 60_000
    assert placed(found[small.id]) == "b"
    # While nobody can say which of them is free first, both are kept for it.
    assert waits(look([on_a, on_b, head, small], [a, b])[small.id]).blocked_by == (head.id,)


def test_a_node_that_could_never_hold_the_head_is_filled() -> None:
    big, little = node("big", slots=4), node("little", slots=2)
    runs, head, small = on(big, 2), waiting(4), waiting(2)
    assert placed(look([runs, head, small], [big, little])[small.id]) == "little"


def test_a_job_of_higher_priority_has_the_fewest_of_the_least_important_drained() -> None:
    plane = node(slots=6)
    old = on(plane, 2)
    young, important = on(plane, 2), on(plane, 2, priority=3)
    head = waiting(2, priority=5)
    found = look([old, young, important, head], [plane])
    room = found[head.id].outcome
    assert isinstance(room, Preempt)
    assert [v.id for v in room.victims] == [young.id]
    larger = waiting(4, priority=5)
    room = look([old, young, important, larger], [plane])[larger.id].outcome
    assert isinstance(room, Preempt)
    assert {v.id for v in room.victims} == {young.id, old.id}


def test_one_large_victim_is_better_than_two_small_ones() -> None:
    plane = node(slots=6)
    jobs = [on(plane, 4), on(plane, 1), on(plane, 1)]
    head = waiting(3, priority=1)
    room = look([*jobs, head], [plane])[head.id].outcome
    assert isinstance(room, Preempt)
    assert [v.id for v in room.victims] == [jobs[0].id]


def test_equals_and_betters_are_not_preempted_and_neither_is_what_would_not_suffice() -> None:
    plane = node(slots=4)
    equal, weaker = on(plane, 3, priority=2), on(plane, 1)
    head = waiting(2, priority=2)
    assert waits(look([equal, weaker, head], [plane])[head.id]).blocked_by == (
        equal.id,
        weaker.id,
    )


def test_room_that_is_being_made_is_waited_for_and_nobody_else_is_drained() -> None:
    plane = node(slots=4)
    leaving, stays = on(plane, 2), on(plane, 2)
    move = MoveAsked("preempted", "job_x", "makes room", 60.0)
    leaving = play(leaving, [move], NOW + 100).job
    assert leaving.state is JobState.RUNNING
    head, small = waiting(2, priority=5), waiting(1)
    found = look([leaving, stays, head, small], [plane], _0=60)
    assert waits(found[head.id]).blocked_by == (leaving.id,)
    assert waits(found[head.id]).start_ms == NOW + 60_000
    assert isinstance(found[small.id].outcome, Waiting)
    pausing = play(stays, [PauseAsked(StopRequest())], NOW + 100).job
    assert waits(look([leaving, pausing, head], [plane])[head.id]).blocked_by


def test_a_draining_node_takes_nobody_and_holds_nobody_up() -> None:
    big, little = node("big", slots=4), node("little", slots=2)
    draining = big.model_copy(update={"drain": Drain(asked_ms=1)})
    large, small = waiting(4), waiting(2)
    found = look([large, small], [draining, little])
    assert "draining: big" in waits(found[large.id]).reason
    assert placed(found[small.id]) == "little"


def test_nobody_is_drained_on_several_nodes_for_a_gang_that_waits_for_a_single_one() -> None:
    """The job was placed again as soon as it had ended, and drained again, 30 times in a minute."""
    nodes = [node("a", slots=4), node("b", slots=4), node("pool-1", slots=8)]
    runs, urgent = on(nodes[0], 4), waiting(8, priority=1)
    leases = {n.id: Lease(n.incarnation, 5000) for n in nodes}
    on_its_way = {"pool-1": Reserved("pool", is_ready=False)}
    usages = usages_of(nodes, [runs], leases, on_its_way)
    (turn,) = schedule([runs, urgent], usages, {}, NOW).turns
    assert waits(turn).reason.endswith("provisioned or given back: pool-1")


def test_a_gang_for_several_nodes_is_not_starved_by_those_that_fit_on_one() -> None:
    plane = [node("a", slots=4), node("b", slots=4)]
    runs, wide, small = on(plane[0], 2), waiting(8), waiting(1)
    found = look([runs, wide, small], plane)
    assert waits(found[wide.id]).blocked_by == (runs.id,)
    assert waits(found[small.id]).blocked_by == (wide.id,)
    short = look([runs, wide, small], plane, _0=60, _2=30)
    assert placed(short[small.id]) in {"a", "b"}
    outcome = look([wide, small], plane)[wide.id].outcome
    assert isinstance(outcome, Placed)
    assert len(outcome.nodes) == 2


def test_a_gang_for_several_nodes_preempts_on_all_of_them() -> None:
    plane = [node("a", slots=2), node("b", slots=2)]
    jobs = [on(plane[0], 2), on(plane[1], 2)]
    wide = waiting(4, priority=1)
    room = look([*jobs, wide], plane)[wide.id].outcome
    assert isinstance(room, Preempt)
    assert {victim.id for victim in room.victims} == {job.id for job in jobs}


def test_seats_that_make_no_whole_group_are_no_room_and_nobody_is_drained_for_them() -> None:
    # Once the weaker one has left, three seats of one node and one of the other are free: two
    # pairs are not.
    plane = [node("a", slots=3), node("b", slots=3)]
    stays = parted({"a": 2}, priority=10)
    weaker = parted({"b": 3, "a": 1})
    pairs = waiting(4, priority=5, mesh={"dp_replicate": 1, "dp_shard": 2, "tp": 2})
    found = waits(look([stays, weaker, pairs], plane)[pairs.id])
    assert (set(found.blocked_by), found.start_ms) == ({stays.id, weaker.id}, None)
    # Nor is it waited for as if its end were enough.
    leaving = play(weaker, [PauseAsked(StopRequest())], NOW).job
    found = waits(look([stays, leaving, pairs], plane, _1=60)[pairs.id])
    assert (set(found.blocked_by), found.start_ms) == ({stays.id, weaker.id}, None)
    assert waits(look([stays, leaving, pairs], plane, _0=90, _1=60)[pairs.id]).start_ms == (
        NOW + 90_000
    )


def test_only_those_are_drained_whose_seats_make_whole_groups() -> None:
    # The youngest would be the first to leave, but its seat makes no pair with any other.
    plane = [node("a", slots=3), node("b", slots=2)]
    stays, useful, in_vain = parted({"a": 2}, priority=9), parted({"b": 1}), parted({"a": 1})
    pair = waiting(2, priority=5, mesh={"dp_shard": 1, "tp": 2})
    room = look([stays, useful, in_vain, pair], plane)[pair.id].outcome
    assert isinstance(room, Preempt)
    assert [victim.id for victim in room.victims] == [useful.id]
    wide = [node("a", slots=3), node("b", slots=3)]
    large, small = parted({"a": 1, "b": 1}, priority=9), [parted({"a": 1}), parted({"b": 1})]
    pairs = waiting(4, priority=5, mesh={"dp_replicate": 1, "dp_shard": 2, "tp": 2})
    room = look([large, *small, pairs], wide)[pairs.id].outcome
    assert isinstance(room, Preempt)
    assert {victim.id for victim in room.victims} == {job.id for job in small}


def test_a_rank_that_would_break_a_pair_of_the_head_on_another_node_waits() -> None:
    # Ten ranks in pairs need all but one pair of seats; one seat of b stays taken.
    plane = [node("a"), node("b"), node("c")]
    running = [parted(shares, priority=9) for shares in ({"a": 4}, {"b": 1}, {"c": 2})]
    pairs = waiting(10, priority=5, mesh={"dp_replicate": 1, "dp_shard": 5, "tp": 2})
    single = waiting(1)
    jobs = [*running, pairs, single]
    assert waits(look(jobs, plane, _0=60, _2=30)[pairs.id]).start_ms == NOW + 60_000
    assert waits(look(jobs, plane, _0=60, _2=30)[single.id]).start_ms is None
    assert placed(look(jobs, plane, _0=60, _2=30, _4=20)[single.id]) == "c"


@settings(max_examples=60, derandomize=True)
@given(
    sizes=st.lists(
        st.tuples(st.integers(0, 2), st.integers(0, 2), st.integers(0, 2)), min_size=1, max_size=5
    ),
    important=st.lists(st.booleans(), min_size=5, max_size=5),
)
def test_who_is_drained_makes_room_and_none_of_them_in_vain(
    *, sizes: list[tuple[int, int, int]], important: list[bool]
) -> None:
    plane = [node("a", slots=3), node("b", slots=3), node("c", slots=3)]
    there = [0, 0, 0]
    jobs = []
    for shares, strong in zip(sizes, important, strict=False):
        fits = tuple(min(more, 3 - taken) for more, taken in zip(shares, there, strict=True))
        if any(fits):
            there = [taken + more for taken, more in zip(there, fits, strict=True)]
            by_node = dict(zip("abc", fits, strict=True))
            jobs.append(parted(by_node, priority=9 if strong else 0))
    pairs = waiting(4, priority=5, mesh={"dp_replicate": 1, "dp_shard": 2, "tp": 2})

    def fits_without(gone: set[str]) -> bool:
        left = [job for job in jobs if job.id not in gone]
        return isinstance(look([*left, pairs], plane)[pairs.id].outcome, Placed)

    weaker = {job.id for job in jobs if job.spec.priority == 0}
    outcome = look([*jobs, pairs], plane)[pairs.id].outcome
    if isinstance(outcome, Preempt):
        victims = {victim.id for victim in outcome.victims}
        assert fits_without(victims)
        assert not any(fits_without(victims - {one}) for one in victims)
    else:
        assert isinstance(outcome, Placed) or not fits_without(weaker)


# --- over time ------------------------------------------------------------------------------------

ARRIVALS = st.lists(
    st.tuples(st.integers(1, 4), st.integers(0, 4), st.integers(1, 20), st.integers(0, 6)),
    min_size=1,
    max_size=14,
)


@settings(max_examples=60, derandomize=True)
@given(arrivals=ARRIVALS, knows=st.booleans())
def test_nobody_who_was_promised_a_start_begins_later_and_everybody_begins(
    *, arrivals: list[tuple[int, int, int, int]], knows: bool
) -> None:
    """Jobs (ranks, most of them, seconds, seconds since the one before).

    Their estimates are right, or unknown.
    """
    plane = node(slots=4)
    leases = {plane.id: Lease(plane.incarnation, 5000)}
    coming: list[tuple[int, Job, int]] = []
    at_ms = NOW
    for ranks, most, lasts_s, gap_s in arrivals:
        at_ms += gap_s * 1_000
        coming.append((at_ms, waiting(ranks, resources=up_to(most, ranks)), lasts_s * 1_000))
    lasts = {job.id: lasts_ms for _, job, lasts_ms in coming}
    queued: list[Job] = []
    running: dict[str, tuple[int, Job]] = {}
    promised: dict[str, int] = {}
    while coming or queued or running:
        now = min([at for at, _, _ in coming] + [end for end, _ in running.values()])
        queued += [job for at, job, _ in coming if at <= now]
        coming = [entry for entry in coming if entry[0] > now]
        running = {name: entry for name, entry in running.items() if entry[0] > now}
        jobs = [*(job for _, job in running.values()), *queued]
        left = {name: end - now for name, (end, _) in running.items()}
        outlook = lasts | left if knows else {}
        for turn in schedule(jobs, usages_of([plane], jobs, leases), outlook, now).turns:
            match turn.outcome:
                case Placed() as seat:
                    assert now <= promised.get(turn.job.id, now), "begins later than was promised"
                    event = GangPlaced(default_plan.gang(turn.job.spec, seat), {NODE: "life-1"})
                    placed = play(turn.job, [event], now).job
                    running[placed.id] = (now + lasts[placed.id], placed)
                    queued = [job for job in queued if job.id != placed.id]
                case Waiting(start_ms=int(start_ms)):
                    promised.setdefault(turn.job.id, start_ms)
        assert sum(job.plan.world_size for _, job in running.values() if job.plan) <= 4
        assert running or not queued, "with nobody in the way, somebody begins"
