"""A record that this version cannot read costs itself alone: the controller goes on placing jobs."""

import contextlib
from collections.abc import Iterator

import pytest
from redis import Redis

from meshloom.client import RestClient as Client
from services.cli.doctor import Finding, examine
from services.contract.redis import redis_keys as keys
from services.contract.words.ids import new_job_id
from services.contract.words.states import NodeState
from services.controller.api.guard import AccessPolicy
from tests.controller.agent_double import AgentDouble, append_fact
from tests.controller.conftest import job_body, open_plane
from tests.controller.test_process import Controller, is_unready_for, started
from tests.waiting import until

TORN = '{"of_tomorrow": '
OTHER = '{"of_tomorrow": 1}'
NO_TEXT = b"\xff\xfe{"


def write_unreadable(redis: Redis, job_id: str, node_id: str) -> str:
    """Records of every kind that this version cannot read; answers the id of the job among them."""
    strange = new_job_id(1, bytes(10))
    redis.hset(keys.job(strange), mapping={"doc": OTHER, "version": 1, "state": "DREAMING"})
    redis.zadd(keys.JOBS, {strange: 1})
    redis.sadd(keys.ACTIVE_JOBS, strange)
    for text, name in zip((TORN, OTHER), ("torn", "other"), strict=True):
        redis.hset(keys.NODES, name, text)
        redis.hset(keys.job_ranks(job_id), "7" + str(len(text)), text)
        redis.hset(keys.job_stacks(job_id), name, text)
        for stream in (
            keys.job_steps(job_id),
            keys.job_logs(job_id),
            keys.job_events(job_id),
            keys.FACTS,
        ):
            redis.xadd(stream, {keys.MESSAGE_FIELD: text})
        redis.hset(keys.TOKENS, name, text)
    redis.xadd(keys.FACTS, {"of_tomorrow": "1"})
    redis.xadd(keys.FACTS, {keys.MESSAGE_FIELD: '{"kind": "fact_of_tomorrow"}'})
    redis.hset(keys.MEASURED_NODES, f"{node_id}/cpu", OTHER)
    # Keys that agents may write, of another type than they should be.
    redis.hset(keys.node_lease("retyped"), "a", "b")
    node = str(redis.hget(keys.NODES, node_id)).replace(node_id, "retyped")
    redis.hset(keys.NODES, "retyped", node.replace(NodeState.READY, NodeState.LOST))
    append_fact(redis, node_id, NO_TEXT)
    redis.hset(keys.job_ranks(job_id), "8", NO_TEXT)
    for stream in (keys.job_steps(job_id), keys.job_logs(job_id)):
        redis.xadd(stream, {keys.MESSAGE_FIELD: NO_TEXT})
    return strange


@pytest.mark.redis
def test_unreadable_records_of_every_kind_stop_no_other_job(redis_url: str) -> None:
    with (
        started(redis_url) as controller,
        Redis.from_url(redis_url, decode_responses=True) as redis,
    ):
        agent = AgentDouble(redis)
        agent.join()
        first = controller.client.post("/v1/jobs", json=job_body()).json()["id"]
        gang = agent.launches(first)
        agent.trains(gang, [1, 2])
        agent.samples(gang, [1, 1])
        until(lambda: controller.state(first) == "RUNNING")
        strange = write_unreadable(redis, first, agent.node_id)
        second = controller.client.post("/v1/jobs", json=job_body()).json()["id"]
        redis.hset(keys.job_steps(second), "a", "b")
        redis.set(keys.job_ranks(second), "b")
        agent.launches(second)
        until(lambda: redis.xlen(keys.FACTS) == 0)
        for path in ("", "/steps", "/metrics", "/events", "/logs", "/ranks"):
            answer = controller.client.get(f"/v1/jobs/{first}{path}")
            assert answer.status_code in {200, 404}, answer.text
        for path in ("/v1/jobs", "/v1/nodes", "/v1/queue", "/v1/tokens", "/metrics"):
            assert controller.client.get(path).status_code == 200, path
        assert controller.client.get(f"/v1/jobs/{strange}").status_code == 409
        checks = controller.client.get("/readyz").json()["checks"]
        assert "cannot be read" in checks["records"]
        written = {keys.job(strange), f"{keys.NODES} torn", f"{keys.NODES} other"}
        until(lambda: written <= named(controller))
        until(lambda: doctor_says_the_same(controller, strange))
        assert not controller.said("term_failed")
        # A record of a node that trains, too: its lease says that it lives.
        redis.hset(keys.NODES, agent.node_id, OTHER)
        third = controller.client.post("/v1/jobs", json=job_body()).json()["id"]
        other = AgentDouble(redis, "loom-2")
        other.join()
        other.launches(third)
        until(lambda: controller.state(third) == "STARTING")
        assert controller.client.get(f"/v1/jobs/{first}").json()["attempt"] == 1
        agent.join(slots=8)
        until(lambda: controller.client.get(f"/v1/nodes/{agent.node_id}").status_code == 200)
        assert controller.client.get(f"/v1/jobs/{first}").json()["attempt"] == 1


