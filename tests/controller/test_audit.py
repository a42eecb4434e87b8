"""The audit trail: what is in it, how it is read, and who cannot displace it."""

import pytest
from fastapi import FastAPI

from services.contract.redis import redis_keys as keys
from services.controller.api import rates
from tests.controller.conftest import BOOTSTRAP, ControlPlane, job_body
from tests.controller.credentials import bearer, make, trail

pytestmark = pytest.mark.redis


def test_every_change_and_every_refusal_is_in_the_trail(guarded: ControlPlane) -> None:
    client = guarded.client
    alice = make(guarded, "submitter", "alice")
    job = client.post("/v1/jobs", json=job_body(), headers={**alice, "X-Request-ID": "r-1"})
    client.get("/v1/jobs", headers=alice)
    client.get("/v1/jobs", headers={"X-Request-ID": "r-2"})
    client.get("/v1/tokens", headers={**alice, "X-Request-ID": "r-3"})
    path = f"/v1/jobs/{job.json()['id']}"
    client.delete(path, headers={**alice, "X-Request-ID": "r-4"})
    entries = [
        (e["actor"], e["scope"], e["request_id"], e["method"], e["path"], e["status"], e["outcome"])
        for e in trail(guarded)
    ]
    assert entries[:-1] == [
        ("alice", "submitter", "r-4", "DELETE", path, 409, "refused"),
        ("alice", "submitter", "r-3", "GET", "/v1/tokens", 403, "refused"),
        (None, None, "r-2", "GET", "/v1/jobs", 401, "refused"),
        ("alice", "submitter", "r-1", "POST", "/v1/jobs", 201, "done"),
    ]
    assert entries[-1][0] == "bootstrap"


def test_a_method_in_the_trail_is_as_short_as_methods_are(guarded: ControlPlane) -> None:
    # Without a token, and as long as a request's head may be.
    answer = guarded.client.request("A" * 12_000, "/v1/jobs")
    assert answer.status_code == 401
    assert trail(guarded)[0]["method"] == "A" * 32
    assert len(str(guarded.redis.xrange(keys.AUDIT_OF_REFUSALS))) < 1_000


def test_a_change_that_fails_unforeseen_is_in_the_trail_too(guarded: ControlPlane) -> None:
    async def fail() -> None:
        raise RuntimeError("unforeseen")

    app = guarded.client.app
    assert isinstance(app, FastAPI)
    app.add_api_route("/v1/broken", fail, methods=["POST"])
    alice = make(guarded, "submitter", "alice")
    assert guarded.client.post("/v1/broken", json={}, headers=alice).status_code == 500
    entry = trail(guarded)[0]
    told = tuple(entry[name] for name in ("actor", "method", "path", "status", "outcome"))
    assert told == ("alice", "POST", "/v1/broken", 500, "failed")


def test_the_trail_is_read_page_by_page(guarded: ControlPlane) -> None:
    for _ in range(5):
        make(guarded, "viewer")
    whole = [entry["id"] for entry in trail(guarded)]
    seen: list[object] = []
    query = "?limit=2"
    while query:
        answer = guarded.client.get(f"/v1/audit{query}", headers=bearer(BOOTSTRAP))
        seen += [entry["id"] for entry in answer.json()["items"]]
        cursor = answer.json()["next_cursor"]
        query = f"?limit=2&cursor={cursor}" if cursor else ""
    assert seen == whole
    assert len(whole) == 5


@pytest.mark.parametrize(
    ("method", "headers", "status"),
    [
        ("GET", {}, 401),
        ("POST", {}, 401),
        ("POST", {"Content-Type": "text/plain"}, 415),
        ("PUT", {"Content-Type": "text/plain"}, 415),
        ("PUT", {}, 401),
        ("POST", {"Origin": "http://evil.example"}, 403),
    ],
)
def test_refusals_without_end_displace_nothing_else_of_the_trail(
    guarded: ControlPlane, method: str, headers: dict[str, str], status: int
) -> None:
    alice = make(guarded, "viewer")
    for _ in range(260):
        answer = guarded.client.request(method, "/v1/jobs", headers=headers)
        assert answer.status_code == status
    entries = guarded.redis.xrange(keys.AUDIT_OF_REFUSALS) or []
    refused = [entry for entry in entries if f'"status":{status}' in str(entry)]
    assert 200 <= len(refused) < 260
    # Who shows a token has a bucket of their own: strangers cannot hide what they try.
    assert guarded.client.post("/v1/jobs", json=job_body(), headers=alice).status_code == 403
    assert trail(guarded)[0]["actor"] == "alice"


def test_the_next_entry_counts_the_refusals_that_were_left_out(
    guarded: ControlPlane, monkeypatch: pytest.MonkeyPatch
) -> None:
    for _ in range(230):
        guarded.client.get("/v1/jobs")
    later_ms = rates.now_ms() + 3_600_000
    monkeypatch.setattr(rates, "now_ms", lambda: later_ms)
    guarded.client.get("/v1/jobs")
    counts = [int(str(entry["left_out"])) for entry in trail(guarded)]
    assert counts[0] > 0
    assert guarded.redis.xlen(keys.AUDIT_OF_REFUSALS) + sum(counts) == 231
