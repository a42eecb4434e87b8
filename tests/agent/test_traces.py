"""An agent has its ranks record, tells what came of it, and removes what dead ranks left."""

import gzip
import json
import os
import signal
from pathlib import Path

import pytest

from services.contract.jobs.traces import draft, raw_draft, trace_file, traces_folder
from services.contract.messages.commands import RecordTrace, RemoveTraces, StopGang
from services.contract.messages.facts import (
    GangEnded,
    GangProgressed,
    TraceFailed,
    TraceOrdered,
    TraceRecorded,
)
from services.contract.messages.rank_pipe import (
    RankFinished,
    RankOrder,
    RankTraced,
    RankTraceFailed,
    TraceOrder,
)
from services.contract.words.ids import new_trace_id
from services.worker.agent.gangs.events import (
    DropTrace,
    Exited,
    Instruct,
    Kill,
    MessageCame,
    Tell,
    TraceAsked,
)
from services.worker.rank.process.seat import DEFAULT_TRAINER
from tests.agent.conftest import (
    FOREVER,
    JOB,
    NODE,
    AgentProcess,
    Controller,
    StartAgent,
    ended,
    launch,
    launched,
    running,
)
from tests.agent.test_gang import after, gang
from tests.agent.test_real_trainer import tiny
from tests.waiting import until

KILLED = int(signal.SIGKILL)


def trace_id(number: int = 1) -> str:
    return new_trace_id(1_700_000_000_000, bytes([number] * 10))


def record(*ranks: int, steps: int = 3, number: int = 1, fence: int = 1) -> RecordTrace:
    return RecordTrace(job_id=JOB, fence=fence, trace_id=trace_id(number), steps=steps, ranks=ranks)


# --- decisions ----------------------------------------------------------------------------------


def ordered(number: int = 1) -> Tell:
    return Tell(TraceOrdered(job_id=JOB, fence=1, node_id=NODE, trace_id=trace_id(number)))


def instruct(*ranks: int, number: int = 1) -> Instruct:
    return Instruct(ranks, RankOrder(trace=TraceOrder(trace_id=trace_id(number), steps=3)))


def failure(rank: int, reason: str, number: int = 1) -> TraceFailed:
    return TraceFailed(
        job_id=JOB, fence=1, node_id=NODE, trace_id=trace_id(number), rank=rank, reason=reason
    )


def traced(rank: int, number: int = 1) -> MessageCame:
    said = RankTraced(trace_id=trace_id(number), bytes=7, first_step=4, last_step=6)
    return MessageCame(rank, said)


def test_the_ranks_that_live_here_are_told_once_however_often_the_command_comes() -> None:
    state, effects = after(gang(2), TraceAsked(record(1, 5)))
    assert effects == [ordered(), instruct(1)]
    assert after(state, TraceAsked(record(1, 5)))[1] == [ordered()]


def test_what_a_rank_recorded_is_told_with_its_place_and_then_it_may_record_again() -> None:
    state, effects = after(gang(2), TraceAsked(record(0, 1)), traced(1))
    assert effects[-1] == Tell(
        TraceRecorded(
            job_id=JOB,
            fence=1,
            node_id=NODE,
            trace_id=trace_id(),
            rank=1,
            path=str(trace_file(Path(), JOB, trace_id(), 1)),
            bytes=7,
            first_step=4,
            last_step=6,
        )
    )
    _, effects = after(state, TraceAsked(record(0, 1, number=2)))
    busy = failure(0, f"it still records {trace_id()}", 2)
    assert effects == [ordered(2), Tell(busy), instruct(1, number=2)]


def test_a_rank_that_dies_records_no_more_and_what_it_left_is_removed_before_that_is_told() -> None:
    state, _ = after(gang(2), TraceAsked(record(0, 1)))
    state, effects = after(state, Exited(1, None, KILLED))
    why = "its process ended by signal 9 before it was done"
    assert effects == [DropTrace(1, trace_id(), failure(1, why)), Kill((0,))]
    done = MessageCame(0, RankFinished(step=9, drained=False))
    state, effects = after(state, done, Exited(0, 0, None))
    why = "its process ended by code 0 before it was done"
    assert effects == [DropTrace(0, trace_id(), failure(0, why))]
    assert after(state, TraceAsked(record(0, number=2)))[1] == [
        ordered(2),
        Tell(failure(0, "it has ended", 2)),
    ]


