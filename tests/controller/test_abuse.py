"""What hostile clients do to a real controller, over real sockets: it stays fair, quick and readable."""

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from services.contract.problems import MOST_FAULTS
from services.controller.api.framing import MAX_BODY_BYTES
from services.local.embedded_redis import EmbeddedRedis
from tests.controller.conftest import job_body
from tests.controller.test_process import Controller, started

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
def test_a_body_full_of_faults_gets_a_short_answer_and_costs_no_lead(
    controller: Controller, body: bytes
) -> None:
    assert MAX_BODY_BYTES * 0.8 < len(body) < MAX_BODY_BYTES
    headers = bearer(controller, "sam") | JSON

    def ask(_: int) -> tuple[int, bytes]:
        answer = controller.client.post("/v1/jobs", content=body, headers=headers, timeout=60)
        return answer.status_code, answer.content

    with ThreadPoolExecutor(8) as crowd:
        answers = list(crowd.map(ask, range(8)))
    for status, content in answers:
        assert status == 422
        assert len(content) < MAX_BODY_BYTES / 2
        faults = json.loads(content)["errors"]
        assert len(faults) == MOST_FAULTS + 1
        assert faults[-1]["code"] == "more_faults"
    assert not controller.said("no_longer_leading")


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
