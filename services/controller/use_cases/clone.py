"""Another job of the same spec, and the checkpoint of the first that it begins with.

The checkpoint is held in its job before the clone exists, and until the clone has a committed one
of its own or is deleted: at no moment may retention take what the clone will load.
"""

import contextlib
from dataclasses import dataclass
from typing import Final

import structlog

from services.contract.api.requests import CloneRequest
from services.contract.api.views import JobView
from services.contract.jobs.entry_points import EntryPoints
from services.contract.jobs.specs import JobSpec
from services.contract.words.problems import Fault
from services.contract.words.states import CheckpointState
from services.controller.domain.decisions.dispatch import first_decision
from services.controller.domain.decisions.history import Occurrence
from services.controller.domain.decisions.patch import with_patch
from services.controller.domain.errors import (
    InvalidRequestError,
    KeyReusedError,
    MeshloomError,
    NotFoundError,
    RecordUnreadableError,
    StoreUnavailableError,
    TooManyJobsError,
)
from services.controller.domain.job.events import HoldAsked, HoldReleased, JobEvent, OriginReleased
from services.controller.domain.job.job import Job, Origin
from services.controller.ports.coordination import Ports
from services.controller.ports.jobs import Actor, Claim, Place, Stored
from services.controller.use_cases.change import apply_events
from services.controller.use_cases.present import job_view
from services.controller.use_cases.submit import (
    Drafting,
    draft_job,
    predicted,
)

_log = structlog.get_logger()
_CHUNK: Final = 200


@dataclass(frozen=True)
class Cloning:
    """Which job is cloned, and how that was asked for."""

    job_id: str
    wanted: CloneRequest
    claim: Claim | None = None
    dry_run: bool = False


async def clone(ports: Ports, cloning: Cloning, actor: Actor, allowed: EntryPoints) -> JobView:
    """Queue a clone; the same claim again answers the same job.

    Raises:
        NotFoundError: There is no such job.
        InvalidRequestError: The clone can never run, or the checkpoint is none to begin with.
        StateConflictError: The checkpoints of the job are being removed, or there are too many jobs
            of who asks.
        KeyReusedError: The claim's key came with another body before.
    """
    if cloning.claim is not None and not cloning.dry_run:
        earlier = await ports.jobs.claimed(cloning.claim)
        if earlier is not None:
            return job_view(earlier.job, (), {})
    source = (await ports.jobs.load(cloning.job_id)).job
    spec = with_patch(source.asked or source.spec, cloning.wanted.overrides, "/overrides")
    origin = _origin(source, cloning.wanted, spec)
    try:
        job, outcome = await draft_job(ports, spec, Drafting(actor, allowed, origin))
    except InvalidRequestError as error:
        raise InvalidRequestError(
            [f.model_copy(update={"pointer": f"/overrides{f.pointer}"}) for f in error.faults]
        ) from error
    if cloning.dry_run:
        return predicted(job, outcome)
    if origin.checkpoint_id is not None:
        await _apply(ports, source.id, HoldAsked(origin.checkpoint_id, job.id), actor)
    try:
        stored = await ports.jobs.create(first_decision(job), actor, cloning.claim)
    except (KeyReusedError, StoreUnavailableError, TooManyJobsError):
        await _release_unless_created(ports, job, actor)
        raise
    if stored.job.id != job.id:
        # The same request came twice at once, and the other one was first.
        await release_origin(ports, job, actor)
    return job_view(stored.job, (), {})


async def let_go_of_origin(ports: Ports, job: Job, epoch: int) -> None:
    """Once a clone has a committed checkpoint of its own, its origin may be retired.

    Doing so again changes nothing.

    Raises:
        DeposedError: ``epoch`` is over.
    """
    if job.origin is None or job.origin.checkpoint_id is None or job.latest_checkpoint is None:
        return
    actor = Actor("controller")
    # First the clone: it must never be sent back to a checkpoint that may be gone.
    await _apply(ports, job.id, OriginReleased(), actor, epoch)
    await release_origin(ports, job, actor, epoch)


