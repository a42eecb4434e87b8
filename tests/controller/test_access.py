"""Who may ask for what: scopes, tokens, rates, provenance, the audit trail."""

import json
from collections.abc import Callable, Iterator

import pytest
from fastapi import APIRouter, FastAPI
from fastapi.routing import APIRoute
from httpx2 import Response

from services.contract.api.access import Scope
from services.contract.jobs.entry_points import EntryPoints
from services.contract.redis import redis_keys as keys
from services.controller.api import rates
from services.controller.api.app import ROUTERS
from services.controller.api.guard import AccessPolicy
from services.controller.api.scopes import READS, scope_of, unscoped
from services.controller.domain.access.rate import Bucket, Rate, take
from services.controller.settings import Settings
from tests.controller.conftest import ControlPlane, job_body, open_plane

pytestmark = pytest.mark.redis
BOOTSTRAP = "the-operators-own"


def bearer(token: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {token}"}


@pytest.fixture
def guarded(redis_url: str) -> Iterator[ControlPlane]:
    """A controller that wants tokens; its client shows none by itself."""
    with open_plane(redis_url, AccessPolicy(token=BOOTSTRAP), leads=False) as plane:
        yield plane


def make(plane: ControlPlane, scope: str, subject: str = "alice", **more: object) -> dict[str, str]:
    """The headers of a new token."""
    body = {"subject": subject, "scope": scope, **more}
    answer = plane.client.post("/v1/tokens", json=body, headers=bearer(BOOTSTRAP))
    assert answer.status_code == 201, answer.text
    return bearer(answer.json()["token"])


def trail(plane: ControlPlane) -> list[dict[str, object]]:
    answer = plane.client.get("/v1/audit", headers=bearer(BOOTSTRAP))
    assert answer.status_code == 200
    return list(answer.json()["items"])


def refusal(answer: Response) -> tuple[int, str]:
    return answer.status_code, answer.json()["code"]


# --- scopes -------------------------------------------------------------------------------------


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


def test_each_scope_opens_its_doors_and_no_others(guarded: ControlPlane) -> None:
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


# --- tokens -------------------------------------------------------------------------------------


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


# --- rates --------------------------------------------------------------------------------------


def test_a_bucket_holds_its_burst_and_fills_at_its_rate() -> None:
    rate = Rate(per_s=2, burst=3)
    bucket: Bucket | None = None
    waits = []
    for now_ms in (0, 0, 0, 0, 400, 500, 500, 10_000, 10_000, 10_000, 10_000):
        bucket, wait_ms = take(bucket, rate, now_ms)
        waits.append(wait_ms)
    assert waits == [0, 0, 0, 500, 100, 0, 500, 0, 0, 0, 500]


def test_a_clock_that_goes_back_fills_no_bucket() -> None:
    rate = Rate(per_s=1, burst=1)
    bucket, _ = take(None, rate, 1_000_000)
    waits = []
    for now_ms in (0, 500, 1000):
        bucket, wait_ms = take(bucket, rate, now_ms)
        waits.append(wait_ms)
    assert waits == [1000, 500, 0]


def test_each_token_has_its_own_rate_at_each_controller(redis_url: str) -> None:
    slow = AccessPolicy(token=BOOTSTRAP, rate=Rate(per_s=0.001, burst=3))
    with (
        open_plane(redis_url, slow, leads=False) as one,
        open_plane(redis_url, slow, leads=False) as two,
    ):
        alice, bob = make(one, "viewer", "alice"), make(one, "viewer", "bob")
        for plane in (one, two):
            answers = [plane.client.get("/v1/jobs", headers=alice) for _ in range(4)]
            assert [answer.status_code for answer in answers] == [200, 200, 200, 429]
            assert refusal(answers[3]) == (429, "rate_limited")
            assert 990 <= int(answers[3].headers["retry-after"]) <= 1000
        assert one.client.get("/v1/jobs", headers=bob).status_code == 200
        assert one.client.get("/v1/jobs", headers=bearer(BOOTSTRAP)).status_code == 200
        assert one.client.get("/healthz").status_code == 200


def test_a_request_within_its_rate_writes_nothing_to_redis(guarded: ControlPlane) -> None:
    alice = make(guarded, "viewer")
    before = guarded.redis.info("commandstats")
    assert guarded.client.get("/v1/capacity", headers=alice).status_code == 200
    after = guarded.redis.info("commandstats")
    writes = ("cmdstat_hset", "cmdstat_set", "cmdstat_pexpire", "cmdstat_xadd")
    assert [before.get(name) for name in writes] == [after.get(name) for name in writes]


def test_buckets_that_are_full_again_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    moment = 0
    monkeypatch.setattr(rates, "now_ms", lambda: moment)
    monkeypatch.setattr(rates, "_KEPT", 2)
    buckets = rates.Buckets(Rate(per_s=1, burst=2))
    for name in ("a", "b"):
        assert [buckets.take(name) for _ in range(3)] == [0, 0, 1000]
    moment = 1999
    assert [buckets.take(name) for name in ("b", "c", "a")] == [0, 0, 0]
    assert set(buckets._buckets) == {"a", "b", "c"}
    moment = 2000 + 1999
    assert buckets.take("d") == 0
    assert set(buckets._buckets) == {"d"}


# --- where requests come from -------------------------------------------------------------------


def test_a_page_that_rebinds_its_name_to_this_machine_reads_nothing(
    quiet_plane: ControlPlane,
) -> None:
    for host in ("evil.example", "evil.example:8400", "127.0.0.1.evil.example", ""):
        answer = quiet_plane.client.get("/v1/jobs", headers={"Host": host})
        assert refusal(answer) == (421, "misdirected_request")
    for host in ("localhost:8400", "LOCALHOST", "[::1]:8400", "127.0.0.1"):
        assert quiet_plane.client.get("/v1/jobs", headers={"Host": host}).status_code == 200


@pytest.mark.parametrize(
    "media_type",
    ["application/x-www-form-urlencoded", "multipart/form-data; boundary=x", "text/plain", ""],
)
def test_a_form_of_another_site_changes_nothing(quiet_plane: ControlPlane, media_type: str) -> None:
    job_id = quiet_plane.submit()
    sent = {"Content-Type": media_type}
    for path, body in (("/v1/jobs", json.dumps(job_body())), (f"/v1/jobs/{job_id}/kill", "")):
        blind = quiet_plane.client.post(path, content=body, headers=sent)
        assert refusal(blind) == (415, "unsupported_media_type")
        for mark in ({"Origin": "http://evil.example"}, {"Sec-Fetch-Site": "cross-site"}):
            marked = quiet_plane.client.post(path, content=body, headers={**sent, **mark})
            assert refusal(marked) == (403, "cross_origin")
    assert quiet_plane.job(job_id)["state"] == "QUEUED"
    assert len(quiet_plane.get("/v1/jobs")["items"]) == 1


def test_a_body_without_a_type_is_not_taken(quiet_plane: ControlPlane) -> None:
    answer = quiet_plane.client.post("/v1/jobs", content=json.dumps(job_body()))
    assert refusal(answer) == (415, "unsupported_media_type")


def test_further_names_can_be_allowed(redis_url: str) -> None:
    policy = AccessPolicy(token=BOOTSTRAP, names=frozenset({"meshloom.example"}))
    with open_plane(redis_url, policy, leads=False) as plane:
        shown = bearer(BOOTSTRAP)
        for host, status in (("meshloom.example", 200), ("localhost", 200), ("evil.example", 421)):
            answer = plane.client.get("/v1/jobs", headers={**shown, "Host": host})
            assert answer.status_code == status, host
        for origin, status in (("https://meshloom.example", 201), ("https://evil.example", 403)):
            answer = plane.client.post(
                "/v1/jobs", json=job_body(), headers={**shown, "Origin": origin}
            )
            assert answer.status_code == status, origin


# --- the audit trail ----------------------------------------------------------------------------


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
        ("POST", {"Origin": "http://evil.example"}, 403),
    ],
)
def test_who_is_refused_forever_does_not_wash_the_trail_away(
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


# --- what specs may say -------------------------------------------------------------------------


def test_entry_points_that_are_not_listed_are_refused_with_the_place(redis_url: str) -> None:
    listed = EntryPoints(("models",))
    with open_plane(redis_url, AccessPolicy(), leads=False, entry_points=listed) as plane:
        good = job_body(model={"factory": "models.net:Tiny"})
        assert plane.client.post("/v1/jobs", json=good).status_code == 201
        bad = job_body(
            model={"factory": "os:system"},
            optimizer={"factory": "modelsx:f"},
            evaluation={"metrics": {"factory": "other:f", "args": {"token": "abc"}}},
        )
        answer = plane.client.post("/v1/jobs", json=bad)
        assert answer.status_code == 422
        found = {fault["pointer"]: fault["code"] for fault in answer.json()["errors"]}
        named = ("/model/factory", "/optimizer/factory", "/evaluation/metrics/factory")
        assert {p: code for p, code in found.items() if p in named} == dict.fromkeys(
            named, "factory_not_allowed"
        )
        assert found.keys() - named == {"/evaluation/metrics/args/token"}
        assert "MESHLOOM_FACTORY_PREFIXES" in answer.json()["detail"]


def test_with_tokens_nothing_but_built_ins_is_allowed_unless_listed() -> None:
    def allowed(**fields: object) -> bool:
        settings = Settings.model_validate({"redis_url": "redis://x", **fields})
        return settings.entry_points.allows("models:Tiny")

    assert allowed()
    assert not allowed(token="x" * 32)
    assert allowed(token="x" * 32, factory_prefixes="other, models")
    assert not allowed(factory_prefixes="")


def test_a_credential_in_a_spec_is_refused_and_not_echoed(quiet_plane: ControlPlane) -> None:
    literal = job_body(data={"factory": "stdlib_bytes", "args": {"hf_token": "hf_abcdefgh"}})
    answer = quiet_plane.client.post("/v1/jobs", json=literal)
    assert answer.status_code == 422
    (fault,) = answer.json()["errors"]
    assert (fault["pointer"], fault["code"]) == ("/data/args/hf_token", "credential_written_out")
    assert "MESHLOOM_SECRETS_DIR" in fault["detail"]
    assert "hf_abcdefgh" not in answer.text
    written = {"labels": {"api-key": "abcdefgh", "note": "ghp_" + "x" * 36}}
    answer = quiet_plane.client.post("/v1/jobs", json=job_body(**written))
    places = [fault["pointer"] for fault in answer.json()["errors"]]
    assert (answer.status_code, places) == (422, ["/labels/api-key", "/labels/note"])
    path = f"/v1/jobs/{quiet_plane.submit()}"
    answer = quiet_plane.client.patch(path, json=written, headers={"If-Match": "*"})
    assert (answer.status_code, answer.json()["errors"][0]["pointer"]) == (422, "/labels/api-key")
    typed = {"dim": "ghp_" + "x" * 36}
    answer = quiet_plane.client.post(
        "/v1/jobs",
        json=job_body(model={"factory": "decoder", "args": typed}, priority=typed["dim"]),
    )
    assert {each["pointer"] for each in answer.json()["errors"]} == {"/model/args/dim", "/priority"}
    assert "ghp_" not in answer.text
    named = job_body(data={"factory": "mine:load", "args": {"hf_token": {"secret": "HUB"}}})
    assert quiet_plane.client.post("/v1/jobs", json=named).status_code == 201


def test_a_spec_that_is_too_large_is_refused(quiet_plane: ControlPlane) -> None:
    answer = quiet_plane.client.post("/v1/jobs", json=job_body(plan={"x": "y" * 70_000}))
    assert refusal(answer) == (413, "spec_too_large")
