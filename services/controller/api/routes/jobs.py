"""``/v1/jobs``: submit, look, change their course, forget."""

import hashlib
import json
from collections.abc import Iterator
from http import HTTPStatus
from typing import Annotated, Any

from fastapi import APIRouter, Header, Query, Request, Response
from pydantic import BaseModel

from services.contract.api.plan_views import Submitted
from services.contract.api.pointers import pointer_of
from services.contract.api.requests import CloneRequest, JobPatch
from services.contract.api.views import (
    AttemptList,
    JobPage,
    JobView,
    ResumeRequest,
    SparseJobPage,
    StopRequest,
)
from services.contract.words.problems import Fault, Problem, first_faults
from services.contract.words.states import JobState
from services.controller.api.conditional import answer, answer_page, next_link, revisions_matched
from services.controller.api.context import WithActor, WithContext, WithPorts, WithPrincipal
from services.controller.api.scopes import OWNS_JOB, READS, SUBMITS
from services.controller.domain.errors import InvalidRequestError
from services.controller.domain.job.events import (
    CancelAsked,
    KillAsked,
    PatchAsked,
    PauseAsked,
    ResumeAsked,
)
from services.controller.ports.jobs import Claim
from services.controller.use_cases import jobs as use_cases
from services.controller.use_cases.access import check_owner
from services.controller.use_cases.clone import Cloning
from services.controller.use_cases.clone import clone as clone_job
from services.controller.use_cases.listing import NEWEST_FIRST, JobFilter, JobOrder
from services.controller.use_cases.submit import Submission
from services.controller.use_cases.submit import submit as submit_job

router = APIRouter(prefix="/v1/jobs", tags=["jobs"])

IdempotencyKey = Annotated[
    str | None,
    Header(
        min_length=1,
        max_length=255,
        pattern=r"^[\x21-\x7e]+$",
        description="A repeated request of the same subject, with the same key and body, gets the "
        "same answer",
    ),
]


@router.post(
    "",
    status_code=HTTPStatus.CREATED,
    response_model=JobView,
    responses={200: {"model": JobView, "description": "With `dry_run`: nothing was stored"}},
    dependencies=[SUBMITS],
)
async def submit(
    wanted: Submitted,
    request: Request,
    context: WithContext,
    actor: WithActor,
    idempotency_key: IdempotencyKey = None,
    dry_run: bool = False,  # noqa: FBT001, FBT002 a query parameter
) -> Response:
    """Submit a job by a spec, or by a plan.

    A job that can never run is refused, with all errors. A job by a plan runs exactly that plan.
    """
    refuse_unspeakable(wanted)
    claim = None
    if idempotency_key is not None:
        claim = Claim(actor.name, idempotency_key, _digest(_json(wanted)))
    view = await submit_job(
        context.ports,
        Submission(wanted, claim, dry_run),
        actor,
        context.entry_points,
        context.drawing,
    )
    if dry_run:
        return answer(request, view)
    location = {"Location": f"/v1/jobs/{view.id}"}
    return answer(request, view, status=HTTPStatus.CREATED, headers=location)


@router.get("", response_model=JobPage | SparseJobPage, dependencies=[READS])
async def list_jobs(  # noqa: PLR0913 one parameter a filter
    request: Request,
    context: WithContext,
    asks: WithPrincipal,
    *,
    state: Annotated[list[JobState] | None, Query(description="any of these")] = None,
    label: Annotated[
        list[str] | None, Query(max_length=64, description="`key=value` or `key`; all")
    ] = None,
    owner: Annotated[str | None, Query(max_length=200, description="whose, exactly")] = None,
    q: Annotated[str | None, Query(max_length=200, description="text in id or name")] = None,
    sort: Annotated[
        JobOrder, Query(description="sort field, then id; `-` sorts in descending order")
    ] = NEWEST_FIRST,
    fields: Annotated[
        str | None,
        Query(
            max_length=1000,
            description="comma-separated fields of a job; only these and `id` are returned",
        ),
    ] = None,
    limit: Annotated[int, Query(ge=1, le=200)] = 50,
    cursor: str | None = None,
) -> Response:
    """Jobs, newest first or as ``sort`` says.

    Jobs of more than 64 ranks are listed without the measured peak.
    """
    names = None if fields is None else _field_names(fields)
    wanted = JobFilter(frozenset(state or ()), tuple(label or ()), q, owner)
    async with context.turns.in_parts(asks.subject) as give_way:
        page = await use_cases.list_jobs(
            context.ports, wanted, cursor, limit, sort, fields=names, give_way=give_way
        )
        headers = next_link(request, page.next_cursor)
        return await answer_page(request, page, headers=headers, fields=names)


@router.get("/{job_id}", response_model=JobView, dependencies=[READS])
async def get_job(job_id: str, request: Request, ports: WithPorts) -> Response:
    """One job: its state and the reason for it, and its progress."""
    return answer(request, await use_cases.get_job(ports, job_id))


@router.patch(
    "/{job_id}",
    response_model=JobView,
    responses={
        412: {"model": Problem, "description": "The job was changed since it was read"},
        428: {"model": Problem, "description": "If-Match is required"},
    },
    dependencies=[OWNS_JOB],
)
async def patch_job(
    job_id: str,
    patch: JobPatch,
    request: Request,
    ports: WithPorts,
    actor: WithActor,
    if_match: Annotated[
        str | None, Header(max_length=1000, description="The ETag from GET, or `*`")
    ] = None,
) -> Response:
    """Change priority, labels, retention or restart budget (a JSON merge patch).

    Only edits of a job make its ETag stale, not its progress.
    """
    refuse_unspeakable(patch)
    faults = [] if patch.priority is None else actor.priority_faults(patch.priority)
    if faults:
        raise InvalidRequestError(faults)
    event = PatchAsked(patch, revisions_matched(if_match))
    return answer(request, await use_cases.change_course(ports, job_id, event, actor))


