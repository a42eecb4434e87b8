"""A job's record is split by how its parts change; whole ones of older versions are taken over."""

import json
from pathlib import Path
from typing import Any, Final

import pytest
from redis import Redis

from services.contract.messages.commands import LaunchGang
from services.contract.redis import redis_keys as keys
from services.controller.adapters.redis.job_rows import PARTS, SPLIT_MARK
from services.controller.api.guard import AccessPolicy
from services.controller.domain.job.job import Job
from tests.controller.conftest import ControlPlane, open_plane
from tests.controller.dump_records import restore
from tests.waiting import until

pytestmark = pytest.mark.redis
WHOLE, LANDED = (
    Path(__file__).parent / f"records_{name}.json"
    for name in ("before_the_split", "of_the_landed_version")
)
# Nobody who writes a part writes it so: it stays as long as nobody does.
UNTOUCHED: Final = "  \n"


def record(redis: Redis, job_id: str) -> dict[str, str]:
    found: Any = redis.hgetall(keys.job(job_id))
    return dict(found)


def touch(redis: Redis, job_id: str) -> None:
    for part in PARTS:
        text = str(redis.hget(keys.job(job_id), part))
        redis.hset(keys.job(job_id), part, text[:-1] + UNTOUCHED + text[-1])


def untouched(redis: Redis, job_id: str) -> set[str]:
    return {part for part in PARTS if UNTOUCHED in str(redis.hget(keys.job(job_id), part))}


def raise_priority(plane: ControlPlane, job_id: str) -> None:
    changed = plane.client.patch(
        f"/v1/jobs/{job_id}", json={"priority": 7}, headers={"If-Match": "*"}
    )
    assert changed.status_code == 200, changed.text


def trains(plane: ControlPlane) -> LaunchGang:
    plane.agent.join()
    gang = plane.agent.launches(plane.submit(train={"steps": 100}))
    plane.agent.trains(gang, range(1, 4))
    plane.in_state(gang.job_id, "RUNNING")
    return gang


def test_a_vote_and_a_change_of_state_write_no_spec_and_no_plan(plane: ControlPlane) -> None:
    gang = trains(plane)
    touch(plane.redis, gang.job_id)
    before = plane.job(gang.job_id)
    name = plane.agent.saves(gang, 3)
    until(lambda: plane.get(f"/v1/checkpoints/{name}")["state"] == "COMMITTED", every_s=0.01)
    # Nor the attempts: votes are in the records of their checkpoints.
    assert untouched(plane.redis, gang.job_id) == set(PARTS)
    told = record(plane.redis, gang.job_id)
    assert told["doc"].startswith(SPLIT_MARK)
    assert not {"spec", "asked", "plan", "estimate", "attempts"} & set(json.loads(told["doc"]))
    plane.act(gang.job_id, "pause", {"checkpoint": "none"})
    plane.agent.ends(gang, 4, exit_code=0, drained=True)
    plane.in_state(gang.job_id, "PAUSED")
    assert untouched(plane.redis, gang.job_id) == {"spec", "plan"}
    after = plane.job(gang.job_id)
    assert (after["spec"], after["attempt"]) == (before["spec"], 1)


def test_a_spec_that_people_change_is_written_and_nothing_else_of_the_parts(
    plane: ControlPlane,
) -> None:
    gang = trains(plane)
    touch(plane.redis, gang.job_id)
    raise_priority(plane, gang.job_id)
    assert untouched(plane.redis, gang.job_id) == {"plan", "attempts"}
    assert plane.job(gang.job_id)["spec"]["priority"] == 7


def test_who_does_not_lead_leaves_a_record_as_an_older_leader_reads_it(
    quiet_plane: ControlPlane,
) -> None:
    job_id = quiet_plane.submit()
    raise_priority(quiet_plane, job_id)
    told = record(quiet_plane.redis, job_id)
    assert Job.model_validate_json(told["doc"]).spec.priority == 7
    assert not set(PARTS) & set(told)


def test_what_an_older_controller_wrote_over_a_record_counts_and_is_split_again(
    plane: ControlPlane,
) -> None:
    gang = trains(plane)
    redis, key = plane.redis, keys.job(gang.job_id)
    redis.hincrby(key, "version", 1)
    redis.hset(key, "doc", whole(record(redis, gang.job_id)))
    # What lies beside it is of the past now.
    for part in PARTS:
        redis.hset(key, part, "{}")
    before = plane.job(gang.job_id)
    plane.agent.saves(gang, 3)
    until(lambda: record(redis, gang.job_id)["doc"].startswith(SPLIT_MARK), every_s=0.01)
    after = plane.job(gang.job_id)
    assert (after["spec"], after["plan"]) == (before["spec"], before["plan"])
    assert "{}" not in [record(redis, gang.job_id)[part] for part in PARTS]


@pytest.mark.parametrize("part", PARTS)
def test_a_record_that_lacks_a_part_costs_itself_and_is_named(
    plane: ControlPlane, part: str
) -> None:
    gang = trains(plane)
    plane.redis.hdel(keys.job(gang.job_id), part)
    answer = plane.client.get(f"/v1/jobs/{gang.job_id}")
    assert answer.json()["code"] == "record_unreadable"
    checks = plane.client.get("/readyz").json()["checks"]
    assert checks["records"].startswith("1 cannot be read")
    assert plane.client.delete(f"/v1/jobs/{gang.job_id}").status_code == 204


def whole(told: dict[str, str]) -> str:
    parts = [told[part][1:-1] for part in PARTS]
    return "{" + ",".join([*parts, told["doc"].removeprefix(SPLIT_MARK)])


@pytest.mark.parametrize("records", [WHOLE, LANDED], ids=["whole", "landed"])
def test_records_of_an_older_version_are_taken_over_with_attempts_and_checkpoints(
    redis_url: str, records: Path
) -> None:
    told = json.loads(records.read_text())
    with Redis.from_url(redis_url, decode_responses=True) as redis:
        restore(redis, told["records"])
        for lease in redis.keys("ml:node:*:lease"):
            redis.delete(lease)
        with open_plane(redis_url, AccessPolicy(), leads=False, replays=False) as standby:
            _assert_shown(standby, told)
        documents = {n: record(redis, n)["doc"] for n in told["jobs"]}
        are_split = [doc.startswith(SPLIT_MARK) for doc in documents.values()]
        assert any(are_split) == (records == LANDED)
        with open_plane(redis_url, AccessPolicy(), replays=False) as plane:
            (trained,) = (n for n, j in told["jobs"].items() if j["name"] == "trains")
            # Its node is gone: another life of it goes on from what was committed.
            plane.agent.join("life-2", slots=8)
            gang = plane.agent.launches(trained, fence=2)
            assert gang.resume_from == told["jobs"][trained]["latest_checkpoint"]
            until(lambda: record(redis, trained)["doc"].startswith(SPLIT_MARK), every_s=0.01)
            _assert_shown(plane, told, ended_alone=True)
            attempts = plane.get(f"/v1/jobs/{trained}/attempts")["items"]
            assert [a["fence"] for a in attempts] == [1, 2]


def _assert_shown(plane: ControlPlane, told: dict[str, Any], *, ended_alone: bool = False) -> None:
    """Each job is told as the version told it that wrote it; those alone to which nothing happens."""
    for job_id, job in told["jobs"].items():
        if not ended_alone or job["state"] in {"SUCCEEDED", "CANCELLED", "PAUSED"}:
            now = plane.job(job_id)
            # Why it waits is worked out for whoever asks, and no node lives here.
            known = {name: value for name, value in job.items() if name != "reason"}
            assert now | known == now, job["name"]
