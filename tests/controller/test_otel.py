"""Traces: what a collector receives of a job's life, from a real controller."""

import gzip
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest
from redis import Redis

from services.contract.words.ids import new_job_id
from services.controller.adapters.otel.ids import context_of_attempt, context_of_job
from services.local.embedded_redis import EmbeddedRedis
from tests.controller.agent_double import AgentDouble
from tests.controller.conftest import job_body
from tests.dashboard.tabs import Controller
from tests.waiting import until

trace_service = pytest.importorskip(
    "opentelemetry.proto.collector.trace.v1.trace_service_pb2", reason="needs the extra otel"
)
pytestmark = pytest.mark.redis
CALLER = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


class Collector(ThreadingHTTPServer):
    """Keeps the spans that come over OTLP."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.spans: list[Any] = []
        self.endpoint = f"http://127.0.0.1:{self.server_address[1]}/v1/traces"

    def named(self, name: str) -> list[Any]:
        return [span for span in self.spans if span.name == name]


class _Handler(BaseHTTPRequestHandler):
    server: Collector

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if self.headers.get("Content-Encoding") == "gzip":
            body = gzip.decompress(body)
        request = trace_service.ExportTraceServiceRequest.FromString(body)
        for resource in request.resource_spans:
            for scope in resource.scope_spans:
                self.server.spans += scope.spans
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Say nothing."""


@pytest.fixture
def collector() -> Iterator[Collector]:
    server = Collector()
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def test_a_jobs_life_is_one_trace_to_which_request_and_looks_link(
    collector: Collector, redis_server: EmbeddedRedis, tmp_path: Path
) -> None:
    redis_server.flush()
    settings = {
        "MESHLOOM_OTEL_ENDPOINT": collector.endpoint,
        "OTEL_BSP_SCHEDULE_DELAY": "100",  # milliseconds between two batches
    }
    with (
        Controller(redis_server.url, tmp_path, **settings) as controller,
        Redis.from_url(redis_server.url, decode_responses=True) as redis,
    ):
        agent = AgentDouble(redis)
        agent.join()
        answer = httpx.post(
            f"{controller.url}/v1/jobs", json=job_body(), headers={"traceparent": CALLER}
        )
        job_id = str(answer.json()["id"])
        gang = agent.launches(job_id)
        agent.trains(gang, range(1, 11))
        agent.saves(gang, 10)
        agent.ends(gang, 10)
        (job,) = until(lambda: collector.named("job"))
        (attempt,) = until(lambda: collector.named("attempt 1"))
        (launch,) = until(lambda: collector.named("command launch_gang"))
        (request,) = until(lambda: collector.named("POST /v1/jobs"))
        looks = until(lambda: collector.named("look"))

    trace_id = context_of_job(job_id).trace_id.to_bytes(16, "big")
    assert {span.trace_id for span in (job, attempt, launch)} == {trace_id}
    assert (job.parent_span_id, attempt.parent_span_id) == (b"", job.span_id)
    assert launch.parent_span_id == attempt.span_id
    assert launch.links[0].span_id in {look.span_id for look in looks}
    assert request.links[0].span_id == job.span_id
    # The caller's own trace goes on in the request.
    assert request.trace_id.hex() in CALLER
    assert request.parent_span_id.hex() in CALLER
    told = {pair.key: pair.value for pair in attempt.attributes}
    assert told["meshloom.exit_reason"].string_value == "completed"
    assert told["meshloom.last_step"].int_value == 10
    assert job.start_time_unix_nano <= attempt.start_time_unix_nano < attempt.end_time_unix_nano


def test_strangers_make_no_spans_and_no_headers_of_traces_fill_the_log(
    collector: Collector, redis_server: EmbeddedRedis, tmp_path: Path
) -> None:
    redis_server.flush()
    settings = {"MESHLOOM_OTEL_ENDPOINT": collector.endpoint, "OTEL_BSP_SCHEDULE_DELAY": "100"}
    token = "the-operators-own-token"  # noqa: S105 a test's
    shown = {"Authorization": f"Bearer {token}"}
    hostile = {"traceparent": CALLER, "tracestate": "\x7f=1"}
    with Controller(redis_server.url, tmp_path, token, **settings) as controller:
        url = f"{controller.url}/v1/tokens"
        for headers, status in ((hostile, 401), (shown | hostile, 422)):
            assert httpx.post(url, json={}, headers=headers).status_code == status
        until(lambda: collector.named("POST /v1/tokens"))
    statuses = [
        pair.value.int_value
        for span in collector.spans
        for pair in span.attributes
        if pair.key == "http.response.status_code"
    ]
    assert statuses == [422]
    assert "identifiers" not in (tmp_path / "controller.log").read_text()


def test_every_controller_derives_the_same_ids_of_a_job_and_others_of_another() -> None:
    first, second = (new_job_id(5, bytes([number] * 10)) for number in (1, 2))
    assert context_of_attempt(first, 1) == context_of_attempt(first, 1)
    contexts = [context_of_job(first), context_of_attempt(first, 1), context_of_attempt(first, 2)]
    assert len({context.span_id for context in contexts}) == 3
    assert len({context.trace_id for context in contexts}) == 1
    assert context_of_job(second).trace_id != contexts[0].trace_id