def doctor_says_the_same(controller: Controller, strange: str) -> bool:
    """As the list of unreadable records, in which there may be one more by the time that it asks."""
    told = controller.client.get("/v1/unreadable").json()
    assert keys.job(strange) in told["items"]
    assert (len(told["items"]), told["left_out"]) == (len(set(told["items"])), 0)
    (found,) = (one for one in doctors_findings(controller) if one.what == "records")
    assert not found.healthy
    first, others = f"{told['items'][0]}, ", f"and {len(told['items']) - 5} more"
    return first in found.detail and others in found.detail


def doctors_findings(controller: Controller) -> list[Finding]:
    with Client(str(controller.client.base_url)) as client:
        return list(examine(client))


UNAVAILABLE = {
    keys.JOBS: {"/v1/jobs", "/metrics"},
    keys.ACTIVE_JOBS: {"/v1/nodes", "/v1/queue", "/metrics"},
    keys.DELETED_JOBS: set(),
    keys.NODES: {"/v1/nodes", "/v1/queue", "/metrics"},
    keys.DRAINING_NODES: set(),
    keys.MEASURED_NODES: set(),
    keys.PLANS: {"/v1/plans"},
    keys.FACTS: set(),
    keys.ARRIVED_FACTS: set(),
    keys.FACT_SENDERS: set(),
    keys.TOKENS: {"/v1/tokens"},
    keys.AUDIT: {"/v1/audit"},
}
"""What says 503, by the key that has another type."""
OF_A_JOB = {
    keys.job: 409,
    keys.job_checkpoints: 409,
    keys.job_events: 200,
    keys.job_history: 200,
    keys.job_ranks: 200,
    keys.job_steps: 200,
    keys.job_logs: 200,
    keys.job_stacks: 200,
    keys.job_records: 200,
    keys.job_last: 200,
    keys.job_older_events: 200,
    keys.recalled: 200,
}
"""What all that is asked of the job says, by the key of it that has another type."""
UNNEEDED = {
    *(keys.job_ranks, keys.job_steps, keys.job_logs),
    *(keys.job_stacks, keys.job_last, keys.job_older_events),
}
"""Of these, what a change of a job does without."""
LISTS = ("/v1/jobs", "/v1/nodes", "/v1/queue", "/v1/plans", "/v1/tokens", "/v1/audit", "/metrics")
PARTS = ("", "/events", "/logs", "/ranks", "/metrics", "/checkpoints", "/diagnosis")


@contextlib.contextmanager
def of_another_type(raw: Redis, key: str) -> Iterator[None]:
    """The key is a text until the block ends."""
    before = raw.dump(key)
    raw.delete(key)
    raw.set(key, "x")
    try:
        yield
    finally:
        if before is None:
            raw.delete(key)
        else:
            # In one command: a controller makes a stream again that is not there.
            raw.restore(key, 0, before, replace=True)


def named(controller: Controller) -> set[str]:
    return {str(e["key"]) for e in controller.lines if e["event"] == "record_unreadable"}


