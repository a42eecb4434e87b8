"""Plans over REST, jobs by their plan, and the commands of ``meshloom`` for both."""

import json
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from httpx2 import Response

from services.contract.messages.probing import ProbeFailure
from services.controller.api.guard import AccessPolicy
from tests.controller.conftest import ControlPlane, job_body, open_plane
from tests.controller.profiles import ARGS
from tests.waiting import until

pytestmark = pytest.mark.redis
BATCH = {"steps": 10, "global_batch": 16}


@pytest.fixture
def desk(redis_url: str) -> Iterator[ControlPlane]:
    """A controller whose requests for plans do not wait."""
    with open_plane(redis_url, AccessPolicy(), plan_wait_s=0) as opened:
        yield opened


def body(**changes: object) -> dict[str, object]:
    small = {"model": {"factory": "decoder", "args": ARGS}, "train": BATCH, "plan": "auto"}
    return job_body(**small) | changes


def join(plane: ControlPlane, slots: int = 4) -> None:
    plane.agent.join(slots=slots)
    until(lambda: plane.get("/v1/nodes")["items"], every_s=0.01)


def plan_of(plane: ControlPlane, **changes: object) -> dict[str, Any]:
    """A plan, while the agent's double profiles and measures."""
    answers = threading.Thread(target=_answer, args=(plane,))
    answers.start()
    answer = plane.client.post("/v1/plans", json=body(**changes))
    answers.join()
    assert answer.status_code == 201, answer.text
    assert answer.headers["location"] == f"/v1/plans/{answer.json()['id']}"
    return dict(answer.json())


def _answer(plane: ControlPlane) -> None:
    plane.agent.profiles(plane.agent.is_asked())
    plane.agent.measures()


def in_state(plane: ControlPlane, plan_id: str, state: str) -> dict[str, Any]:
    def look() -> dict[str, Any] | None:
        plan = plane.get(f"/v1/plans/{plan_id}")
        return plan if plan["state"] == state else None

    return until(look, every_s=0.01)


def submits(plane: ControlPlane, plan_id: str, **headers: str) -> Response:
    answer = plane.client.post("/v1/jobs", json={"plan_id": plan_id}, headers=headers)
    assert isinstance(answer, Response)
    return answer


def test_a_plan_says_all_that_a_job_will_need_and_allocates_nothing(plane: ControlPlane) -> None:
    join(plane)
    plan = plan_of(plane, resources={"ranks": 4})
    mesh = plan["mesh"]
    assert mesh["dp_replicate"] * mesh["dp_shard"] * mesh["tp"] == 4
    assert [(seat["rank"], seat["node_id"], seat["device"]) for seat in plan["ranks"]] == [
        (rank, "loom-1", "cpu") for rank in range(4)
    ]
    assert plan["units"][0]["modules"] == [""]
    assert sum(unit["parameters"] for unit in plan["units"]) > 40_000
    assert sorted(rank for kind in plan["memory"] for rank in kind["ranks"]) == [0, 1, 2, 3]
    for kind in plan["memory"]:
        parts = {name: value for name, value in kind["peak"].items() if name != "total"}
        assert sum(parts.values()) == kind["peak"]["total"] <= plan["memory_limit_bytes"]
        assert kind["where"]
    assert plan["step_time"]["total_s"] > 0
    assert all(axis["ranks"] > 1 for axis in plan["traffic"])
    data_ranks = mesh["dp_replicate"] * mesh["dp_shard"]
    assert plan["micro_batch"] * plan["accumulation"] * data_ranks == 16
    assert plan["alternatives"]
    assert all(other["lost_because"] for other in plan["alternatives"])
    assert plane.get(f"/v1/plans/{plan['id']}") == plan
    assert plane.get("/v1/nodes/loom-1")["measured"]["cpu"]["facts"]["ranks"] == 4
    assert plane.get("/v1/jobs")["items"] == []
    assert plane.get("/v1/capacity")["cpu_slots_free"] == 4


