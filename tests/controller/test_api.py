"""What a client can rely on: problems, conditional GETs, idempotency, pages, streams."""

import base64
import re
from typing import Any

import pytest
from httpx2 import Response

from services.contract.redis import redis_keys as keys
from services.contract.words.problems import PROBLEM_MEDIA_TYPE
from services.controller.api.guard import AccessPolicy
from services.controller.api.middleware import MAX_BODY_BYTES
from tests.controller.conftest import ControlPlane, job_body, open_plane
from tests.waiting import until

pytestmark = pytest.mark.redis


def faults(answer: Response) -> dict[str, str]:
    """The faults of a problem, by pointer."""
    assert answer.headers["content-type"] == PROBLEM_MEDIA_TYPE
    return {fault["pointer"]: fault["detail"] for fault in answer.json()["errors"]}


# --- submitting ---------------------------------------------------------------------------------


def test_a_bad_spec_is_refused_with_every_fault_at_once(quiet_plane: ControlPlane) -> None:
    body = job_body(
        train={"steps": 0, "micro_batch": "some", "precision": {"params": "int4"}},
        resources={"ranks": "two"},
        mesh={"dp_shard": 0, "colour": 1},
        labels={"bad key!": "x"},
        extra=1,
    )
    del body["model"]
    answer = quiet_plane.client.post("/v1/jobs", json=body)
    assert answer.status_code == 422
    assert set(faults(answer)) == {
        "/model",
        "/train/steps",
        "/train/micro_batch",
        "/train/precision/params",
        "/resources/ranks",
        "/mesh/dp_shard",
        "/mesh/colour",
        "/labels/bad key!",
        "/extra",
    }
    assert "auto" in faults(answer)["/train/micro_batch"]


def test_faults_between_fields_point_at_the_field_to_change(quiet_plane: ControlPlane) -> None:
    answer = quiet_plane.client.post(
        "/v1/jobs", json=job_body(mesh={"dp_shard": 3}, train={"steps": 1, "global_batch": 3})
    )
    assert set(faults(answer)) == {"/mesh", "/train/global_batch"}


def test_a_plan_or_mesh_that_cannot_be_is_refused(quiet_plane: ControlPlane) -> None:
    body = job_body(model={"factory": "a.b:c"}, mesh={"tp": 2}, plan={"unit": []})
    answer = quiet_plane.client.post("/v1/jobs", json=body)
    assert answer.status_code == 422
    assert set(faults(answer)) == {"/plan/tensor_parallel", "/plan/unit"}


def test_words_that_mean_nothing_in_this_version_are_refused(quiet_plane: ControlPlane) -> None:
    body = job_body(
        model={"factory": "decodr"},
        data={"factory": "bytes"},
        optimizer={"factory": "decoder"},
        schedule={"factory": "lion"},
        plan={"mesh": {"dp_shard": 2, "colour": 1}},
    )
    answer = quiet_plane.client.post("/v1/jobs", json=body)
    assert answer.status_code == 422
    codes = {fault["pointer"]: fault["code"] for fault in answer.json()["errors"]}
    assert codes.pop("/plan/mesh/colour") == "extra_forbidden"
    assert set(codes) == {
        "/model/factory",
        "/data/factory",
        "/optimizer/factory",
        "/schedule/factory",
    }
    assert set(codes.values()) == {"not_supported_yet"}
    assert "choose one of adamw, muon, sgd" in faults(answer)["/optimizer/factory"]
    own = job_body(model={"factory": "a.b:c"}, plan={"mesh": {"dp_shard": 2}})
    assert quiet_plane.client.post("/v1/jobs", json=own).status_code == 201


def test_a_job_that_no_known_node_can_ever_take_is_refused_with_the_reason(
    plane: ControlPlane,
) -> None:
    body = job_body(resources={"ranks": 8}, plan={"unit": []})
    waits = plane.client.post("/v1/jobs", json=job_body(resources={"ranks": 8}))
    assert waits.status_code == 201
    assert waits.json()["reason"] == "no node has joined yet"
    plane.agent.join()
    until(lambda: plane.get("/v1/nodes")["items"])
    answer = plane.client.post("/v1/jobs", json=body)
    assert answer.status_code == 422
    assert "all known nodes together have 4" in faults(answer)["/resources"]
    assert "/plan/unit" in faults(answer)


