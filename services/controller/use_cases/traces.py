"""Asking for traces of a job, and looking at them."""

from typing import Final

from services.contract.jobs.traces import TraceFileView, TraceList, TraceRequest, TraceView
from services.contract.words.ids import new_trace_id
from services.controller.domain.decisions.history import Occurrence
from services.controller.domain.errors import NotFoundError
from services.controller.domain.job.events import TraceAsked
from services.controller.domain.job.job import Job
from services.controller.domain.job.trace import Trace
from services.controller.ports.coordination import Ports
from services.controller.ports.jobs import Actor
from services.controller.use_cases.change import apply_events
from services.controller.use_cases.present import maybe_moment, moment

_RANDOM_BYTES: Final = 10


async def ask_for_trace(ports: Ports, job_id: str, wanted: TraceRequest, actor: Actor) -> TraceView:
    """Have ranks record their next steps; the view's ``state`` tells what comes of it.

    Raises:
        NotFoundError: There is no such job.
        StateConflictError: It does not run, or is already being recorded.
        InvalidRequestError: It has no such rank.
    """
    now_ms = await ports.clock.now_ms()
    trace_id = new_trace_id(now_ms, ports.entropy(_RANDOM_BYTES))
    ranks = None if wanted.ranks == "all" else wanted.ranks
    request = TraceAsked(trace_id, wanted.steps, ranks)
    stored = await apply_events(ports, job_id, [Occurrence(request, now_ms)], actor)
    return _find(stored.job, trace_id)


async def list_traces(ports: Ports, job_id: str) -> TraceList:
    """A job's traces, newest first.

    Raises:
        NotFoundError: There is no such job.
    """
    job = (await ports.jobs.load(job_id)).job
    return TraceList(items=tuple(_view(job, trace) for trace in reversed(job.traces)))


async def get_trace(ports: Ports, job_id: str, trace_id: str) -> TraceView:
    """One trace.

    Raises:
        NotFoundError: There is no such job, or it has no such trace, or none any more.
    """
    return _find((await ports.jobs.load(job_id)).job, trace_id)


def _find(job: Job, trace_id: str) -> TraceView:
    for trace in job.traces:
        if trace.id == trace_id:
            return _view(job, trace)
    raise NotFoundError(f"job {job.id} has no trace {trace_id}; only the newest ones are kept")


def _view(job: Job, trace: Trace) -> TraceView:
    return TraceView(
        id=trace.id,
        job_id=job.id,
        state=trace.state,
        attempt=trace.fence,
        steps=trace.steps,
        ranks=tuple(trace.places),
        folder=f"{job.id}/traces/{trace.id}",
        files=tuple(
            TraceFileView(rank=rank, node_id=trace.places[rank], **file.model_dump())
            for rank, file in sorted(trace.files.items())
        ),
        bytes=trace.total_bytes,
        reason=trace.reason,
        created_at=moment(trace.asked_ms),
        ended_at=maybe_moment(trace.ended_ms),
    )
