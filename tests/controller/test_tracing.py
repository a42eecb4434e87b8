"""What becomes of a trace that somebody asks for, as pure decisions and through the API."""

from typing import Any

import pytest

from services.contract.api.views import StopRequest
from services.contract.jobs.traces import TRACES_KEPT
from services.contract.messages.commands import RecordTrace, RemoveTraces
from services.contract.messages.facts import TraceFailed, TraceOrdered, TraceRecorded
from services.contract.words.ids import new_trace_id
from services.contract.words.states import JobState, TraceState
from services.controller.domain.decisions.tracing import ANSWER_DUE_MS, RESENT_MOST, is_overdue
from services.controller.domain.errors import InvalidRequestError, StateConflictError
from services.controller.domain.job.effects import Decision
from services.controller.domain.job.events import (
    GangPlaced,
    JobEvent,
    KillAsked,
    MoveAsked,
    NodeLost,
    PauseAsked,
    TraceAsked,
    TraceOverdue,
)
from services.controller.domain.job.job import Job
from services.controller.domain.job.trace import Trace
from services.controller.domain.plans.default_plan import gang
from services.controller.domain.scheduling.placement import GangRequest, NodeUsage, Placed, place
from tests.controller.conftest import ControlPlane
from tests.controller.histories import (
    NODE,
    NOW,
    commands,
    crashed,
    finished,
    killed,
    launched,
    new_job,
    node,
    placed,
    play,
    progressed,
    running,
    spec,
)
from tests.waiting import until

OTHER_NODE = "loom-2"


def asked(number: int = 1, steps: int = 3, ranks: tuple[int, ...] | None = (0,)) -> TraceAsked:
    return TraceAsked(named(number), steps, ranks)


def named(number: int) -> str:
    return new_trace_id(NOW, bytes([number] * 10))


def about(job: Job, number: int, on: str) -> dict[str, Any]:
    return {"job_id": job.id, "fence": job.fence, "node_id": on, "trace_id": named(number)}


def ordered(job: Job, number: int = 1, on: str = NODE) -> TraceOrdered:
    return TraceOrdered(**about(job, number, on))


def written(job: Job, rank: int = 0, number: int = 1, on: str = NODE) -> TraceRecorded:
    file: dict[str, Any] = {"path": f"/x/rank-{rank}", "bytes": 7, "first_step": 5, "last_step": 7}
    return TraceRecorded(rank=rank, **file, **about(job, number, on))


def failed(job: Job, rank: int | None = 0, number: int = 1, on: str = NODE) -> TraceFailed:
    return TraceFailed(rank=rank, reason="no room", **about(job, number, on))


def trace(job: Job) -> Trace:
    return job.traces[-1]


def kinds(decision: Decision) -> list[str]:
    return [note.kind for note in decision.notes if note.kind.startswith("trace.")]


def on_two_nodes() -> Job:
    """A job that runs on ranks 0 and 1 of one node and 2 and 3 of another."""
    job = new_job(resources={"ranks": 4}, train={"steps": 100, "global_batch": 12})
    usages = [NodeUsage(node(name, slots=2)) for name in (NODE, OTHER_NODE)]
    placed = place(GangRequest.of(job.spec), usages)
    assert isinstance(placed, Placed)
    lives = {NODE: "life-1", OTHER_NODE: "life-1"}
    job = play(job, [GangPlaced(gang(job.spec, placed), lives)]).job
    here = launched(job).model_copy(update={"pids": {0: 1, 1: 2}})
    there = launched(job).model_copy(update={"pids": {2: 3, 3: 4}, "node_id": OTHER_NODE})
    return play(job, [here, there, progressed(job)]).job


