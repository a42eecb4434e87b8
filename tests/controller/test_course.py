"""Jobs from REST to their end: the real loops on a real Redis, an agent's facts by hand."""

import pytest

from services.contract.messages.base import OfAttempt
from services.contract.messages.commands import LaunchGang, StopGang
from services.contract.messages.facts import RunningGang
from services.contract.redis import redis_keys as keys
from tests.controller.agent_double import AgentDouble, append_fact
from tests.controller.conftest import ControlPlane
from tests.waiting import until

pytestmark = pytest.mark.redis


def test_a_job_is_placed_trained_checkpointed_and_succeeds(plane: ControlPlane) -> None:
    plane.agent.join()
    job_id = plane.submit()
    gang = plane.agent.launches(job_id)
    plane.in_state(job_id, "STARTING")
    plane.agent.trains(gang, range(1, 5))
    running = plane.in_state(job_id, "RUNNING")
    assert running["progress"] == {
        "step": 4, "of": 10, "loss": 1.25, "tokens_per_s": 1000, "step_time_s": 0.5, "eta_s": 3.0,
        "throughput_unit": "tokens", "loss_unit": "nats", "metrics": {}, "mfu": None,
    }  # fmt: skip
    plane.agent.trains(gang, range(5, 11))
    name = plane.agent.saves(gang, 10)
    plane.agent.ends(gang, 10)
    done = plane.in_state(job_id, "SUCCEEDED")
    assert (done["exit_reason"], done["latest_checkpoint"]) == ("completed", name)
    checkpoint = plane.get(f"/v1/checkpoints/{name}")
    assert (checkpoint["state"], checkpoint["votes"], checkpoint["bytes"]) == ("COMMITTED", 2, 14)
    (attempt,) = plane.get(f"/v1/jobs/{job_id}/attempts")["items"]
    assert (attempt["first_step"], attempt["last_step"], attempt["lost_steps"]) == (1, 10, 0)
    kinds = [e["kind"] for e in plane.get(f"/v1/jobs/{job_id}/events")["items"]]
    assert kinds == [
        "job.queued", "job.placing", "job.starting", "job.running", "checkpoint.began",
        "checkpoint.sealed", "checkpoint.committed", "attempt.ended", "job.succeeded",
    ]  # fmt: skip


def test_a_user_error_shows_the_first_ranks_traceback(plane: ControlPlane) -> None:
    plane.agent.join()
    job_id = plane.submit()
    gang = plane.agent.launches(job_id)
    plane.agent.ends(gang, 0, exit_code=1, error="NameError: y", traceback="Traceback: y")
    failed = plane.in_state(job_id, "FAILED")
    assert failed["exit_reason"] == "user_error"
    assert failed["failure"]["traceback"] == "Traceback: y"
    assert failed["failure"]["rank"] == 0


def test_a_killed_rank_restarts_from_the_commit(plane: ControlPlane) -> None:
    plane.agent.join()
    job_id = plane.submit()
    gang = plane.agent.launches(job_id)
    plane.agent.trains(gang, range(1, 8))
    name = plane.agent.saves(gang, 5)
    plane.agent.ends(gang, 7, signal=9, error="ended by SIGKILL")
    second = plane.agent.launches(job_id, 2)
    assert second.resume_from == name
    job = plane.job(job_id)
    assert (job["restarts"], job["attempt"]) == (1, 2)
    (first, _) = plane.get(f"/v1/jobs/{job_id}/attempts")["items"]
    assert (first["lost_steps"], first["failure"]["signal"]) == (2, "SIGKILL")
    assert job["progress"]["step"] == 5


def test_jobs_wait_their_turn_and_say_why(plane: ControlPlane) -> None:
    plane.agent.join()
    first = plane.submit()
    second = plane.submit(resources={"ranks": 4})
    third = plane.submit()
    gang = plane.agent.launches(first)
    reason = until(lambda: _reason(plane, second, "at most 2 are free"))
    assert first in reason
    until(lambda: _reason(plane, third, f"behind {second}"))
    queue = plane.get("/v1/queue")["items"]
    assert [(e["position"], e["job_id"], e["blocked_by"]) for e in queue] == [
        (1, second, [first]),
        (2, third, [second]),
    ]
    room = plane.get("/v1/capacity")
    assert (room["cpu_slots"], room["cpu_slots_free"], room["largest_cpu_gang"]) == (4, 2, 2)
    plane.act(first, "kill")
    plane.agent.awaits(StopGang, first)
    plane.agent.ends(gang, 0, signal=9)
    plane.agent.awaits(LaunchGang, second)


