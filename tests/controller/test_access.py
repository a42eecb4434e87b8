"""Who may ask for what: scopes, tokens, provenance."""

import json
from collections.abc import Callable

import pytest
from fastapi import APIRouter
from fastapi.routing import APIRoute
from httpx2 import Response

from services.contract.api.access import Scope
from services.contract.redis import redis_keys as keys
from services.controller.api.app import ROUTERS
from services.controller.api.scopes import READS, scope_of, unscoped
from tests.controller.conftest import BOOTSTRAP, ControlPlane, job_body
from tests.controller.credentials import bearer, make, refusal, trail

pytestmark = pytest.mark.redis


def test_every_route_says_which_scope_it_wants() -> None:
    assert [route for router in ROUTERS for route in unscoped(router)] == []


def test_a_route_without_a_scope_is_named() -> None:
    router = APIRouter(prefix="/v1/things")

    async def thing() -> None: ...

    router.add_api_route("/open", thing, methods=["POST"])
    router.add_api_route("/shut", thing, dependencies=[READS])
    router.add_api_route("/torn", thing, dependencies=[READS, READS])
    assert list(unscoped(router)) == ["POST /v1/things/open", "GET /v1/things/torn"]


def test_every_change_wants_more_than_looking() -> None:
    routes = [route for router in ROUTERS for route in router.routes]
    for route in routes:
        assert isinstance(route, APIRoute)
        wanted = scope_of(route)
        assert wanted is not None
        if route.methods != {"GET"}:
            assert not Scope.VIEWER.includes(wanted), route.path


def test_scopes_include_those_below_and_agents_stand_apart() -> None:
    included = {held: [wanted for wanted in Scope if held.includes(wanted)] for held in Scope}
    assert included == {
        Scope.VIEWER: [Scope.VIEWER],
        Scope.SUBMITTER: [Scope.VIEWER, Scope.SUBMITTER],
        Scope.OPERATOR: [Scope.VIEWER, Scope.SUBMITTER, Scope.OPERATOR],
        Scope.AGENT: [Scope.AGENT],
    }


def test_each_scope_allows_its_requests_and_no_others(guarded: ControlPlane) -> None:
    client = guarded.client
    doors: dict[str, Callable[[dict[str, str]], Response]] = {
        "look": lambda h: client.get("/v1/jobs", headers=h),
        "submit": lambda h: client.post("/v1/jobs", json=job_body(), headers=h),
        "tokens": lambda h: client.get("/v1/tokens", headers=h),
        "audit": lambda h: client.get("/v1/audit", headers=h),
    }
    opened = {}
    for scope in Scope:
        headers = make(guarded, scope)
        answers = {name: door(headers) for name, door in doors.items()}
        opened[scope] = [name for name, answer in answers.items() if answer.status_code < 400]
        for name in doors.keys() - opened[scope]:
            assert refusal(answers[name]) == (403, "insufficient_scope")
            assert f"has scope {scope}" in answers[name].json()["detail"]
    assert opened == {
        Scope.VIEWER: ["look"],
        Scope.SUBMITTER: ["look", "submit"],
        Scope.OPERATOR: ["look", "submit", "tokens", "audit"],
        Scope.AGENT: [],
    }


def test_a_job_obeys_its_owner_and_operators_alone(guarded: ControlPlane) -> None:
    client = guarded.client
    alice, bob = make(guarded, "submitter", "alice"), make(guarded, "submitter", "bob")
    viewer = make(guarded, "viewer", "alice")
    made = client.post("/v1/jobs", json=job_body(), headers=alice).json()
    assert made["owner"] == "alice"
    path = f"/v1/jobs/{made['id']}"
    for verb in ("pause", "resume", "cancel", "kill", "checkpoints"):
        assert refusal(client.post(f"{path}/{verb}", headers=bob)) == (403, "not_the_owner")
        assert refusal(client.post(f"{path}/{verb}", headers=viewer)) == (403, "insufficient_scope")
    assert refusal(client.delete(path, headers=bob)) == (403, "not_the_owner")
    assert client.get(path, headers=bob).json()["state"] == "QUEUED"
    assert client.post(f"{path}/pause", headers=alice).json()["state"] == "PAUSED"
    assert client.post(f"{path}/kill", headers=bearer(BOOTSTRAP)).status_code == 202
    second = make(guarded, "submitter", "alice", label="another of hers")
    assert client.delete(path, headers=second).status_code == 204
    assert client.post("/v1/jobs/job_nope/pause", headers=bob).status_code == 404


