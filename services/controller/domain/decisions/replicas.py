"""Which replicas of an attempt take part, where it continues without lost ones.

Each change makes the next epoch: a set of members that agents send to their ranks. A lost replica is
started again by its agent, and becomes a member once it has built its model. Where connections broke and nobody died,
the same members begin another epoch. When no other is left, or one is lost again and again, or connections break again
and again, the attempt ends like any other.
"""

from collections.abc import Collection
from typing import Final

from services.contract.jobs.plans import GangPlan
from services.contract.messages.commands import ReturnReplica, SetReplicas, StopGang
from services.contract.messages.facts import (
    EpochBroken,
    ExitStanding,
    RankExit,
    ReplicaLost,
    ReplicaReady,
)
from services.contract.messages.rank_pipe import ReplicaSet
from services.contract.words.states import CheckpointState
from services.controller.domain.job.attempt import Attempt, ReplicaBook
from services.controller.domain.job.effects import Draft
from services.controller.domain.job.job import Job

MOST_LOSSES: Final = 3
"""So often may one replica be lost within ``LOSSES_WITHIN_MS``, or connections break; the last of these ends the attempt."""
LOSSES_WITHIN_MS: Final = 600_000
_LOSSES_KEPT: Final = 64
_LINE_KEPT: Final = 300


def book_of(job: Job, plan: GangPlan) -> ReplicaBook | None:
    """The book of a new attempt; None if any lost rank ends it."""
    if not job.spec.continues_without_replicas:
        return None
    count = plan.sharding.mesh.dp_replicate
    return ReplicaBook(count=count, size=plan.replica_size, lives=dict.fromkeys(range(count), 1))


def on_ready(fact: ReplicaReady, draft: Draft) -> None:
    """A replica has built its model: it becomes a member, the first ones together."""
    attempt, book = _known(draft)
    if attempt is None or book is None or book.lives.get(fact.replica) != fact.life:
        return
    if fact.replica in book.stores or book.given_up is not None:
        return
    stores = {**book.stores, fact.replica: fact.store}
    if book.epoch == 0:
        _write(draft, book, stores=stores)
        if len(stores) == book.count:
            _set(draft, range(book.count))
        return
    _write(draft, book, stores=stores, returned=book.returned + 1)
    _set(draft, {*book.members, fact.replica})
    draft.note(
        "replica.returned",
        f"replica {fact.replica} is back: it gets its state from the memory of another one",
        fence=attempt.fence,
        replica=fact.replica,
        present=len(book.members) + 1,
        of=book.count,
    )


def on_lost(fact: ReplicaLost, draft: Draft) -> None:
    """A replica is dead: the others go on, and it is started again, within bounds."""
    attempt, book = _known(draft)
    if attempt is not None and book is not None and not book.lives:
        _give_up(draft, book, f"replica {fact.replica} is lost, and Redis lost who the others are")
        return
    if attempt is None or book is None or book.lives.get(fact.replica) != fact.life:
        return
    failed = min(fact.exits, key=lambda gone: (gone.standing, gone.order), default=None)
    why = "its ranks could not be started" if failed is None else _words(failed)
    _lose(draft, fact.replica, why)
    attempt, book = _known(draft)
    if attempt is None or book is None or book.given_up is not None:
        return
    node = _node_of(draft.job, book, fact.replica)
    if node in attempt.live_nodes and draft.job.stop is None:
        life = fact.life + 1
        _write(draft, book, lives={**book.lives, fact.replica: life})
        command = ReturnReplica(
            job_id=draft.job.id, fence=attempt.fence, replica=fact.replica, life=life
        )
        draft.send(command, [node])


def on_broken(fact: EpochBroken, draft: Draft) -> None:
    """Connections between members broke and nobody died: the same members begin another epoch, within bounds."""
    attempt, book = _known(draft)
    if attempt is None or book is None or book.given_up is not None or book.epoch != fact.epoch:
        return
    recent = tuple(at for at in book.breaks if draft.now_ms - at < LOSSES_WITHIN_MS)
    breaks = (*recent, draft.now_ms)
    _write(draft, book, breaks=breaks)
    words = "the connections between replicas broke, although none is lost"
    draft.note("replica.reconnected", words, fence=attempt.fence, present=len(book.members))
    if len(breaks) >= MOST_LOSSES:
        often = f"{words}, {len(breaks)} times within {LOSSES_WITHIN_MS // 60_000} minutes"
        _give_up(draft, draft.job.attempts[-1].replicas or book, often)
    else:
        _set(draft, book.members)


def survives(draft: Draft, node_id: str) -> bool:
    """Whether members of other nodes go on without those of a node that has failed."""
    attempt, book = _known(draft)
    if attempt is None or book is None or book.epoch == 0 or book.given_up is not None:
        return False
    # Commits are linked by the agent of the head node.
    others = {_node_of(draft.job, book, member) for member in book.members} - {node_id}
    return node_id != draft.job.head_node and bool(others.intersection(attempt.live_nodes))


