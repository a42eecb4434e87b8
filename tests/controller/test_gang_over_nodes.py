"""A gang on several nodes starts, stops and fails as one."""

import pytest

from services.contract.api.views import StopRequest
from services.contract.jobs.plans import GangPlan, RankPlacement
from services.contract.messages.base import Address
from services.contract.messages.commands import LaunchGang, LoadCheckpoint, StopGang
from services.contract.messages.facts import (
    ExitStanding,
    GangEnded,
    GangLaunched,
    LaunchLoads,
    LaunchRefused,
    RankExit,
)
from services.contract.messages.findings import Findings, RankFinding
from services.contract.redis.redis_keys import LONGEST_TEXT
from services.contract.words.ids import checkpoint_id
from services.contract.words.states import ExitReason, FailureClass, JobState
from services.controller.domain.decisions.attempt_events import (
    ANSWER_DUE_MS,
    RESENT_MOST,
    is_overdue,
)
from services.controller.domain.decisions.dispatch import decide
from services.controller.domain.job.effects import Decision, Send
from services.controller.domain.job.events import (
    AnswerOverdue,
    GangPlaced,
    JobEvent,
    NodeLost,
    PauseAsked,
)
from services.controller.domain.job.job import Job
from services.controller.domain.plans import default_plan
from tests.controller.histories import NOW, linked, new_job, play, votes

HEAD, OTHER = "loom-1", "loom-2"
STORE = Address(host="10.0.0.1", port=4711)


def placed_on_two(job: Job) -> GangPlaced:
    """Ranks 0 and 1 on the head node, 2 and 3 on the other one."""
    seats = tuple(
        RankPlacement(
            rank=rank, node_id=HEAD if rank < 2 else OTHER, local_rank=rank % 2, device="cpu"
        )
        for rank in range(4)
    )
    plan = GangPlan(device_type="cpu", sharding=default_plan.shard(job.spec), ranks=seats)
    return GangPlaced(plan, {HEAD: "life-1", OTHER: "life-1"})


def launched(job: Job, node: str) -> GangLaunched:
    ranks = (0, 1) if node == HEAD else (2, 3)
    return GangLaunched(
        job_id=job.id,
        fence=1,
        node_id=node,
        pids={rank: 100 + rank for rank in ranks},
        store=STORE if node == HEAD else None,
    )


def ended(job: Job, node: str, **how: object) -> GangEnded:
    exits = tuple(
        RankExit.model_validate(
            {"rank": rank, "pid": 100 + rank, "order": order, "step": 5, "phase": "FORWARD"} | how
        )
        for order, rank in enumerate((0, 1) if node == HEAD else (2, 3))
    )
    return GangEnded(job_id=job.id, fence=1, node_id=node, exits=exits, last_step=5)


def wide_job() -> Job:
    return new_job(resources={"ranks": 4})


def starting() -> Job:
    job = wide_job()
    return play(job, [placed_on_two(job), launched(job, HEAD), launched(job, OTHER)]).job


def sent(decision: Decision, kind: type[LaunchGang | StopGang]) -> list[Send]:
    return [send for send in decision.sends if isinstance(send.command, kind)]


def test_the_node_of_rank_0_launches_first_and_the_others_are_told_where_it_listens() -> None:
    job = wide_job()
    first = decide(job, placed_on_two(job), NOW)
    assert [send.node_id for send in first.sends] == [HEAD]
    second = decide(first.job, launched(job, HEAD), NOW)
    (told,) = sent(second, LaunchGang)
    assert told.node_id == OTHER
    assert isinstance(told.command, LaunchGang)
    assert told.command.store == STORE
    assert second.job.state is JobState.PLACING
    third = decide(second.job, launched(job, OTHER), NOW)
    assert third.job.state is JobState.STARTING


def test_the_head_node_is_told_once_however_often_it_answers() -> None:
    job = wide_job()
    events: list[JobEvent] = [placed_on_two(job), launched(job, HEAD), launched(job, HEAD)]
    assert [send.node_id for send in play(job, events).sends] == [HEAD, OTHER]


def test_an_overdue_launch_is_repeated_only_where_it_can_be_carried_out() -> None:
    job = wide_job()
    alone = play(job, [placed_on_two(job), AnswerOverdue()])
    assert [send.node_id for send in alone.sends] == [HEAD, HEAD]
    late = decide(play(job, [placed_on_two(job), launched(job, HEAD)]).job, AnswerOverdue(), NOW)
    (again,) = late.sends
    assert again.node_id == OTHER
    assert isinstance(again.command, LaunchGang)
    assert again.command.store == STORE