def test_a_plan_that_is_not_made_yet_is_answered_as_such_and_cannot_be_submitted(
    desk: ControlPlane,
) -> None:
    join(desk)
    answer = desk.client.post("/v1/plans", json=body())
    assert answer.status_code == 202
    plan = answer.json()
    assert plan["state"] == "PROBING"
    assert answer.headers["location"] == f"/v1/plans/{plan['id']}"
    assert answer.headers["retry-after"] == "1"
    early = submits(desk, plan["id"])
    assert (early.status_code, early.json()["code"]) == (409, "plan_probing")
    failure = ProbeFailure(code="raised", reason="KeyError: 'dim'", traceback="Traceback: dim")
    desk.agent.fails_to_profile(desk.agent.is_asked(), failure)
    failed = in_state(desk, plan["id"], "FAILED")
    assert failed["failure"]["traceback"] == "Traceback: dim"
    refused = submits(desk, plan["id"])
    assert (refused.status_code, refused.json()["code"]) == (409, "plan_failed")
    assert "KeyError" in refused.json()["detail"]
    assert "may still train" in refused.json()["detail"]


def test_a_job_by_a_plan_runs_that_very_plan(plane: ControlPlane) -> None:
    join(plane)
    plan = plan_of(plane)
    made = submits(plane, plan["id"], **{"Idempotency-Key": "once"})
    assert made.status_code == 201, made.text
    job_id = made.json()["id"]
    gang = plane.agent.launches(job_id)
    job = plane.job(job_id)
    assert json.dumps(job["spec"]["plan"]) == json.dumps(plan["sharding"])
    assert json.dumps(job["plan"]["sharding"]) == json.dumps(plan["sharding"])
    assert gang.plan.sharding.mesh.ranks == 2
    assert gang.spec.train.micro_batch == plan["micro_batch"]
    assert job["spec"]["mesh"] == plan["mesh"]
    assert submits(plane, plan["id"], **{"Idempotency-Key": "once"}).json()["id"] == job_id
    fullest = plan["memory"][0]
    assert job["estimate"] | {"measured_as": None} == {
        "plan_id": plan["id"],
        "reason": plan["reason"],
        "peak": fullest["peak"],
        "where": fullest["where"],
        "unit": fullest["unit"],
        "host_bytes": 0,
        "micro_batch": plan["micro_batch"],
        "step_time_s": plan["step_time"]["total_s"],
        "time_scale": 1.0,
        "probe_id": plan["probe"]["id"],
        "model_flops": plan["model_flops"],
        "peak_flops": plan["peak_flops"],
        "measured_peak_bytes": None,
        "measured_as": None,
        "ratio": None,
        "measured_fragments_bytes": None,
    }
    predicted = fullest["peak"]["total"]
    plane.agent.samples(gang, [1, 1], memory_bytes=9 * predicted)
    assert plane.job(job_id)["estimate"]["measured_peak_bytes"] is None
    plane.agent.samples(gang, [2, 2], memory_bytes=9 * predicted, peak_bytes=2 * predicted)
    seen = plane.job(job_id)["estimate"]
    assert seen["measured_peak_bytes"] == 2 * predicted + 1
    # Of so small a model the process itself takes more.
    assert (seen["measured_as"], seen["ratio"]) == ("resident_growth", None)


def test_plans_are_listed_newest_first_and_say_what_each_plan_says(desk: ControlPlane) -> None:
    join(desk)
    made = [desk.client.post("/v1/plans", json=body(name=f"plan-{n}")).json() for n in range(3)]
    assert {plan["state"] for plan in made} == {"PROBING"}
    listed = desk.get("/v1/plans")
    assert [plan["id"] for plan in listed["items"]] == [plan["id"] for plan in made[::-1]]
    assert {plan["state"] for plan in listed["items"]} == {"PROBING"}
    assert listed["next_cursor"] is None
    desk.agent.profiles(desk.agent.is_asked())
    desk.agent.measures()

    def worked_out() -> list[dict[str, Any]] | None:
        # Nobody asks for a plan itself: the list has them worked out.
        items: list[dict[str, Any]] = desk.get("/v1/plans?state=READY")["items"]
        return items if len(items) == len(made) else None

    newest, *_ = until(worked_out, timeout_s=60, every_s=0.05)
    assert desk.get("/v1/plans?state=PROBING")["items"] == []
    whole = desk.get(f"/v1/plans/{newest['id']}")
    for field in ("state", "reason", "feasible", "owner", "mesh", "micro_batch", "expires_at"):
        assert newest[field] == whole[field]
    assert newest["name"] == "plan-2"
    assert newest["peak_bytes"] == max(kind["peak"]["total"] for kind in whole["memory"])
    assert newest["memory_limit_bytes"] == whole["memory_limit_bytes"]
    assert newest["step_time_s"] == whole["step_time"]["total_s"]
    assert desk.get("/v1/plans?owner=nobody")["items"] == []
    assert len(desk.get(f"/v1/plans?owner={whole['owner']}")["items"]) == 3
    first = desk.client.get("/v1/plans?limit=2")
    assert [plan["name"] for plan in first.json()["items"]] == ["plan-2", "plan-1"]
    path = first.headers["link"].removeprefix("<").split(">")[0]
    assert first.headers["link"].endswith('rel="next"')
    rest = desk.client.get(path)
    assert [plan["name"] for plan in rest.json()["items"]] == ["plan-0"]
    assert "link" not in rest.headers
    assert desk.client.get("/v1/plans?cursor=odd").json()["errors"][0]["code"] == "invalid_cursor"


