"""Curves, output and events that storage has: asked back, put together, let go; an agent is spoken for."""

import asyncio
import json
import re
import socket
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import Any

import pytest
from redis import Redis

from services.contract.api.views import EventView, LogView
from services.contract.messages.commands import CloseRecords, LaunchGang, RecallRecords
from services.contract.messages.facts import RecordsClosed
from services.contract.messages.telemetry import LogLine, MetricRecord, StepRecord
from services.contract.redis import redis_keys as keys
from services.contract.system.long_work import Turns
from services.controller.adapters.redis import redis_ports, telemetry
from services.controller.adapters.redis.record_streams import RecordStreams
from services.controller.ports.machines import Entry, Log
from services.controller.use_cases import records, watch
from tests.controller.agent_double import AgentDouble
from tests.controller.conftest import ControlPlane
from tests.waiting import until

pytestmark = pytest.mark.redis
STREAMS = (keys.job_steps, keys.job_metrics, keys.job_logs)
KINDS = {
    "steps": keys.job_steps,
    "metrics": keys.job_metrics,
    "logs": keys.job_logs,
    "events": keys.job_events,
}


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records, "PATIENCE_S", 0.3)
    monkeypatch.setattr(records, "IMPATIENCE_S", 0.3)


def step(number: int, fence: int = 1, loss: float = 1.0) -> StepRecord:
    return StepRecord(step=number, fence=fence, loss=loss, tokens_per_s=1.0, step_time_s=0.1)


def line(text: str) -> LogLine:
    return LogLine(rank=0, fence=1, stream="stdout", time_ms=1, text=text)


def trained(plane: ControlPlane, steps: int = 3) -> LaunchGang:
    """A job that runs and has told steps, metrics and output."""
    plane.agent.join()
    gang = plane.agent.launches(plane.submit())
    plane.agent.trains(gang, range(1, steps + 1))
    plane.agent.tells_metrics(gang, MetricRecord(step=1, fence=1, values={"hits": 1.0}))
    plane.agent.writes(gang, 0, "hello")
    plane.in_state(gang.job_id, "RUNNING")
    return gang


def ended(plane: ControlPlane, gang: LaunchGang) -> CloseRecords:
    plane.agent.saves(gang, 10, number=10)
    plane.agent.ends(gang, 10)
    plane.in_state(gang.job_id, "SUCCEEDED")
    return plane.agent.awaits(CloseRecords, gang.job_id, gang.fence)


def closes(plane: ControlPlane, command: CloseRecords, events_to: str | None = None) -> None:
    """As an agent says that storage has all of it."""
    plane.agent.tell(
        RecordsClosed(
            job_id=command.job_id, fence=command.fence, node_id="loom-1", events_to=events_to
        )
    )
    until(lambda: plane.redis.exists(keys.job_last(command.job_id)), every_s=0.01)
    # The telemetry's keys come after it: they may be on another server.
    steps = keys.job_steps(command.job_id)
    until(lambda: int(str(plane.redis.ttl(steps))) <= keys.RECALLED_S, every_s=0.01)


def rows(redis: Redis, key: str) -> list[tuple[str, str]]:
    found: Any = redis.xrange(key)
    return [(name, fields[keys.MESSAGE_FIELD]) for name, fields in found]


def forget(redis: Redis, job_id: str) -> None:
    """What goes by itself is gone, or Redis was wiped."""
    redis.delete(*(key(job_id) for key in STREAMS), keys.job_records(job_id))


def answer_next_question(
    plane: ControlPlane, job_id: str, held: dict[str, list[tuple[str, str]]], fence: int = 1
) -> None:
    """What an agent does with ``RecallRecords``: append to what the controller made, then say so."""
    known = [c.asked for c in plane.agent.commands() if isinstance(c, RecallRecords)]
    asked = plane.client.get(f"/v1/jobs/{job_id}/metrics")  # nobody answers this one in time
    assert asked.status_code in {200, 503}
    command = plane.agent.awaits(RecallRecords, job_id, fence)
    assert command.asked not in known
    brings(plane, command.asked, job_id, held)