def loads(job: Job, node: str, count: int) -> LaunchLoads:
    return LaunchLoads(job_id=job.id, fence=1, node_id=node, bytes=count, of=10_000_000_000)


def test_a_node_that_loads_the_checkpoint_is_waited_for_as_long_as_bytes_come() -> None:
    job = new_job(resources={"ranks": 4})
    job = play(job, [placed_on_two(job), launched(job, HEAD)]).job
    for count in range(RESENT_MOST + 5):
        job = play(job, [AnswerOverdue(), loads(job, OTHER, count * 100_000_000)]).job
    assert job.state is JobState.PLACING
    assert job.reason == "attempt 1: loom-2 loads the checkpoint, 2.4 of 10.0 GB"
    silent = play(job, [AnswerOverdue()] * (RESENT_MOST + 1)).job
    assert silent.attempts[-1].lost_nodes == (OTHER,)
    stopping = play(job, [AnswerOverdue(), PauseAsked(StopRequest())]).job
    assert play(stopping, [loads(job, OTHER, 1)]).job == stopping


def test_all_nodes_load_the_checkpoint_at_once_and_launch_one_after_the_other() -> None:
    job = new_job(resources={"ranks": 4})
    first = play(job, [placed_on_two(job), launched(job, HEAD)])
    assert not [each for each in first.sends if isinstance(each.command, LoadCheckpoint)]
    saved = checkpoint_id(job.id, 10, 1)
    again = play(
        first.job,
        [
            launched(job, OTHER),
            *votes(job, 10),
            linked(job, 10),
            NodeLost(OTHER, "its lease ended"),
            ended(job, HEAD, signal=9),
            placed_on_two(job),
        ],
    )
    (load,) = [each for each in again.sends if isinstance(each.command, LoadCheckpoint)]
    assert load == Send(OTHER, LoadCheckpoint(job_id=job.id, fence=2, checkpoint_id=saved))


def test_a_stop_before_the_others_were_launched_launches_them_no_more() -> None:
    job = wide_job()
    pause = PauseAsked(StopRequest(checkpoint="none"))
    decision = play(job, [placed_on_two(job), pause, launched(job, HEAD)])
    assert [send.node_id for send in sent(decision, LaunchGang)] == [HEAD]
    refused = LaunchRefused(
        job_id=job.id, fence=1, node_id=OTHER, reason="it was stopped before its launch"
    )
    over = play(decision.job, [refused, ended(job, HEAD, signal=9, standing=ExitStanding.VICTIM)])
    assert over.job.state is JobState.PAUSED


def test_a_refusal_of_one_node_ends_the_others_and_the_attempt() -> None:
    job = play(wide_job(), []).job
    begun = play(job, [placed_on_two(job), launched(job, HEAD)]).job
    refused = LaunchRefused(job_id=job.id, fence=1, node_id=OTHER, reason="no room")
    decision = decide(begun, refused, NOW)
    assert [send.node_id for send in sent(decision, StopGang)] == [HEAD]
    assert decision.job.attempt is not None
    assert not decision.job.attempt.is_over
    over = decide(decision.job, ended(job, HEAD, signal=9, standing=ExitStanding.VICTIM), NOW).job
    assert over.state is JobState.RESTARTING
    assert over.attempts[0].exit_reason is ExitReason.LAUNCH_FAILED


def test_a_node_that_refuses_because_the_attempt_had_failed_is_not_blamed() -> None:
    job = wide_job()
    echo = LaunchRefused(
        job_id=job.id, fence=1, node_id=OTHER, reason="it was stopped before its launch"
    )
    refused = LaunchRefused(job_id=job.id, fence=1, node_id=HEAD, reason="it has no such secret")
    over = play(job, [placed_on_two(job), refused, echo]).job
    assert over.attempts[0].exit_reason is ExitReason.LAUNCH_FAILED
    assert over.reason == (
        "loom-1 could not launch its ranks: it has no such secret; restart 1 of 3"
    )
    over = play(job, [placed_on_two(job), NodeLost(HEAD, "loom-1 is lost"), echo]).job
    assert over.attempts[0].exit_reason is ExitReason.NODE_LOST
    assert over.attempts[0].diagnosis is not None
    assert over.attempts[0].diagnosis.verdict is FailureClass.NODE_LOST
    assert over.reason == "loom-1 is lost; restart 1 of 3"


