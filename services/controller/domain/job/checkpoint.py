"""A checkpoint: WRITING → SEALED (every rank voted) → COMMITTED (linked) or ABORTED.

A committed one that is not what was committed is CORRUPT until it is verified again.

The truth about commits is the chain in storage; this record is an index of it. So a link that
an agent reports wins over everything that was thought before, whatever its fence.
"""

from collections.abc import Iterable
from itertools import accumulate, islice
from typing import Final, Literal

from pydantic import Field

from services.contract.jobs.spec_parts import CheckpointSpec, KeepBestSpec
from services.contract.messages.facts import CheckpointLinked, CheckpointVoted
from services.contract.storage.manifests import Manifest, ShardFile
from services.contract.words.bounds import metric_name
from services.contract.words.ids import CheckpointId, JobId, NodeId, step_and_fence
from services.contract.words.states import CheckpointState
from services.controller.domain.record import Record

LINKED_STATES: Final = frozenset(
    {CheckpointState.COMMITTED, CheckpointState.CORRUPT, CheckpointState.DELETING}
)
"""Their manifest stands in the chain."""
# The record of a job is read as a whole, by all users of the controller in turn.
MOST_KEPT: Final = 8_192
MOST_SHARDS: Final = 65_536


class Export(Record):
    """The last export of a checkpoint: under way, done with its files, or failed and why."""

    state: Literal["RUNNING", "DONE", "FAILED"] = "RUNNING"
    files: tuple[str, ...] = ()
    bytes: int = 0
    reason: str | None = None


class Checkpoint(Record):
    """What is known of one checkpoint.

    ``number`` is its place in the commit chain, ``node_id`` the node that linked it.
    ``corrupt_file`` differs from what was committed. ``checked_ms``: when a node last was done with
    reading it, whatever it found. ``deletion_asked_ms``: when its deletion was last commanded. ``evaluation``: the
    validation loss after its step, and metrics. ``found``: a node told of it, for which not all votes were counted here, and no node has read it since.
    """

    id: CheckpointId
    job_id: JobId
    state: CheckpointState
    step: int
    fence: int
    world_size: int
    votes: dict[int, ShardFile] = Field(default_factory=dict)
    loss: float | None = None
    data_digest: str = ""
    evaluation: dict[str, float | None] = Field(default_factory=dict)
    reason: str | None = None
    number: int | None = None
    created_ms: int
    committed_ms: int | None = None
    verified_ms: int | None = None
    checked_ms: int | None = None
    deletion_asked_ms: int | None = None
    pinned: bool = False
    found: bool = False
    corrupt_file: str | None = None
    node_id: NodeId | None = None
    export: Export | None = None

    @property
    def total_bytes(self) -> int:
        """How many bytes the shards that were voted for have."""
        return sum(shard.bytes for shard in self.votes.values())

    @property
    def manifest(self) -> Manifest:
        """The record that commits it; meaningful once it is sealed."""
        return Manifest(
            job_id=self.job_id,
            checkpoint_id=self.id,
            fence=self.fence,
            step=self.step,
            world_size=self.world_size,
            loss=self.loss,
            data_digest=self.data_digest,
            evaluation=self.evaluation,
            shards=tuple(self.votes[rank] for rank in sorted(self.votes)),
        )


def begin(checkpoint_id: str, job_id: str, world_size: int, now_ms: int) -> Checkpoint:
    """A checkpoint that ranks began to write."""
    step, fence = step_and_fence(checkpoint_id)
    return Checkpoint(
        id=checkpoint_id,
        job_id=job_id,
        state=CheckpointState.WRITING,
        step=step,
        fence=fence,
        world_size=world_size,
        created_ms=now_ms,
    )


def count_vote(checkpoint: Checkpoint, fact: CheckpointVoted) -> Checkpoint:
    """The checkpoint after a rank's vote: sealed by the last one, aborted if ranks disagree.

    A repeated vote, and one for a checkpoint whose fate is sealed, changes nothing.
    """
    if checkpoint.state != CheckpointState.WRITING or fact.shard.rank in checkpoint.votes:
        return checkpoint
    digest = checkpoint.data_digest or fact.data_digest
    if fact.data_digest and fact.data_digest != digest:
        return abort(checkpoint, f"rank {fact.shard.rank} trains on other data than the others")
    votes = {**checkpoint.votes, fact.shard.rank: fact.shard}
    everybody = len(votes) == checkpoint.world_size
    return checkpoint.model_copy(
        update={
            "votes": votes,
            "data_digest": digest,
            "loss": fact.loss if checkpoint.loss is None else checkpoint.loss,
            "evaluation": checkpoint.evaluation or fact.evaluation,
            "state": CheckpointState.SEALED if everybody else CheckpointState.WRITING,
        }
    )


def commit(known: Checkpoint | None, fact: CheckpointLinked, now_ms: int) -> Checkpoint:
    """The checkpoint once its manifest is linked; built from the manifest if it was not known."""
    manifest = fact.manifest
    if known is not None and known.state in LINKED_STATES:
        return known
    return Checkpoint(
        id=manifest.checkpoint_id,
        job_id=manifest.job_id,
        state=CheckpointState.COMMITTED,
        step=manifest.step,
        fence=manifest.fence,
        world_size=manifest.world_size,
        votes={shard.rank: shard for shard in manifest.shards},
        loss=manifest.loss,
        data_digest=manifest.data_digest,
        evaluation=manifest.evaluation,
        number=fact.number,
        created_ms=now_ms if known is None else known.created_ms,
        committed_ms=now_ms,
        found=known is None or len(known.votes) < known.world_size,
        node_id=fact.node_id,
    )


