"""What people ask of a checkpoint: keep it, have it read, delete it.

Asking again for what is already so, or already under way, changes nothing but may be sent again.
"""

from typing import Final

from services.contract.messages.commands import ExportCheckpoint, RetireCheckpoint, VerifyCheckpoint
from services.contract.messages.facts import CheckpointExported, ExportFailed
from services.contract.words.states import CheckpointState
from services.controller.domain.decisions.purge import refuse_while_purged
from services.controller.domain.errors import NotFoundError, StateConflictError
from services.controller.domain.job import checkpoint as checkpoints
from services.controller.domain.job.checkpoint import LINKED_STATES, Checkpoint, Export
from services.controller.domain.job.effects import Draft
from services.controller.domain.job.events import ExportAsked, PinAsked, RemovalAsked, VerifyAsked
from services.controller.domain.job.job import Job

_READERS_KEPT: Final = 8
_KEPT_STATES = frozenset({CheckpointState.COMMITTED, CheckpointState.CORRUPT})


def on_pin(event: PinAsked, draft: Draft) -> None:
    """Retention passes a pinned checkpoint over, and nobody deletes it.

    Raises:
        NotFoundError: The job has no such checkpoint.
        StateConflictError: It is not committed, or is being deleted, alone or with all others; or so
            many are pinned that the job's record has no room for more.
    """
    known = _kept(draft.job, event.checkpoint_id, "pinned or unpinned")
    if known.pinned == event.pin:
        return
    if event.pin:
        pinned = [c for c in draft.job.checkpoints.values() if c.pinned]
        if checkpoints.room_for(len(c.votes) for c in [*pinned, known]) <= len(pinned):
            raise StateConflictError(
                f"{len(pinned)} checkpoints of {draft.job.id} are pinned, and there is no room for more: unpin some, "
                "or export what is to be kept"
            )
    _put(draft, known.model_copy(update={"pinned": event.pin}))
    verb = "pinned" if event.pin else "unpinned"
    draft.note(
        f"checkpoint.{verb}",
        f"checkpoint of step {known.step} is {verb}",
        checkpoint=known.id,
        step=known.step,
    )


def on_verify(event: VerifyAsked, draft: Draft) -> None:
    """Command a node to read every file of it; its facts say what it found.

    Raises:
        NotFoundError: The job has no such checkpoint.
        StateConflictError: It is not committed, or is being deleted, alone or with all others.
    """
    known = _kept(draft.job, event.checkpoint_id, "verified")
    job = draft.job
    command = VerifyCheckpoint(
        job_id=job.id, fence=job.fence, checkpoint_id=known.id, owner=job.owner
    )
    _ask(draft, command, event.node_id)
    draft.note(
        "checkpoint.verifying",
        f"checkpoint of step {known.step}: {event.node_id} reads every file",
        checkpoint=known.id,
        step=known.step,
        node_id=event.node_id,
    )


def on_export(event: ExportAsked, draft: Draft) -> None:
    """Command a node to put its model together; its facts say what came of it.

    Raises:
        NotFoundError: The job has no such checkpoint.
        StateConflictError: It is not committed, is corrupt, or is being deleted, alone or with
            all others.
    """
    known = _kept(draft.job, event.checkpoint_id, "exported")
    if known.state == CheckpointState.CORRUPT:
        raise StateConflictError(f"checkpoint {known.id} is corrupt: {known.reason}")
    _put(draft, known.model_copy(update={"export": Export()}))
    job = draft.job
    command = ExportCheckpoint(
        job_id=job.id, fence=job.fence, checkpoint_id=known.id, owner=job.owner
    )
    _ask(draft, command, event.node_id)
    draft.note(
        "checkpoint.exporting",
        f"checkpoint of step {known.step}: {event.node_id} exports its model",
        checkpoint=known.id,
        step=known.step,
        node_id=event.node_id,
    )


def on_exported(fact: CheckpointExported, draft: Draft) -> None:
    """Its model lies in files that others can read."""
    done = Export(state="DONE", files=fact.files, bytes=fact.bytes)
    known = _with_export(draft, fact.checkpoint_id, done)
    if known is not None:
        draft.note(
            "checkpoint.exported",
            f"checkpoint of step {known.step} is exported ({fact.bytes} bytes)",
            checkpoint=known.id,
            files=list(fact.files),
        )