def test_only_the_owner_has_a_checkpoint_kept_for_a_clone(guarded: ControlPlane) -> None:
    client = guarded.client
    alice, bob = make(guarded, "submitter", "alice"), make(guarded, "submitter", "bob")
    job_id = client.post("/v1/jobs", json=job_body(), headers=alice).json()["id"]
    path, begun = f"/v1/jobs/{job_id}/clone", {"from_checkpoint": "latest"}
    refused = client.post(path, json=begun, headers=bob)
    assert refusal(refused) == (403, "not_the_owner")
    assert "without from_checkpoint" in refused.json()["detail"]
    for allowed in (alice, bearer(BOOTSTRAP)):
        answer = client.post(path, json=begun, headers=allowed)
        assert answer.status_code == 422, "it has no checkpoint yet"
        assert answer.json()["errors"][0]["code"] == "unknown_checkpoint"
    mine = client.post(path, json={}, headers=bob)
    assert (mine.status_code, mine.json()["owner"]) == (202, "bob")
    for name, ids in (("alice", [job_id]), ("bob", [mine.json()["id"]]), ("bo", [])):
        page = client.get(f"/v1/jobs?owner={name}", headers=bob).json()
        assert [job["id"] for job in page["items"]] == ids


def test_an_agents_token_sees_its_own_node_alone(guarded: ControlPlane) -> None:
    agent = make(guarded, "agent", "loom-1")
    assert guarded.client.get("/v1/nodes/loom-1", headers=agent).status_code == 404
    for path in ("/v1/nodes/loom-2", "/v1/nodes", "/v1/jobs"):
        assert refusal(guarded.client.get(path, headers=agent)) == (403, "insufficient_scope")


def test_events_name_who_asked(guarded: ControlPlane) -> None:
    alice = make(guarded, "submitter", "alice")
    job_id = guarded.client.post("/v1/jobs", json=job_body(), headers=alice).json()["id"]
    guarded.client.post(f"/v1/jobs/{job_id}/kill", headers=bearer(BOOTSTRAP))
    events = guarded.client.get(f"/v1/jobs/{job_id}/events", headers=alice).json()["items"]
    assert events[0]["actor"] == "alice"
    assert events[-1]["actor"] == "bootstrap"


def test_a_token_is_shown_once_and_kept_as_a_digest(guarded: ControlPlane) -> None:
    headers = bearer(BOOTSTRAP)
    wanted = {"subject": "alice", "scope": "viewer", "label": "laptop"}
    made = guarded.client.post("/v1/tokens", json=wanted, headers=headers)
    assert made.headers["cache-control"] == "no-store"
    token = made.json()["token"]
    secret = token.split("_", 2)[2]
    (listed,) = guarded.client.get("/v1/tokens", headers=headers).json()["items"]
    assert listed == {k: v for k, v in made.json().items() if k != "token"}
    assert (listed["created_by"], listed["label"]) == ("bootstrap", "laptop")
    assert secret not in json.dumps(guarded.redis.hgetall(keys.TOKENS))
    assert secret not in json.dumps(trail(guarded))


def test_a_revoked_token_opens_nothing(guarded: ControlPlane) -> None:
    alice = make(guarded, "viewer")
    (listed,) = guarded.client.get("/v1/tokens", headers=bearer(BOOTSTRAP)).json()["items"]
    assert guarded.client.get("/v1/jobs", headers=alice).status_code == 200
    path = f"/v1/tokens/{listed['id']}"
    assert guarded.client.delete(path, headers=bearer(BOOTSTRAP)).status_code == 204
    answer = guarded.client.get("/v1/jobs", headers=alice)
    assert refusal(answer) == (401, "unauthorized")
    assert "revoked" in answer.json()["detail"]
    assert guarded.client.delete(path, headers=bearer(BOOTSTRAP)).status_code == 404


