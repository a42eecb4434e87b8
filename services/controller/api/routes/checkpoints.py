"""Checkpoints: look, take, keep, have them read, delete."""

import functools
from http import HTTPStatus

from fastapi import APIRouter, Request, Response

from services.contract.api.views import CheckpointList, CheckpointView, JobView
from services.contract.storage.exports import ExportManifest
from services.contract.words.problems import Problem
from services.controller.api.conditional import answer, answer_page
from services.controller.api.context import (
    Context,
    WithActor,
    WithContext,
    WithPorts,
    WithPrincipal,
)
from services.controller.api.downloads import download
from services.controller.api.routes.watch import viewer_of
from services.controller.api.scopes import OWNS_JOB, READS
from services.controller.domain.errors import StateConflictError
from services.controller.domain.job.events import CheckpointAsked
from services.controller.ports.exports import ExportStore
from services.controller.use_cases import checkpoints as use_cases
from services.controller.use_cases import exports as of_exports
from services.controller.use_cases.jobs import change_course

router = APIRouter(prefix="/v1", tags=["checkpoints"])


@router.get("/jobs/{job_id}/checkpoints", response_model=CheckpointList, dependencies=[READS])
async def list_checkpoints(
    job_id: str, request: Request, context: WithContext, asks: WithPrincipal
) -> Response:
    """A job's checkpoints, newest first."""
    async with context.turns.of(asks.subject):
        found = await use_cases.list_checkpoints(context.ports, job_id)
        return await answer_page(request, found)


@router.post(
    "/jobs/{job_id}/checkpoints",
    status_code=HTTPStatus.ACCEPTED,
    response_model=JobView,
    dependencies=[OWNS_JOB],
)
async def take_checkpoint(
    job_id: str, request: Request, ports: WithPorts, actor: WithActor
) -> Response:
    """Take a checkpoint at the next step on which the ranks agree."""
    view = await change_course(ports, job_id, CheckpointAsked(), actor)
    return answer(request, view, status=HTTPStatus.ACCEPTED)


@router.get("/checkpoints/{checkpoint_id}", response_model=CheckpointView, dependencies=[READS])
async def get_checkpoint(checkpoint_id: str, request: Request, ports: WithPorts) -> Response:
    """One checkpoint: its state, its shards and their digests, and why it is kept."""
    return answer(request, await use_cases.get_checkpoint(ports, checkpoint_id))


@router.post(
    "/checkpoints/{checkpoint_id}/verify",
    status_code=HTTPStatus.ACCEPTED,
    response_model=CheckpointView,
    dependencies=[OWNS_JOB],
)
async def verify(
    checkpoint_id: str, request: Request, ports: WithPorts, actor: WithActor
) -> Response:
    """Have a node read every shard and compare it with its digest.

    The result is `verified_at`, or the state CORRUPT with the file that differs.
    """
    view = await use_cases.verify(ports, checkpoint_id, actor)
    return answer(request, view, status=HTTPStatus.ACCEPTED)


@router.post(
    "/checkpoints/{checkpoint_id}/export",
    status_code=HTTPStatus.ACCEPTED,
    response_model=CheckpointView,
    dependencies=[OWNS_JOB],
)
async def export(
    checkpoint_id: str, request: Request, ports: WithPorts, actor: WithActor
) -> Response:
    """Export its model as safetensors files, in the storage, below the job's folder.

    The result is in `export`: its state, its folder and files.
    """
    view = await use_cases.export(ports, checkpoint_id, actor)
    return answer(request, view, status=HTTPStatus.ACCEPTED)


@router.get(
    "/checkpoints/{checkpoint_id}/files", response_model=ExportManifest, dependencies=[OWNS_JOB]
)
async def list_files(checkpoint_id: str, request: Request, context: WithContext) -> Response:
    """The files of its export, each with its size and SHA-256."""
    found = await of_exports.exported(context.ports, _exports(context), checkpoint_id)
    return answer(request, found)


@router.get(
    "/checkpoints/{checkpoint_id}/files/{name}",
    response_class=Response,
    responses={
        200: {"content": {"application/octet-stream": {}}, "description": "The file"},
        206: {"content": {"application/octet-stream": {}}, "description": "A range of it"},
        416: {"model": Problem, "description": "The range begins behind its end"},
    },
    dependencies=[OWNS_JOB],
)
async def get_file(
    checkpoint_id: str, name: str, request: Request, context: WithContext, asks: WithPrincipal
) -> Response:
    """A file of its export. `Range` takes one range of bytes; the ETag is the file's SHA-256.

    A download counts as a stream: of all that are open a subject may have a quarter.
    """
    exports = _exports(context)
    file = await of_exports.exported_file(context.ports, exports, checkpoint_id, name)
    content = functools.partial(of_exports.content, exports, checkpoint_id, name)
    return await download(request, file, content, context.streams, viewer_of(context, asks))


@router.post(
    "/checkpoints/{checkpoint_id}/pin",
    status_code=HTTPStatus.ACCEPTED,
    response_model=CheckpointView,
    dependencies=[OWNS_JOB],
)
async def pin(checkpoint_id: str, request: Request, ports: WithPorts, actor: WithActor) -> Response:
    """Keep it until it is unpinned; retention does not delete it."""
    view = await use_cases.pin(ports, checkpoint_id, actor, keep=True)
    return answer(request, view, status=HTTPStatus.ACCEPTED)


@router.post(
    "/checkpoints/{checkpoint_id}/unpin",
    status_code=HTTPStatus.ACCEPTED,
    response_model=CheckpointView,
    dependencies=[OWNS_JOB],
)
async def unpin(
    checkpoint_id: str, request: Request, ports: WithPorts, actor: WithActor
) -> Response:
    """Leave it to retention again."""
    view = await use_cases.pin(ports, checkpoint_id, actor, keep=False)
    return answer(request, view, status=HTTPStatus.ACCEPTED)


@router.delete(
    "/checkpoints/{checkpoint_id}",
    status_code=HTTPStatus.ACCEPTED,
    response_model=CheckpointView,
    dependencies=[OWNS_JOB],
)
async def remove(
    checkpoint_id: str, request: Request, ports: WithPorts, actor: WithActor
) -> Response:
    """Delete it, unless it is pinned, being loaded, or where a job would resume."""
    view = await use_cases.remove(ports, checkpoint_id, actor)
    return answer(request, view, status=HTTPStatus.ACCEPTED)


def _exports(context: Context) -> ExportStore:
    if context.exports is None:
        raise StateConflictError("this controller has no storage to read exports from")
    return context.exports
