"""Jobs from REST to their end: the real loops on a real Redis, an agent's facts by hand."""

import pytest

from services.contract.messages.base import OfAttempt
from services.contract.messages.commands import LaunchGang, StopGang
from services.contract.messages.facts import RunningGang
from services.contract.redis import redis_keys as keys
from tests.controller.agent_double import AgentDouble
from tests.controller.conftest import House
from tests.waiting import until

pytestmark = pytest.mark.redis


def test_a_job_is_placed_trained_checkpointed_and_succeeds(house: House) -> None:
    house.agent.join()
    job_id = house.submit()
    gang = house.agent.launches(job_id)
    house.in_state(job_id, "STARTING")
    house.agent.trains(gang, range(1, 5))
    running = house.in_state(job_id, "RUNNING")
    assert running["progress"] == {
        "step": 4, "of": 10, "loss": 1.25, "tokens_per_s": 1000, "step_time_s": 0.5, "eta_s": 3.0,
        "throughput_unit": "tokens", "loss_unit": "nats", "metrics": {}, "mfu": None,
    }  # fmt: skip
    house.agent.trains(gang, range(5, 11))
    name = house.agent.saves(gang, 10)
    house.agent.ends(gang, 10)
    done = house.in_state(job_id, "SUCCEEDED")
    assert (done["exit_reason"], done["latest_checkpoint"]) == ("completed", name)
    checkpoint = house.get(f"/v1/checkpoints/{name}")
    assert (checkpoint["state"], checkpoint["votes"], checkpoint["bytes"]) == ("COMMITTED", 2, 14)
    (attempt,) = house.get(f"/v1/jobs/{job_id}/attempts")["items"]
    assert (attempt["first_step"], attempt["last_step"], attempt["lost_steps"]) == (1, 10, 0)
    kinds = [e["kind"] for e in house.get(f"/v1/jobs/{job_id}/events")["items"]]
    assert kinds == [
        "job.queued", "job.placing", "job.starting", "job.running", "checkpoint.began",
        "checkpoint.sealed", "checkpoint.committed", "attempt.ended", "job.succeeded",
    ]  # fmt: skip


def test_a_user_error_shows_the_first_ranks_traceback(house: House) -> None:
    house.agent.join()
    job_id = house.submit()
    gang = house.agent.launches(job_id)
    house.agent.ends(gang, 0, exit_code=1, error="NameError: y", traceback="Traceback: y")
    failed = house.in_state(job_id, "FAILED")
    assert failed["exit_reason"] == "user_error"
    assert failed["failure"]["traceback"] == "Traceback: y"
    assert failed["failure"]["rank"] == 0


def test_a_killed_rank_restarts_from_the_commit(house: House) -> None:
    house.agent.join()
    job_id = house.submit()
    gang = house.agent.launches(job_id)
    house.agent.trains(gang, range(1, 8))
    name = house.agent.saves(gang, 5)
    house.agent.ends(gang, 7, signal=9, error="ended by SIGKILL")
    second = house.agent.launches(job_id, 2)
    assert second.resume_from == name
    job = house.job(job_id)
    assert (job["restarts"], job["attempt"]) == (1, 2)
    (first, _) = house.get(f"/v1/jobs/{job_id}/attempts")["items"]
    assert (first["lost_steps"], first["failure"]["signal"]) == (2, "SIGKILL")
    assert job["progress"]["step"] == 5


def test_jobs_wait_their_turn_and_say_why(house: House) -> None:
    house.agent.join()
    first = house.submit()
    second = house.submit(resources={"ranks": 4})
    third = house.submit()
    gang = house.agent.launches(first)
    reason = until(lambda: _reason(house, second, "at most 2 are free"))
    assert first in reason
    until(lambda: _reason(house, third, f"behind {second}"))
    queue = house.get("/v1/queue")["items"]
    assert [(e["position"], e["job_id"], e["blocked_by"]) for e in queue] == [
        (1, second, [first]),
        (2, third, [second]),
    ]
    room = house.get("/v1/capacity")
    assert (room["cpu_slots"], room["cpu_slots_free"], room["largest_cpu_gang"]) == (4, 2, 2)
    house.act(first, "kill")
    house.agent.awaits(StopGang, first)
    house.agent.ends(gang, 0, signal=9)
    house.agent.awaits(LaunchGang, second)


