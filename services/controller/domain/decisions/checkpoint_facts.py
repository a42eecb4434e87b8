"""What votes and links do to a job's checkpoints, and to the job that waits for them."""

from typing import Final

from services.contract.messages.commands import RetireCheckpoint
from services.contract.messages.facts import (
    ChainDamaged,
    CheckpointBegan,
    CheckpointCorrupt,
    CheckpointLinked,
    CheckpointLost,
    CheckpointRetired,
    CheckpointUnread,
    CheckpointVerified,
    CheckpointVoted,
    CheckpointWaits,
)
from services.contract.words.ids import step_and_fence
from services.contract.words.states import CheckpointState
from services.controller.domain.decisions.attempt_end import settle, succeed_late
from services.controller.domain.decisions.attempt_events import (
    COMMITS_AT_ONCE,
    answered,
    sealed_of,
    send_commit,
)
from services.controller.domain.job import checkpoint as checkpoints
from services.controller.domain.job.attempt import Attempt
from services.controller.domain.job.checkpoint import LINKED_STATES, Checkpoint
from services.controller.domain.job.effects import Draft
from services.controller.domain.job.job import Job
from services.controller.domain.record import is_ahead

_GONE_KEPT: Final = 64
_ABORTED_KEPT: Final = 8
_WRITING_KEPT: Final = 16
# Ranks may put files into a chain, and each number is an event and stays in the job's record.
_DAMAGED_KEPT: Final = 256
_STUCK_RESENT: Final = 16
_STUCK_MS: Final = 60_000
_KEPT_NAMED: Final = 16


def on_began(fact: CheckpointBegan, draft: Draft) -> None:
    """Ranks of the newest attempt write a checkpoint."""
    _open(draft, fact.checkpoint_id)


def on_voted(fact: CheckpointVoted, draft: Draft) -> None:
    """One more shard is durable; the last vote commands the commit."""
    before = _open(draft, fact.checkpoint_id)
    if before is None:
        return
    book = draft.job.attempts[-1].replicas
    if book is not None and not book.has(fact.shard.rank):
        return  # its replica was given up for lost before its vote came
    after = checkpoints.count_vote(before, fact)
    _put(draft, after)
    if before.state == after.state:
        return
    if after.state == CheckpointState.SEALED:
        if draft.job.attempts[-1].condition is not None:
            words = f"all ranks have written the checkpoint of step {after.step}"
            draft.change(reason=words)
            draft.change_attempt(condition=None)
        draft.note(
            "checkpoint.sealed",
            f"checkpoint of step {after.step}: all {after.world_size} ranks voted",
            checkpoint=after.id,
            step=after.step,
        )
        _commit_in_turn(draft, after)
    else:
        draft.note("checkpoint.aborted", f"checkpoint {after.id}: {after.reason}")


def on_waits(fact: CheckpointWaits, draft: Draft) -> None:
    """The state of a node prevents a rank from writing the last checkpoint: it tries again.

    Told by each rank at each try, and noted once.
    """
    known = _open(draft, fact.checkpoint_id)
    if known is not None and known.state == CheckpointState.WRITING:
        _wait(draft, known, fact.condition, "the ranks wait, and write")


def on_linked(fact: CheckpointLinked, draft: Draft) -> None:
    """The checkpoint is committed. True whatever the fence: the chain in storage says so."""
    name = fact.manifest.checkpoint_id
    known = draft.job.checkpoints.get(name)
    if name in draft.job.gone:
        return
    if known is not None and _is_committed(known):
        # Its node may have said so with all that it found, for which nothing waits.
        settle(draft)
        return
    answered(draft)
    linked = checkpoints.commit(known, fact, draft.now_ms)
    _put(draft, linked)
    _commit_what_waited(draft, known)
    attempt = draft.job.attempt
    if attempt is not None and attempt.condition is not None and fact.fence == attempt.fence:
        draft.change(reason=f"the checkpoint of step {linked.step} is committed")
        draft.change_attempt(condition=None)
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
    """The checkpoint will not be committed; training goes on without it.

    Unless the state of the node or of the bucket is to blame and no later one takes its place: then the commit is
    commanded again when its answer would be overdue.
    """
    if fact.checkpoint_id in draft.job.gone:
        return
    known = draft.job.checkpoints.get(fact.checkpoint_id) or _open(draft, fact.checkpoint_id)
    if known is None:
        return
    if fact.condition is not None and _is_worth_waiting(draft, known):
        answered(draft)
        _wait(draft, known, fact.condition, "its agent waits, and commits")
        return
    aborted = checkpoints.abort(known, fact.reason)
    if aborted != known:
        _abort(draft, known, fact.reason)
        _commit_what_waited(draft, known)
        settle(draft)


def on_retired(fact: CheckpointRetired, draft: Draft) -> None:
    """Its deletion, which was commanded, stands in the chain: the index forgets it."""
    known = draft.job.checkpoints.get(fact.checkpoint_id)
    # Any agent can say so of any checkpoint, and one that is forgotten does not come back.
    if known is not None and known.state == CheckpointState.DELETING:
        _forget(draft, [known])
        draft.note(
            "checkpoint.retired",
            f"checkpoint of step {known.step} is removed",
            checkpoint=known.id,
            step=known.step,
        )


