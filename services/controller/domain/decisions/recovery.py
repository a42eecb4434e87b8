"""Jobs that storage told of after Redis had lost them: made again, and their ranks adopted."""

from typing import Final

from services.contract.messages.facts import ChainDamaged, CheckpointLinked, JobFound
from services.contract.storage.job_cards import JobCard
from services.contract.words.bounds import MOST_ATTEMPTS
from services.contract.words.ids import job_of_checkpoint, step_and_fence
from services.contract.words.states import (
    TERMINAL_STATES,
    CheckpointState,
    ExitReason,
    JobState,
)
from services.controller.domain.decisions.checkpoint_facts import on_damaged
from services.controller.domain.job import checkpoint as checkpoints
from services.controller.domain.job.attempt import Attempt, ReplicaBook
from services.controller.domain.job.checkpoint import LINKED_STATES
from services.controller.domain.job.effects import Decision, Draft, Note
from services.controller.domain.job.events import FoundInStorage
from services.controller.domain.job.job import Job, Origin

FOUND_AGAIN = "found again in storage"
ADOPTED_WITHIN_MS: Final = 20_000
"""For so long a job that was meant to run waits for its ranks. Agents that live have told of them by
then; ranks of a node that is cut off are fenced by the next attempt."""
_DAMAGED: Final = (
    "records of its commit chain cannot be read, and without them it would start over: restore them, "
    "or resume it to do so"
)
_STANDINGS: Final = TERMINAL_STATES | {JobState.QUEUED, JobState.PAUSED}
# Names of checkpoints hold ten digits, those of its next attempts too.
_MOST_FOUND: Final = 9_000_000_000
_PINNED = "pinned, because Redis lost pins and holds: unpin those that retention may delete"


def found_again(fact: JobFound, now_ms: int) -> Decision:
    """The job as its card and its commit chain tell of it.

    It has SUCCEEDED if its last step is committed, or stays where its card says that a person put it
    or it ended. One that was meant to run is QUEUED, and waits at first whether its ranks train on.
    Its next attempt is numbered behind all that opened the chain, and goes on in the line of the
    newest one. What was pinned or held nobody knows any more: all its checkpoints are pinned until
    somebody unpins them.
    """
    card = fact.card
    if card.standing not in _STANDINGS:
        # Ranks may write where cards lie: without an attempt it could neither run nor end.
        card = card.model_copy(update={"standing": JobState.PAUSED})
    job = Job(
        id=fact.job_id,
        spec=card.spec,
        state=card.standing,
        exit_reason=card.exit_reason,
        owner=card.owner,
        # Ranks may write where cards lie, and no job is of the future: lists are sorted by this.
        created_ms=min(card.created_ms or now_ms, now_ms),
        updated_ms=now_ms,
        # Its own, however high: ranks of that attempt may live, and the next one must not have its number.
        fence=min(fact.fence, _MOST_FOUND),
        run_fence=min(fact.fence, _MOST_FOUND),
        found=True,
    )
    indexed = _in_line(_with_checkpoints(job, fact, now_ms), card)
    # All that is known of it is what storage holds: one node's older copy is not to strike out the rest.
    book = {c.id: c.model_copy(update={"found": False}) for c in indexed.checkpoints.values()}
    indexed = indexed.model_copy(update={"checkpoints": book})
    latest = indexed.latest_checkpoint
    saved = 0 if latest is None else latest.step
    count = len(indexed.checkpoints)
    reason = f"{FOUND_AGAIN}: {count} committed checkpoints, the newest of step {saved}"
    changes: dict[str, object] = {"reason": f"{reason}; {card.reason}" if card.reason else reason}
    if card.standing == JobState.QUEUED and fact.damaged and latest is None:
        changes["state"] = JobState.PAUSED
        changes["reason"] = f"{reason}; {_DAMAGED}"
    elif card.standing == JobState.QUEUED:
        # Of another node's ranks only that node can tell.
        is_known = {seat.node_id for seat in card.plan.ranks} == {fact.node_id}
        wait_ms = 0 if is_known and not fact.is_running else ADOPTED_WITHIN_MS
        changes["not_before_ms"] = now_ms + wait_ms
    if job.is_terminal:
        changes["ended_ms"] = now_ms
    if saved >= card.spec.train.steps:
        changes |= {
            "state": JobState.SUCCEEDED,
            "exit_reason": ExitReason.COMPLETED,
            "ended_ms": now_ms,
        }
    words = f"{reason}; all are {_PINNED}" if count else reason
    if indexed.base_checkpoint is not None:
        words += f"; it had discarded later ones to resume from {indexed.base_checkpoint}"
    note = Note("job.found_again", words, {"fence": fact.fence, "node_id": fact.node_id})
    return Decision(indexed.model_copy(update=changes), notes=(note,))