def test_a_job_makes_room_for_one_of_higher_priority_and_pays_nothing(house: House) -> None:
    house.agent.join()
    modest = house.submit(faults={"max_restarts": 0})
    gang = house.agent.launches(modest)
    house.agent.trains(gang, range(1, 5))
    house.in_state(modest, "RUNNING")
    urgent = house.submit(resources={"ranks": 4}, priority=5)
    stop = house.agent.awaits(StopGang, modest)
    assert (stop.mode, stop.checkpoint) == ("drain", "best_effort")
    until(lambda: _reason(house, modest, f"preempted by {urgent}"))
    name = house.agent.saves(gang, 4)
    house.agent.ends(gang, 4, exit_code=0, finished=True, drained=True)
    house.agent.launches(urgent)
    waits = house.in_state(modest, "QUEUED")
    assert (waits["restarts"], waits["latest_checkpoint"]) == (0, name)
    events = house.get(f"/v1/jobs/{modest}/events")["items"]
    asked = next(e for e in events if e["kind"] == "job.preempting")
    assert asked["data"]["by"] == urgent
    assert [e["kind"] for e in events][-3:] == ["job.restarting", "job.queued", "job.waiting"]
    (attempt,) = house.get(f"/v1/jobs/{modest}/attempts")["items"]
    assert (attempt["exit_reason"], attempt["lost_steps"]) == ("preempted", 0)
    house.act(urgent, "kill")
    house.agent.ends(house.agent.awaits(LaunchGang, urgent), 0, signal=9)
    assert house.agent.launches(modest, 2).resume_from == name


def test_a_drained_node_is_left_after_a_checkpoint_and_used_again_when_undrained(
    house: House,
) -> None:
    house.agent.join()
    job_id = house.submit(faults={"max_restarts": 0})
    gang = house.agent.launches(job_id)
    house.agent.trains(gang, range(1, 5))
    house.in_state(job_id, "RUNNING")
    drained = house.client.post("/v1/nodes/loom-1/drain", json={"grace_s": 7})
    assert (drained.status_code, drained.json()["state"]) == (202, "DRAINING")
    stop = house.agent.awaits(StopGang, job_id)
    assert stop.mode == "drain"
    assert 0 < stop.grace_s <= 7
    name = house.agent.saves(gang, 4)
    house.agent.ends(gang, 4, exit_code=0, finished=True, drained=True)
    until(lambda: _reason(house, job_id, "draining: loom-1"))
    waits = house.job(job_id)
    assert (waits["state"], waits["restarts"]) == ("RESTARTING", 0)
    # Another life of its agent changes nothing: an operator's request stands until it is taken back.
    house.agent.join("life-2")
    until(lambda: "life-2" in str(house.redis.hget(keys.NODES, "loom-1")))
    assert house.get("/v1/nodes/loom-1")["state"] == "DRAINING"
    other = AgentDouble(house.redis, "loom-2")
    other.join()
    assert other.launches(job_id, 2).resume_from == name
    assert house.client.post("/v1/nodes/loom-1/undrain").json()["state"] == "READY"
    house.agent.awaits(LaunchGang, house.submit(resources={"ranks": 4}))
    (first, _) = house.get(f"/v1/jobs/{job_id}/attempts")["items"]
    assert first["exit_reason"] == "node_drained"
    assert house.client.post("/v1/nodes/nobody/drain").status_code == 404


def test_a_pause_is_committed_and_resumed(house: House) -> None:
    house.agent.join()
    job_id = house.submit()
    gang = house.agent.launches(job_id)
    house.agent.trains(gang, range(1, 4))
    house.in_state(job_id, "RUNNING")
    house.act(job_id, "checkpoints")
    assert house.act(job_id, "pause", {"checkpoint": "required"})["state"] == "PAUSING"
    assert house.act(job_id, "pause")["state"] == "PAUSING"
    name = house.agent.saves(gang, 3)
    house.agent.ends(gang, 3, exit_code=0, finished=True, drained=True)
    house.in_state(job_id, "PAUSED")
    house.act(job_id, "resume", {"from_checkpoint": name})
    assert house.agent.launches(job_id, 2).resume_from == name