def test_a_refusal_is_the_cause_even_if_a_node_is_lost_afterwards() -> None:
    job = wide_job()
    refused = LaunchRefused(job_id=job.id, fence=1, node_id=OTHER, reason="no room")
    lost = NodeLost(HEAD, "loom-1 is lost")
    over = play(job, [placed_on_two(job), launched(job, HEAD), refused, lost]).job
    assert over.attempts[0].exit_reason is ExitReason.LAUNCH_FAILED
    assert over.attempts[0].diagnosis is not None
    assert over.attempts[0].diagnosis.verdict is FailureClass.LAUNCH_FAILED
    assert over.reason == "loom-2 could not launch its ranks: no room; restart 1 of 3"


def test_a_refusal_of_an_attempt_that_is_to_stop_is_no_failure() -> None:
    job = wide_job()
    refusals = [
        LaunchRefused(job_id=job.id, fence=1, node_id=name, reason="it was stopped")
        for name in (HEAD, OTHER)
    ]
    over = play(job, [placed_on_two(job), PauseAsked(StopRequest()), *refusals]).job
    assert over.state is JobState.PAUSED
    assert over.attempts[0].refusal is None


def test_a_lost_node_ends_the_others_and_their_seats_are_taken_until_they_are_gone() -> None:
    job = starting()
    lost = decide(job, NodeLost(OTHER, "loom-2 is lost"), NOW)
    assert {send.node_id for send in sent(lost, StopGang)} == {HEAD, OTHER}
    assert lost.job.attempt is not None
    assert lost.job.attempt.live_nodes == (HEAD,)
    assert lost.job.state is JobState.STARTING
    over = decide(lost.job, ended(job, HEAD, signal=9, standing=ExitStanding.VICTIM), NOW).job
    assert over.state is JobState.RESTARTING
    assert over.attempts[0].exit_reason is ExitReason.NODE_LOST
    assert over.attempts[0].failure is not None
    assert over.attempts[0].failure.error == "loom-2 is lost"


def test_a_kill_that_nobody_answered_is_repeated() -> None:
    job = decide(starting(), NodeLost(OTHER, "loom-2 is lost"), NOW).job
    assert not is_overdue(job, NOW + ANSWER_DUE_MS)
    assert is_overdue(job, NOW + ANSWER_DUE_MS + 1)
    again = decide(job, AnswerOverdue(), NOW)
    assert [send.node_id for send in sent(again, StopGang)] == [HEAD]


def test_the_rank_that_failed_by_itself_is_named_whichever_node_reports_first() -> None:
    job = starting()
    echo = ended(
        job, HEAD, exit_code=1, standing=ExitStanding.ECHO, error="Connection closed by peer"
    )
    own = ended(job, OTHER, exit_code=7, standing=ExitStanding.OWN_FAILURE)
    for events in ([echo, own], [own, echo]):
        failure = play(job, events).job.attempts[0].failure
        assert failure is not None
        assert (failure.rank, failure.exit_code) == (2, 7)


def hung(job: Job, node: str, *, stopped: int | None = None) -> GangEnded:
    """Its agent found that its ranks stand still: all in a collective, but the stopped one."""
    ranks = tuple(
        RankFinding(
            rank=rank,
            pid=100 + rank,
            phase="FORWARD",
            process="T" if rank == stopped else "S",
            frames=() if rank == stopped else ("wait (torch/distributed/c10d.py:1)",),
        )
        for rank in ((0, 1) if node == HEAD else (2, 3))
    )
    found = Findings(why="hang", still_s=6.0, allowed_s=5.0, ranks=ranks)
    end = ended(job, node, signal=9, standing=ExitStanding.VICTIM)
    return end.model_copy(update={"hang": found})


def test_of_ranks_that_hang_on_several_nodes_the_one_that_is_stopped_is_named() -> None:
    job = starting()
    waiting, frozen = hung(job, HEAD), hung(job, OTHER, stopped=3)
    for events in ([waiting, frozen], [frozen, waiting]):
        (attempt,) = play(job, events).job.attempts
        assert attempt.exit_reason is ExitReason.HANG
        assert attempt.failure is not None
        assert (attempt.failure.rank, attempt.failure.node_id) == (3, OTHER)
        assert attempt.diagnosis is not None
        assert (attempt.diagnosis.verdict, attempt.diagnosis.rank) == (FailureClass.FROZEN, 3)


def test_ranks_that_hang_because_a_node_is_gone_are_not_blamed() -> None:
    job = starting()
    lost = NodeLost(OTHER, "loom-2 is lost")
    orders: list[list[JobEvent]] = [[hung(job, HEAD), lost], [lost, hung(job, HEAD)]]
    for events in orders:
        (attempt,) = play(job, events).job.attempts
        assert attempt.exit_reason is ExitReason.NODE_LOST
        assert attempt.failure is not None
        assert attempt.failure.error == "loom-2 is lost"
        assert attempt.diagnosis is not None
        assert attempt.diagnosis.verdict is FailureClass.NODE_LOST


