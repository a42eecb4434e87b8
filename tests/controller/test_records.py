"""Curves, output and events that storage has: asked back, put together, let go; an agent is spoken for."""

import json
from typing import Any

import pytest
from redis import Redis

from services.contract.messages.commands import CloseRecords, LaunchGang, RecallRecords
from services.contract.messages.facts import RecordsClosed
from services.contract.messages.telemetry import LogLine, MetricRecord, StepRecord
from services.contract.redis import redis_keys as keys
from services.controller.use_cases import records
from tests.controller.conftest import House
from tests.waiting import until

pytestmark = pytest.mark.redis
STREAMS = (keys.job_steps, keys.job_metrics, keys.job_logs)


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records, "PATIENCE_S", 0.3)
    monkeypatch.setattr(records, "IMPATIENCE_S", 0.3)


def step(number: int, fence: int = 1, loss: float = 1.0) -> StepRecord:
    return StepRecord(step=number, fence=fence, loss=loss, tokens_per_s=1.0, step_time_s=0.1)


def line(text: str) -> LogLine:
    return LogLine(rank=0, fence=1, stream="stdout", time_ms=1, text=text)


def trained(house: House, steps: int = 3) -> LaunchGang:
    """A job that runs and has told steps, metrics and output."""
    house.agent.join()
    gang = house.agent.launches(house.submit())
    house.agent.trains(gang, range(1, steps + 1))
    house.agent.tells_metrics(gang, MetricRecord(step=1, fence=1, values={"hits": 1.0}))
    house.agent.writes(gang, 0, "hello")
    house.in_state(gang.job_id, "RUNNING")
    return gang


def ended(house: House, gang: LaunchGang) -> CloseRecords:
    house.agent.saves(gang, 10, number=10)
    house.agent.ends(gang, 10)
    house.in_state(gang.job_id, "SUCCEEDED")
    return house.agent.awaits(CloseRecords, gang.job_id, gang.fence)


def closes(house: House, command: CloseRecords, events_to: str | None = None) -> None:
    """As an agent says that storage has all of it."""
    house.agent.tell(
        RecordsClosed(
            job_id=command.job_id, fence=command.fence, node_id="loom-1", events_to=events_to
        )
    )
    until(lambda: house.redis.exists(keys.job_last(command.job_id)), every_s=0.01)


def rows(redis: Redis, key: str) -> list[tuple[str, str]]:
    found: Any = redis.xrange(key)
    return [(name, fields[keys.MESSAGE_FIELD]) for name, fields in found]


def forget(redis: Redis, job_id: str) -> None:
    """What goes by itself is gone, or Redis was wiped."""
    redis.delete(*(key(job_id) for key in STREAMS), keys.job_records(job_id))


def answer_next_question(
    house: House, job_id: str, held: dict[str, list[tuple[str, str]]], fence: int = 1
) -> None:
    """What an agent does with ``RecallRecords``: append to what the controller made, then say so."""
    known = [c.asked for c in house.agent.commands() if isinstance(c, RecallRecords)]
    asked = house.client.get(f"/v1/jobs/{job_id}/metrics")  # nobody answers this one in time
    assert asked.status_code in {200, 503}
    command = house.agent.awaits(RecallRecords, job_id, fence)
    assert command.asked not in known
    for kind, entries in held.items():
        for name, body in entries:
            key = f"{keys.recalled(job_id)}:{kind}"
            house.redis.xadd(key, {keys.MESSAGE_FIELD: body}, id=name, nomkstream=True)
    house.redis.hset(keys.recalled(job_id), "done", command.asked)


def metrics(house: House, job_id: str) -> dict[int, float]:
    items = house.get(f"/v1/jobs/{job_id}/metrics")["items"]
    assert len(items) == len({item["step"] for item in items})
    return {item["step"]: item["loss"] for item in items}


def test_a_job_that_ends_is_closed_and_what_storage_has_goes_but_for_the_last(
    house: House,
) -> None:
    gang = trained(house)
    command = ended(house, gang)
    before = house.job(gang.job_id)
    kept = [house.redis.ttl(key(gang.job_id)) for key in STREAMS]
    assert min(map(int, map(str, kept))) > keys.RECALLED_S
    closes(house, command)
    for key in (*STREAMS, keys.job_records, keys.job_history):
        assert 0 < int(str(house.redis.ttl(key(gang.job_id)))) <= keys.RECALLED_S
    forget(house.redis, gang.job_id)
    after = house.job(gang.job_id)
    assert after == before
    assert after["progress"]["loss"] == 5.0 / 3
    assert after["progress"]["metrics"] == {"hits": 1.0}