def test_an_agent_that_was_started_again_has_lost_its_gangs(house: House) -> None:
    house.agent.join()
    job_id = house.submit()
    gang = house.agent.launches(job_id)
    house.agent.trains(gang, range(1, 4))
    house.in_state(job_id, "RUNNING")
    house.agent.join("life-2")
    house.agent.launches(job_id, 2)
    (first, _) = house.get(f"/v1/jobs/{job_id}/attempts")["items"]
    assert (first["exit_reason"], first["last_step"]) == ("node_lost", 3)


def test_an_agent_that_is_stopped_and_started_again_costs_no_restart(house: House) -> None:
    house.agent.join()
    job_id = house.submit(faults={"max_restarts": 0})
    gang = house.agent.launches(job_id)
    house.agent.trains(gang, range(1, 4))
    house.in_state(job_id, "RUNNING")
    house.agent.leave()
    house.agent.ends(gang, 3, signal=9, error="killed: the agent was stopped")
    waits = house.in_state(job_id, "RESTARTING")
    assert waits["restarts"] == 0
    # It is not placed on the node that leaves, though that still holds its lease.
    until(lambda: _reason(house, job_id, "lost or silent"))
    house.agent.lose_lease()
    house.agent.join("life-2")
    house.agent.launches(job_id, 2)
    assert house.job(job_id)["restarts"] == 0


def test_an_agent_that_joins_with_a_deleted_jobs_gang_is_told_to_kill_it_and_no_lost_ones(
    house: House,
) -> None:
    lost, deleted = ("job_" + letter * 26 for letter in "01")
    house.redis.sadd(keys.DELETED_JOBS, deleted)
    house.agent.join(
        gangs=tuple(RunningGang(job_id=name, fence=3, ranks=(0, 1)) for name in (lost, deleted))
    )
    assert house.agent.awaits(StopGang, deleted, 3).mode == "kill"
    assert [c.job_id for c in house.agent.commands() if isinstance(c, OfAttempt)] == [deleted]


def test_a_node_whose_lease_ran_out_while_redis_was_well_loses_its_attempts(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("services.controller.domain.scheduling.node.NODE_LEASE_MS", 200)
    house.agent.join()
    job_id = house.submit()
    house.agent.launches(job_id)
    house.in_state(job_id, "STARTING")
    house.agent.lose_lease()
    restarting = house.in_state(job_id, "RESTARTING")
    assert "lost" in restarting["reason"]
    assert house.get("/v1/nodes/loom-1")["state"] == "LOST"
    house.agent.join("life-2")
    house.agent.launches(job_id, 2)


def test_an_unreadable_fact_does_not_hold_up_the_others(house: House) -> None:
    house.redis.rpush(keys.ARRIVED_FACTS, "{nonsense")
    house.agent.join()
    until(lambda: house.get("/v1/nodes")["items"], every_s=0.01)
    until(lambda: house.redis.xlen(keys.FACTS) == 0, every_s=0.01)


def _reason(house: House, job_id: str, words: str) -> str:
    reason = str(house.job(job_id)["reason"])
    return reason if words in reason else ""


def test_a_node_is_deleted_once_it_is_lost_and_no_rank_can_live_there(house: House) -> None:
    house.agent.join()
    job_id = house.submit()
    gang = house.agent.launches(job_id)

    def refused() -> str:
        answer = house.client.delete("/v1/nodes/loom-1")
        assert answer.status_code == 409, answer.text
        return str(answer.json()["detail"])

    assert job_id in refused()
    house.act(job_id, "kill")
    house.agent.ends(gang, 1, signal=9)
    house.in_state(job_id, "CANCELLED")
    assert "READY" in refused()
    house.agent.leave()
    until(lambda: house.get("/v1/nodes/loom-1")["state"] == "LOST", every_s=0.01)
    assert "is alive" in refused()
    house.agent.lose_lease()
    assert house.client.delete("/v1/nodes/loom-1").status_code == 204
    assert house.client.delete("/v1/nodes/loom-1").status_code == 404
    assert house.get("/v1/nodes")["items"] == []
    house.agent.join("life-2")
    until(lambda: house.get("/v1/nodes")["items"], every_s=0.01)