def verified(checkpoint: Checkpoint, now_ms: int) -> Checkpoint:
    """The checkpoint once every file of it was read and is what was committed."""
    return checkpoint.model_copy(
        update={
            "state": CheckpointState.COMMITTED,
            "verified_ms": now_ms,
            "checked_ms": now_ms,
            "found": False,
            "corrupt_file": None,
            "reason": None,
        }
    )


def corrupted(checkpoint: Checkpoint, file: str, reason: str, now_ms: int) -> Checkpoint:
    """The checkpoint once a file of it is known to be missing or to differ."""
    return checkpoint.model_copy(
        update={
            "state": CheckpointState.CORRUPT,
            "verified_ms": None,
            "checked_ms": now_ms,
            "corrupt_file": file,
            "reason": f"{file}: {reason}",
        }
    )


def deleting(checkpoint: Checkpoint, now_ms: int) -> Checkpoint:
    """The checkpoint once its deletion is commanded."""
    return checkpoint.model_copy(
        update={"state": CheckpointState.DELETING, "deletion_asked_ms": now_ms}
    )


def last_verified(checkpoints: Iterable[Checkpoint]) -> Checkpoint | None:
    """The newest committed one whose files were read and found whole."""
    read = [c for c in checkpoints if c.state == CheckpointState.COMMITTED and c.verified_ms]
    return max(read, key=lambda c: (c.step, c.fence), default=None)


def abort(checkpoint: Checkpoint, reason: str) -> Checkpoint:
    """The checkpoint when it will not be committed; a committed one stays so."""
    if checkpoint.state not in {CheckpointState.WRITING, CheckpointState.SEALED}:
        return checkpoint
    return checkpoint.model_copy(update={"state": CheckpointState.ABORTED, "reason": reason})


def best_of(line: Iterable[Checkpoint], wanted: KeepBestSpec) -> tuple[Checkpoint, ...]:
    """The best committed ones, the very best first; of equals the one that was committed first.

    One without an evaluation, or of which the metric is no number, is none of them.
    """
    sign = 1.0 if wanted.mode == "min" else -1.0
    metric = metric_name(wanted.metric)
    judged = [
        (sign * value, c)
        for c in line
        if c.state == CheckpointState.COMMITTED and (value := c.evaluation.get(metric)) is not None
    ]
    judged.sort(key=lambda each: (each[0], each[1].number or 0, each[1].step))
    return tuple(c for _, c in judged[: wanted.count])


def to_retire(
    line: Iterable[Checkpoint],
    abandoned: Iterable[Checkpoint],
    wanted: CheckpointSpec,
    protected: frozenset[str],
) -> tuple[Checkpoint, ...]:
    """Which committed checkpoints retention gives up: abandoned ones, then the oldest commits.

    The ``keep_last`` (at least 1) of the line that were committed last stay, as far as there is `room_for` them;
    so do the best ones of the line by ``keep_best``, the last verified one, those that are pinned, and the
    ``protected`` ones. What the job would never go on from is kept only while the line leaves room for it.

    Args:
        line: Those from which the job may go on.
        abandoned: All others of the job.
        wanted: What the job's spec says.
        protected: Ids of those that something needs.
    """
    line, abandoned = tuple(line), tuple(abandoned)
    if wanted.keep_best is not None:
        protected |= {c.id for c in best_of(line, wanted.keep_best)}
    verified_last = last_verified(line) or last_verified(abandoned)
    committed = _in_order(line, abandoned)
    kept = room_for(len(c.votes) for c in reversed(committed[-wanted.keep_last :]))
    # Damage may be none, or be repaired: these stay as long as there is room for them.
    corrupt = _by_commit((*line, *abandoned), CheckpointState.CORRUPT)
    damaged = room_for(len(c.votes) for c in reversed(corrupt))
    return tuple(
        c
        for c in (*corrupt[:-damaged], *committed[:-kept])
        if c.id not in protected and c != verified_last and not c.pinned
    )


def room_for(shards: Iterable[int]) -> int:
    """How many checkpoints a job's record has room for, beside those that are kept for other reasons; at least 1.

    Args:
        shards: How many each of them has, the newest first.
    """
    totals = islice(accumulate(shards), MOST_KEPT)
    return max(sum(total <= MOST_SHARDS for total in totals), 1)


def newest(
    line: Iterable[Checkpoint], abandoned: Iterable[Checkpoint], count: int
) -> tuple[Checkpoint, ...]:
    """The last ``count`` committed ones in the order in which retention gives them up."""
    return tuple(_in_order(line, abandoned)[-count:])


def _in_order(line: Iterable[Checkpoint], abandoned: Iterable[Checkpoint]) -> list[Checkpoint]:
    return [*_by_commit(abandoned), *_by_commit(line)]


def _by_commit(
    checkpoints: Iterable[Checkpoint], state: CheckpointState = CheckpointState.COMMITTED
) -> list[Checkpoint]:
    committed = [c for c in checkpoints if c.state == state]
    return sorted(committed, key=lambda c: (c.number or 0, c.step))
