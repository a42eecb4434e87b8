"""Every route of the API under every kind of token: who is let in stands here once more, by hand."""

from collections.abc import Iterator

import pytest
from fastapi.routing import APIRoute

from services.contract.words.ids import checkpoint_id
from services.controller.api.app import ROUTERS
from services.controller.api.guard import AccessPolicy
from services.local.embedded_redis import EmbeddedRedis
from tests.controller.conftest import BOOTSTRAP, ControlPlane, job_body, open_plane
from tests.controller.credentials import make

pytestmark = pytest.mark.redis

LOOKING = {"viewer", "sam", "sue", "operator"}
SUBMITTING = {"sam", "sue", "operator"}
OWNING = {"sue", "operator"}
OPERATING = {"operator"}
LET_IN: dict[str, set[str]] = {
    "POST /v1/jobs": SUBMITTING,
    "GET /v1/jobs": LOOKING,
    "GET /v1/jobs/{job_id}": LOOKING,
    "PATCH /v1/jobs/{job_id}": OWNING,
    "POST /v1/jobs/{job_id}/clone": SUBMITTING,
    "DELETE /v1/jobs/{job_id}": OWNING,
    "POST /v1/jobs/{job_id}/pause": OWNING,
    "POST /v1/jobs/{job_id}/resume": OWNING,
    "POST /v1/jobs/{job_id}/cancel": OWNING,
    "POST /v1/jobs/{job_id}/kill": OWNING,
    "GET /v1/jobs/{job_id}/attempts": LOOKING,
    "GET /v1/jobs/{job_id}/events": LOOKING,
    "GET /v1/events": LOOKING,
    "GET /v1/metrics": LOOKING,
    "GET /v1/jobs/{job_id}/logs": LOOKING,
    "GET /v1/jobs/{job_id}/ranks": LOOKING,
    "GET /v1/jobs/{job_id}/ranks/{rank}": LOOKING,
    "POST /v1/jobs/{job_id}/diagnose": OWNING,
    "GET /v1/jobs/{job_id}/diagnosis": LOOKING,
    "GET /v1/jobs/{job_id}/metrics": LOOKING,
    "GET /v1/nodes": LOOKING,
    "GET /v1/nodes/{node_id}": LOOKING | {"its agent"},
    "GET /v1/pools": LOOKING,
    "GET /v1/queue": LOOKING,
    "GET /v1/capacity": LOOKING,
    "POST /v1/nodes/{node_id}/drain": OPERATING | {"its agent"},
    "DELETE /v1/nodes/{node_id}": OPERATING | {"its agent"},
    "POST /v1/nodes/{node_id}/undrain": OPERATING | {"its agent"},
    "POST /v1/plans": SUBMITTING,
    "GET /v1/plans": LOOKING,
    "GET /v1/plans/{plan_id}": LOOKING,
    "GET /v1/jobs/{job_id}/checkpoints": LOOKING,
    "POST /v1/jobs/{job_id}/checkpoints": OWNING,
    "GET /v1/jobs/{job_id}/traces": LOOKING,
    "POST /v1/jobs/{job_id}/traces": OWNING,
    "GET /v1/jobs/{job_id}/traces/{trace_id}": LOOKING,
    "GET /v1/checkpoints/{checkpoint_id}": LOOKING,
    "GET /v1/checkpoints/{checkpoint_id}/files": OWNING,
    "GET /v1/checkpoints/{checkpoint_id}/files/{name}": OWNING,
    "POST /v1/checkpoints/{checkpoint_id}/verify": OWNING,
    "POST /v1/checkpoints/{checkpoint_id}/export": OWNING,
    "POST /v1/checkpoints/{checkpoint_id}/pin": OWNING,
    "POST /v1/checkpoints/{checkpoint_id}/unpin": OWNING,
    "DELETE /v1/checkpoints/{checkpoint_id}": OWNING,
    "POST /v1/tokens": OPERATING,
    "GET /v1/tokens": OPERATING,
    "DELETE /v1/tokens/{token_id}": OPERATING,
    "GET /v1/audit": OPERATING,
    "POST /v1/webhooks": SUBMITTING,
    "GET /v1/webhooks": SUBMITTING,
    "DELETE /v1/webhooks/{webhook_id}": SUBMITTING,
    "GET /v1/unreadable": OPERATING,
    "PUT /v1/code/{digest}": SUBMITTING,
    "GET /v1/code/{digest}": SUBMITTING,
}


def routes() -> Iterator[str]:
    for router in ROUTERS:
        for route in router.routes:
            assert isinstance(route, APIRoute)
            yield from (f"{method} {route.path}" for method in route.methods or ())


def test_who_is_let_in_is_written_down_for_every_route() -> None:
    assert sorted(routes()) == sorted(LET_IN)


@pytest.fixture(scope="module")
def guarded(redis_server: EmbeddedRedis) -> Iterator[ControlPlane]:
    redis_server.flush()
    policy = AccessPolicy(token=BOOTSTRAP)
    with open_plane(redis_server.url, policy, leads=False, plan_wait_s=0) as plane:
        yield plane


@pytest.fixture(scope="module")
def tokens(guarded: ControlPlane) -> dict[str, dict[str, str]]:
    """Headers by who asks; a job is sue's, a node is loom-1. Those who are refused come first."""
    return {
        "nobody": {},
        "its agent": make(guarded, "agent", "loom-1"),
        "other agent": make(guarded, "agent", "loom-2"),
        # An agent whose node has the owner's name is nobody's owner.
        "agent sue": make(guarded, "agent", "sue"),
        "viewer sue": make(guarded, "viewer", "sue"),
        "viewer": make(guarded, "viewer", "vic"),
        "sam": make(guarded, "submitter", "sam"),
        "sue": make(guarded, "submitter", "sue"),
        "operator": make(guarded, "operator", "olga"),
    }


@pytest.mark.parametrize("route", LET_IN)
def test_a_route_lets_in_whom_it_should_and_nobody_else(
    guarded: ControlPlane, tokens: dict[str, dict[str, str]], route: str
) -> None:
    made = guarded.client.post("/v1/jobs", json=job_body(), headers=tokens["sue"])
    job_id = str(made.json()["id"])
    names = {"job_id": job_id, "rank": "0", "node_id": "loom-1", "token_id": "tok_x"}
    names |= {"webhook_id": "webhook_x"}
    names |= {"digest": f"sha256:{'0' * 64}"}
    names |= {"trace_id": "trace_x", "name": "model.safetensors"}
    names |= {"plan_id": "plan_x", "checkpoint_id": checkpoint_id(job_id, 1, 1)}
    method, path = route.format(**names).split()
    # No body is one that would be taken: who may do a thing is judged before what it is.
    for headers_more in ({}, {"X-HTTP-Method-Override": "GET", "X-Original-URL": "/healthz"}):
        let_in = set()
        for who, headers in tokens.items():
            if who in LET_IN[route] and headers_more:
                continue
            answer = guarded.client.request(method, path, headers={**headers, **headers_more})
            assert answer.status_code < 500, answer.text
            # Who may upload code hears that it is not taken here.
            if answer.status_code not in {401, 403} or answer.json()["code"] == "code_not_allowed":
                let_in.add(who)
            else:
                assert (answer.status_code == 401) == (who == "nobody")
        wanted = LET_IN[route] | ({"viewer sue"} if "viewer" in LET_IN[route] else set())
        assert let_in == (wanted - LET_IN[route] if headers_more else wanted)