def test_the_same_key_and_body_get_the_same_answer(plane: ControlPlane) -> None:
    headers = {"Idempotency-Key": "k-1"}
    first = plane.client.post("/v1/jobs", json=job_body(), headers=headers)
    plane.act(first.json()["id"], "cancel")
    again = plane.client.post("/v1/jobs", json=job_body(), headers=headers)
    assert (again.status_code, again.content) == (201, first.content)
    assert again.headers["etag"] == first.headers["etag"]
    assert again.headers["location"] == f"/v1/jobs/{first.json()['id']}"
    other = plane.client.post("/v1/jobs", json=job_body(priority=1), headers=headers)
    assert (other.status_code, other.json()["code"]) == (422, "idempotency_key_reused")
    empty = plane.client.post("/v1/jobs", json=job_body(), headers={"Idempotency-Key": ""})
    assert empty.status_code == 422


def test_a_dry_run_shows_the_plan_and_keeps_nothing(plane: ControlPlane) -> None:
    plane.agent.join()
    until(lambda: plane.get("/v1/nodes")["items"])
    answer = plane.client.post("/v1/jobs", params={"dry_run": True}, json=job_body())
    assert answer.status_code == 200
    plan = answer.json()["plan"]
    assert [seat["node_id"] for seat in plan["ranks"]] == ["loom-1", "loom-1"]
    assert plan["sharding"]["units"][0]["modules"] == ["blocks.*"]
    assert plane.get("/v1/jobs")["items"] == []


# --- errors -------------------------------------------------------------------------------------


def test_every_error_is_a_problem_with_the_requests_id(quiet_plane: ControlPlane) -> None:
    client = quiet_plane.client
    large = "x" * (MAX_BODY_BYTES + 1)
    json_type = {"Content-Type": "application/json"}
    answers = {
        "not_found": client.get("/v1/jobs/job_nope"),
        "method_not_allowed": client.put("/v1/jobs", json={}),
        "malformed_json": client.post("/v1/jobs", content="{", headers=json_type),
        "body_too_large": client.post("/v1/jobs", content=large, headers=json_type),
        "invalid_request": client.get("/v1/jobs", params={"limit": 201}),
        "invalid_cursor": client.get("/v1/jobs", params={"cursor": "&"}),
    }
    assert {name: answer.status_code for name, answer in answers.items()} == {
        "not_found": 404,
        "method_not_allowed": 405,
        "malformed_json": 400,
        "body_too_large": 413,
        "invalid_request": 422,
        "invalid_cursor": 422,
    }
    for name, answer in answers.items():
        problem = answer.json()
        assert answer.headers["content-type"] == PROBLEM_MEDIA_TYPE
        assert problem["request_id"] == answer.headers["x-request-id"]
        if name != "invalid_cursor":
            assert problem["code"] == name
        assert problem["type"].startswith("https://")
    assert answers["method_not_allowed"].headers["allow"] == "GET, POST"


def test_a_body_that_is_announced_too_large_is_not_read(quiet_plane: ControlPlane) -> None:
    answer = quiet_plane.client.post(
        "/v1/jobs",
        content=b"{}",
        headers={
            "Content-Type": "application/json",
            "Content-Length": str(MAX_BODY_BYTES * 100),
        },
    )
    assert answer.status_code == 413


@pytest.mark.parametrize(
    "body",
    [
        '{"name": "\\ud800"}',
        '{"\\ud800": 1}',
        "[" * 100_000,
        "NaN",
        "null",
        "[]",
        '"x"',
        '{"a": 1e999}',
        "\x00",
    ],
)
def test_odd_bodies_are_the_clients_fault(quiet_plane: ControlPlane, body: str) -> None:
    headers = {"Content-Type": "application/json"}
    answer = quiet_plane.client.post("/v1/jobs", content=body, headers=headers)
    assert answer.status_code in {400, 422}, answer.text
    assert answer.headers["content-type"] == PROBLEM_MEDIA_TYPE


@pytest.mark.parametrize("value", ['"\\ud800"', "NaN", "Infinity", "1e999"])
def test_odd_values_of_arguments_are_the_clients_fault(
    quiet_plane: ControlPlane, value: str
) -> None:
    model = f'{{"factory": "decoder", "args": {{"x": {value}}}}}'
    body = f'{{"model": {model}, "data": {{"factory": "bytes"}}, "train": {{"steps": 1}}}}'
    headers = {"Content-Type": "application/json"}
    answer = quiet_plane.client.post("/v1/jobs", content=body, headers=headers)
    assert answer.status_code in {400, 422}, answer.text


