"""Telemetry under a name that only the agents of its job know."""

import asyncio

import pytest
from redis import Redis

from services.contract.messages.board import MAX_STEP
from services.contract.messages.commands import CloseRecords
from services.contract.messages.facts import RecordsClosed
from services.contract.messages.telemetry import StepRecord
from services.contract.redis import redis_keys as keys
from services.controller.adapters.redis import redis_ports
from services.controller.adapters.redis.telemetry_names import TelemetryNames
from services.worker.agent.storage.record_files import STEPS, read_entries
from services.worker.agent.telemetry.beat import LearnedNames
from tests.agent.conftest import (
    JOB,
    NODE,
    AgentProcess,
    Controller,
    StartAgent,
    ended,
    launch,
    running,
)
from tests.controller.conftest import job_body
from tests.controller.test_process import Controller as Plane
from tests.controller.test_process import started
from tests.waiting import until

pytestmark = [pytest.mark.ranks, pytest.mark.redis]
SECRET = bytes(range(16)).hex()
RECORDS = (keys.job_ranks, keys.job_steps, keys.job_metrics, keys.job_logs)


@pytest.fixture
def controller(controller: Controller) -> Controller:
    controller.names = TelemetryNames(SECRET)
    return controller


def test_a_curve_stays_under_its_secret_name_when_the_agent_dies_and_storage_gives_it_back(
    agent: AgentProcess, controller: Controller, start_agent: StartAgent, redis_url: str
) -> None:
    client = controller.client
    running(controller, lines=3)
    until(lambda: len(controller.steps()) > 20)
    agent.kill()
    second = start_agent()
    ended(controller)
    controller.open_job(fence=2)
    controller.send(launch(2, 2, 5))
    ended(controller, fence=2)
    controller.send(CloseRecords(job_id=JOB, fence=2))
    controller.fact(RecordsClosed)
    told = controller.steps()
    first = [record.step for record in told if record.fence == 1]
    assert first == list(range(1, len(first) + 1)), "what the first agent had not written is there"
    assert [record.step for record in told if record.fence == 2] == [1, 2, 3, 4, 5]
    stored = read_entries(second.checkpoint_root, JOB, STEPS).values()
    assert [StepRecord.model_validate_json(body) for body in stored] == told
    client.delete(keys.job_steps(controller.names.of(JOB)))

    async def ask_back() -> None:
        async with redis_ports(redis_url, telemetry_secret=SECRET) as ports:
            assert await ports.telemetry.ask_back(JOB, 2, NODE)

    async def came_back() -> bool:
        async with redis_ports(redis_url, telemetry_secret=SECRET) as ports:
            return await ports.telemetry.put_together(JOB, has_ended=False)

    asyncio.run(ask_back())
    until(lambda: asyncio.run(came_back()))
    assert controller.steps() == told
    assert {line.text for line in controller.logs()} >= {"line 0", "line 1", "line 2"}
    assert client.exists(keys.job_ranks(controller.names.of(JOB)))
    known_to_all = [*RECORDS, keys.recalled, keys.recalled_steps, keys.recalled_events]
    assert not client.exists(*(key(JOB) for key in known_to_all))


def test_what_was_told_before_the_secret_was_set_comes_back_from_storage_and_goes_with_the_job(
    redis_url: str, start_agent: StartAgent
) -> None:
    endless = {"factory": "rank_program:train", "args": {"pause_s": 0.01, "lines": 3}}
    start_agent()

    def curve(plane: Plane, job_id: str) -> list[int]:
        path = f"/v1/jobs/{job_id}/metrics?max_points=10000"
        return [point["step"] for point in plane.client.get(path).json()["items"]]

    with started(redis_url) as plane:
        body = job_body(model=endless, train={"steps": 10**6})
        job_id = plane.client.post("/v1/jobs", json=body).json()["id"]
        until(lambda: plane.state(job_id) == "RUNNING")
        until(lambda: len(curve(plane, job_id)) > 20)
        assert plane.client.post(f"/v1/jobs/{job_id}/pause").status_code == 202
        until(lambda: plane.state(job_id) == "PAUSED")
        before = curve(plane, job_id)
        text = plane.client.get(f"/v1/jobs/{job_id}/logs").json()["items"]
    with started(redis_url, telemetry_secret=SECRET) as plane:
        until(lambda: curve(plane, job_id) == before)
        assert plane.client.get(f"/v1/jobs/{job_id}/logs").json()["items"] == text
        assert plane.client.post(f"/v1/jobs/{job_id}/cancel").status_code == 202
        until(lambda: plane.state(job_id) == "CANCELLED")
        assert plane.client.delete(f"/v1/jobs/{job_id}").status_code == 204
    with Redis.from_url(redis_url, decode_responses=True) as redis:
        assert list(redis.scan_iter(f"{keys.job(job_id)}*")) == []


def test_each_job_and_each_purpose_has_a_name_of_its_own() -> None:
    names, others = TelemetryNames(SECRET), TelemetryNames(SECRET[::-1])
    other_job = f"{JOB[:-1]}z"
    made = [names.of(JOB), names.recalled(JOB), names.of(other_job), others.of(JOB)]
    assert len({name.partition(":")[2] for name in made}) == len(made)
    assert all(keys.is_telemetry_name(JOB, name) for name in (made[0], made[1], made[3], JOB))
    assert not keys.is_telemetry_name(JOB, names.of(other_job))
    assert not keys.is_telemetry_name(JOB, f"{JOB}:")
    for key in (*RECORDS, keys.recalled, keys.recalled_steps):
        assert (
            keys.without_secret(f"at {key(names.of(JOB))}, {key(JOB)}")
            == f"at {key(JOB)}, {key(JOB)}"
        )
        assert keys.without_secret(f"{key(names.of(JOB))[:50]}...") == f"ml:job:{JOB}..."
    commanded = names.told(launch(1, 2, MAX_STEP))
    assert SECRET not in commanded.model_dump_json()
    assert names.of(JOB).partition(":")[2] not in repr(commanded)


def test_an_agent_knows_the_names_of_the_jobs_that_it_launched_or_wrote_last() -> None:
    names = LearnedNames()
    for number in range(10_001):
        names.learn(f"job-{number}", f"name-{number}")
        assert names.of("job-0") == "name-0", "a job that trains on while many others come and go"
    assert (names.of("job-1"), names.of("job-2"), names.of("job-10000")) == (
        "job-1",
        "name-2",
        "name-10000",
    )
