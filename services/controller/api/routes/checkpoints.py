"""Checkpoints: look, take, keep, have them read, delete."""

from http import HTTPStatus

from fastapi import APIRouter, Request, Response

from services.contract.api.views import CheckpointList, CheckpointView, JobView
from services.controller.api.conditional import answer
from services.controller.api.context import WithActor, WithPorts
from services.controller.api.scopes import OWNS_JOB, READS
from services.controller.domain.job.events import CheckpointAsked
from services.controller.use_cases import checkpoints as use_cases
from services.controller.use_cases.jobs import change_course

router = APIRouter(prefix="/v1", tags=["checkpoints"])


@router.get("/jobs/{job_id}/checkpoints", response_model=CheckpointList, dependencies=[READS])
async def list_checkpoints(job_id: str, request: Request, ports: WithPorts) -> Response:
    """A job's checkpoints, newest first."""
    return answer(request, await use_cases.list_checkpoints(ports, job_id))


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
