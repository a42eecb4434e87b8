"""What hostile clients do to a real controller, over real sockets: it stays fair, quick and readable."""

import base64
import contextlib
import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from urllib.parse import urlencode

import hypothesis
import pytest
from httpx2 import Response
from hypothesis import strategies
from redis import Redis

from meshloom.client import RestClient as Client
from services.cli.errors import RefusedError
from services.contract.messages.telemetry import LogLine
from services.contract.redis import redis_keys as keys
from services.contract.words.problems import MOST_FAULTS
from services.controller.api.guard import AccessPolicy
from services.controller.api.middleware import MAX_BODY_BYTES
from services.local.embedded_redis import EmbeddedRedis
from tests.controller.conftest import job_body, open_plane
from tests.controller.test_connections import answered
from tests.controller.test_process import Controller, started
from tests.waiting import until

pytestmark = pytest.mark.redis
BOOTSTRAP = "the-operators-own-token"
SHOWN = {"Authorization": f"Bearer {BOOTSTRAP}"}


@pytest.fixture(scope="module")
def controller(redis_server: EmbeddedRedis) -> Iterator[Controller]:
    """A controller that wants tokens; its client shows none by itself."""
    redis_server.flush()
    with started(redis_server.url, token=BOOTSTRAP) as controller:
        yield controller


def bearer(controller: Controller, subject: str, scope: str = "submitter") -> dict[str, str]:
    """The headers of a new token."""
    wanted = {"subject": subject, "scope": scope}
    made = controller.client.post("/v1/tokens", json=wanted, headers=SHOWN)
    assert made.status_code == 201, made.text
    return {"Authorization": f"Bearer {made.json()['token']}"}


# --- idempotency keys ---------------------------------------------------------------------------


def test_the_same_key_of_two_subjects_makes_a_job_for_each(controller: Controller) -> None:
    made = {}
    for subject in ("sue", "sam"):
        headers = bearer(controller, subject) | {"Idempotency-Key": "nightly"}
        first = controller.client.post("/v1/jobs", json=job_body(), headers=headers)
        again = controller.client.post("/v1/jobs", json=job_body(), headers=headers)
        assert (first.status_code, again.content) == (201, first.content)
        assert first.json()["owner"] == subject
        made[subject] = first.json()["id"]
        body = {"overrides": {"priority": 1}}
        path = f"/v1/jobs/{made['sue']}/clone"
        headers["Idempotency-Key"] = "cloned"
        clone = controller.client.post(path, json=body, headers=headers)
        assert (clone.status_code, clone.json()["owner"]) == (202, subject)
    assert made["sue"] != made["sam"]


# --- how many jobs ------------------------------------------------------------------------------


def test_nobody_has_more_unfinished_jobs_than_the_bound_and_others_still_have_theirs(
    redis_server: EmbeddedRedis,
) -> None:
    redis_server.flush()
    with started(redis_server.url, token=BOOTSTRAP, max_unfinished_jobs="3") as controller:
        sue, sam = (bearer(controller, name) for name in ("sue", "sam"))

        def submit(headers: dict[str, str], path: str = "/v1/jobs") -> Response:
            body = job_body() if path == "/v1/jobs" else {}
            return controller.client.post(path, json=body, headers=headers)

        jobs = [submit(sue).json()["id"] for _ in range(3)]
        paused = controller.client.post(f"/v1/jobs/{jobs[0]}/pause", headers=sue)
        assert paused.status_code == 202, paused.text
        for path in ("/v1/jobs", f"/v1/jobs/{jobs[0]}/clone"):
            refused = submit(sue, path)
            assert (refused.status_code, refused.json()["code"]) == (409, "too_many_jobs")
            assert "sue has 3 jobs that have not ended" in refused.json()["detail"]
        assert submit(sam).status_code == 201
        assert submit(sue | {"Idempotency-Key": "a"}).status_code == 409
        controller.client.post(f"/v1/jobs/{jobs[1]}/cancel", headers=sue)
        until(lambda: submit(sue).status_code == 201)


# --- priority -----------------------------------------------------------------------------------