def on_export_failed(fact: ExportFailed, draft: Draft) -> None:
    """It could not be exported."""
    failed = Export(state="FAILED", reason=fact.reason)
    known = _with_export(draft, fact.checkpoint_id, failed)
    if known is not None:
        draft.note(
            "checkpoint.export_failed",
            f"checkpoint of step {known.step} could not be exported: {fact.reason}",
            checkpoint=known.id,
        )


def on_removal(event: RemovalAsked, draft: Draft) -> None:
    """Delete it: first its deletion is linked into the chain, then its files go.

    Raises:
        NotFoundError: The job has no such checkpoint.
        StateConflictError: Something still needs it.
    """
    job = draft.job
    known = _known(job, event.checkpoint_id)
    if known.state == CheckpointState.ABORTED:
        kept = {name: c for name, c in job.checkpoints.items() if name != known.id}
        draft.change(checkpoints=kept, gone=(*job.gone, known.id))
        draft.note("checkpoint.retired", f"checkpoint {known.id} is forgotten")
        return
    _refuse_removal(job, known)
    if event.node_id is None:
        raise StateConflictError("no node is ready to delete its files; retry later")
    _put(draft, checkpoints.deleting(known, draft.now_ms))
    if known.state != CheckpointState.DELETING:
        draft.note(
            "checkpoint.deleting",
            f"checkpoint of step {known.step} is deleted on request",
            checkpoint=known.id,
            step=known.step,
        )
    command = RetireCheckpoint(job_id=job.id, fence=job.fence, checkpoint_id=known.id)
    draft.send(command, [event.node_id])


def _ask(draft: Draft, command: VerifyCheckpoint | ExportCheckpoint, node_id: str) -> None:
    """Command a node to read storage, and know it by that: what others say of it is ignored."""
    others = [name for name in draft.job.readers if name != node_id]
    draft.change(readers=(*others, node_id)[-_READERS_KEPT:])
    draft.send(command, [node_id])


def _refuse_removal(job: Job, known: Checkpoint) -> None:
    why = None
    attempt = job.attempt
    latest = job.latest_checkpoint
    verified = checkpoints.last_verified(job.checkpoints.values())
    if known.state not in LINKED_STATES:
        why = f"it is {known.state}: ranks may still write it"
    elif known.pinned:
        why = "it is pinned; unpin it first"
    elif job.holds.get(known.id):
        why = f"job {job.holds[known.id][0]} starts from it"
    elif attempt is not None and attempt.loads(known.id):
        why = f"attempt {attempt.fence} is loading it"
    if why is None and not job.is_terminal and latest is not None and latest.id == known.id:
        why = f"the job is {job.state} and would resume from it"
    if why is None and not job.is_terminal and verified is not None and verified.id == known.id:
        why = f"the job is {job.state} and it is the last verified one"
    if why is not None:
        raise StateConflictError(f"checkpoint {known.id} cannot be deleted: {why}")


def _kept(job: Job, checkpoint_id: str, verb: str) -> Checkpoint:
    known = _known(job, checkpoint_id)
    refuse_while_purged(job)
    if known.state not in _KEPT_STATES:
        raise StateConflictError(
            f"checkpoint {known.id} is {known.state}: only a committed one is {verb}"
        )
    return known


def _known(job: Job, checkpoint_id: str) -> Checkpoint:
    known = job.checkpoints.get(checkpoint_id)
    if known is None:
        raise NotFoundError(f"there is no checkpoint {checkpoint_id}")
    return known


def _with_export(draft: Draft, checkpoint_id: str, export: Export) -> Checkpoint | None:
    """The checkpoint, if this is news of it."""
    known = draft.job.checkpoints.get(checkpoint_id)
    if known is None or known.export == export:
        return None
    _put(draft, known.model_copy(update={"export": export}))
    return known


def _put(draft: Draft, checkpoint: Checkpoint) -> None:
    draft.change(checkpoints={**draft.job.checkpoints, checkpoint.id: checkpoint})