def test_a_trace_is_ordered_recorded_and_done_and_each_is_said_once() -> None:
    job = running()
    decision = play(job, [asked(ranks=None, steps=1)])
    (command,) = commands(decision)
    assert command == RecordTrace(job_id=job.id, fence=1, trace_id=named(1), steps=1, ranks=(0, 1))
    assert trace(decision.job).state is TraceState.REQUESTED
    told: list[JobEvent] = [ordered(job), ordered(job)]
    recording = play(decision.job, told)
    assert trace(recording.job).state is TraceState.RECORDING
    half = play(recording.job, [written(job), written(job)]).job
    assert trace(half).state is TraceState.RECORDING
    done = play(recording.job, [written(job), written(job), written(job, 1), written(job, 1)])
    assert (trace(done.job).state, trace(done.job).total_bytes) == (TraceState.DONE, 14)
    assert trace(done.job).ended_ms == NOW
    assert kinds(decision) + kinds(recording) + kinds(done) == [
        "trace.asked",
        "trace.recording",
        "trace.done",
    ]
    assert play(done.job, [failed(job), ordered(job), asked(ranks=None)]).job == done.job
    assert done.job.state is JobState.RUNNING


def test_one_rank_that_fails_fails_the_trace_and_the_files_of_others_are_kept() -> None:
    job = running()
    after = play(job, [asked(ranks=None), ordered(job), failed(job, 1), written(job)]).job
    assert (trace(after).state, trace(after).reason) == (TraceState.FAILED, "rank 1: no room")
    assert list(trace(after).files) == [0]
    assert after.state is JobState.RUNNING


def test_each_node_is_told_of_its_ranks_and_speaks_for_them_alone() -> None:
    job = on_two_nodes()
    decision = play(job, [asked(ranks=(3, 1, 1))])
    assert [send.node_id for send in decision.sends] == [NODE, OTHER_NODE]
    assert trace(decision.job).places == {1: NODE, 3: OTHER_NODE}
    one = play(decision.job, [ordered(job), written(job, 3), failed(job, 3), failed(job, 0)]).job
    assert trace(one).state is TraceState.REQUESTED, "the other agent has said nothing"
    assert not trace(one).files
    both = play(one, [ordered(job, on=OTHER_NODE), written(job, 1)]).job
    assert trace(both).state is TraceState.RECORDING
    unread = play(both, [failed(job, None, on=OTHER_NODE)]).job
    assert trace(unread).reason == f"{OTHER_NODE}: no room"
    assert trace(unread).failures.keys() == {3}
    only = play(job, [asked(ranks=(2,))])
    assert [send.node_id for send in only.sends] == [OTHER_NODE]


@pytest.mark.parametrize(
    ("events", "state", "words"),
    [
        (lambda job: [killed(job)], JobState.RESTARTING, "rank_lost"),
        (lambda job: [crashed(job, "ValueError: x")], JobState.RESTARTING, "user_error"),
        (lambda job: [finished(job)], JobState.RESTARTING, "checkpoint_failed"),
        (lambda job: [KillAsked(), killed(job)], JobState.CANCELLED, "killed"),
        (
            lambda job: [PauseAsked(StopRequest()), finished(job, step=9, drained=True)],
            JobState.PAUSED,
            "paused",
        ),
        (lambda _: [NodeLost(NODE, "gone")], JobState.RESTARTING, "node_lost"),
    ],
)
def test_an_attempt_that_ends_fails_what_it_had_not_recorded(
    events: Any,  # noqa: ANN401 a function of the job
    state: JobState,
    words: str,
) -> None:
    job = play(running(), [asked(ranks=None)]).job
    job = play(job, [ordered(job), written(job)]).job
    after = play(job, events(job))
    assert after.job.state is state, after.job.reason
    assert trace(after.job).state is TraceState.FAILED
    assert trace(after.job).reason == f"attempt 1 ended ({words}) before all of it was recorded"
    assert kinds(after) == ["trace.failed"]
    assert play(after.job, [written(job, 1), ordered(job)]).job == after.job