@pytest.mark.redis
def test_a_key_of_another_type_costs_itself_alone_and_is_named(redis_url: str) -> None:
    with (
        started(redis_url) as controller,
        Redis.from_url(redis_url, decode_responses=True) as redis,
        Redis.from_url(redis_url) as raw,
    ):
        ask = controller.client
        agent = AgentDouble(redis)
        agent.join()
        first = ask.post("/v1/jobs", json=job_body()).json()["id"]
        gang = agent.launches(first)
        agent.trains(gang, [1, 2])
        agent.ends(gang, 2, exit_code=1, error="E", traceback="", phase="FORWARD")
        agent.launches(first, fence=2)
        second = ask.post("/v1/jobs", json=job_body(resources={"ranks": 4})).json()["id"]
        until(lambda: ask.get(f"/v1/jobs/{first}/diagnosis").status_code == 200)

        def status(path: str) -> int:
            answer = ask.get(path)
            if answer.status_code == 503:
                assert "rename" in answer.text or "another name" in answer.text
            return answer.status_code

        for key, out in UNAVAILABLE.items():
            with of_another_type(raw, key):
                found = {path: status(path) for path in LISTS}
                assert found == {path: 503 if path in out else 200 for path in LISTS}, key
                # What a change of a job does not need does not keep anybody from it.
                patch = ask.patch(
                    f"/v1/jobs/{second}", json={"labels": {"key": key}}, headers={"If-Match": "*"}
                )
                assert patch.status_code == (503 if key == keys.ACTIVE_JOBS else 200), key
                if key != keys.DELETED_JOBS:  # nothing asks for it here
                    until(lambda key=key: key in named(controller))  # type: ignore[misc] # a default
        for build, its in OF_A_JOB.items():
            with of_another_type(raw, build(first)):
                assert {status(f"/v1/jobs/{first}{part}") for part in PARTS} == {its}, build
                assert [status(path) for path in LISTS] == [200] * len(LISTS)
                assert status(f"/v1/jobs/{second}") == 200
                patch = ask.patch(
                    f"/v1/jobs/{first}",
                    json={"labels": {"key": build.__name__}},
                    headers={"If-Match": "*"},
                )
                # Those are texts, or were not asked for here.
                is_text = build in {keys.job_records, keys.recalled}
                is_written = is_text or build in UNNEEDED
                assert patch.status_code == (200 if is_written else 409)
                if build is not keys.job_history and not is_text:  # it is written alone
                    assert "cannot be read" in ask.get("/readyz").json()["checks"]["records"]
        assert not any(controller.said(word) for word in ("term_failed", "no_longer_leading"))
        assert not any(controller.said(word) for word in ("request_failed", "leader_died"))
        # Once they are repaired and were looked at, nothing of it is left.
        body = {"labels": {"key": "repaired"}}
        ask.patch(f"/v1/jobs/{first}", json=body, headers={"If-Match": "*"})
        for path in (*LISTS, *(f"/v1/jobs/{first}{part}" for part in PARTS)):
            assert status(path) == 200
        until(lambda: "records" not in ask.get("/readyz").json()["checks"])
        assert ask.get(f"/v1/jobs/{first}").json()["state"] == "STARTING"


@pytest.mark.redis
@pytest.mark.parametrize("key", [keys.LEADER, keys.EPOCH])
def test_a_lead_that_cannot_be_read_is_waited_for_and_told(redis_url: str, key: str) -> None:
    with started(redis_url) as controller, Redis.from_url(redis_url) as raw:
        until(lambda: raw.exists(keys.EPOCH))
        with of_another_type(raw, key):
            raw.delete(key)
            raw.hset(key, "a", "b")
            if key == keys.EPOCH:
                raw.delete(keys.LEADER)
            until(lambda: is_unready_for("the wrong type", controller))
        until(lambda: controller.client.get("/readyz").status_code == 200)
        assert controller.process.poll() is None


@pytest.mark.redis
def test_a_job_whose_version_is_no_number_hides_no_other_and_is_deleted(redis_url: str) -> None:
    with (
        open_plane(redis_url, AccessPolicy(), leads=False) as plane,
        Redis.from_url(redis_url, decode_responses=True) as redis,
    ):
        ask = plane.client
        kept = plane.submit()
        for field, text in (("version", "many"), ("version", ""), ("version", "0")):
            torn = plane.submit()
            redis.hset(keys.job(torn), field, text)
            redis.zadd(keys.JOBS, {torn: "inf"})
            items = ask.get("/v1/jobs").json()["items"]
            assert [job["id"] for job in items] == [kept]
            assert ask.get("/v1/queue").status_code == 200
            assert ask.get(f"/v1/jobs/{torn}").json()["code"] == "record_unreadable"
            assert "records" in ask.get("/readyz").json()["checks"]
            assert ask.delete(f"/v1/jobs/{torn}").status_code == 204
            assert "records" not in ask.get("/readyz").json()["checks"]
        redis.delete(keys.job(kept))
        redis.set(keys.job(kept), "x")
        assert ask.delete(f"/v1/jobs/{kept}").status_code == 204
        assert redis.exists(keys.job(kept)) == 0