def test_a_spec_that_could_not_be_read_back_is_refused(quiet_plane: ControlPlane) -> None:
    deep: dict[str, object] = {}
    for _ in range(198):
        deep = {"a": deep}
    model = {"factory": "decoder", "args": deep}
    answer = quiet_plane.client.post("/v1/jobs", json=job_body(model=model, plan=deep))
    assert answer.status_code == 422
    assert set(faults(answer)) == {"/model/args/a", "/plan/a"}
    large = quiet_plane.client.post("/v1/jobs", json=job_body(plan={"x": "y" * 70_000}))
    assert list(faults(large)) == [""]


def test_one_unreadable_record_hides_no_other_and_can_be_deleted(plane: ControlPlane) -> None:
    broken, sound = plane.submit(), plane.submit()
    plane.redis.hset(keys.job(broken), "doc", "[" * 500)
    assert [job["id"] for job in plane.get("/v1/jobs")["items"]] == [sound]
    plane.agent.join()
    plane.agent.launches(sound)  # the reconciler goes on
    assert plane.get("/v1/nodes")["items"]
    assert plane.client.get("/metrics").status_code == 200
    for answer in (
        plane.client.get(f"/v1/jobs/{broken}"),
        plane.client.post(f"/v1/jobs/{broken}/cancel"),
    ):
        assert (answer.status_code, answer.json()["code"]) == (409, "record_unreadable")
    assert plane.client.delete(f"/v1/jobs/{broken}").status_code == 204
    assert plane.client.get(f"/v1/jobs/{broken}").status_code == 404


def test_a_request_id_is_echoed_if_it_is_one_and_stands_in_the_events(
    quiet_plane: ControlPlane,
) -> None:
    client = quiet_plane.client
    answer = client.post("/v1/jobs", json=job_body(), headers={"X-Request-ID": "mine-7"})
    assert answer.headers["x-request-id"] == "mine-7"
    (event,) = quiet_plane.get(f"/v1/jobs/{answer.json()['id']}/events")["items"]
    assert (event["kind"], event["actor"], event["request_id"]) == ("job.queued", "local", "mine-7")
    odd = client.get("/version", headers={"X-Request-ID": "a b"})
    assert re.fullmatch(r"[0-9a-f]{16}", odd.headers["x-request-id"])


@pytest.mark.parametrize("method", ["GET", "DELETE", "POST"])
def test_an_empty_id_names_nothing(quiet_plane: ControlPlane, method: str) -> None:
    answer = quiet_plane.client.request(method, "/v1/jobs/", follow_redirects=False)
    assert (answer.status_code, answer.json()["code"]) == (404, "not_found")


@pytest.mark.parametrize("cursor", ["\u0663-\u0663", "1-1\n", "9" * 20 + "-1"])
@pytest.mark.parametrize("log", ["events", "logs"])
def test_a_cursor_of_other_digits_is_none_of_ours(
    quiet_plane: ControlPlane, log: str, cursor: str
) -> None:
    job_id = quiet_plane.submit()
    answer = quiet_plane.client.get(f"/v1/jobs/{job_id}/{log}", params={"cursor": cursor})
    assert answer.status_code == 422
    assert answer.json()["errors"][0]["code"] == "invalid_cursor"


@pytest.mark.parametrize("place", ["\u0663 job_x", "9" * 400 + " job_x", "-1 job_x", "1 [x"])
def test_a_place_that_no_list_has_is_none_of_ours(quiet_plane: ControlPlane, place: str) -> None:
    cursor = base64.urlsafe_b64encode(place.encode()).decode()
    answer = quiet_plane.client.get("/v1/jobs", params={"cursor": cursor})
    assert answer.status_code == 422


def test_a_number_beyond_all_bounds_is_the_clients_fault(quiet_plane: ControlPlane) -> None:
    train = {"steps": 1, "global_batch": 10**400 + 1}
    answer = quiet_plane.client.post("/v1/jobs", json=job_body(train=train))
    assert set(faults(answer)) == {"/train/global_batch"}


# --- changing -----------------------------------------------------------------------------------


def test_requests_are_accepted_again_and_refused_in_the_wrong_state(
    quiet_plane: ControlPlane,
) -> None:
    job_id = quiet_plane.submit()
    assert quiet_plane.act(job_id, "pause")["state"] == "PAUSED"
    assert quiet_plane.act(job_id, "pause", {"grace_s": 1})["state"] == "PAUSED"
    assert quiet_plane.act(job_id, "resume")["state"] == "QUEUED"
    assert quiet_plane.act(job_id, "resume", {})["state"] == "QUEUED"
    client = quiet_plane.client
    assert client.post(f"/v1/jobs/{job_id}/checkpoints").status_code == 409
    assert client.delete(f"/v1/jobs/{job_id}").status_code == 409
    bad = client.post(f"/v1/jobs/{job_id}/cancel", json={"grace": 1, "checkpoint": "maybe"})
    assert set(faults(bad)) == {"/grace", "/checkpoint"}
    named = client.post(f"/v1/jobs/{job_id}/resume", json={"from_checkpoint": "latest"})
    assert set(faults(named)) == {"/from_checkpoint"}
    assert quiet_plane.act(job_id, "kill")["state"] == "CANCELLED"
    assert quiet_plane.act(job_id, "kill")["state"] == "CANCELLED"
    assert client.post(f"/v1/jobs/{job_id}/pause").status_code == 409
    assert client.delete(f"/v1/jobs/{job_id}").status_code == 204
    assert client.get(f"/v1/jobs/{job_id}").status_code == 404
    assert client.post("/v1/jobs/job_nope/pause").status_code == 404