def test_a_submitter_gives_no_job_a_higher_priority_than_the_controller_allows(
    redis_url: str,
) -> None:
    with open_plane(redis_url, AccessPolicy(BOOTSTRAP), leads=False, most_priority=10) as plane:
        client = plane.client
        operator = {"Authorization": f"Bearer {BOOTSTRAP}"}
        body = {"subject": "sue", "scope": "submitter"}
        token = client.post("/v1/tokens", json=body, headers=operator).json()["token"]
        sue = {"Authorization": f"Bearer {token}"}

        def submit(priority: int, headers: dict[str, str]) -> Response:
            return client.post("/v1/jobs", json=job_body(priority=priority), headers=headers)

        own, urgent = submit(10, sue).json()["id"], submit(1000, operator).json()["id"]
        shown = sue | {"If-Match": "*"}
        for refused, place in (
            (submit(11, sue), "/priority"),
            (client.post(f"/v1/jobs/{urgent}/clone", headers=sue), "/overrides/priority"),
            (client.patch(f"/v1/jobs/{own}", json={"priority": 11}, headers=shown), "/priority"),
        ):
            (fault,) = refused.json()["errors"]
            assert (refused.status_code, fault["pointer"]) == (422, place)
            assert fault["code"] == "priority_not_allowed"
        assert (
            client.patch(f"/v1/jobs/{own}", json={"priority": 9}, headers=shown).status_code == 200
        )


# --- bodies -------------------------------------------------------------------------------------

JSON = {"Content-Type": "application/json"}


def filled(spec: dict[str, object], fields: dict[str, object]) -> bytes:
    """A spec with so many bad fields as the largest body has room for."""
    return json.dumps(spec | fields, separators=(",", ":")).encode()


@pytest.mark.parametrize(
    "body",
    [
        filled(job_body(), {f"{number:x}": 0 for number in range(26_000)}),
        filled(job_body(), {"labels": {f"/{number:x}": "" for number in range(21_000)}}),
        filled(job_body(), {"labels": {f"a{number:x}": 0 for number in range(25_000)}}),
        filled(job_body(), {"model": {"factory": "decoder", "args": {"a": [1 << 64] * 11_000}}}),
    ],
    ids=["unknown fields", "keys of labels", "values of labels", "numbers of args"],
)
def test_a_body_full_of_faults_gets_a_short_answer(controller: Controller, body: bytes) -> None:
    assert MAX_BODY_BYTES * 0.8 < len(body) < MAX_BODY_BYTES
    headers = bearer(controller, "sam") | JSON

    answer = controller.client.post("/v1/jobs", content=body, headers=headers, timeout=60)
    assert answer.status_code == 422
    assert len(answer.content) < MAX_BODY_BYTES / 2
    faults = answer.json()["errors"]
    assert len(faults) == MOST_FAULTS + 1
    assert faults[-1]["code"] == "more_faults"


@pytest.mark.parametrize("path", ["/v1/jobs", "/v1/plans"])
def test_more_values_than_a_spec_may_have_are_told_as_such(
    controller: Controller, path: str
) -> None:
    body = filled(job_body(), {"model": {"factory": "decoder", "args": {"a": [0] * 70_000}}})
    answer = controller.client.post(path, content=body, headers=bearer(controller, "sam") | JSON)
    assert answer.status_code == 422
    assert [fault["code"] for fault in answer.json()["errors"]] == ["too_many_values"]


def test_faults_of_a_clones_overrides_are_bounded_too(controller: Controller) -> None:
    sue = bearer(controller, "sue")
    job_id = controller.client.post("/v1/jobs", json=job_body(), headers=sue).json()["id"]
    overrides = {f"field{number}": 0 for number in range(5_000)}
    path = f"/v1/jobs/{job_id}/clone"
    answer = controller.client.post(path, json={"overrides": overrides}, headers=sue)
    assert answer.status_code == 422
    assert len(answer.json()["errors"]) == MOST_FAULTS + 1


def test_a_body_above_the_limit_is_refused_whether_or_not_it_is_announced(
    controller: Controller,
) -> None:
    body = filled(job_body(), {f"{number:x}": 0 for number in range(110_000)})
    headers = bearer(controller, "sam") | JSON
    for content in (body, iter([body])):
        answer = controller.client.post("/v1/jobs", content=content, headers=headers)
        assert (answer.status_code, answer.json()["code"]) == (413, "body_too_large")


