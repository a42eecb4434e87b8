"""What votes and links do to a job's checkpoints, and to the job that waits for them."""

from typing import Final

from services.contract.messages.commands import RetireCheckpoint
from services.contract.messages.facts import (
    CheckpointBegan,
    CheckpointLinked,
    CheckpointLost,
    CheckpointRetired,
    CheckpointVoted,
)
from services.contract.states import CheckpointState
from services.controller.domain import checkpoint as checkpoints
from services.controller.domain.checkpoint import Checkpoint
from services.controller.domain.effects import Draft
from services.controller.domain.gang import send_commit
from services.controller.domain.settle import settle, succeed_late

_GONE_KEPT: Final = 64
_ABORTED_KEPT: Final = 8


def on_began(fact: CheckpointBegan, draft: Draft) -> None:
    """Ranks of the newest attempt write a checkpoint."""
    _open(draft, fact.checkpoint_id)


def on_voted(fact: CheckpointVoted, draft: Draft) -> None:
    """One more shard is durable; the last vote commands the commit."""
    before = _open(draft, fact.checkpoint_id)
    if before is None:
        return
    after = checkpoints.count_vote(before, fact)
    _put(draft, after)
    if before.state == after.state:
        return
    if after.state == CheckpointState.SEALED:
        draft.note(
            "checkpoint.sealed",
            f"checkpoint of step {after.step}: all {after.world_size} ranks voted",
            checkpoint=after.id,
            step=after.step,
        )
        send_commit(draft, fact.fence, after.id)
    else:
        draft.note("checkpoint.aborted", f"checkpoint {after.id}: {after.reason}")


def on_linked(fact: CheckpointLinked, draft: Draft) -> None:
    """The checkpoint is committed. True whatever the fence: the chain in storage says so."""
    name = fact.manifest.checkpoint_id
    known = draft.job.checkpoints.get(name)
    if name in draft.job.gone or (known is not None and _is_committed(known)):
        return
    linked = checkpoints.commit(known, fact, draft.now_ms)
    _put(draft, linked)
    draft.note(
        "checkpoint.committed",
        f"checkpoint of step {linked.step} is committed ({linked.total_bytes} bytes)",
        checkpoint=linked.id,
        step=linked.step,
        number=linked.number,
    )
    _retire(draft)
    succeed_late(draft, linked)
    settle(draft)


def on_lost(fact: CheckpointLost, draft: Draft) -> None:
    """The checkpoint will not be committed; training goes on without it."""
    if fact.checkpoint_id in draft.job.gone:
        return
    known = draft.job.checkpoints.get(fact.checkpoint_id) or _open(draft, fact.checkpoint_id)
    if known is None:
        return
    aborted = checkpoints.abort(known, fact.reason)
    if aborted != known:
        _put(draft, aborted)
        _forget_aborted(draft)
        draft.note(
            "checkpoint.aborted",
            f"checkpoint of step {known.step}: {fact.reason}",
            checkpoint=known.id,
            step=known.step,
        )
        settle(draft)


def on_retired(fact: CheckpointRetired, draft: Draft) -> None:
    """Its deletion stands in the chain: the index forgets it."""
    known = draft.job.checkpoints.get(fact.checkpoint_id)
    if known is not None:
        _forget(draft, [known])
        draft.note(
            "checkpoint.retired",
            f"checkpoint of step {known.step} is removed",
            checkpoint=known.id,
            step=known.step,
        )


def retire_surplus(draft: Draft) -> None:
    """Give up what retention no longer keeps, when something else than a commit changed that."""
    _retire(draft)


def _open(draft: Draft, checkpoint_id: str) -> Checkpoint | None:
    """The record of a checkpoint of the living attempt, begun if it is new; else None."""
    job, attempt = draft.job, draft.job.attempt
    _, fence = checkpoints.step_and_fence(checkpoint_id)
    if attempt is None or fence != attempt.fence or checkpoint_id in job.gone:
        return None
    known = job.checkpoints.get(checkpoint_id)
    if known is None and not attempt.is_over:
        known = checkpoints.begin(checkpoint_id, job.id, attempt.world_size, draft.now_ms)
        _put(draft, known)
        draft.note(
            "checkpoint.began",
            f"checkpoint of step {known.step}: ranks write",
            checkpoint=known.id,
            step=known.step,
        )
    return known


def _put(draft: Draft, checkpoint: Checkpoint) -> None:
    draft.change(checkpoints={**draft.job.checkpoints, checkpoint.id: checkpoint})


def _retire(draft: Draft) -> None:
    """Give up what retention no longer keeps; what an older fence failed to remove, again."""
    job, attempt = draft.job, draft.job.attempt
    if job.head_node is None:
        return
    latest = job.latest_checkpoint
    source = None if attempt is None else attempt.resumed_from
    protected = frozenset(
        name
        for name in (
            None if latest is None else latest.id,
            source if latest is None or latest.id == source else None,
            *job.holds,
        )
        if name is not None
    )
    surplus = checkpoints.to_retire(
        job.checkpoints.values(), job.spec.checkpoint.keep_last, protected
    )
    stuck = [c for c in job.checkpoints.values() if c.state == CheckpointState.DELETING]
    for checkpoint in [*stuck, *surplus]:
        deleting = checkpoint.model_copy(update={"state": CheckpointState.DELETING})
        _put(draft, deleting)
        command = RetireCheckpoint(job_id=job.id, fence=job.fence, checkpoint_id=checkpoint.id)
        draft.send(command, [job.head_node])


def _forget_aborted(draft: Draft) -> None:
    aborted = sorted(
        (c for c in draft.job.checkpoints.values() if c.state == CheckpointState.ABORTED),
        key=lambda c: (c.fence, c.step),
    )
    _forget(draft, aborted[:-_ABORTED_KEPT])


def _forget(draft: Draft, old: list[Checkpoint]) -> None:
    names = {c.id for c in old}
    if names:
        kept = {k: c for k, c in draft.job.checkpoints.items() if k not in names}
        gone = (*draft.job.gone, *sorted(names))[-_GONE_KEPT:]
        draft.change(checkpoints=kept, gone=gone)


def _is_committed(checkpoint: Checkpoint) -> bool:
    return checkpoint.state in {CheckpointState.COMMITTED, CheckpointState.DELETING}