@pytest.mark.parametrize("number", [1, 2])
def test_a_rank_that_speaks_of_a_trace_that_it_was_not_told_to_record_ends_its_gang(
    number: int,
) -> None:
    told = [TraceAsked(record(0))] if number == 2 else []
    state, effects = after(gang(2), *told, traced(0, number))
    assert effects[-1] == Kill((0, 1))
    failed = state.ranks[0].failed
    assert failed is not None
    assert "which it was not asked to record" in failed.error


def test_a_failure_that_a_rank_tells_is_passed_on() -> None:
    said = MessageCame(0, RankTraceFailed(trace_id=trace_id(), reason="no room"))
    state, effects = after(gang(2), TraceAsked(record(0)), said)
    assert effects[-1] == Tell(failure(0, "no room"))
    assert after(state, Exited(0, None, KILLED))[1] == [Kill((1,))]


# --- a real agent ---------------------------------------------------------------------------------


@pytest.mark.system
@pytest.mark.ranks
def test_real_ranks_record_while_they_train(
    start_agent: StartAgent, controller: Controller
) -> None:
    controller.open_job()
    agent = start_agent(MESHLOOM_TRAINER=DEFAULT_TRAINER)
    controller.send(tiny(steps=100_000))
    controller.fact(GangProgressed)
    controller.send(record(0, 1, steps=2))
    until(lambda: len(controller.all_of(TraceRecorded)) == 2)
    for fact in controller.all_of(TraceRecorded):
        path = trace_file(agent.checkpoint_root, JOB, trace_id(), fact.rank)
        assert (Path(fact.path), fact.bytes) == (path, path.stat().st_size)
        names = {
            event.get("name")
            for event in json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
        }
        assert {f"ProfilerStep#{n}" for n in (fact.first_step, fact.last_step)} <= names
    assert controller.all_of(TraceFailed) == []
    controller.send(StopGang(job_id=JOB, fence=1, mode="drain", checkpoint="none"))
    assert all(e.drained for e in ended(controller).exits)
    removal = RemoveTraces(job_id=JOB, fence=1, trace_ids=(trace_id(), trace_id(9)))
    controller.send(removal)
    until(lambda: not list(traces_folder(agent.checkpoint_root, JOB).iterdir()))


def test_what_a_rank_left_that_was_killed_while_it_recorded_is_removed(
    agent: AgentProcess, controller: Controller
) -> None:
    running(controller)  # of a trainer that records nothing, as one of an older version
    controller.send(record(0, 1))
    controller.fact(TraceOrdered)
    whole, unfinished = (trace_file(agent.checkpoint_root, JOB, trace_id(), r) for r in (0, 1))
    whole.parent.mkdir(parents=True)
    for path in (whole, raw_draft(unfinished), draft(unfinished)):
        path.write_bytes(b"{")
    os.kill(launched(controller).pids[1], signal.SIGKILL)
    ended(controller)
    reasons = {fact.rank: fact.reason for fact in controller.all_of(TraceFailed)}
    assert reasons == dict.fromkeys((0, 1), "its process ended by signal 9 before it was done")
    kinds = [type(fact) for fact in controller.facts()]
    assert kinds.index(GangEnded) > max(n for n, kind in enumerate(kinds) if kind is TraceFailed)
    assert list(whole.parent.iterdir()) == [whole]


def test_a_gang_that_is_not_here_and_a_command_that_cannot_be_read_fail_the_trace(
    agent: AgentProcess, controller: Controller
) -> None:
    assert agent.process.poll() is None
    controller.send(record(0, fence=7))
    fact = controller.fact(TraceFailed)
    assert (fact.rank, fact.reason) == (None, "no rank of this attempt runs on this node")
    running(controller)
    of_tomorrow = record(0).model_copy(update={"steps": 1_000_000})
    controller.send(of_tomorrow)
    fact = controller.fact(TraceFailed, lambda fact: fact.fence == 1)
    assert fact.reason.startswith("this agent cannot read record_trace: /record_trace/steps")
    controller.send(StopGang(job_id=JOB, fence=1, mode="kill"))
    ended(controller)


def test_an_order_to_a_rank_that_has_ended_is_answered(
    agent: AgentProcess, controller: Controller
) -> None:
    assert agent.process.poll() is None
    controller.send(launch(1, 2, FOREVER, pause_s=0.01, then="hang", at_step=2, bad_rank=1))
    launched(controller)
    controller.send(record(1))
    controller.fact(TraceOrdered)
    controller.send(StopGang(job_id=JOB, fence=1, mode="kill"))
    ended(controller)
    assert [fact.rank for fact in controller.all_of(TraceFailed)] == [1]