def test_only_a_running_job_is_recorded_and_the_refusal_says_what_to_do() -> None:
    job = running()
    paused = play(job, [PauseAsked(StopRequest()), finished(job, step=9, drained=True)]).job
    with pytest.raises(StateConflictError, match=r"PAUSED: .*resume it first, and retry when"):
        play(paused, [asked()])
    queued = new_job()
    with pytest.raises(StateConflictError, match=r"QUEUED: .*; retry when it is RUNNING"):
        play(queued, [asked()])
    starting = play(queued, [placed(queued), launched(queued)]).job
    with pytest.raises(StateConflictError, match="STARTING"):
        play(starting, [asked()])
    moving = play(job, [MoveAsked("resized", "4 ranks", "resizing", 60.0)]).job
    with pytest.raises(StateConflictError, match="being stopped"):
        play(moving, [asked()])


def test_a_job_has_one_trace_at_a_time() -> None:
    job = play(running(), [asked(1)]).job
    with pytest.raises(StateConflictError, match=f"{named(1)} is REQUESTED") as refused:
        play(job, [asked(2)])
    assert refused.value.code == "trace_under_way"
    again = play(job, [ordered(job), written(job), asked(2)]).job
    assert [each.state for each in again.traces] == [TraceState.DONE, TraceState.REQUESTED]


def test_ranks_that_are_not_there_are_named_by_their_places() -> None:
    with pytest.raises(InvalidRequestError) as refused:
        play(running(), [asked(ranks=(0, 2, 1, 7))])
    assert [fault.pointer for fault in refused.value.faults] == ["/ranks/1", "/ranks/3"]
    assert "the job runs on ranks 0 to 1" in refused.value.faults[0].detail


def test_all_ranks_of_a_large_job_are_more_than_a_trace_has() -> None:
    job = new_job(resources={"ranks": 65}, train={"steps": 100, "global_batch": 65})
    placed = place(GangRequest.of(job.spec), [NodeUsage(node(slots=65))])
    assert isinstance(placed, Placed)
    job = play(job, [GangPlaced(gang(job.spec, placed), {NODE: "life-1"}), launched(job)]).job
    job = play(job, [progressed(job)]).job
    with pytest.raises(InvalidRequestError) as refused:
        play(job, [asked(ranks=None)])
    assert [fault.pointer for fault in refused.value.faults] == ["/ranks"]
    assert trace(play(job, [asked(ranks=(64,))]).job).places == {64: NODE}


def test_the_newest_traces_are_kept_and_the_files_of_older_ones_removed() -> None:
    job = running()
    removed: list[str] = []
    for number in range(1, TRACES_KEPT + 3):
        decision = play(job, [asked(number), ordered(job, number), written(job, 0, number)])
        job = decision.job
        removed += [
            name for c in commands(decision) if isinstance(c, RemoveTraces) for name in c.trace_ids
        ]
    assert [each.id for each in job.traces] == [named(n) for n in range(3, TRACES_KEPT + 3)]
    assert removed == [named(1), named(2)]


def test_an_agent_that_does_not_answer_is_told_again_and_then_given_up() -> None:
    job = play(running(), [asked()]).job
    assert not is_overdue(job, NOW + ANSWER_DUE_MS)
    for round_ in range(1, RESENT_MOST + 1):
        now_ms = NOW + round_ * (ANSWER_DUE_MS + 1)
        assert is_overdue(job, now_ms)
        decision = play(job, [TraceOverdue()], now_ms)
        assert [type(command) for command in commands(decision)] == [RecordTrace]
        job = decision.job
        assert not is_overdue(job, now_ms)
    given_up = play(job, [TraceOverdue()], NOW + 100 * ANSWER_DUE_MS)
    assert commands(given_up) == []
    assert trace(given_up.job).state is TraceState.FAILED
    assert str(trace(given_up.job).reason).startswith(
        f"the agent of {NODE} did not answer: one of an older version than the controller"
    )
    assert not is_overdue(given_up.job, NOW + 1_000 * ANSWER_DUE_MS)
    answered = play(job, [ordered(job)]).job
    assert not is_overdue(answered, NOW + 1_000 * ANSWER_DUE_MS), "long steps take their time"
    assert play(answered, [TraceOverdue()]).job == answered


def test_a_clock_that_is_set_back_does_not_keep_an_agent_from_being_told_again() -> None:
    job = play(running(), [asked()], NOW).job
    back = NOW - 600_000
    rewound = job.rewound(back)
    assert is_overdue(rewound, back + ANSWER_DUE_MS + 1)