@pytest.mark.parametrize(
    ("body", "words"),
    [(b"[" * 100_000, "nested too deep"), (b"1" * 5_000, "digits"), (b"\xff", "UTF-8")],
)
def test_what_no_parser_reads_is_refused_with_the_reason(
    controller: Controller, body: bytes, words: str
) -> None:
    answer = controller.client.post(
        "/v1/jobs", content=body, headers=bearer(controller, "sam") | JSON
    )
    assert (answer.status_code, answer.json()["code"]) == (400, "malformed_json")
    assert words in answer.json()["detail"]


def test_a_field_that_is_nested_as_deep_as_the_parser_takes_is_a_fault_as_any_other(
    controller: Controller,
) -> None:
    nested = '{"a":' * 900 + "1" + "}" * 900
    body = f'{json.dumps(job_body())[:-1]}, "checkpoint": {nested}}}'.encode()
    headers = bearer(controller, "sam") | JSON
    for path in ("/v1/jobs", "/v1/plans"):
        answer = controller.client.post(path, content=body, headers=headers)
        (fault,) = answer.json()["errors"]
        assert (answer.status_code, fault["pointer"]) == (422, "/checkpoint/a")


# --- cursors, labels of figures, headers --------------------------------------------------------

NUMBERS = strategies.sampled_from(
    [0, 1, -1, 10**14, 10**15, 10**18, 1 << 63, (1 << 64) - 1, 10**19, 10**30]
)
PLACES = strategies.builds(
    "{} {}".format, NUMBERS, strategies.sampled_from(["job_x", "", "\u00e9"])
)
ORDERS = strategies.builds(
    "{} {}".format, strategies.sampled_from(["-priority", "updated"]), PLACES
)
CURSORS = (
    strategies.builds("{}-{}".format, NUMBERS, NUMBERS)
    | (PLACES | ORDERS).map(lambda text: base64.urlsafe_b64encode(text.encode()).decode())
    | strategies.sampled_from(["0-0", "-", "+", "$", "*", "0", "", "(0-1", "\x00", "\u0660-\u0661"])
    | strategies.text(max_size=12)
)


@pytest.mark.parametrize(
    "path",
    [
        "/v1/jobs?",
        "/v1/jobs?sort=-priority&",
        "/v1/plans?",
        "/v1/audit?",
        "/v1/jobs/{job}/events?",
        "/v1/jobs/{job}/logs?",
    ],
)
def test_a_cursor_of_any_kind_is_a_place_or_a_fault_of_the_client(
    controller: Controller, path: str
) -> None:
    job = controller.client.post("/v1/jobs", json=job_body(), headers=SHOWN).json()["id"]

    @hypothesis.settings(
        max_examples=60, derandomize=True, deadline=None, database=None,
        suppress_health_check=list(hypothesis.HealthCheck),
    )  # fmt: skip
    @hypothesis.example("0-0")
    @hypothesis.given(CURSORS)
    def ask(cursor: str) -> None:
        query = urlencode({"cursor": cursor}, errors="surrogatepass")
        answer = controller.client.get(path.format(job=job) + query, headers=SHOWN)
        assert answer.status_code in {200, 410, 422}, answer.text

    ask()


def test_methods_and_paths_that_no_route_knows_are_one_series(controller: Controller) -> None:
    for number in range(30):
        controller.client.request(f"M{number}", "/v1/jobs")
        controller.client.get(f"/P{number}")
        controller.client.get(f"/v1/P{number}", headers=SHOWN)
        controller.client.get(f"/v1/jobs/P{number}", headers=SHOWN)
    figures = controller.client.get("/metrics").text
    assert 'method="other"' in figures
    assert 'method="M' not in figures
    assert 'route="(none)"' in figures
    assert "/P" not in figures


@pytest.mark.parametrize("path", ["/v1/jobs", "/v1/nope", "/healthz", "/metrics", "/", "/assets/x"])
def test_no_browser_may_take_an_answer_for_another_kind(controller: Controller, path: str) -> None:
    for headers in ({}, SHOWN):
        answer = controller.client.get(path, headers=headers)
        assert answer.headers.get_list("x-content-type-options") == ["nosniff"]
        assert answer.headers["cross-origin-resource-policy"] == "same-origin"


