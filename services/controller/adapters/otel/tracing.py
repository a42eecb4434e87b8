"""Spans of requests, looks, commands and attempts, sent to an OTLP endpoint.

::

    POST /v1/jobs ─ link ─► job ── attempt 1 ── command launch_gang ─ link ─► look
                             │        └──────── command commit_checkpoint
                             └──── attempt 2 …

Each job is one trace. The spans of job and attempts are written when they end, by whichever controller
leads then; commands name them as parents before.
"""

import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from time import time_ns
from typing import Any, Final, cast

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import Link, NonRecordingSpan, Span, SpanContext, SpanKind, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from services.contract.words.states import ExitReason
from services.controller.adapters.otel.ids import (
    ChosenIds,
    chosen_ids,
    context_of_attempt,
    context_of_job,
)
from services.controller.domain.job.attempt import Attempt
from services.controller.domain.job.effects import Decision
from services.controller.domain.job.job import Job
from services.controller.ports.jobs import Actor, Change, Claim, JobStore, Stored

_NS_A_MS: Final = 1_000_000
_ENDED_WELL: Final = frozenset({ExitReason.COMPLETED, ExitReason.PAUSED, ExitReason.CANCELLED})
_FAILED_FROM: Final = 500
_SEND_S: Final = 5.0


@dataclass
class _Look:
    """A look of the reconciler: it has a span only if it changes something."""

    began_ns: int
    span: Span | None = None


_look: ContextVar[_Look | None] = ContextVar("meshloom_look", default=None)


class OtelTracing:
    """The port ``Tracing``.

    Args:
        endpoint: Of OTLP over HTTP, such as ``http://127.0.0.1:4318/v1/traces``.
    """

    def __init__(self, endpoint: str) -> None:
        self._provider = TracerProvider(
            resource=Resource.create({"service.name": "meshloom-controller"}),
            id_generator=ChosenIds(),
            shutdown_on_exit=False,
        )
        self._provider.add_span_processor(
            BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint, timeout=_SEND_S))
        )
        self._tracer = self._provider.get_tracer("meshloom")

    def close(self) -> None:
        """Send what waits; then nothing more."""
        self._provider.shutdown()

    def traced(self, jobs: JobStore) -> JobStore:
        """The same store, whose writes are traced."""
        return cast("JobStore", _TracedJobs(jobs, self))

    @contextlib.contextmanager
    def request(
        self, method: str, headers: dict[str, str]
    ) -> Iterator[Callable[[str, int, str], None]]:
        """Within, a request is answered; the function takes its route, status and id."""
        parent = TraceContextTextMapPropagator().extract(headers)
        with self._tracer.start_as_current_span(
            method, context=parent, kind=SpanKind.SERVER
        ) as span:

            def answered(route: str, status: int, request_id: str) -> None:
                span.update_name(f"{method} {route}")
                span.set_attributes(
                    {
                        "http.request.method": method,
                        "http.route": route,
                        "http.response.status_code": status,
                        "meshloom.request_id": request_id,
                    }
                )
                if status >= _FAILED_FROM:
                    span.set_status(StatusCode.ERROR)

            yield answered

    @contextlib.contextmanager
    def looking(self) -> Iterator[None]:
        """Within, the reconciler looks at all jobs."""
        look = _Look(time_ns())
        token = _look.set(look)
        try:
            yield
        finally:
            _look.reset(token)
            if look.span is not None:
                look.span.end()

    def created(self, job: Job) -> None:
        """A job was kept: the request that is answered now links to its trace."""
        span = self._cause()
        if span is not None:
            span.add_link(context_of_job(job.id))
            span.set_attribute("meshloom.job_id", job.id)

    def committed(self, change: Change, began_ns: int) -> None:
        """A change of a job was written: commands, and what ended with it."""
        before, job = change.before.job, change.decision.job
        cause = self._cause()
        links = [] if cause is None else [Link(cause.get_span_context())]
        for send in change.decision.sends:
            span = self._tracer.start_span(
                f"command {send.command.kind}",
                context=_below(context_of_attempt(job.id, job.fence)),
                kind=SpanKind.PRODUCER,
                links=links,
                start_time=began_ns,
                attributes={"meshloom.job_id": job.id, "meshloom.node_id": send.node_id},
            )
            span.end()
        running = {a.fence for a in before.attempts if a.ended_ms is None}
        running |= {job.fence} if job.fence > before.fence else set()
        for attempt in job.attempts:
            if attempt.fence in running and attempt.ended_ms is not None:
                self._attempt_ended(job, attempt)
        if job.is_terminal and not before.is_terminal:
            self._job_ended(job)

    def _cause(self) -> Span | None:
        """The span of the request or look in which something is written; None: neither."""
        look = _look.get()
        if look is not None:
            if look.span is None:
                look.span = self._tracer.start_span("look", start_time=look.began_ns)
            return look.span
        current = trace.get_current_span()
        return current if current.is_recording() else None

    def _attempt_ended(self, job: Job, attempt: Attempt) -> None:
        reason = attempt.exit_reason
        self._ended(
            f"attempt {attempt.fence}",
            context_of_attempt(job.id, attempt.fence),
            (attempt.started_ms, attempt.ended_ms or attempt.started_ms),
            {
                "meshloom.job_id": job.id,
                "meshloom.world_size": attempt.world_size,
                "meshloom.last_step": attempt.last_step,
                "meshloom.exit_reason": "" if reason is None else reason.value,
            },
            parent=context_of_job(job.id),
            failed=reason not in _ENDED_WELL,
        )

    def _job_ended(self, job: Job) -> None:
        self._ended(
            "job",
            context_of_job(job.id),
            (job.created_ms, job.updated_ms),
            {
                "meshloom.job_id": job.id,
                "meshloom.job_name": job.spec.name,
                "meshloom.state": job.state.value,
                "meshloom.restarts": job.restarts,
            },
            failed=job.state.value == "FAILED",
        )

    def _ended(
        self,
        name: str,
        context: SpanContext,
        times_ms: tuple[int, int],
        attributes: dict[str, Any],
        *,
        parent: SpanContext | None = None,
        failed: bool,
    ) -> None:
        with chosen_ids(context):
            span = self._tracer.start_span(
                name,
                context=Context() if parent is None else _below(parent),
                start_time=times_ms[0] * _NS_A_MS,
                attributes=attributes,
            )
        if failed:
            span.set_status(StatusCode.ERROR)
        span.end(times_ms[1] * _NS_A_MS)


class _TracedJobs:
    """Wraps a store of jobs: reports each write to the traces, and passes everything else on."""

    def __init__(self, jobs: JobStore, tracing: OtelTracing) -> None:
        self._jobs = jobs
        self._tracing = tracing

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 whatever the store has
        return getattr(self._jobs, name)

    async def create(self, decision: Decision, actor: Actor, claim: Claim | None) -> Stored:
        stored = await self._jobs.create(decision, actor, claim)
        self._tracing.created(stored.job)
        return stored

    async def commit(self, change: Change, epoch: int | None = None) -> Stored:
        began_ns = time_ns()
        stored = await self._jobs.commit(change, epoch)
        self._tracing.committed(change, began_ns)
        return stored


def _below(context: SpanContext) -> Context:
    return trace.set_span_in_context(NonRecordingSpan(context))