def on_found(event: FoundInStorage, draft: Draft) -> None:
    """What storage tells of a job that is known: checkpoints that the index lacks, live ranks."""
    job, fact = draft.job, event.fact
    draft.change(checkpoints=_with_checkpoints(job, fact, draft.now_ms).checkpoints)
    for new in (c for name, c in draft.job.checkpoints.items() if name not in job.checkpoints):
        words = f"checkpoint of step {new.step} was {FOUND_AGAIN}; it is {_PINNED}"
        draft.note("checkpoint.pinned", words, checkpoint=new.id, step=new.step)
    # The answer to a purge is that of the number with which it was commanded.
    is_idle = job.attempt is None and job.purge_node is None
    if job.fence < fact.fence <= MOST_ATTEMPTS and is_idle:
        draft.change(fence=fact.fence)
    if fact.is_all and _is_of_launch(job, fact) and fact.node_id in job.attempts[-1].incarnations:
        _give_up_others(fact, draft)
    # Of a job with an attempt, a node without ranks of it has nothing to tell but what it lacks.
    reads = fact.node_id in job.attempts[-1].incarnations if job.attempts else job.found
    if fact.damaged and reads:
        damage = ChainDamaged(
            job_id=job.id, fence=fact.fence, node_id=fact.node_id, records=fact.damaged
        )
        on_damaged(damage, draft)
    nodes = dict.fromkeys(seat.node_id for seat in fact.card.plan.ranks)
    awaited = awaits_adoption(draft.job, fact.fence) and fact.is_running
    # Of ranks that live on other nodes alone their own agents tell.
    if awaited and fact.node_id in nodes and event.incarnations.keys() >= nodes.keys():
        _adopt(fact, {node: event.incarnations[node] for node in nodes}, draft)


def _give_up_others(fact: JobFound, draft: Draft) -> None:
    """Nothing goes on from what nodes told of and the chain does not commit.

    Any node may tell of checkpoints that it found, and each that there is not would cost an attempt of its own. Those
    whose votes were counted here stay: the node may have an older copy of the storage.
    """
    there = {manifest.checkpoint_id for manifest in fact.manifests.values()}
    book, attempt = draft.job.checkpoints, draft.job.attempts[-1]
    if attempt.resumed_from not in book or attempt.resumed_from in there:
        return
    lacking = [
        c
        for c in book.values()
        if c.found and c.state == CheckpointState.COMMITTED and c.id not in there
    ]
    if not lacking:
        return
    why = "the chain does not commit it"
    corrupt = {c.id: checkpoints.corrupted(c, "chain", why, draft.now_ms) for c in lacking}
    draft.change(checkpoints={**book, **corrupt})
    draft.note(
        "checkpoint.corrupt",
        f"{len(lacking)} checkpoints are corrupt of which nodes had told, that of step {lacking[0].step} first: chain: {why}",
        checkpoint=lacking[0].id,
        step=lacking[0].step,
        file="chain",
        node_id=fact.node_id,
    )


def _is_of_launch(job: Job, fact: JobFound) -> bool:
    """Whether it was told before the launch of the newest attempt, whose checkpoint to load is not in storage."""
    return job.state == JobState.PLACING and fact.fence == job.fence and job.attempt is not None


def awaits_adoption(job: Job, fence: int) -> bool:
    """Whether ranks of this attempt, should any live, are to become the job's again.

    It was made again from storage, and nobody has resumed it since. Its fence may be behind: who
    told of it first may not have seen yet that the attempt was opened.
    """
    is_idle = job.state in {JobState.PAUSED, JobState.QUEUED} and not job.attempts
    return job.found and is_idle and 0 < job.fence <= fence <= max(job.fence, MOST_ATTEMPTS)


def _adopt(fact: JobFound, incarnations: dict[str, str], draft: Draft) -> None:
    """Its ranks train on: they become the newest attempt's again."""
    card = fact.card
    source = card.resume_from
    resumed_step = 0 if source is None else step_and_fence(source)[0]
    stepped = fact.last_step > resumed_step
    attempt = Attempt(
        fence=fact.fence,
        world_size=card.plan.world_size,
        mesh=card.plan.sharding.mesh,
        incarnations=incarnations,
        resumed_from=source,
        resumed_step=resumed_step,
        started_ms=draft.now_ms,
        launched=tuple(incarnations),
        first_step=resumed_step + 1 if stepped else None,
        first_step_ms=draft.now_ms if stepped else None,
        last_step=max(fact.last_step, resumed_step),
        replicas=_forgotten_replicas(card),
    )
    draft.change(
        attempts=(attempt,), plan=card.plan, started_ms=draft.now_ms, run_fence=fact.fence - 1
    )
    draft.transition(
        JobState.RUNNING,
        f"{FOUND_AGAIN}: attempt {fact.fence} trains on after step {attempt.last_step}",
    )