def test_facts_of_an_older_attempt_or_of_a_trace_that_nobody_knows_change_nothing() -> None:
    job = play(running(), [asked()]).job
    late = written(job).model_copy(update={"fence": 7})
    assert play(job, [late, written(job, 0, 2), failed(job, 0, 2), ordered(job, 2)]).job == job
    assert spec().train.steps == 100


# --- through the API ----------------------------------------------------------------------------


@pytest.mark.redis
def test_a_trace_is_asked_for_and_looked_at_through_the_api(plane: ControlPlane) -> None:
    plane.agent.join()
    job_id = plane.submit()
    gang = plane.agent.launches(job_id)
    plane.agent.trains(gang, [1])
    plane.in_state(job_id, "RUNNING")
    answer = plane.client.post(f"/v1/jobs/{job_id}/traces", json={"steps": 2, "ranks": [1]})
    assert answer.status_code == 202, answer.text
    asked_for = answer.json()
    path = f"/v1/jobs/{job_id}/traces/{asked_for['id']}"
    assert answer.headers["Location"] == path
    assert (asked_for["state"], asked_for["ranks"], asked_for["steps"]) == ("REQUESTED", [1], 2)
    command = plane.agent.awaits(RecordTrace, job_id)
    assert (command.trace_id, command.ranks) == (asked_for["id"], (1,))
    said = {"job_id": job_id, "fence": 1, "node_id": "loom-1", "trace_id": asked_for["id"]}
    plane.agent.tell(TraceOrdered.model_validate(said))
    until(lambda: plane.get(path)["state"] == "RECORDING", every_s=0.01)
    second = plane.client.post(f"/v1/jobs/{job_id}/traces")
    assert (second.status_code, second.json()["code"]) == (409, "trace_under_way")
    file = {"rank": 1, "path": "/x/r", "bytes": 9, "first_step": 3, "last_step": 4}
    plane.agent.tell(TraceRecorded.model_validate({**said, **file}))
    done = until(lambda: _in_state(plane, path, "DONE"), every_s=0.01)
    assert done["files"] == [{**file, "node_id": "loom-1"}]
    assert done["folder"] == f"{job_id}/traces/{asked_for['id']}"
    assert plane.get(f"/v1/jobs/{job_id}/traces")["items"] == [done]
    kinds = [event["kind"] for event in plane.get(f"/v1/jobs/{job_id}/events")["items"]]
    assert [kind for kind in kinds if kind.startswith("trace.")] == [
        "trace.asked",
        "trace.recording",
        "trace.done",
    ]


def _in_state(plane: ControlPlane, path: str, state: str) -> dict[str, Any] | None:
    found = plane.get(path)
    return found if found["state"] == state else None


@pytest.mark.redis
def test_what_cannot_be_recorded_is_refused_with_the_place_and_what_to_do(
    quiet_plane: ControlPlane,
) -> None:
    job_id = quiet_plane.submit()
    path = f"/v1/jobs/{job_id}/traces"

    def pointers(body: object) -> list[str]:
        answer = quiet_plane.client.post(path, json=body)
        assert answer.status_code == 422, answer.text
        return [fault["pointer"] for fault in answer.json()["errors"]]

    assert pointers({"steps": 51}) == ["/steps"]
    assert pointers({"steps": 0, "rank": 1}) == ["/steps", "/rank"]
    assert pointers({"ranks": []}) == ["/ranks"]
    assert pointers({"ranks": [0, -1]}) == ["/ranks/1"]
    assert pointers({"ranks": "some"}) == ["/ranks"]
    refused = quiet_plane.client.post(path)
    assert refused.status_code == 409
    assert "retry when it is RUNNING" in refused.json()["detail"]
    assert quiet_plane.get(path) == {"items": []}
    missing = quiet_plane.client.get(f"{path}/{named(1)}")
    assert missing.status_code == 404
    assert named(1) in missing.json()["detail"]