def brings(
    plane: ControlPlane, asked: str, job_id: str, held: dict[str, list[tuple[str, str]]]
) -> None:
    for kind, entries in held.items():
        for name, body in entries:
            key = f"{keys.recalled(job_id)}:{kind}"
            plane.redis.xadd(key, {keys.MESSAGE_FIELD: body}, id=name, nomkstream=True)
    plane.redis.hset(keys.recalled(job_id), "done", asked)


def metrics(plane: ControlPlane, job_id: str) -> dict[int, float]:
    items = plane.get(f"/v1/jobs/{job_id}/metrics")["items"]
    assert len(items) == len({item["step"] for item in items})
    return {item["step"]: item["loss"] for item in items}


def test_a_job_that_ends_is_closed_and_what_storage_has_goes_but_for_the_last(
    plane: ControlPlane,
) -> None:
    gang = trained(plane)
    command = ended(plane, gang)
    before = plane.job(gang.job_id)
    kept = [plane.redis.ttl(key(gang.job_id)) for key in STREAMS]
    assert min(map(int, map(str, kept))) > keys.RECALLED_S
    closes(plane, command)
    for key in (*STREAMS, keys.job_records, keys.job_history):
        assert 0 < int(str(plane.redis.ttl(key(gang.job_id)))) <= keys.RECALLED_S
    forget(plane.redis, gang.job_id)
    after = plane.job(gang.job_id)
    assert after == before
    assert after["progress"]["loss"] == 5.0 / 3
    assert after["progress"]["metrics"] == {"hits": 1.0}


def test_what_is_done_with_an_ended_job_keeps_nothing_longer_in_redis(plane: ControlPlane) -> None:
    gang = trained(plane)
    name = plane.agent.saves(gang, 3)
    closes(plane, ended(plane, gang))
    assert plane.client.post(f"/v1/checkpoints/{name}/pin").status_code == 202
    assert int(str(plane.redis.ttl(keys.job_steps(gang.job_id)))) <= keys.RECALLED_S


def test_only_the_node_that_was_told_to_has_the_records_of_an_ended_job_go(
    plane: ControlPlane,
) -> None:
    gang = trained(plane)
    ended(plane, gang)
    other = AgentDouble(plane.redis, "loom-2")
    other.tell(RecordsClosed(job_id=gang.job_id, fence=gang.fence, node_id="loom-2"))
    other.join()
    until(lambda: plane.client.get("/v1/nodes/loom-2").status_code == 200)
    for key in STREAMS:
        assert int(str(plane.redis.ttl(key(gang.job_id)))) > keys.RECALLED_S


@pytest.mark.parametrize("fence", [1, 2])
def test_records_of_a_job_that_runs_do_not_go_whatever_an_agent_says(
    plane: ControlPlane, fence: int
) -> None:
    gang = trained(plane)
    plane.agent.tell(RecordsClosed(job_id=gang.job_id, fence=fence, node_id="loom-1"))
    plane.agent.writes(gang, 0, "a line later")
    other = trained(plane)  # what was told before it was heard
    assert other.job_id != gang.job_id
    for key in STREAMS:
        assert plane.redis.ttl(key(gang.job_id)) == -1
    assert not plane.redis.exists(keys.job_last(gang.job_id))


def test_without_a_node_that_lives_a_curve_in_storage_is_not_told_to_be_empty(
    plane: ControlPlane,
) -> None:
    gang = trained(plane)
    closes(plane, ended(plane, gang))
    forget(plane.redis, gang.job_id)
    plane.agent.lose_lease()
    for path in ("metrics", "logs"):
        answer = plane.client.get(f"/v1/jobs/{gang.job_id}/{path}")
        assert answer.status_code == 503
        assert answer.json()["code"] == "records_away"
        assert "no live agent" in answer.json()["detail"]
        assert answer.headers["Retry-After"]


def test_an_agent_that_does_not_answer_costs_what_is_not_here(plane: ControlPlane) -> None:
    gang = trained(plane)
    plane.redis.delete(keys.job_records(gang.job_id))
    assert sorted(metrics(plane, gang.job_id)) == [1, 2, 3]
    forget(plane.redis, gang.job_id)
    answer = plane.client.get(f"/v1/jobs/{gang.job_id}/metrics")
    assert answer.status_code == 503
    assert "has not brought them back" in answer.json()["detail"]
    asked = [c for c in plane.agent.commands() if isinstance(c, RecallRecords)]
    assert len(asked) == 1  # once a minute, however many read