def test_a_job_makes_room_for_one_of_higher_priority_and_pays_nothing(plane: ControlPlane) -> None:
    plane.agent.join()
    modest = plane.submit(faults={"max_restarts": 0})
    gang = plane.agent.launches(modest)
    plane.agent.trains(gang, range(1, 5))
    plane.in_state(modest, "RUNNING")
    urgent = plane.submit(resources={"ranks": 4}, priority=5)
    stop = plane.agent.awaits(StopGang, modest)
    assert (stop.mode, stop.checkpoint) == ("drain", "best_effort")
    until(lambda: _reason(plane, modest, f"preempted by {urgent}"))
    name = plane.agent.saves(gang, 4)
    plane.agent.ends(gang, 4, exit_code=0, finished=True, drained=True)
    plane.agent.launches(urgent)
    waits = plane.in_state(modest, "QUEUED")
    assert (waits["restarts"], waits["latest_checkpoint"]) == (0, name)
    events = plane.get(f"/v1/jobs/{modest}/events")["items"]
    asked = next(e for e in events if e["kind"] == "job.preempting")
    assert asked["data"]["by"] == urgent
    assert [e["kind"] for e in events][-3:] == ["job.restarting", "job.queued", "job.waiting"]
    (attempt,) = plane.get(f"/v1/jobs/{modest}/attempts")["items"]
    assert (attempt["exit_reason"], attempt["lost_steps"]) == ("preempted", 0)
    plane.act(urgent, "kill")
    plane.agent.ends(plane.agent.awaits(LaunchGang, urgent), 0, signal=9)
    assert plane.agent.launches(modest, 2).resume_from == name


def test_a_drained_node_is_left_after_a_checkpoint_and_used_again_when_undrained(
    plane: ControlPlane,
) -> None:
    plane.agent.join()
    job_id = plane.submit(faults={"max_restarts": 0})
    gang = plane.agent.launches(job_id)
    plane.agent.trains(gang, range(1, 5))
    plane.in_state(job_id, "RUNNING")
    drained = plane.client.post("/v1/nodes/loom-1/drain", json={"grace_s": 7})
    assert (drained.status_code, drained.json()["state"]) == (202, "DRAINING")
    stop = plane.agent.awaits(StopGang, job_id)
    assert stop.mode == "drain"
    assert 0 < stop.grace_s <= 7
    name = plane.agent.saves(gang, 4)
    plane.agent.ends(gang, 4, exit_code=0, finished=True, drained=True)
    until(lambda: _reason(plane, job_id, "draining: loom-1"))
    waits = plane.job(job_id)
    assert (waits["state"], waits["restarts"]) == ("RESTARTING", 0)
    # Another life of its agent changes nothing: an operator's request stands until it is taken back.
    plane.agent.join("life-2")
    until(lambda: "life-2" in str(plane.redis.hget(keys.NODES, "loom-1")))
    assert plane.get("/v1/nodes/loom-1")["state"] == "DRAINING"
    other = AgentDouble(plane.redis, "loom-2")
    other.join()
    assert other.launches(job_id, 2).resume_from == name
    assert plane.client.post("/v1/nodes/loom-1/undrain").json()["state"] == "READY"
    plane.agent.awaits(LaunchGang, plane.submit(resources={"ranks": 4}))
    (first, _) = plane.get(f"/v1/jobs/{job_id}/attempts")["items"]
    assert first["exit_reason"] == "node_drained"
    assert plane.client.post("/v1/nodes/nobody/drain").status_code == 404


def test_a_pause_is_committed_and_resumed(plane: ControlPlane) -> None:
    plane.agent.join()
    job_id = plane.submit()
    gang = plane.agent.launches(job_id)
    plane.agent.trains(gang, range(1, 4))
    plane.in_state(job_id, "RUNNING")
    plane.act(job_id, "checkpoints")
    assert plane.act(job_id, "pause", {"checkpoint": "required"})["state"] == "PAUSING"
    assert plane.act(job_id, "pause")["state"] == "PAUSING"
    name = plane.agent.saves(gang, 3)
    plane.agent.ends(gang, 3, exit_code=0, finished=True, drained=True)
    plane.in_state(job_id, "PAUSED")
    plane.act(job_id, "resume", {"from_checkpoint": name})
    assert plane.agent.launches(job_id, 2).resume_from == name


