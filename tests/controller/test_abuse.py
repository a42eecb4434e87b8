"""What hostile clients do to a real controller, over real sockets: it stays fair, quick and readable."""

from collections.abc import Iterator

import pytest

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