@router.post(
    "/{job_id}/clone",
    status_code=HTTPStatus.ACCEPTED,
    response_model=JobView,
    responses={200: {"model": JobView, "description": "With `dry_run`: nothing was stored"}},
    dependencies=[SUBMITS],
)
async def clone(  # noqa: PLR0913 one parameter a part of the request
    job_id: str,
    request: Request,
    context: WithContext,
    actor: WithActor,
    asks: WithPrincipal,
    wanted: CloneRequest | None = None,
    *,
    idempotency_key: IdempotencyKey = None,
    dry_run: bool = False,
) -> Response:
    """Queue another job of the same spec, with overrides, from a checkpoint or from the start.

    Its checkpoint is kept for the clone, so only the job's owner or an operator may use
    `from_checkpoint`.
    """
    body = wanted or CloneRequest()
    if body.from_checkpoint is not None:
        may = "clone it from a checkpoint; without from_checkpoint any submitter may clone it"
        await check_owner(context.ports, job_id, asks, may)
    refuse_unspeakable(body)
    claim = None
    if idempotency_key is not None:
        claim = Claim(actor.name, idempotency_key, _digest({"clone": job_id, **_json(body)}))
    cloning = Cloning(job_id, body, claim, dry_run)
    view = await clone_job(context.ports, cloning, actor, context.entry_points)
    if dry_run:
        return answer(request, view)
    location = {"Location": f"/v1/jobs/{view.id}"}
    return answer(request, view, status=HTTPStatus.ACCEPTED, headers=location)


@router.delete(
    "/{job_id}",
    status_code=HTTPStatus.NO_CONTENT,
    response_class=Response,
    responses={202: {"model": JobView, "description": "Its checkpoints are being removed"}},
    dependencies=[OWNS_JOB],
)
async def delete_job(
    job_id: str,
    request: Request,
    ports: WithPorts,
    actor: WithActor,
    *,
    purge_checkpoints: Annotated[
        bool, Query(description="Remove its checkpoints too; the job is deleted after them")
    ] = False,
) -> Response:
    """Delete a finished job. Its checkpoints stay in storage unless they are purged."""
    if purge_checkpoints:
        view = await use_cases.purge_job(ports, job_id, actor)
        if view is not None:
            return answer(request, view, status=HTTPStatus.ACCEPTED)
    else:
        await use_cases.delete_job(ports, job_id, actor)
    return Response(status_code=HTTPStatus.NO_CONTENT)


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
    """Stop after a checkpoint, as requested; `resume` continues."""
    event = PauseAsked(stop or StopRequest())
    view = await use_cases.change_course(ports, job_id, event, actor)
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
    """Continue from a named checkpoint, or from the latest committed one."""
    event = ResumeAsked((source or ResumeRequest()).from_checkpoint)
    view = await use_cases.change_course(ports, job_id, event, actor)
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
    """Stop permanently, after a checkpoint as requested."""
    event = CancelAsked(stop or StopRequest())
    view = await use_cases.change_course(ports, job_id, event, actor)
    return answer(request, view, status=HTTPStatus.ACCEPTED)


@router.post(
    "/{job_id}/kill",
    status_code=HTTPStatus.ACCEPTED,
    response_model=JobView,
    dependencies=[OWNS_JOB],
)
async def kill(job_id: str, request: Request, ports: WithPorts, actor: WithActor) -> Response:
    """Stop permanently, at once, without a checkpoint."""
    view = await use_cases.change_course(ports, job_id, KillAsked(), actor)
    return answer(request, view, status=HTTPStatus.ACCEPTED)


@router.get("/{job_id}/attempts", response_model=AttemptList, dependencies=[READS])
async def list_attempts(job_id: str, request: Request, ports: WithPorts) -> Response:
    """A job's attempts, oldest first, and how each ended."""
    return answer(request, await use_cases.list_attempts(ports, job_id))


def _field_names(fields: str) -> set[str]:
    """The fields of a job that are named, by commas, and its id.

    Raises:
        InvalidRequestError: A job has no such field.
    """
    names = {name.strip() for name in fields.split(",")}
    if unknown := sorted(names - JobView.model_fields.keys()):
        known = ", ".join(JobView.model_fields)
        faults = [
            Fault(
                pointer="",
                detail=f"fields: a job has no field {name!r}; its fields are {known}",
                code="unknown_field",
            )
            for name in unknown
        ]
        raise InvalidRequestError(faults)
    return {*names, "id"}


def refuse_unspeakable(spec: BaseModel) -> None:
    """Refuse what is no text: JSON may escape half of a surrogate pair in an argument; no store or stream can carry it."""
    faults = first_faults(
        Fault(pointer=place, detail="not a Unicode string", code="string_unicode")
        for place in _unspeakable(spec.model_dump(), "")
    )
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


def _json(body: BaseModel) -> dict[str, Any]:
    return body.model_dump(mode="json")


def _digest(document: dict[str, Any]) -> str:
    text = json.dumps(document, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()