def test_strangers_do_not_fill_the_log(controller: Controller) -> None:
    before = len(controller.lines)
    path = "/v1/" + "x" * 10_000
    for _ in range(400):
        assert controller.client.post(path).status_code == 401
    for sent in (b"GARBAGE\r\n\r\n", b"GET / HTTP/1.1\r\nA: " + b"x" * 70_000) * 100:
        with contextlib.suppress(ConnectionError):
            answered(controller, sent)
    made = controller.client.post("/v1/jobs", json=job_body(), headers=SHOWN).headers[
        "x-request-id"
    ]
    until(lambda: controller.lines[-1].get("request_id") == made)
    said = controller.lines[before:]
    assert len(said) < 300
    assert sum(len(str(line)) for line in said) < 300_000


# --- streams ------------------------------------------------------------------------------------

STREAM = {"Accept": "text/event-stream"}


def revoke(controller: Controller, _redis: Redis, token_id: str) -> None:
    done = controller.client.delete(f"/v1/tokens/{token_id}", headers=SHOWN)
    assert done.status_code == 204


def let_expire(_controller: Controller, redis: Redis, token_id: str) -> None:
    record = json.loads(str(redis.hget(keys.TOKENS, token_id)))
    redis.hset(keys.TOKENS, token_id, json.dumps(record | {"expires_ms": 1}))


@pytest.mark.parametrize("ended", [revoke, let_expire])
@pytest.mark.parametrize(
    "place",
    [
        "/v1/jobs/{job}/events",
        "/v1/jobs/{job}/logs?follow=true",
        "/v1/jobs/{job}/logs?follow=true&text=never",
        "/v1/events",
        "/v1/events?kind=never",
    ],
)
def test_a_stream_does_not_outlive_its_token(
    controller: Controller,
    redis_server: EmbeddedRedis,
    ended: Callable[[Controller, Redis, str], None],
    place: str,
) -> None:
    job = controller.client.post("/v1/jobs", json=job_body(), headers=SHOWN).json()["id"]
    viewer = bearer(controller, "vic", "viewer")
    token_id = f"tok_{viewer['Authorization'].split('_')[1]}"
    path = place.format(job=job)
    with (
        Redis.from_url(redis_server.url, decode_responses=True) as redis,
        controller.client.stream("GET", path, headers=viewer | STREAM, timeout=12) as stream,
    ):
        lines = stream.iter_lines()
        assert next(lines).startswith(":")
        ended(controller, redis, token_id)
        said = [line for line in lines if line]
    assert "event: refused" in said
    problem = json.loads(said[-1].removeprefix("data: "))
    assert (problem["status"], problem["code"]) == (401, "unauthorized")
    assert controller.client.get(path, headers=viewer).status_code == 401


def test_who_follows_logs_with_a_revoked_token_is_told(
    controller: Controller, redis_server: EmbeddedRedis
) -> None:
    job = controller.client.post("/v1/jobs", json=job_body(), headers=SHOWN).json()["id"]
    shown = bearer(controller, "vic", "viewer")["Authorization"].removeprefix("Bearer ")
    line = LogLine(rank=0, fence=1, stream="stdout", time_ms=1, text="first")
    with (
        Redis.from_url(redis_server.url, decode_responses=True) as redis,
        Client(str(controller.client.base_url), shown) as client,
    ):
        redis.xadd(keys.job_logs(job), {keys.MESSAGE_FIELD: line.model_dump_json()})
        lines = client.follow_logs(job)
        assert next(lines).text == "first"
        revoke(controller, redis, f"tok_{shown.split('_')[1]}")
        with pytest.raises(RefusedError, match="revoked"):
            next(lines)


def test_one_viewer_takes_a_quarter_of_the_streams_and_others_get_theirs(
    controller: Controller,
) -> None:
    job = controller.client.post("/v1/jobs", json=job_body(), headers=SHOWN).json()["id"]
    path = f"/v1/jobs/{job}/events"
    viewer, other = (bearer(controller, name, "viewer") | STREAM for name in ("max", "mia"))
    with ExitStack() as stack:

        def follow(headers: dict[str, str]) -> tuple[int, str | None]:
            answer = stack.enter_context(controller.client.stream("GET", path, headers=headers))
            return answer.status_code, answer.headers.get("retry-after")

        taken = [follow(viewer) for _ in range(16)]
        assert set(taken) == {(200, None)}
        assert follow(viewer) == (429, "5")
        assert follow(other) == (200, None)
        assert controller.client.get(path, headers=viewer | {"Accept": "*/*"}).status_code == 200
