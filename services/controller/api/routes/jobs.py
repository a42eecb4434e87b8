"""``/v1/jobs``: submit, look, change their course, forget."""

import hashlib
import json
from collections.abc import Iterator
from http import HTTPStatus
from typing import Annotated

from fastapi import APIRouter, Header, Query, Request, Response

from services.contract.problems import Fault
from services.contract.specs import JobSpec
from services.contract.states import JobState
from services.contract.views import AttemptList, JobPage, JobView, ResumeRequest, StopRequest
from services.controller.api.conditional import answer
from services.controller.api.context import WithActor, WithContext, WithPorts
from services.controller.api.pointers import pointer_of
from services.controller.api.scopes import OWNS_JOB, READS, SUBMITS
from services.controller.domain.errors import InvalidRequestError
from services.controller.domain.events import CancelAsked, KillAsked, PauseAsked, ResumeAsked
from services.controller.ports.jobs import Claim
from services.controller.use_cases import jobs as use_cases
from services.controller.use_cases.submit import Submission
from services.controller.use_cases.submit import submit as submit_job

router = APIRouter(prefix="/v1/jobs", tags=["jobs"])

IdempotencyKey = Annotated[
    str | None,
    Header(
        min_length=1,
        max_length=255,
        pattern=r"^[\x21-\x7e]+$",
        description="The same key with the same body again gets the same answer",
    ),
]


@router.post(
    "",
    status_code=HTTPStatus.CREATED,
    response_model=JobView,
    responses={200: {"model": JobView, "description": "With `dry_run`: nothing was kept"}},
    dependencies=[SUBMITS],
)
async def submit(
    spec: JobSpec,
    request: Request,
    context: WithContext,
    actor: WithActor,
    idempotency_key: IdempotencyKey = None,
    dry_run: bool = False,  # noqa: FBT001, FBT002 a query parameter
) -> Response:
    """Submit a job. What can never run is refused, with every fault at once."""
    _refuse_unspeakable(spec)
    claim = None if idempotency_key is None else Claim(idempotency_key, _digest(spec))
    view = await submit_job(
        context.ports, Submission(spec, claim, dry_run=dry_run), actor, context.entry_points
    )
    if dry_run:
        return answer(request, view)
    location = {"Location": f"/v1/jobs/{view.id}"}
    return answer(request, view, status=HTTPStatus.CREATED, headers=location)


@router.get("", response_model=JobPage, dependencies=[READS])
async def list_jobs(  # noqa: PLR0913 one parameter a filter
    request: Request,
    ports: WithPorts,
    *,
    state: Annotated[list[JobState] | None, Query(description="any of these")] = None,
    label: Annotated[list[str] | None, Query(description="`key=value` or `key`; all")] = None,
    q: Annotated[str | None, Query(max_length=200, description="text in id or name")] = None,
    limit: Annotated[int, Query(ge=1, le=200)] = 50,
    cursor: str | None = None,
) -> Response:
    """Jobs, newest first."""
    wanted = use_cases.JobFilter(frozenset(state or ()), tuple(label or ()), q)
    page = await use_cases.list_jobs(ports, wanted, cursor, limit)
    return answer(request, page, headers=next_link(request, page.next_cursor))


@router.get("/{job_id}", response_model=JobView, dependencies=[READS])
async def get_job(job_id: str, request: Request, ports: WithPorts) -> Response:
    """One job: where it stands and why, how far it is."""
    return answer(request, await use_cases.get_job(ports, job_id))


@router.delete("/{job_id}", status_code=HTTPStatus.NO_CONTENT, dependencies=[OWNS_JOB])
async def delete_job(job_id: str, ports: WithPorts) -> None:
    """Forget a job that has ended. Its checkpoints stay in storage."""
    await use_cases.delete_job(ports, job_id)


@router.post(
    "/{job_id}/pause",
    status_code=HTTPStatus.ACCEPTED,
    response_model=JobView,
    dependencies=[OWNS_JOB],
)
async def pause(
    job_id: str,
    request: Request,
    ports: WithPorts,
    actor: WithActor,
    stop: StopRequest | None = None,
) -> Response:
    """Stop after a checkpoint, as asked; `resume` goes on."""
    wish = PauseAsked(stop or StopRequest())
    view = await use_cases.change_course(ports, job_id, wish, actor)
    return answer(request, view, status=HTTPStatus.ACCEPTED)


@router.post(
    "/{job_id}/resume",
    status_code=HTTPStatus.ACCEPTED,
    response_model=JobView,
    dependencies=[OWNS_JOB],
)
async def resume(
    job_id: str,
    request: Request,
    ports: WithPorts,
    actor: WithActor,
    source: ResumeRequest | None = None,
) -> Response:
    """Go on, from a named checkpoint or from the latest committed one."""
    wish = ResumeAsked((source or ResumeRequest()).from_checkpoint)
    view = await use_cases.change_course(ports, job_id, wish, actor)
    return answer(request, view, status=HTTPStatus.ACCEPTED)


@router.post(
    "/{job_id}/cancel",
    status_code=HTTPStatus.ACCEPTED,
    response_model=JobView,
    dependencies=[OWNS_JOB],
)
async def cancel(
    job_id: str,
    request: Request,
    ports: WithPorts,
    actor: WithActor,
    stop: StopRequest | None = None,
) -> Response:
    """Stop for good, after a checkpoint as asked."""
    wish = CancelAsked(stop or StopRequest())
    view = await use_cases.change_course(ports, job_id, wish, actor)
    return answer(request, view, status=HTTPStatus.ACCEPTED)


@router.post(
    "/{job_id}/kill",
    status_code=HTTPStatus.ACCEPTED,
    response_model=JobView,
    dependencies=[OWNS_JOB],
)
async def kill(job_id: str, request: Request, ports: WithPorts, actor: WithActor) -> Response:
    """Stop for good, at once, without a checkpoint."""
    view = await use_cases.change_course(ports, job_id, KillAsked(), actor)
    return answer(request, view, status=HTTPStatus.ACCEPTED)


@router.get("/{job_id}/attempts", response_model=AttemptList, dependencies=[READS])
async def list_attempts(job_id: str, request: Request, ports: WithPorts) -> Response:
    """A job's tries, oldest first, and how each ended."""
    return answer(request, await use_cases.list_attempts(ports, job_id))


def next_link(request: Request, cursor: str | None) -> dict[str, str]:
    """The header that names the next page, if there is one."""
    if cursor is None:
        return {}
    url = request.url.include_query_params(cursor=cursor)
    return {"Link": f'<{url.path}?{url.query}>; rel="next"'}


def _refuse_unspeakable(spec: JobSpec) -> None:
    """JSON may escape half of a surrogate pair in an argument; no store or stream can carry it."""
    faults = [
        Fault(pointer=place, detail="not a Unicode string", code="string_unicode")
        for place in _unspeakable(spec.model_dump(), "")
    ]
    if faults:
        raise InvalidRequestError(faults)


def _unspeakable(value: object, place: str) -> Iterator[str]:
    if isinstance(value, dict):
        for key, item in value.items():
            yield from _unspeakable(key, place)
            yield from _unspeakable(item, place + pointer_of([key]))
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield from _unspeakable(item, place + pointer_of([index]))
    elif isinstance(value, str) and any("\ud800" <= letter <= "\udfff" for letter in value):
        yield place


def _digest(spec: JobSpec) -> str:
    text = json.dumps(spec.model_dump(mode="json"), sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()
