"""``/v1/jobs/{job_id}/traces``: what ranks record of their steps."""

from http import HTTPStatus

from fastapi import APIRouter, Request, Response

from services.contract.jobs.traces import TraceList, TraceRequest, TraceView
from services.controller.api.conditional import answer
from services.controller.api.context import WithActor, WithPorts
from services.controller.api.scopes import OWNS_JOB, READS
from services.controller.use_cases import traces as use_cases

router = APIRouter(prefix="/v1/jobs/{job_id}/traces", tags=["traces"])


@router.post(
    "",
    status_code=HTTPStatus.ACCEPTED,
    response_model=TraceView,
    dependencies=[OWNS_JOB],
)
async def record_trace(
    job_id: str,
    request: Request,
    ports: WithPorts,
    actor: WithActor,
    wanted: TraceRequest | None = None,
) -> Response:
    """Record the next whole steps of some ranks of a running job with PyTorch's profiler.

    One trace at a time; the eight newest of a job are kept. The result is the `state` of the trace
    that `Location` names, and its `files`, which Perfetto opens.
    """
    view = await use_cases.ask_for_trace(ports, job_id, wanted or TraceRequest(), actor)
    location = {"Location": f"/v1/jobs/{view.job_id}/traces/{view.id}"}
    return answer(request, view, status=HTTPStatus.ACCEPTED, headers=location)


@router.get("", response_model=TraceList, dependencies=[READS])
async def list_traces(job_id: str, request: Request, ports: WithPorts) -> Response:
    """A job's traces, newest first."""
    return answer(request, await use_cases.list_traces(ports, job_id))


@router.get("/{trace_id}", response_model=TraceView, dependencies=[READS])
async def get_trace(job_id: str, trace_id: str, request: Request, ports: WithPorts) -> Response:
    """One trace: REQUESTED, RECORDING, DONE with its files, or FAILED with the reason."""
    return answer(request, await use_cases.get_trace(ports, job_id, trace_id))