def _forgotten_replicas(card: JobCard) -> ReplicaBook | None:
    """Which of them take part is not known any more: the next loss ends the attempt."""
    if not card.spec.continues_without_replicas:
        return None
    return ReplicaBook(count=card.plan.sharding.mesh.dp_replicate, size=card.plan.replica_size)


def _in_line(job: Job, card: JobCard) -> Job:
    """The job with what its newest attempt began with as the place to go on from.

    A clone begins with another job's checkpoint, until it has one of its own. An attempt that left
    later checkpoints behind was resumed from an older one by a person, or because they are corrupt:
    those do not count, unless all that there was to do is in them.
    """
    source = card.resume_from
    if source is None:
        return job
    origin_id = job_of_checkpoint(source)
    if origin_id != job.id:
        step = step_and_fence(source)[0]
        is_held = not job.checkpoints
        origin = Origin(job_id=origin_id, checkpoint_id=source, step=step, held=is_held, found=True)
        return job.model_copy(update={"origin": origin})
    older = [c for c in job.checkpoints.values() if c.fence < card.fence]
    newest = max(older, key=lambda c: (c.step, c.fence), default=None)
    # A source that is gone is nothing to go on from: if nothing followed it, all others count.
    is_known = source in job.checkpoints or len(older) < len(job.checkpoints)
    if newest is None or newest.id == source or not is_known:
        return job
    if newest.step >= job.spec.train.steps:
        return job
    line = {"base_checkpoint": source, "base_fence": card.fence - 1}
    return job.model_copy(update=line)


def _newest_told(job: Job, fact: JobFound) -> int:
    """Of which attempts a node may tell what the chain commits; 0: of none.

    What ranks write now is committed by their votes: would a node's word do, theirs would count no more, and a later
    one than their last would have nobody wait for that. So while an attempt lives, its own nodes tell before they
    launch it, when nothing of it is written: attempts that Redis lost may have had its number, and later ones. Of ranks
    that live on through a loss of Redis their own node tells in several facts. Of an attempt to come nobody can know.
    """
    attempt = job.attempt
    if attempt is None:
        return max(job.fence, min(fact.fence, MOST_ATTEMPTS))
    is_own = fact.node_id in attempt.incarnations
    if is_own and fact.node_id not in attempt.launched:
        return max(attempt.fence, min(fact.fence, MOST_ATTEMPTS))
    if not job.found:
        return 0
    return attempt.fence if is_own else attempt.fence - 1


def _with_checkpoints(job: Job, fact: JobFound, now_ms: int) -> Job:
    """The job with an index of what its chain commits; what is new to it is pinned."""
    book = dict(job.checkpoints)
    newest = _newest_told(job, fact)
    told = {
        number: manifest
        for number, manifest in fact.manifests.items()
        if step_and_fence(manifest.checkpoint_id) == (manifest.step, manifest.fence)
        and manifest.fence <= newest
    }
    new = sorted(n for n, manifest in told.items() if manifest.checkpoint_id not in book)
    # Whoever may tell of jobs could tell of any number of checkpoints.
    # Of the others those that retention keeps leave room, for it gives up the oldest: what is found may be the newest.
    pinned = [len(c.votes) for c in book.values() if c.pinned]
    found = [len(fact.manifests[number].shards) for number in reversed(new)]
    room = max(checkpoints.room_for([*pinned, *found]) - len(pinned), 0)
    left_out = set(new[: len(new) - room])
    committed = {c.id for c in book.values() if c.state == CheckpointState.COMMITTED}
    # A storage that was restored from an older copy may have only what retention has removed since. It is told of
    # before the launch that is to load another one; at other times a fact may be older than a removal.
    is_older = committed and committed.isdisjoint(m.checkpoint_id for m in fact.manifests.values())
    gone = () if _is_of_launch(job, fact) and is_older else job.gone
    for number, manifest in told.items():
        known = book.get(manifest.checkpoint_id)
        if manifest.checkpoint_id in gone or number in left_out:
            continue
        if known is None or known.state not in LINKED_STATES:
            link = CheckpointLinked(
                job_id=job.id,
                fence=manifest.fence,
                node_id=fact.node_id,
                number=number,
                manifest=manifest,
            )
            linked = checkpoints.commit(known, link, now_ms)
            book[linked.id] = linked.model_copy(update={"pinned": known is None})
    return job.model_copy(update={"checkpoints": book})
