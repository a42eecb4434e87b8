"""Looking at checkpoints, keeping them, having them read, deleting them."""

from services.contract.api.views import CheckpointList, CheckpointView
from services.contract.system.long_work import in_turns
from services.contract.words.ids import job_of_checkpoint
from services.contract.words.states import NodeState
from services.controller.domain.decisions.history import Occurrence
from services.controller.domain.errors import NotFoundError, StateConflictError
from services.controller.domain.job.events import (
    ExportAsked,
    JobEvent,
    PinAsked,
    RemovalAsked,
    VerifyAsked,
)
from services.controller.domain.job.job import Job
from services.controller.ports.coordination import Ports
from services.controller.ports.jobs import Actor
from services.controller.use_cases.change import apply_events
from services.controller.use_cases.present import checkpoint_view


async def list_checkpoints(ports: Ports, job_id: str) -> CheckpointList:
    """A job's checkpoints, newest first.

    Raises:
        NotFoundError: There is no such job.
    """
    stored = await ports.jobs.load(job_id)
    newest_first = sorted(
        stored.job.checkpoints.values(), key=lambda c: (c.fence, c.step), reverse=True
    )
    best = stored.job.best_checkpoint
    return CheckpointList(
        items=tuple(
            [
                checkpoint_view(stored.job, c, is_best=c is best)
                async for c in in_turns(newest_first)
            ]
        )
    )


async def get_checkpoint(ports: Ports, checkpoint_id: str) -> CheckpointView:
    """One checkpoint.

    Raises:
        NotFoundError: There is none.
    """
    return _view(await _owner(ports, checkpoint_id), checkpoint_id)


async def pin(ports: Ports, checkpoint_id: str, actor: Actor, *, keep: bool) -> CheckpointView:
    """Keep a checkpoint whatever retention says, or no longer.

    Raises:
        NotFoundError: There is none.
        StateConflictError: It is not committed.
    """
    return await _change(ports, checkpoint_id, PinAsked(checkpoint_id, keep), actor)


async def verify(ports: Ports, checkpoint_id: str, actor: Actor) -> CheckpointView:
    """Have a node read every file; ``verified_at`` or the state CORRUPT tell what came of it.

    Raises:
        NotFoundError: There is none.
        StateConflictError: It is not committed, or no node is ready to read it.
    """
    node_id = await _reader(ports, checkpoint_id)
    return await _change(ports, checkpoint_id, VerifyAsked(checkpoint_id, node_id), actor)


async def export(ports: Ports, checkpoint_id: str, actor: Actor) -> CheckpointView:
    """Have a node put the model together; the view's ``export`` tells what came of it.

    Raises:
        NotFoundError: There is none.
        StateConflictError: It is not committed, or no node is ready to read it.
    """
    node_id = await _reader(ports, checkpoint_id)
    return await _change(ports, checkpoint_id, ExportAsked(checkpoint_id, node_id), actor)


async def remove(ports: Ports, checkpoint_id: str, actor: Actor) -> CheckpointView:
    """Delete a checkpoint that nothing needs any more.

    Raises:
        NotFoundError: There is none.
        StateConflictError: Something needs it, or no node is ready to delete its files.
    """
    job = await _owner(ports, checkpoint_id)
    before = _view(job, checkpoint_id)
    node_id = await _find_reader(ports, job, checkpoint_id)
    after = await _apply(ports, job.id, RemovalAsked(checkpoint_id, node_id), actor)
    return _view(after, checkpoint_id) if checkpoint_id in after.checkpoints else before


async def _change(
    ports: Ports, checkpoint_id: str, request: JobEvent, actor: Actor
) -> CheckpointView:
    job = await _apply(ports, job_of_checkpoint(checkpoint_id), request, actor)
    return _view(job, checkpoint_id)


async def _apply(ports: Ports, job_id: str, request: JobEvent, actor: Actor) -> Job:
    now_ms = await ports.clock.now_ms()
    return (await apply_events(ports, job_id, [Occurrence(request, now_ms)], actor)).job


async def _owner(ports: Ports, checkpoint_id: str) -> Job:
    return (await ports.jobs.load(job_of_checkpoint(checkpoint_id))).job


def _view(job: Job, checkpoint_id: str) -> CheckpointView:
    known = job.checkpoints.get(checkpoint_id)
    if known is None:
        raise NotFoundError(f"there is no checkpoint {checkpoint_id}")
    return checkpoint_view(job, known, is_best=known is job.best_checkpoint)


async def _reader(ports: Ports, checkpoint_id: str) -> str:
    node_id = await _find_reader(ports, await _owner(ports, checkpoint_id), checkpoint_id)
    if node_id is None:
        raise StateConflictError("no node is ready to read the storage; start an agent and retry")
    return node_id


async def _find_reader(ports: Ports, job: Job, checkpoint_id: str) -> str | None:
    """A node that is up: the one that linked the checkpoint, else the job's, else any."""
    nodes = await ports.nodes.nodes()
    leases = await ports.nodes.leases([node.id for node in nodes])
    ready = [n.id for n in nodes if n.state != NodeState.LOST and n.id in leases]
    known = job.checkpoints.get(checkpoint_id)
    preferred = [None if known is None else known.node_id, job.head_node, *ready]
    return next((name for name in preferred if name in ready), None)