@pytest.mark.redis
def test_an_entry_that_cannot_be_read_costs_itself_and_is_logged_once(
    redis_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    with (
        open_plane(redis_url, AccessPolicy(), leads=False) as plane,
        Redis.from_url(redis_url, decode_responses=True) as redis,
    ):
        job_id = plane.submit()
        for stream in (keys.AUDIT, keys.job_logs(job_id), keys.job_steps(job_id)):
            for number in range(100):
                redis.xadd(stream, {keys.MESSAGE_FIELD: f'{{"of_tomorrow": {number}}}'})
            redis.xadd(stream, {"other": "x"})
        for _ in range(3):
            trail = plane.get("/v1/audit")["items"]
            assert {e["path"] for e in trail} == {"(unreadable)"}
            assert plane.get(f"/v1/jobs/{job_id}/logs")["items"] == []
            assert plane.get(f"/v1/jobs/{job_id}/metrics")["items"] == []
        assert "3 cannot be read" in plane.get("/readyz")["checks"]["records"]
    told = [line for line in caplog.messages if line == "record_unreadable"]
    assert len(told) == 3


@pytest.mark.redis
@pytest.mark.parametrize("number", ["NaN", "1e999"])
def test_a_number_that_no_record_can_hold_leaves_the_job_readable(
    redis_url: str, number: str
) -> None:
    """Any agent may say anything of any job, and what the controller keeps of it is to be read again."""
    with open_plane(redis_url, AccessPolicy()) as plane:
        plane.agent.join()
        job_id = plane.submit(resources={"ranks": 1})
        gang = plane.agent.launches(job_id)
        plane.agent.trains(gang, [1])
        plane.in_state(job_id, "RUNNING")
        about = f'"job_id":"{job_id}","fence":1,"node_id":"{plane.agent.node_id}"'
        found = f'{{"why":"asked","still_s":{number},"allowed_s":1,"ranks":[]}}'
        told = f'{{"kind":"gang_diagnosed",{about},"findings":{found}}}'
        append_fact(plane.redis, plane.agent.node_id, told)
        checkpoint = plane.agent.saves(gang, 1)  # which takes a job that can be read
        until(lambda: plane.get(f"/v1/jobs/{job_id}")["latest_checkpoint"] == checkpoint)
        assert plane.get("/v1/unreadable")["items"] == []


@pytest.mark.redis
def test_measurements_of_names_that_are_no_nodes_are_not_kept(redis_url: str) -> None:
    with open_plane(redis_url, AccessPolicy()) as plane:
        AgentDouble(plane.redis, "ghost").measures()
        plane.agent.join()
        plane.agent.measures()
        until(lambda: plane.redis.hexists(keys.MEASURED_NODES, f"{plane.agent.node_id}/cpu"))
        assert not plane.redis.hexists(keys.MEASURED_NODES, "ghost/cpu")


def test_an_inbox_that_its_agent_retyped_costs_nobody_else_a_command(redis_url: str) -> None:
    with open_plane(redis_url, AccessPolicy(), plan_wait_s=0) as plane:
        other = AgentDouble(plane.redis, "loom-2")
        plane.agent.join(slots=1)
        other.join(slots=1)
        plane.redis.set(keys.node_inbox("loom-2"), "mine")
        until(lambda: len(plane.get("/v1/nodes")["items"]) == 2)
        job_id = plane.submit()
        # The command to the second node is a part of the commit that this is told with.
        gang = plane.agent.launches(job_id)
        until(lambda: plane.redis.llen(keys.FACT_SENDERS) == 0 == plane.redis.xlen(keys.FACTS))
        plane.act(job_id, "kill")
        plane.agent.ends(gang, 0, exit_code=None, signal=9)
        events = plane.get(f"/v1/jobs/{job_id}/events")["items"]
        assert "job.placing" in [event["kind"] for event in events]
        # Now the plan's question can go to the second node alone.
        plane.agent.leave()
        until(
            lambda: [node["state"] for node in plane.get("/v1/nodes")["items"]].count("READY") == 1
        )
        assert plane.client.post("/v1/plans?fresh=true", json=job_body(plan="auto")).is_success