async def hold_origin(ports: Ports, job: Job, actor: Actor, epoch: int) -> None:
    """Hold again what a clone begins with, as far as the job that it was cloned from is known.

    Raises:
        DeposedError: ``epoch`` is over.
    """
    if job.origin is None or job.origin.checkpoint_id is None or not job.origin.held:
        return
    hold = HoldAsked(job.origin.checkpoint_id, job.id)
    try:
        await _apply(ports, job.origin.job_id, hold, actor, epoch)
    except (NotFoundError, RecordUnreadableError, InvalidRequestError) as error:
        _log.warning("origin_not_held", job_id=job.id, origin=job.origin.job_id, why=str(error))


async def release_origin(ports: Ports, job: Job, actor: Actor, epoch: int | None = None) -> None:
    """The job that was cloned need no longer keep the checkpoint for ``job``."""
    if job.origin is None or job.origin.checkpoint_id is None:
        return
    released = HoldReleased(job.origin.checkpoint_id, job.id)
    try:
        await _apply(ports, job.origin.job_id, released, actor, epoch)
    except (NotFoundError, RecordUnreadableError):
        return  # then there is nothing that retires it, either


async def delete_with_holds(
    ports: Ports, stored: Stored, actor: Actor, epoch: int | None = None
) -> None:
    """Delete a job, and let go of the checkpoint that it began with: both, or neither.

    Raises:
        StaleWriteError: The job changed since it was read; it goes on, and so does its hold.
    """
    origin = stored.job.origin
    if origin is not None and origin.checkpoint_id is not None:
        now_ms = await ports.clock.now_ms()
        released = Occurrence(HoldReleased(origin.checkpoint_id, stored.job.id), now_ms)
        with contextlib.suppress(NotFoundError, RecordUnreadableError):
            await apply_events(ports, origin.job_id, [released], actor, epoch, deletes=stored)
            return
    await ports.jobs.delete(stored)


async def release_all_held_for(ports: Ports, clone_id: str, actor: Actor) -> None:
    """Whatever any job keeps for this clone, whose own record cannot tell, it need not keep."""
    place: Place | None = None
    while chunk := await ports.jobs.page(place, _CHUNK):
        for job in (stored.job for stored in chunk):
            for checkpoint_id in [k for k, names in job.holds.items() if clone_id in names]:
                released = HoldReleased(checkpoint_id, clone_id)
                with contextlib.suppress(NotFoundError, RecordUnreadableError):
                    await _apply(ports, job.id, released, actor)
        place = Place(chunk[-1].job.created_ms, chunk[-1].job.id)


async def _release_unless_created(ports: Ports, job: Job, actor: Actor) -> None:
    """Have nothing kept for a clone that never came to be.

    While it cannot be known whether it did, the checkpoint stays held: one that is kept for nobody
    costs space, one that is missing costs the clone.
    """
    with contextlib.suppress(MeshloomError):
        try:
            await ports.jobs.load(job.id)
        except NotFoundError:
            await release_origin(ports, job, actor)


def _origin(source: Job, wanted: CloneRequest, spec: JobSpec) -> Origin:
    asked = wanted.from_checkpoint
    if asked is None:
        return Origin(job_id=source.id)
    by_word = {"latest": source.latest_checkpoint, "best": source.best_checkpoint}
    known = by_word[asked] if asked in by_word else source.checkpoints.get(asked)
    if known is None or known.state != CheckpointState.COMMITTED:
        missing = {
            "latest": "there is none yet",
            "best": "there is none yet with an evaluation at its step",
        }
        what = missing.get(asked, f"{asked} is not one")
        raise _refusal(
            "/from_checkpoint",
            f"only a committed checkpoint of {source.id} can be cloned, and {what}; "
            f"GET /v1/jobs/{source.id}/checkpoints lists them",
            "unknown_checkpoint",
        )
    if known.step >= spec.train.steps:
        raise _refusal(
            "/overrides/train/steps",
            f"checkpoint {known.id} is of step {known.step} and train.steps is "
            f"{spec.train.steps}: nothing is left to do; override train.steps with more",
            "nothing_left",
        )
    return Origin(job_id=source.id, checkpoint_id=known.id, step=known.step, held=True)


def _refusal(pointer: str, detail: str, code: str) -> InvalidRequestError:
    return InvalidRequestError([Fault(pointer=pointer, detail=detail, code=code)])


async def _apply(
    ports: Ports, job_id: str, event: JobEvent, actor: Actor, epoch: int | None = None
) -> None:
    now_ms = await ports.clock.now_ms()
    await apply_events(ports, job_id, [Occurrence(event, now_ms)], actor, epoch)