def test_what_is_done_with_an_ended_job_keeps_nothing_longer_in_redis(house: House) -> None:
    gang = trained(house)
    name = house.agent.saves(gang, 3)
    closes(house, ended(house, gang))
    assert house.client.post(f"/v1/checkpoints/{name}/pin").status_code == 202
    assert int(str(house.redis.ttl(keys.job_steps(gang.job_id)))) <= keys.RECALLED_S


@pytest.mark.parametrize("fence", [1, 2])
def test_records_of_a_job_that_runs_do_not_go_whatever_an_agent_says(
    house: House, fence: int
) -> None:
    gang = trained(house)
    house.agent.tell(RecordsClosed(job_id=gang.job_id, fence=fence, node_id="loom-1"))
    house.agent.writes(gang, 0, "a line later")
    other = trained(house)  # what was told before it was heard
    assert other.job_id != gang.job_id
    for key in STREAMS:
        assert house.redis.ttl(key(gang.job_id)) == -1
    assert not house.redis.exists(keys.job_last(gang.job_id))


def test_without_a_node_that_lives_a_curve_in_storage_is_not_told_to_be_empty(
    house: House,
) -> None:
    gang = trained(house)
    closes(house, ended(house, gang))
    forget(house.redis, gang.job_id)
    house.agent.lose_lease()
    for path in ("metrics", "logs"):
        answer = house.client.get(f"/v1/jobs/{gang.job_id}/{path}")
        assert answer.status_code == 503
        assert answer.json()["code"] == "records_away"
        assert "no live agent" in answer.json()["detail"]
        assert answer.headers["Retry-After"]


def test_an_agent_that_does_not_answer_costs_what_is_not_here(house: House) -> None:
    gang = trained(house)
    house.redis.delete(keys.job_records(gang.job_id))
    assert sorted(metrics(house, gang.job_id)) == [1, 2, 3]
    forget(house.redis, gang.job_id)
    answer = house.client.get(f"/v1/jobs/{gang.job_id}/metrics")
    assert answer.status_code == 503
    assert "has not brought them back" in answer.json()["detail"]
    asked = [c for c in house.agent.commands() if isinstance(c, RecallRecords)]
    assert len(asked) == 1  # once a minute, however many read


@pytest.mark.parametrize("is_retyped", [True, False])
def test_what_nobody_asked_for_is_not_taken_for_what_was_brought_back(
    house: House,
    is_retyped: bool,  # noqa: FBT001 a parameter of pytest's
) -> None:
    """Any agent may write these keys, at any time."""
    gang = trained(house)
    job_id = gang.job_id
    before = {key: rows(house.redis, key(job_id)) for key in STREAMS}
    forget(house.redis, job_id)
    if is_retyped:
        house.redis.xadd(keys.recalled(job_id), {keys.MESSAGE_FIELD: "{}"})
    else:
        house.redis.hset(keys.recalled(job_id), mapping={"asked": "x", "done": "x"})
    forged = {"kind": "job.created", "message": "forged", "actor": "bootstrap", "data": {}}
    body = json.dumps(forged)
    house.redis.xadd(keys.recalled_events(job_id), {keys.MESSAGE_FIELD: body}, id="5-0")
    answer_next_question(house, job_id, {"steps": before[keys.job_steps]})
    assert sorted(metrics(house, job_id)) == [1, 2, 3]
    assert "forged" not in json.dumps(house.get(f"/v1/jobs/{job_id}/events"))


def test_what_was_brought_back_and_what_came_since_are_one_curve(house: House) -> None:
    gang = trained(house)
    job_id = gang.job_id
    before = {key: rows(house.redis, key(job_id)) for key in STREAMS}
    forget(house.redis, job_id)  # as a wiped Redis
    house.agent.trains(gang, range(3, 6))
    held = {
        "steps": before[keys.job_steps],
        "metrics": before[keys.job_metrics],
        "logs": before[keys.job_logs],
    }
    # Storage also has what came since, and of another attempt a step that was done again.
    again = rows(house.redis, keys.job_steps(job_id))[0]
    held["steps"] = [*held["steps"], again]
    answer_next_question(house, job_id, held)
    assert metrics(house, job_id) == {n: 5.0 / n for n in range(1, 6)}
    found = rows(house.redis, keys.job_steps(job_id))
    assert len(found) == len(set(found)) == 6
    assert house.get(f"/v1/jobs/{job_id}/logs")["items"][0]["text"] == "hello"
    for key in STREAMS:
        assert house.redis.ttl(key(job_id)) == -1
    assert not house.redis.keys(f"{keys.recalled(job_id)}*")
    house.agent.trains(gang, [6])
    assert len(metrics(house, job_id)) == 6