def on_verified(fact: CheckpointVerified, draft: Draft) -> None:
    """Every file of it is what was committed, now; one that was CORRUPT counts again."""
    known = draft.job.checkpoints.get(fact.checkpoint_id)
    if known is None or known.state not in LINKED_STATES:
        return
    # One that is being deleted stays: its agent found that those are missing for which it was given up.
    verified_ms = known.verified_ms
    if (
        known.state != CheckpointState.DELETING
        and verified_ms is not None
        and draft.now_ms <= verified_ms
        and not is_ahead(verified_ms, draft.now_ms)
    ):
        return
    _put(draft, checkpoints.verified(known, draft.now_ms))
    draft.note(
        "checkpoint.verified",
        f"checkpoint of step {known.step}: all {len(known.votes)} files are what was committed",
        checkpoint=known.id,
        step=known.step,
        bytes=fact.bytes,
    )


def on_corrupt(fact: CheckpointCorrupt, draft: Draft) -> None:
    """It is not what was committed: nothing goes on from it any more.

    An attempt that was to load it is not at fault, whosever checkpoint it is.
    """
    attempt = draft.job.attempt
    # A clone that loads it speaks of an attempt of its own.
    is_own = attempt is not None and (fact.job_id, fact.fence) == (draft.job.id, attempt.fence)
    if is_own and attempt is not None and attempt.resumed_from == fact.checkpoint_id:
        draft.change_attempt(corrupt_source=attempt.corrupt_source or fact.file)
    known = draft.job.checkpoints.get(fact.checkpoint_id)
    if known is None or known.state not in {CheckpointState.COMMITTED, CheckpointState.CORRUPT}:
        return
    _put(draft, checkpoints.corrupted(known, fact.file, fact.reason, draft.now_ms))
    if known.state == CheckpointState.CORRUPT:
        return
    draft.note(
        "checkpoint.corrupt",
        f"checkpoint of step {known.step} is corrupt: {fact.file}: {fact.reason}",
        checkpoint=known.id,
        step=known.step,
        file=fact.file,
        node_id=fact.node_id,
    )


def on_unread(fact: CheckpointUnread, draft: Draft) -> None:
    """A node could not look at it, which says nothing about it."""
    known = draft.job.checkpoints.get(fact.checkpoint_id)
    if known is None or known.checked_ms == draft.now_ms:
        return
    _put(draft, known.model_copy(update={"checked_ms": draft.now_ms}))
    draft.note(
        "checkpoint.unread",
        f"{fact.node_id} could not read the checkpoint: {fact.reason}",
        checkpoint=fact.checkpoint_id,
        node_id=fact.node_id,
    )


def on_damaged(fact: ChainDamaged, draft: Draft) -> None:
    """Records of the chain cannot be read: the checkpoints that they commit are CORRUPT."""
    known = frozenset(draft.job.damaged_records)
    numbers = {record.number: record for record in fact.records if record.number not in known}
    new = list(numbers.values())[: max(_DAMAGED_KEPT - len(known), 0)]
    draft.change(damaged_records=(*draft.job.damaged_records, *(each.number for each in new)))
    for record in new:
        draft.note(
            "checkpoint.chain_damaged",
            f"record {record.name} of the commit chain cannot be read: {record.reason}; the others "
            "are valid, and its number is not used again",
            number=record.number,
            file=f"chain/{record.name}",
        )
    for checkpoint in draft.job.checkpoints.values():
        if checkpoint.state == CheckpointState.COMMITTED and checkpoint.number in numbers:
            damaged = numbers[checkpoint.number]
            loss = CheckpointCorrupt(
                job_id=fact.job_id,
                fence=fact.fence,
                node_id=fact.node_id,
                checkpoint_id=checkpoint.id,
                file=f"chain/{damaged.name}",
                reason=damaged.reason,
            )
            on_corrupt(loss, draft)


def retire_surplus(draft: Draft) -> None:
    """Give up what retention no longer keeps, when something else than a commit changed that."""
    _retire(draft)


def _open(draft: Draft, checkpoint_id: str) -> Checkpoint | None:
    """The record of a checkpoint of the living attempt, begun if it is new; else None."""
    job, attempt = draft.job, draft.job.attempt
    _, fence = step_and_fence(checkpoint_id)
    if attempt is None or fence != attempt.fence or checkpoint_id in job.gone:
        return None
    known = job.checkpoints.get(checkpoint_id)
    if known is None and not attempt.is_over:
        known = checkpoints.begin(checkpoint_id, job.id, attempt.writers, draft.now_ms)
        _put(draft, known)
        _give_up_oldest(draft)
        draft.note(
            "checkpoint.began",
            f"checkpoint of step {known.step}: ranks write",
            checkpoint=known.id,
            step=known.step,
        )
    return known


def _give_up_oldest(draft: Draft) -> None:
    """Ranks write one at a time: of those that are begun and never voted for, few are kept."""
    writing = [c for c in draft.job.checkpoints.values() if c.state == CheckpointState.WRITING]
    for old in sorted(writing, key=lambda c: c.step)[:-_WRITING_KEPT]:
        _put(draft, checkpoints.abort(old, "many later ones were started before its last vote"))
        _forget_aborted(draft)