def test_an_elastic_job_is_planned_for_the_fewest_ranks_that_it_may_have(
    plane: ControlPlane,
) -> None:
    join(plane)
    plan = plan_of(plane, resources={"world": {"min": 2, "max": 4}})
    mesh = plan["mesh"]
    assert mesh["dp_replicate"] * mesh["dp_shard"] * mesh["tp"] == 2
    assert "fewest" in plan["reason"]
    made = submits(plane, plan["id"]).json()
    assert made["spec"]["resources"]["world"] == {"min": 2, "max": 4}
    gang = plane.agent.launches(made["id"])
    # Of a mesh that is left open dp_shard goes on following the ranks, of which there are more.
    assert (mesh["dp_shard"], gang.plan.sharding.mesh.dp_shard) == (2, 4)
    assert json.dumps(made["spec"]["plan"]["units"]) == json.dumps(plan["sharding"]["units"])


def test_a_job_by_a_spec_is_not_probed_and_has_no_estimate(plane: ControlPlane) -> None:
    join(plane)
    job_id = plane.submit()
    plane.agent.launches(job_id)
    assert {command.kind for command in plane.agent.commands()} == {"launch_gang"}
    assert plane.job(job_id)["estimate"] is None


def test_a_repeated_submission_finds_its_job_when_the_plan_is_forgotten(
    plane: ControlPlane,
) -> None:
    join(plane)
    plan = plan_of(plane)
    job_id = submits(plane, plan["id"], **{"Idempotency-Key": "once"}).json()["id"]
    plane.redis.delete(f"ml:plan:{plan['id']}")
    assert submits(plane, plan["id"], **{"Idempotency-Key": "once"}).json()["id"] == job_id
    gone = submits(plane, plan["id"])
    (fault,) = gone.json()["errors"]
    assert (gone.status_code, fault["code"], fault["pointer"]) == (422, "plan_unknown", "/plan_id")
    assert "seven days" in fault["detail"]
    assert plane.client.get(f"/v1/plans/{plan['id']}").status_code == 404


def test_an_infeasible_plan_says_why_and_is_not_run(plane: ControlPlane) -> None:
    join(plane, slots=1)
    plan = plan_of(plane, resources={"ranks": 2})
    assert (plan["state"], plan["feasible"]) == ("READY", False)
    assert plan["reasons"]
    assert plan["advice"]
    refused = submits(plane, plan["id"])
    (fault,) = refused.json()["errors"]
    assert (refused.status_code, fault["code"]) == (422, "plan_infeasible")
    assert plan["reasons"][0] in fault["detail"]


@pytest.mark.parametrize(
    ("path", "sent", "pointers"),
    [
        ("/v1/plans", {"train": {"steps": 0}}, {"/model", "/data", "/train/steps"}),
        ("/v1/plans", body(plan={"colour": 1}), {"/plan/colour"}),
        ("/v1/plans", body(mesh={"dp_shard": 3}), {"/mesh"}),
        ("/v1/jobs", {"plan_id": "mine"}, {"/plan_id"}),
        ("/v1/jobs", {"plan_id": "plan_" + "0" * 26, "name": "x"}, {"/name"}),
        ("/v1/jobs", body(mesh={"dp_shard": 3}), {"/mesh"}),
    ],
)
def test_faults_point_into_the_body(
    quiet_plane: ControlPlane, path: str, sent: object, pointers: set[str]
) -> None:
    answer = quiet_plane.client.post(path, json=sent)
    assert answer.status_code == 422, answer.text
    assert {fault["pointer"] for fault in answer.json()["errors"]} == pointers


def test_without_a_node_there_is_nobody_to_profile_a_model(quiet_plane: ControlPlane) -> None:
    answer = quiet_plane.client.post("/v1/plans", json=body())
    assert (answer.status_code, answer.json()["code"]) == (409, "no_node_to_probe")
    assert "start an agent" in answer.json()["detail"]