def lose_node(draft: Draft, node_id: str, why: str) -> None:
    """The replicas of a node are lost, and stay away: nothing there can start them again."""
    attempt, book = _known(draft)
    if attempt is None or book is None:
        return
    for replica in range(book.count):
        if _node_of(draft.job, book, replica) == node_id:
            _, now = _known(draft)
            lives = {} if now is None else {**now.lives, replica: now.lives[replica] + 1}
            if now is not None:
                _write(draft, now, lives=lives)
            _lose(draft, replica, why)


def leave_behind(draft: Draft, exits: Collection[RankExit]) -> None:
    """Members that came back too late to make a step, and were ended as the others had finished."""
    _, book = _known(draft)
    if book is None or not any(gone.finished for gone in exits):
        return
    late = {
        gone.rank // book.size
        for gone in exits
        if not gone.finished
        and gone.standing == ExitStanding.VICTIM
        and book.lives.get(gone.rank // book.size, 1) > 1
    }
    if late:
        _write(draft, book, members=tuple(each for each in book.members if each not in late))


def idle_nodes(draft: Draft) -> tuple[str, ...]:
    """Live nodes of the attempt without a member."""
    attempt, book = _known(draft)
    if attempt is None or book is None or book.epoch == 0:
        return ()
    busy = {_node_of(draft.job, book, member) for member in book.members}
    return tuple(node for node in attempt.live_nodes if node not in busy)


def _lose(draft: Draft, replica: int, why: str) -> None:
    attempt, book = _known(draft)
    if attempt is None or book is None or book.given_up is not None:
        return
    left = tuple(member for member in book.members if member != replica)
    losses = (*book.losses, (replica, draft.now_ms))[-_LOSSES_KEPT:]
    recent = [at for each, at in losses if each == replica and draft.now_ms - at < LOSSES_WITHIN_MS]
    stores = {each: store for each, store in book.stores.items() if each != replica}
    _write(draft, book, losses=losses, stores=stores, lost=book.lost + 1)
    words = f"replica {replica} is lost: {why}"
    draft.note(
        "replica.lost",
        f"{words}; {len(left)} of {book.count} go on",
        fence=attempt.fence,
        replica=replica,
        present=len(left),
        of=book.count,
    )
    book = draft.job.attempts[-1].replicas or book
    if not left or len(recent) >= MOST_LOSSES or book.epoch == 0:
        often = f"{words}, {len(recent)} times within {LOSSES_WITHIN_MS // 60_000} minutes"
        _give_up(draft, book, often if left else f"{words}, the last one")
        return
    if replica in book.members:
        _forget_votes(draft, attempt, book, replica)
        _set(draft, left)


def _give_up(draft: Draft, book: ReplicaBook, why: str) -> None:
    """The attempt ends, as without replicas."""
    _write(draft, book, given_up=why)
    attempt = draft.job.attempts[-1]
    command = StopGang(job_id=draft.job.id, fence=attempt.fence, mode="kill")
    draft.send(command, attempt.live_nodes)


def _words(gone: RankExit) -> str:
    how = gone.error or f"exited with code {gone.exit_code}"
    return (
        f"rank {gone.rank} after step {gone.step}: {how.strip().partition(chr(10))[0][:_LINE_KEPT]}"
    )


def _set(draft: Draft, members: Collection[int]) -> None:
    """Begins the next epoch with these members, of which one that was there before has the store."""
    attempt, book = _known(draft)
    if attempt is None or book is None:
        return
    epoch, ordered = book.epoch + 1, tuple(sorted(members))
    host = next((each for each in ordered if each in book.members), ordered[0])
    store = book.stores[host]
    _write(draft, book, epoch=epoch, members=ordered)
    told = ReplicaSet(epoch=epoch, members=ordered, host=store.host, port=store.port)
    command = SetReplicas(job_id=draft.job.id, fence=attempt.fence, replicas=told)
    draft.send(command, attempt.live_nodes)


def _forget_votes(draft: Draft, attempt: Attempt, book: ReplicaBook, replica: int) -> None:
    """What a lost replica had begun to write is written by another one, or never."""
    ranks = range(replica * book.size, (replica + 1) * book.size)
    kept = {}
    for name, known in draft.job.checkpoints.items():
        is_open = known.state == CheckpointState.WRITING and known.fence == attempt.fence
        votes = {rank: vote for rank, vote in known.votes.items() if rank not in ranks}
        kept[name] = known.model_copy(update={"votes": votes}) if is_open else known
    draft.change(checkpoints=kept)


def _known(draft: Draft) -> tuple[Attempt | None, ReplicaBook | None]:
    attempt = draft.job.attempt
    if attempt is None or attempt.is_over:
        return None, None
    return attempt, attempt.replicas


def _write(draft: Draft, book: ReplicaBook, **fields: object) -> None:
    draft.change_attempt(replicas=book.model_copy(update=fields))


def _node_of(job: Job, book: ReplicaBook, replica: int) -> str:
    return "" if job.plan is None else job.plan.ranks[replica * book.size].node_id