def test_an_agent_that_was_started_again_has_lost_its_gangs(plane: ControlPlane) -> None:
    plane.agent.join()
    job_id = plane.submit()
    gang = plane.agent.launches(job_id)
    plane.agent.trains(gang, range(1, 4))
    plane.in_state(job_id, "RUNNING")
    plane.agent.join("life-2")
    plane.agent.launches(job_id, 2)
    (first, _) = plane.get(f"/v1/jobs/{job_id}/attempts")["items"]
    assert (first["exit_reason"], first["last_step"]) == ("node_lost", 3)


def test_an_agent_that_is_stopped_and_started_again_costs_no_restart(plane: ControlPlane) -> None:
    plane.agent.join()
    job_id = plane.submit(faults={"max_restarts": 0})
    gang = plane.agent.launches(job_id)
    plane.agent.trains(gang, range(1, 4))
    plane.in_state(job_id, "RUNNING")
    plane.agent.leave()
    plane.agent.ends(gang, 3, signal=9, error="killed: the agent was stopped")
    waits = plane.in_state(job_id, "RESTARTING")
    assert waits["restarts"] == 0
    # It is not placed on the node that leaves, though that still holds its lease.
    until(lambda: _reason(plane, job_id, "lost or silent"))
    plane.agent.lose_lease()
    plane.agent.join("life-2")
    plane.agent.launches(job_id, 2)
    assert plane.job(job_id)["restarts"] == 0


def test_an_agent_that_joins_with_a_deleted_jobs_gang_is_told_to_kill_it_and_no_lost_ones(
    plane: ControlPlane,
) -> None:
    lost, deleted = ("job_" + letter * 26 for letter in "01")
    plane.redis.sadd(keys.DELETED_JOBS, deleted)
    plane.agent.join(
        gangs=tuple(RunningGang(job_id=name, fence=3, ranks=(0, 1)) for name in (lost, deleted))
    )
    assert plane.agent.awaits(StopGang, deleted, 3).mode == "kill"
    assert [c.job_id for c in plane.agent.commands() if isinstance(c, OfAttempt)] == [deleted]


def test_a_node_whose_lease_ran_out_while_redis_was_well_loses_its_attempts(
    plane: ControlPlane, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("services.controller.domain.scheduling.node.NODE_LEASE_MS", 200)
    plane.agent.join()
    job_id = plane.submit()
    plane.agent.launches(job_id)
    plane.in_state(job_id, "STARTING")
    plane.agent.lose_lease()
    restarting = plane.in_state(job_id, "RESTARTING")
    assert "lost" in restarting["reason"]
    assert plane.get("/v1/nodes/loom-1")["state"] == "LOST"
    plane.agent.join("life-2")
    plane.agent.launches(job_id, 2)


def test_an_unreadable_fact_does_not_hold_up_the_others(plane: ControlPlane) -> None:
    append_fact(plane.redis, "loom-1", "{nonsense")
    plane.agent.join()
    until(lambda: plane.get("/v1/nodes")["items"], every_s=0.01)
    until(lambda: plane.redis.xlen(keys.FACTS) == 0, every_s=0.01)


def _reason(plane: ControlPlane, job_id: str, words: str) -> str:
    reason = str(plane.job(job_id)["reason"])
    return reason if words in reason else ""


def test_a_node_is_deleted_once_it_is_lost_and_no_rank_can_live_there(plane: ControlPlane) -> None:
    plane.agent.join()
    job_id = plane.submit()
    gang = plane.agent.launches(job_id)

    def refused() -> str:
        answer = plane.client.delete("/v1/nodes/loom-1")
        assert answer.status_code == 409, answer.text
        return str(answer.json()["detail"])

    assert job_id in refused()
    plane.act(job_id, "kill")
    plane.agent.ends(gang, 1, signal=9)
    plane.in_state(job_id, "CANCELLED")
    assert "READY" in refused()
    plane.agent.leave()
    until(lambda: plane.get("/v1/nodes/loom-1")["state"] == "LOST", every_s=0.01)
    assert "is alive" in refused()
    plane.agent.lose_lease()
    assert plane.client.delete("/v1/nodes/loom-1").status_code == 204
    assert plane.client.delete("/v1/nodes/loom-1").status_code == 404
    assert plane.get("/v1/nodes")["items"] == []
    plane.agent.join("life-2")
    until(lambda: plane.get("/v1/nodes")["items"], every_s=0.01)
