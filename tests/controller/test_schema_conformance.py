"""Requests made up from the OpenAPI document, good and bad: no 5xx, and answers as promised.

They go to a controller process that wants tokens, with jobs in it for the ids to name.
"""

import json
from collections.abc import Iterator
from typing import Any

import hypothesis
import pytest
import schemathesis
from hypothesis import strategies
from schemathesis.specs.openapi.checks import (
    negative_data_rejection,
    positive_data_acceptance,
)
from schemathesis.specs.openapi.schemas import OpenApiSchema

from services.local.embedded_redis import EmbeddedRedis
from tests.controller.conftest import job_body
from tests.controller.test_openapi import FROZEN
from tests.controller.test_process import Controller, started

pytestmark = pytest.mark.redis
TOKEN = "a-token-for-the-schema-tests"  # noqa: S105 a test's
SHOWN = {"Authorization": f"Bearer {TOKEN}"}
EXAMPLES = 12
schemathesis.serializer.alias("application/gzip", "application/octet-stream")
OPERATIONS = [
    (method, path)
    for path, methods in json.loads(FROZEN.read_text())["paths"].items()
    for method in methods
]


@pytest.fixture(scope="module")
def controller(redis_server: EmbeddedRedis) -> Iterator[Controller]:
    redis_server.flush()
    limits = {"rate_burst": "100000", "max_streams": "4", "uploaded_code": "true"}
    with started(redis_server.url, token=TOKEN, **limits) as controller:
        controller.client.headers.update(SHOWN)
        yield controller


@pytest.fixture(scope="module")
def api(controller: Controller) -> OpenApiSchema:
    url = str(controller.client.base_url)
    return schemathesis.openapi.from_url(f"{url}/v1/openapi.json", headers=SHOWN)


@pytest.mark.parametrize(("method", "path"), OPERATIONS)
def test_answers_are_as_promised(
    api: OpenApiSchema, controller: Controller, method: str, path: str
) -> None:
    made = controller.client.post("/v1/jobs", json=job_body())
    assert made.status_code == 201
    operation = api[path][method]
    good = operation.as_strategy(generation_mode=schemathesis.GenerationMode.POSITIVE)
    bad = operation.as_strategy(generation_mode=schemathesis.GenerationMode.NEGATIVE)

    @hypothesis.settings(
        max_examples=EXAMPLES,
        derandomize=True,
        deadline=None,
        database=None,
        suppress_health_check=list(hypothesis.HealthCheck),
        phases=[hypothesis.Phase.generate],
    )
    @hypothesis.given(case=good | bad, is_real=strategies.booleans())
    def ask(case: schemathesis.Case[Any], is_real: bool) -> None:  # noqa: FBT001 drawn by hypothesis
        if is_real and "job_id" in case.path_parameters:
            case.path_parameters["job_id"] = made.json()["id"]
        # What the schema allows may still be refused (cursors are opaque, names may be unknown), and
        # what a query says beyond it is passed over; a body must say nothing beyond it.
        excluded: list[Any] = [positive_data_acceptance]
        if method == "get":
            excluded.append(negative_data_rejection)
        case.call_and_validate(
            headers=SHOWN,
            timeout=30,
            excluded_checks=excluded,
        )

    ask()