@pytest.mark.parametrize("path", ["logs", "logs?tail=5", "metrics", "metrics?name=loss"])
def test_nobody_else_waits_for_an_agent_that_brings_records_back(
    plane: ControlPlane, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    gang = trained(plane)
    closes(plane, ended(plane, gang))
    curve = {"steps": rows(plane.redis, keys.job_steps(gang.job_id))}
    forget(plane.redis, gang.job_id)
    monkeypatch.setattr(records, "PATIENCE_S", 10.0)
    with ThreadPoolExecutor(1) as pool:
        waits = pool.submit(plane.client.get, f"/v1/jobs/{gang.job_id}/{path}")
        asked = plane.agent.awaits(RecallRecords, gang.job_id, gang.fence).asked
        assert [job["id"] for job in plane.get("/v1/jobs")["items"]] == [gang.job_id]
        assert not waits.done()
        brings(plane, asked, gang.job_id, curve)
        assert waits.result().status_code == 200


@pytest.mark.parametrize("is_retyped", [True, False])
def test_what_nobody_asked_for_is_not_taken_for_what_was_brought_back(
    plane: ControlPlane,
    is_retyped: bool,  # noqa: FBT001 a parameter of pytest's
) -> None:
    """Any agent may write these keys, at any time."""
    gang = trained(plane)
    job_id = gang.job_id
    before = {key: rows(plane.redis, key(job_id)) for key in STREAMS}
    forget(plane.redis, job_id)
    if is_retyped:
        plane.redis.xadd(keys.recalled(job_id), {keys.MESSAGE_FIELD: "{}"})
    else:
        plane.redis.hset(keys.recalled(job_id), mapping={"asked": "x", "done": "x"})
    forged = {"kind": "job.created", "message": "forged", "actor": "bootstrap", "data": {}}
    body = json.dumps(forged)
    plane.redis.xadd(keys.recalled_events(job_id), {keys.MESSAGE_FIELD: body}, id="5-0")
    answer_next_question(plane, job_id, {"steps": before[keys.job_steps]})
    assert sorted(metrics(plane, job_id)) == [1, 2, 3]
    assert "forged" not in json.dumps(plane.get(f"/v1/jobs/{job_id}/events"))


def test_an_answer_that_is_longer_than_any_question_is_neither_read_nor_kept(
    plane: ControlPlane,
) -> None:
    """What is kept of it is read whenever somebody looks. Any agent may write hundreds of megabytes."""

    def sent() -> int:
        stats: Any = plane.redis.info("stats")
        return int(stats["total_net_output_bytes"])

    gang = trained(plane)
    job_id = gang.job_id
    forget(plane.redis, job_id)
    plane.agent.trains(gang, [6])
    long, before = "x" * (4 << 20), 0
    for _ in range(2):
        assert plane.client.get(f"/v1/jobs/{job_id}/metrics").status_code == 200
        before = sent()
        plane.redis.hset(keys.recalled(job_id), mapping={"asked": long, "done": long})
    assert plane.client.get(f"/v1/jobs/{job_id}/metrics").status_code == 200
    assert sent() - before < len(long)
    assert not plane.redis.exists(keys.job_records(job_id))


def test_what_was_brought_back_and_what_came_since_are_one_curve(plane: ControlPlane) -> None:
    gang = trained(plane)
    job_id = gang.job_id
    before = {key: rows(plane.redis, key(job_id)) for key in STREAMS}
    forget(plane.redis, job_id)  # as a wiped Redis
    plane.agent.trains(gang, range(3, 6))
    held = {
        "steps": before[keys.job_steps],
        "metrics": before[keys.job_metrics],
        "logs": before[keys.job_logs],
    }
    # Storage also has what came since, and of another attempt a step that was done again.
    again = rows(plane.redis, keys.job_steps(job_id))[0]
    held["steps"] = [*held["steps"], again]
    answer_next_question(plane, job_id, held)
    assert metrics(plane, job_id) == {n: 5.0 / n for n in range(1, 6)}
    found = rows(plane.redis, keys.job_steps(job_id))
    assert len(found) == len(set(found)) == 6
    assert plane.get(f"/v1/jobs/{job_id}/logs")["items"][0]["text"] == "hello"
    for key in STREAMS:
        assert plane.redis.ttl(key(job_id)) == -1
    assert not plane.redis.keys(f"{keys.recalled(job_id)}*")
    plane.agent.trains(gang, [6])
    assert len(metrics(plane, job_id)) == 6


def test_a_line_that_no_file_has_though_later_ones_are_there_is_kept(plane: ControlPlane) -> None:
    gang = trained(plane)
    job_id = gang.job_id
    forget(plane.redis, job_id)
    plane.agent.writes(gang, 1, "of a node that had not written it yet")
    ((name, _),) = rows(plane.redis, keys.job_logs(job_id))
    later = f"{int(name.partition('-')[0]) + 1}-0"
    answer_next_question(plane, job_id, {"logs": [(later, line("later").model_dump_json())]})
    texts = {item["text"] for item in plane.get(f"/v1/jobs/{job_id}/logs")["items"]}
    assert texts == {"later", "of a node that had not written it yet"}


def test_entries_that_no_agent_writes_keep_nothing_from_being_put_together(
    plane: ControlPlane,
) -> None:
    """Every user of an agent may add to what is there now."""
    gang = trained(plane)
    job_id = gang.job_id
    held = {"logs": rows(plane.redis, keys.job_logs(job_id))}
    forget(plane.redis, job_id)
    plane.agent.writes(gang, 0, "since")
    plane.redis.xadd(keys.job_logs(job_id), dict.fromkeys(map(str, range(5_000)), "x"))
    answer_next_question(plane, job_id, held)
    said = [line["text"] for line in plane.get(f"/v1/jobs/{job_id}/logs")["items"]]
    assert said == ["hello", "since"]
    forget(plane.redis, job_id)
    plane.agent.writes(gang, 0, "since")
    last_of_all = "-".join(["18446744073709551615"] * 2)
    answer_next_question(plane, job_id, {"logs": [*held["logs"], (last_of_all, "{}")]})
    assert plane.get(f"/v1/jobs/{job_id}/logs")["items"][0]["text"] == "hello"


def test_what_is_brought_back_of_an_ended_job_goes_again(plane: ControlPlane) -> None:
    gang = trained(plane)
    job_id = gang.job_id
    closes(plane, ended(plane, gang))
    held = {"steps": rows(plane.redis, keys.job_steps(job_id))}
    forget(plane.redis, job_id)
    answer_next_question(plane, job_id, held)
    assert sorted(metrics(plane, job_id)) == [1, 2, 3]
    for key in (keys.job_steps, keys.job_records):
        assert 0 < int(str(plane.redis.ttl(key(job_id)))) <= keys.RECALLED_S
    assert not plane.redis.keys(f"{keys.recalled(job_id)}*")


def test_what_is_brought_back_of_many_ended_jobs_takes_so_much_and_the_first_of_it_goes(
    plane: ControlPlane, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever may read has it brought back, of each job up to a fiftieth of Redis's memory."""
    names = []
    for _ in range(4):
        gang = trained(plane)
        names.append(gang.job_id)
        closes(plane, ended(plane, gang))
        forget(plane.redis, gang.job_id)
    held = {"steps": [(f"{at}-0", step(at).model_dump_json()) for at in range(1, 400)]}

    def here() -> list[bool]:
        return [bool(plane.redis.exists(keys.job_records(name))) for name in names]

    monkeypatch.setattr(keys, "RECALLED_BYTES", 1 << 16)
    for name in names[:2]:
        answer_next_question(plane, name, held)
        assert len(metrics(plane, name)) == 399
    both = sum(int(str(plane.redis.memory_usage(keys.job_steps(name)))) for name in names[:2])
    assert both > keys.RECALLED_BYTES
    # Who asked a moment ago still reads.
    assert here() == [True, True, False, False]
    # One that goes on, as after a resume.
    for key in (keys.job_records, *STREAMS):
        plane.redis.persist(key(names[0]))
    monkeypatch.setattr(keys, "RECALLED_STAYS_S", 0)
    answer_next_question(plane, names[2], held)
    assert len(metrics(plane, names[2])) == 399
    assert here() == [True, False, True, False]
    assert len(rows(plane.redis, keys.job_steps(names[0]))) == 399
    assert not plane.redis.exists(keys.job_steps(names[1]))
    # It is brought again for whoever reads it.
    answer_next_question(plane, names[1], held)
    assert len(metrics(plane, names[1])) == 399


def test_records_that_storage_may_not_have_do_not_go_for_those_of_others(
    plane: ControlPlane, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The node of an ended job is still to close them, and another node brought back what storage has."""
    gang = trained(plane)
    ended(plane, gang)
    plane.redis.delete(keys.job_records(gang.job_id))
    answer_next_question(plane, gang.job_id, {"steps": [("1-0", step(4).model_dump_json())]})
    assert sorted(metrics(plane, gang.job_id)) == [1, 2, 3, 4]
    other = trained(plane)
    closes(plane, ended(plane, other))
    forget(plane.redis, other.job_id)
    monkeypatch.setattr(keys, "RECALLED_BYTES", 1)
    monkeypatch.setattr(keys, "RECALLED_STAYS_S", 0)
    answer_next_question(plane, other.job_id, {"steps": [("1-0", step(1).model_dump_json())]})
    assert sorted(metrics(plane, other.job_id)) == [1]
    assert not plane.redis.exists(keys.job_records(gang.job_id))
    assert sorted(metrics(plane, gang.job_id)) == [1, 2, 3, 4]


@pytest.mark.parametrize("is_back", [False, True])
@pytest.mark.parametrize("path", ["metrics", "metrics?name=loss", "logs", "logs?tail=1000"])
def test_records_that_go_while_they_are_read_are_not_told_as_if_they_were_all(
    plane: ControlPlane, monkeypatch: pytest.MonkeyPatch, path: str, *, is_back: bool
) -> None:
    """For their time is over, or others took their room, and perhaps somebody else had them brought back."""
    gang = trained(plane)
    job_id = gang.job_id
    closes(plane, ended(plane, gang))
    forget(plane.redis, job_id)
    held = {
        "steps": [(f"{at}-0", step(at).model_dump_json()) for at in range(1, 30)],
        "logs": [(f"{at}-0", line("said").model_dump_json()) for at in range(1, 30)],
    }
    answer_next_question(plane, job_id, held)
    monkeypatch.setattr(telemetry, "_STEPS_A_READ", 10)
    monkeypatch.setattr(watch, "_CHUNK", 10)
    assert len(plane.get(f"/v1/jobs/{job_id}/{path}")["items"]) == 29
    read = RecordStreams.rows

    async def read_and_lose(self: RecordStreams, *args: Any) -> Any:  # noqa: ANN401 as what it stands for
        told = await read(self, *args)
        if told[0]:
            forget(plane.redis, job_id)
            if is_back:
                plane.redis.set(keys.job_records(job_id), "those of another question")
        return told

    monkeypatch.setattr(RecordStreams, "rows", read_and_lose)
    answer = plane.client.get(f"/v1/jobs/{job_id}/{path}")
    assert answer.status_code == 503
    assert answer.json()["code"] == "records_away"
    assert "went while" in answer.json()["detail"]


def test_a_stream_of_output_that_goes_meanwhile_does_not_say_that_it_was_all(
    plane: ControlPlane, monkeypatch: pytest.MonkeyPatch
) -> None:
    gang = trained(plane)
    job_id = gang.job_id
    closes(plane, ended(plane, gang))
    forget(plane.redis, job_id)
    lines = [(f"{at}-0", line("said").model_dump_json()) for at in range(1, 30)]
    answer_next_question(plane, job_id, {"logs": lines})
    monkeypatch.setattr(watch, "_CHUNK", 10)
    read = RecordStreams.rows

    async def read_and_lose(self: RecordStreams, *args: Any) -> Any:  # noqa: ANN401 as what it stands for
        told = await read(self, *args)
        forget(plane.redis, job_id)
        return told

    headers = {"Accept": "text/event-stream"}
    with monkeypatch.context() as patched:
        patched.setattr(RecordStreams, "rows", read_and_lose)
        cut = plane.client.get(f"/v1/jobs/{job_id}/logs", headers=headers).text
    assert cut.count("data: {") == 10
    assert "event: end" not in cut
    answer_next_question(plane, job_id, {"logs": lines})
    rest = plane.client.get(
        f"/v1/jobs/{job_id}/logs", headers={**headers, "Last-Event-ID": "10-0"}
    ).text
    assert [name for name, _ in lines[10:]] == re.findall(r"^id: (.*)$", rest, re.MULTILINE)
    assert "event: end" in rest


def test_nothing_of_a_question_that_nobody_answers_stays(plane: ControlPlane) -> None:
    gang = trained(plane)
    forget(plane.redis, gang.job_id)
    assert plane.client.get(f"/v1/jobs/{gang.job_id}/metrics").status_code == 503
    left: Any = plane.redis.keys(f"{keys.recalled(gang.job_id)}*")
    assert len(left) == 5
    assert all(0 < int(str(plane.redis.ttl(name))) <= 60 for name in left)


def closed_with_events(
    plane: ControlPlane,
) -> tuple[str, list[dict[str, Any]], list[tuple[str, str]]]:
    """An ended job whose records storage has: its events as they were told before, and as they were stored."""
    gang = trained(plane)
    job_id = gang.job_id
    for at in range(4, 8):
        plane.agent.saves(gang, at, number=at)
    command = ended(plane, gang)
    before = plane.get(f"/v1/jobs/{job_id}/events?limit=1000")["items"]
    stored = rows(plane.redis, keys.job_events(job_id))
    closes(plane, command, events_to=stored[-1][0])
    return job_id, before, stored


def test_events_of_an_ended_job_are_told_whole_before_and_after_they_went(
    plane: ControlPlane,
) -> None:
    job_id, before, stored = closed_with_events(plane)
    assert plane.redis.xlen(keys.job_events(job_id)) == keys.LAST_EVENTS_KEPT
    assert plane.get(f"/v1/jobs/{job_id}/events?limit=1000")["items"] == before
    page = plane.get(f"/v1/jobs/{job_id}/events?limit=3&cursor={before[1]['id']}")
    assert page["items"] == before[2:5]
    plane.redis.delete(keys.job_older_events(job_id))
    assert plane.client.get(f"/v1/jobs/{job_id}/events").status_code == 503
    forget(plane.redis, job_id)
    plane.redis.delete(keys.recalled(job_id))
    answer_next_question(plane, job_id, {"events": stored})
    assert plane.get(f"/v1/jobs/{job_id}/events?limit=1000")["items"] == before
    stream = plane.client.get(f"/v1/jobs/{job_id}/events", headers={"Accept": "text/event-stream"})
    assert [line for line in stream.text.splitlines() if line.startswith("id: ")] == [
        f"id: {event['id']}" for event in before
    ]


def test_of_events_that_are_brought_back_no_more_is_read_than_a_controller_can_hold(
    plane: ControlPlane, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Any agent may add to them: what is read takes five times as much, and is kept beside jobs and tokens."""
    job_id, before, stored = closed_with_events(plane)
    plane.redis.delete(keys.job_older_events(job_id))
    forget(plane.redis, job_id)
    monkeypatch.setattr(telemetry, "_LONGEST_EVENTS", 64 << 10)
    far = [(f"{2**62 + at}-0", json.dumps({"padding": "x" * 1000})) for at in range(100)]
    answer_next_question(plane, job_id, {"events": [*stored, *far]})
    answer = plane.client.get(f"/v1/jobs/{job_id}/events")
    assert answer.json()["code"] == "records_away"
    assert not plane.redis.exists(keys.job_older_events(job_id))
    plane.redis.delete(keys.recalled(job_id))  # as when its time is over
    answer_next_question(plane, job_id, {"events": stored})
    assert plane.get(f"/v1/jobs/{job_id}/events?limit=1000")["items"] == before


def test_events_that_storage_does_not_have_stay(plane: ControlPlane) -> None:
    gang = trained(plane)
    for at in range(4, 8):
        plane.agent.saves(gang, at, number=at)
    command = ended(plane, gang)
    stored = rows(plane.redis, keys.job_events(gang.job_id))
    closes(plane, command, events_to=stored[2][0])  # what it had read of them
    assert rows(plane.redis, keys.job_events(gang.job_id)) == stored[2:]


def test_a_deleted_job_leaves_none_of_these_keys(plane: ControlPlane) -> None:
    gang = trained(plane)
    closes(plane, ended(plane, gang), events_to="99999999999999-0")
    forget(plane.redis, gang.job_id)
    plane.client.get(f"/v1/jobs/{gang.job_id}/metrics")
    assert plane.client.delete(f"/v1/jobs/{gang.job_id}").status_code == 204
    assert plane.redis.keys(f"{keys.job(gang.job_id)}*") == []


def test_all_who_wait_for_records_have_them_once_they_are_back(
    plane: ControlPlane, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A page that shows a job asks for its curve, its output and its events at once."""
    gang = trained(plane)
    job_id = gang.job_id
    for at in range(4, 8):
        plane.agent.saves(gang, at, number=at)
    command = ended(plane, gang)
    held = {kind: rows(plane.redis, key(job_id)) for kind, key in KINDS.items()}
    closes(plane, command, events_to=held["events"][-1][0])
    forget(plane.redis, job_id)
    plane.redis.delete(keys.job_older_events(job_id))
    monkeypatch.setattr(records, "PATIENCE_S", 3600.0)
    paths = ("metrics", "logs", "events") * 2
    with ThreadPoolExecutor(len(paths)) as pool:
        waiting = [pool.submit(plane.client.get, f"/v1/jobs/{job_id}/{path}") for path in paths]
        recall = plane.agent.awaits(RecallRecords, job_id, gang.fence)
        brings(plane, recall.asked, job_id, held)
        answers = [each.result(20) for each in waiting]
    assert [answer.status_code for answer in answers] == [200] * len(paths)
    assert all(answer.json()["items"] for answer in answers)


@pytest.mark.anyio
async def test_streams_search_the_lines_that_are_there_one_at_a_time(
    redis_url: str, plane: ControlPlane, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As pages do: dozens of them would have the loop to themselves."""
    plane.agent.join()
    gang = plane.agent.launches(plane.submit())
    for number in range(7):
        plane.agent.writes(gang, 0, f"line {number}")
    monkeypatch.setattr(watch, "_CHUNK", 3)
    turns, in_turn, working = Turns(), list[bool](), set[object]()

    async def reads(job_id: str, log: Log, after: str | None, count: int) -> Sequence[Entry]:
        in_turn.append(asyncio.current_task() in working)
        assert len(working) < 2
        return await read(job_id, log, after, count)

    @asynccontextmanager
    async def turn() -> AsyncIterator[None]:
        async with turns.of("max"):
            working.add(asyncio.current_task())
            yield
            working.clear()

    async def follows(tail: int | None) -> list[str]:
        wanted = watch.LineFilter(text="LINE")
        lines = watch.follow(
            ports, gang.job_id, wanted, None, to_the_end=False, tail=tail, turn=turn
        )
        return [line.text async for line in lines if isinstance(line, LogView)]

    async with redis_ports(redis_url) as ports:
        read = ports.telemetry.read
        monkeypatch.setattr(ports.telemetry, "read", reads)
        last, *whole = await asyncio.gather(follows(2), follows(None), follows(None))
    assert last == ["line 5", "line 6"]
    assert whole == [[f"line {number}" for number in range(7)]] * 2
    # Of nine reads of lines and one behind the last ones by each; what is new is read without a turn.
    assert in_turn.count(False) == 2


@pytest.mark.anyio
async def test_events_are_followed_while_the_server_that_has_telemetry_is_away(
    redis_url: str, plane: ControlPlane
) -> None:
    job_id = plane.submit()
    told = [event["kind"] for event in plane.get(f"/v1/jobs/{job_id}/events")["items"]]
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
    async with redis_ports(redis_url, telemetry_url=f"redis://127.0.0.1:{port}") as ports:
        entries = watch.follow(ports, job_id, None, None, to_the_end=False)
        followed = [entry.kind async for entry in entries if isinstance(entry, EventView)]
    assert followed[: len(told)] == told
    assert told