def test_an_expired_token_opens_nothing(guarded: ControlPlane) -> None:
    alice = make(guarded, "viewer", expires_in_s=3600)
    assert guarded.client.get("/v1/jobs", headers=alice).status_code == 200
    ((name, text),) = guarded.redis.hgetall(keys.TOKENS).items()
    record = json.loads(text)
    assert record["expires_ms"] == record["created_ms"] + 3_600_000
    record["expires_ms"] = record["created_ms"] - 1
    guarded.redis.hset(keys.TOKENS, name, json.dumps(record))
    answer = guarded.client.get("/v1/jobs", headers=alice)
    assert refusal(answer) == (401, "unauthorized")
    assert "expired" in answer.json()["detail"]
    (listed,) = guarded.client.get("/v1/tokens", headers=bearer(BOOTSTRAP)).json()["items"]
    assert listed["expired"] is True


def test_what_is_nearly_a_token_is_none(guarded: ControlPlane) -> None:
    good = make(guarded, "operator")["Authorization"].removeprefix("Bearer ")
    other = make(guarded, "operator")["Authorization"].removeprefix("Bearer ")
    mixed = f"{good.rpartition('_')[0]}_{other.rpartition('_')[2]}"
    last = "A" if good[-1] != "A" else "B"
    for shown in (mixed, good[:-1] + last, good.upper(), f"{good} ", "mlt_", "", "\u00e9"):
        headers = [(b"Authorization", f"Bearer {shown}".encode())]
        assert refusal(guarded.client.get("/v1/jobs", headers=headers)) == (401, "unauthorized")
    basic = {"Authorization": f"Basic {good}"}
    assert refusal(guarded.client.get("/v1/jobs", headers=basic)) == (401, "unauthorized")


def test_of_two_tokens_none_is_taken(guarded: ControlPlane) -> None:
    good = make(guarded, "viewer")["Authorization"].encode()
    for other in (b"Bearer mlt_", good):
        headers = [(b"Authorization", good), (b"Authorization", other)]
        assert refusal(guarded.client.get("/v1/jobs", headers=headers)) == (401, "unauthorized")


@pytest.mark.parametrize(
    ("body", "pointer"),
    [
        ({"subject": "local", "scope": "viewer"}, "/subject"),
        ({"subject": "agent:x", "scope": "viewer"}, "/subject"),
        ({"subject": "a", "scope": "root"}, "/scope"),
        ({"subject": "a", "scope": "viewer", "expires_in_s": 0}, "/expires_in_s"),
        ({"subject": "a", "scope": "viewer", "secret": "mine"}, "/secret"),
        ({"subject": "a", "scope": "viewer", "label": "two\nlines"}, "/label"),
    ],
)
def test_a_token_that_cannot_be_is_refused(
    guarded: ControlPlane, body: dict[str, object], pointer: str
) -> None:
    answer = guarded.client.post("/v1/tokens", json=body, headers=bearer(BOOTSTRAP))
    assert answer.status_code == 422
    assert [fault["pointer"] for fault in answer.json()["errors"]] == [pointer]


def test_a_token_record_that_cannot_be_read_opens_nothing_and_hides_none(
    guarded: ControlPlane,
) -> None:
    alice = make(guarded, "viewer")
    guarded.redis.hset(keys.TOKENS, "tok_00000000000000000000000000", "{")
    shown = bearer("mlt_00000000000000000000000000_" + "x" * 43)
    assert guarded.client.get("/v1/jobs", headers=shown).status_code == 401
    assert len(guarded.client.get("/v1/tokens", headers=bearer(BOOTSTRAP)).json()["items"]) == 1
    assert guarded.client.get("/v1/jobs", headers=alice).status_code == 200