def test_a_line_that_no_file_has_though_later_ones_are_there_is_kept(house: House) -> None:
    gang = trained(house)
    job_id = gang.job_id
    forget(house.redis, job_id)
    house.agent.writes(gang, 1, "of a node that had not written it yet")
    ((name, _),) = rows(house.redis, keys.job_logs(job_id))
    later = f"{int(name.partition('-')[0]) + 1}-0"
    answer_next_question(house, job_id, {"logs": [(later, line("later").model_dump_json())]})
    texts = {item["text"] for item in house.get(f"/v1/jobs/{job_id}/logs")["items"]}
    assert texts == {"later", "of a node that had not written it yet"}


def test_what_is_brought_back_of_an_ended_job_goes_again(house: House) -> None:
    gang = trained(house)
    job_id = gang.job_id
    closes(house, ended(house, gang))
    held = {"steps": rows(house.redis, keys.job_steps(job_id))}
    forget(house.redis, job_id)
    answer_next_question(house, job_id, held)
    assert sorted(metrics(house, job_id)) == [1, 2, 3]
    for key in (keys.job_steps, keys.job_records):
        assert 0 < int(str(house.redis.ttl(key(job_id)))) <= keys.RECALLED_S
    assert not house.redis.keys(f"{keys.recalled(job_id)}*")


def test_nothing_of_a_question_that_nobody_answers_stays(house: House) -> None:
    gang = trained(house)
    forget(house.redis, gang.job_id)
    assert house.client.get(f"/v1/jobs/{gang.job_id}/metrics").status_code == 503
    left: Any = house.redis.keys(f"{keys.recalled(gang.job_id)}*")
    assert len(left) == 5
    assert all(0 < int(str(house.redis.ttl(name))) <= 60 for name in left)


def test_events_of_an_ended_job_are_told_whole_before_and_after_they_went(house: House) -> None:
    gang = trained(house)
    job_id = gang.job_id
    for at in range(4, 8):
        house.agent.saves(gang, at, number=at)
    command = ended(house, gang)
    before = house.get(f"/v1/jobs/{job_id}/events?limit=1000")["items"]
    stored = rows(house.redis, keys.job_events(job_id))
    closes(house, command, events_to=stored[-1][0])
    assert house.redis.xlen(keys.job_events(job_id)) == keys.LAST_EVENTS_KEPT
    assert house.get(f"/v1/jobs/{job_id}/events?limit=1000")["items"] == before
    page = house.get(f"/v1/jobs/{job_id}/events?limit=3&cursor={before[1]['id']}")
    assert page["items"] == before[2:5]
    house.redis.delete(keys.job_older_events(job_id))
    assert house.client.get(f"/v1/jobs/{job_id}/events").status_code == 503
    forget(house.redis, job_id)
    house.redis.delete(keys.recalled(job_id))
    answer_next_question(house, job_id, {"events": stored})
    assert house.get(f"/v1/jobs/{job_id}/events?limit=1000")["items"] == before
    stream = house.client.get(f"/v1/jobs/{job_id}/events", headers={"Accept": "text/event-stream"})
    assert [line for line in stream.text.splitlines() if line.startswith("id: ")] == [
        f"id: {event['id']}" for event in before
    ]


def test_events_that_storage_does_not_have_stay(house: House) -> None:
    gang = trained(house)
    for at in range(4, 8):
        house.agent.saves(gang, at, number=at)
    command = ended(house, gang)
    stored = rows(house.redis, keys.job_events(gang.job_id))
    closes(house, command, events_to=stored[2][0])  # what it had read of them
    assert rows(house.redis, keys.job_events(gang.job_id)) == stored[2:]


def test_a_deleted_job_leaves_none_of_these_keys(house: House) -> None:
    gang = trained(house)
    closes(house, ended(house, gang), events_to="99999999999999-0")
    forget(house.redis, gang.job_id)
    house.client.get(f"/v1/jobs/{gang.job_id}/metrics")
    assert house.client.delete(f"/v1/jobs/{gang.job_id}").status_code == 204
    assert house.redis.keys(f"{keys.job(gang.job_id)}*") == []