def test_what_the_other_nodes_see_is_asked_for_before_ranks_that_hang_are_killed_there() -> None:
    job = starting()
    (kill,) = sent(decide(job, hung(job, HEAD), NOW), StopGang)
    assert isinstance(kill.command, StopGang)
    assert (kill.node_id, kill.command.mode, kill.command.look) == (OTHER, "kill", True)
    failed = ended(job, HEAD, exit_code=1)
    (plain,) = sent(decide(job, failed, NOW), StopGang)
    assert isinstance(plain.command, StopGang)
    assert not plain.command.look  # no rank hangs: the next attempt must not wait


def test_ranks_that_lost_each_other_and_did_not_fail_blame_the_network() -> None:
    job = starting()
    said = {"exit_code": 1, "error": "DistStoreError: wait timeout", "traceback": "Traceback"}
    echoes = [ended(job, node, standing=ExitStanding.ECHO, **said) for node in (HEAD, OTHER)]
    (attempt,) = play(job, echoes).job.attempts
    assert attempt.diagnosis is not None
    assert attempt.diagnosis.verdict is FailureClass.NETWORK
    assert f"ranks on {HEAD}, {OTHER} did not find or lost each other" in attempt.diagnosis.summary
    own = ended(job, OTHER, **{**said, "error": "ValueError: no"})
    (attempt,) = play(job, [echoes[0], own]).job.attempts
    assert attempt.diagnosis is not None
    assert attempt.diagnosis.verdict is FailureClass.USER_ERROR


def test_a_node_whose_ranks_trained_on_is_told_from_one_that_is_gone() -> None:
    job = starting()
    head = ended(job, HEAD, signal=9, standing=ExitStanding.VICTIM)
    for on_s, is_said in ((4.2, True), (None, False)):
        lost = NodeLost(OTHER, "loom-2 is lost", trained_on_s=on_s)
        (attempt,) = play(job, [lost, head]).job.attempts
        assert attempt.diagnosis is not None
        assert attempt.diagnosis.summary.startswith("loom-2 is lost")
        told = "for 4.2 s after its agent was last heard of" in attempt.diagnosis.summary
        assert told is is_said


@pytest.mark.parametrize("how", ["they fail", "they hang"])
def test_a_record_takes_whatever_five_hundred_ranks_say_as_they_end(how: str) -> None:
    """One that Redis does not take can never be written, and the attempt would not end."""
    job = new_job(resources={"ranks": 512}, train={"steps": 10, "global_batch": 512})
    nodes = [f"loom-{number}" for number in range(1, 65)]
    seats = tuple(
        RankPlacement(rank=rank, node_id=nodes[rank // 8], local_rank=rank % 8, device="cpu")
        for rank in range(512)
    )
    plan = GangPlan(device_type="cpu", sharding=default_plan.shard(job.spec), ranks=seats)
    events: list[JobEvent] = [GangPlaced(plan, dict.fromkeys(nodes, "life-1"))]
    for place, node in enumerate(nodes):
        pids = dict.fromkeys(range(8 * place, 8 * place + 8), 1)
        store = STORE if node == HEAD else None
        events.append(GangLaunched(job_id=job.id, fence=1, node_id=node, pids=pids, store=store))
    job = play(job, events).job
    for place, node in enumerate(nodes):
        its = range(8 * place, 8 * place + 8)
        shown = {"pid": 1, "phase": "FORWARD", "step": 5}
        found = Findings(
            why="hang",
            still_s=6.0,
            allowed_s=5.0,
            ranks=tuple(
                RankFinding(rank=rank, stacks="s" * 32_768, process="S", **shown) for rank in its
            ),
        )
        exits = tuple(
            RankExit(
                rank=rank,
                order=order,
                exit_code=1,
                error="e" * 4_096,
                traceback="t" * 32_768,
                **shown,
            )
            for order, rank in enumerate(its)
        )
        fact = GangEnded(
            job_id=job.id,
            fence=1,
            node_id=node,
            exits=exits,
            last_step=5,
            hang=found if how == "they hang" else None,
        )
        job = decide(job, fact, NOW).job
        assert len(job.model_dump_json()) < LONGEST_TEXT
    assert job.attempt is None or job.attempt.is_over
    assert job.attempts[-1].exit_reason is not None