def _commit_in_turn(draft: Draft, sealed: Checkpoint) -> None:
    """Command its commit; while many are not answered, it waits in the place of the one that waited before."""
    *earlier, _newest = sealed_of(draft.job, sealed.fence)
    if len(earlier) < COMMITS_AT_ONCE:
        send_commit(draft, sealed.fence, sealed.id)
        return
    for old in earlier[COMMITS_AT_ONCE:]:
        why = f"a later one was written while {COMMITS_AT_ONCE} commits were not answered"
        _abort(draft, old, why)


def _commit_what_waited(draft: Draft, answered_for: Checkpoint | None) -> None:
    """An answer has made room for one."""
    if answered_for is None or answered_for.state != CheckpointState.SEALED:
        return
    sealed = sealed_of(draft.job, answered_for.fence)
    if len(sealed) == COMMITS_AT_ONCE:
        send_commit(draft, answered_for.fence, sealed[-1].id)


def _abort(draft: Draft, known: Checkpoint, why: str) -> None:
    _put(draft, checkpoints.abort(known, why))
    _forget_aborted(draft)
    draft.note(
        "checkpoint.aborted",
        f"checkpoint of step {known.step}: {why}",
        checkpoint=known.id,
        step=known.step,
    )


def _wait(draft: Draft, checkpoint: Checkpoint, condition: str, who: str) -> None:
    if draft.job.attempts[-1].condition is not None:
        return
    words = f"{condition}: {who} the checkpoint of step {checkpoint.step} when that is over"
    draft.change_attempt(condition=condition)
    draft.change(reason=words)
    draft.note("checkpoint.waits", words, checkpoint=checkpoint.id, step=checkpoint.step)


def _is_worth_waiting(draft: Draft, sealed: Checkpoint) -> bool:
    """Whether no later checkpoint has taken the place of this one, and no stop's grace is over."""
    job, attempt = draft.job, draft.job.attempt
    if attempt is None or sealed.state != CheckpointState.SEALED or sealed.fence != attempt.fence:
        return False
    if job.stop is not None:
        return draft.now_ms < job.stop.asked_ms + int(job.stop.grace_s * 1000)
    written = {CheckpointState.SEALED, *LINKED_STATES}
    return not any(c.step > sealed.step and c.state in written for c in job.checkpoints.values())


def _put(draft: Draft, *changed: Checkpoint) -> None:
    draft.change(checkpoints={**draft.job.checkpoints, **{c.id: c for c in changed}})


def _retire(draft: Draft) -> None:
    """Give up what retention no longer keeps; what an older fence failed to remove, again."""
    job, attempt = draft.job, draft.job.attempt
    if job.head_node is None:
        return
    latest = job.latest_checkpoint
    source = None if attempt is None else _source_in_use(job, attempt)
    protected = frozenset(
        name
        for name in (None if latest is None else latest.id, source, *job.holds)
        if name is not None
    )
    everything = job.checkpoints.values()
    line = [c for c in everything if job.is_on_line(c)]
    abandoned = [c for c in everything if not job.is_on_line(c)]
    surplus = checkpoints.to_retire(line, abandoned, job.spec.checkpoint, protected)
    stuck = [c for c in everything if _is_stuck(c, attempt, draft.now_ms)][:_STUCK_RESENT]
    count = min(job.spec.checkpoint.keep_last, _KEPT_NAMED)
    given_up = {c.id for c in surplus}
    newest = checkpoints.newest(line, abandoned, count)
    kept = tuple(c.id for c in newest if c.id not in given_up)
    # At once: where retention is lowered there may be thousands.
    _put(draft, *(checkpoints.deleting(c, draft.now_ms) for c in (*stuck, *surplus)))
    for checkpoint in (*stuck, *surplus):
        command = RetireCheckpoint(
            job_id=job.id, fence=job.fence, checkpoint_id=checkpoint.id, kept=kept
        )
        draft.send(command, [job.head_node])


def _is_stuck(checkpoint: Checkpoint, attempt: Attempt | None, now_ms: int) -> bool:
    """Whether its deletion was commanded long ago, or to an older attempt, and nobody told of it."""
    if checkpoint.state != CheckpointState.DELETING:
        return False
    told_ms = checkpoint.deletion_asked_ms
    if told_ms is None or is_ahead(told_ms, now_ms) or now_ms - told_ms >= _STUCK_MS:
        return True
    return attempt is not None and told_ms <= attempt.started_ms


def _source_in_use(job: Job, attempt: Attempt) -> str | None:
    """What the living attempt loads, or resumed from and has no commit of its own beside.

    A late commit of an older attempt may be newer: the living one does not stand on it.
    """
    source = attempt.resumed_from
    has_own = any(
        c.state == CheckpointState.COMMITTED and c.fence == attempt.fence
        for c in job.checkpoints.values()
    )
    return source if source is not None and (attempt.loads(source) or not has_own) else None


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
    return checkpoint.state in LINKED_STATES