# --- who may ask --------------------------------------------------------------------------------


def test_without_the_token_only_the_open_doors_open(redis_url: str) -> None:
    with open_plane(redis_url, AccessPolicy(token="s3cret"), leads=False) as plane:  # noqa: S106 a test's
        for path in ("/healthz", "/readyz", "/metrics", "/version", "/"):
            assert plane.client.get(path).status_code == 200, path
        for shown in ({}, {"Authorization": "Bearer no"}, {"Authorization": "s3cret"}):
            answer = plane.client.get("/v1/jobs", headers=shown)
            assert answer.status_code == 401
            assert answer.headers["www-authenticate"].startswith("Bearer")
            assert answer.json()["code"] == "unauthorized"
        good = {"Authorization": "Bearer s3cret"}
        assert plane.client.get("/v1/jobs", headers=good).status_code == 200
        named = {**good, "Host": "meshloom.example"}
        assert plane.client.get("/v1/jobs", headers=named).status_code == 200


def test_pages_of_other_origins_change_nothing(quiet_plane: ControlPlane) -> None:
    job_id = quiet_plane.submit()
    client = quiet_plane.client
    evil = {"Origin": "https://evil.example"}
    answer = client.post(f"/v1/jobs/{job_id}/kill", headers=evil)
    assert (answer.status_code, answer.json()["code"]) == (403, "cross_origin")
    rebound = client.get("/v1/jobs", headers={"Host": "evil.example:8400"})
    assert rebound.status_code == 421
    own = {"Origin": "http://127.0.0.1"}
    assert client.post(f"/v1/jobs/{job_id}/kill", headers=own).status_code == 202


def test_names_that_are_none_are_refused(quiet_plane: ControlPlane) -> None:
    client = quiet_plane.client
    assert client.get("/v1/jobs", headers={"Host": "["}).status_code == 421
    answer = client.post("/v1/jobs", json=job_body(), headers={"Origin": "http://["})
    assert (answer.status_code, answer.json()["code"]) == (403, "cross_origin")


# --- the system's own ---------------------------------------------------------------------------


def test_prometheus_finds_jobs_ranks_and_requests(plane: ControlPlane) -> None:
    plane.agent.join()
    job_id = plane.submit()
    plane.agent.launches(job_id)
    plane.in_state(job_id, "STARTING")
    text = plane.client.get("/metrics").text
    assert 'meshloom_jobs{state="STARTING"} 1.0' in text
    assert 'meshloom_ranks{device="cpu"} 2.0' in text
    assert 'route="/v1/jobs/{job_id}",status="200"' in text
    assert job_id not in text


def test_the_dashboard_is_served_under_a_strict_policy(quiet_plane: ControlPlane) -> None:
    answer = quiet_plane.client.get("/")
    assert answer.status_code == 200
    assert answer.headers["content-type"].startswith("text/html")
    assert "default-src 'none'" in answer.headers["content-security-policy"]
    missing = quiet_plane.client.get("/assets/nothing.js")
    assert missing.status_code == 404
    assert missing.headers["content-type"] == PROBLEM_MEDIA_TYPE


def test_a_job_that_never_ran_has_no_attempts(quiet_plane: ControlPlane) -> None:
    assert quiet_plane.get(f"/v1/jobs/{quiet_plane.submit()}/attempts")["items"] == []


def test_a_method_that_is_not_taken_makes_no_document(quiet_plane: ControlPlane) -> None:
    """It takes half a second, and who asks may be a stranger."""
    refused = quiet_plane.client.post("/healthz", json={})
    assert (refused.status_code, refused.headers["allow"]) == (405, "GET")
    refused = quiet_plane.client.put("/v1/jobs", json={})
    assert (refused.status_code, refused.headers["allow"]) == (405, "GET, POST")
    app: Any = quiet_plane.client.app
    assert app.openapi_schema is None
