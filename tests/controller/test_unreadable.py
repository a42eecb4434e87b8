"""A record that this version cannot read costs itself alone: the controller goes on placing jobs."""

import itertools

import pytest
from redis import Redis

from services.contract import redis_keys as keys
from services.contract.ids import new_job_id
from services.contract.states import ExitReason, JobState, NodeState
from services.contract.views import StopRequest
from services.controller.domain.decide import decide
from services.controller.domain.events import (
    AnswerOverdue,
    JobEvent,
    KillAsked,
    PauseAsked,
)
from services.controller.domain.gang import ANSWER_DUE_MS, RESENT_MOST, is_overdue
from services.controller.domain.job import Job
from tests.controller.agent_double import AgentDouble
from tests.controller.conftest import job_body
from tests.controller.histories import NODE, NOW, began, new_job, placed, play, running, votes
from tests.controller.test_process import started
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
    redis.rpush(keys.ARRIVED_FACTS, NO_TEXT)
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
        named = {str(e["key"]) for e in controller.lines if e["event"] == "record_unreadable"}
        assert {keys.job(strange), f"{keys.NODES} torn", f"{keys.NODES} other"} <= named
        assert not controller.said("reign_failed")
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


def overdue(job: Job) -> tuple[Job, int]:
    """The job once nothing is overdue any more, and how often something was."""
    now_ms = NOW
    for times in itertools.count():
        if not is_overdue(job, now_ms := now_ms + ANSWER_DUE_MS + 60_001):
            return job, times
        job = decide(job, AnswerOverdue(), now_ms).job
    raise AssertionError


@pytest.mark.parametrize(
    ("events", "state", "reason"),
    [
        ([], JobState.RESTARTING, ExitReason.NODE_LOST),
        ([KillAsked()], JobState.CANCELLED, ExitReason.KILLED),
        ([PauseAsked(StopRequest(grace_s=30))], JobState.PAUSED, ExitReason.PAUSED),
    ],
)
def test_what_no_agent_answers_is_sent_again_so_often_then_the_attempt_ends(
    events: list[JobEvent], state: JobState, reason: ExitReason
) -> None:
    job, times = overdue(play(new_job(), [placed(new_job()), *events]).job)
    assert times == RESENT_MOST + 1
    assert job.state is state
    assert job.attempts[-1].exit_reason is reason
    assert NODE in str(job.attempts[-1].lost)


def test_a_commit_that_no_agent_answers_is_given_up_and_training_goes_on() -> None:
    job = running()
    job, times = overdue(play(job, [began(job, 10), *votes(job, 10)]).job)
    assert times == RESENT_MOST + 1
    assert (job.state, job.attempts[-1].ended_ms) == (JobState.RUNNING, None)
    (given_up,) = job.checkpoints.values()
    assert given_up.state == "ABORTED"
    assert NODE in str(given_up.reason)
