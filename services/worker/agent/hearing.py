"""What a rank may say, and what its agent then tells the controller: pure functions.

A rank speaks of the checkpoints of its own attempt, votes for its own shard, finds corrupt only
what its attempt was to load, and speaks only of the trace that it was told to record: else one job could
spoil another's checkpoints.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

from services.contract.ids import attempt_of_checkpoint, checkpoint_id
from services.contract.messages.facts import (
    CheckpointBegan,
    CheckpointCorrupt,
    CheckpointLost,
    CheckpointVoted,
    CheckpointWaits,
    Evaluated,
    Fact,
    TraceFailed,
    TraceRecorded,
)
from services.contract.messages.rank_pipe import (
    RankCheckpointBegan,
    RankCheckpointFailed,
    RankCheckpointWaits,
    RankEvaluated,
    RankFoundCorrupt,
    RankMessage,
    RankTraced,
    RankTraceFailed,
    RankVote,
)
from services.contract.traces import trace_file

_Told = (
    RankCheckpointBegan
    | RankVote
    | RankCheckpointWaits
    | RankCheckpointFailed
    | RankFoundCorrupt
    | RankEvaluated
)


class Attempt(Protocol):
    """Of which attempt ranks are, on which node, which checkpoint they load, what they record."""

    @property
    def job_id(self) -> str: ...  # noqa: D102 the class says it
    @property
    def fence(self) -> int: ...  # noqa: D102 the class says it
    @property
    def node_id(self) -> str: ...  # noqa: D102 the class says it
    @property
    def resume_from(self) -> str | None: ...  # noqa: D102 the class says it
    @property
    def tracing(self) -> Mapping[int, str]: ...  # noqa: D102 the class says it
    @property
    def storage_root(self) -> Path: ...  # noqa: D102 the class says it


def not_its_own(attempt: Attempt, rank: int, message: RankMessage) -> str | None:
    """What ``rank`` says of something that is not its attempt's; None where it does not.

    In words that follow "rank 1 …".
    """
    match message:
        case (
            RankCheckpointBegan(checkpoint_id=named, step=step)
            | RankCheckpointWaits(checkpoint_id=named, step=step)
            | RankVote(checkpoint_id=named, step=step)
        ):
            is_own = named == checkpoint_id(attempt.job_id, step, attempt.fence)
        case RankCheckpointFailed(checkpoint_id=named):
            is_own = attempt_of_checkpoint(named) == (attempt.job_id, attempt.fence)
        case RankFoundCorrupt(checkpoint_id=named):
            is_own = named == attempt.resume_from
        case RankTraced(trace_id=named) | RankTraceFailed(trace_id=named):
            if attempt.tracing.get(rank) == named:
                return None
            return f"spoke of trace {named}, which it was not told to record ({message.kind})"
        case _:
            return None
    if not is_own:
        return f"spoke of checkpoint {named}, which is not its attempt's ({message.kind})"
    if isinstance(message, RankVote) and message.shard.rank != rank:
        return f"voted for rank {message.shard.rank}"
    return None


def vote_fact(attempt: Attempt, rank: int, vote: RankVote, fault: str | None) -> Fact:
    """A vote of ``rank`` whose shard was read; with a ``fault`` its checkpoint is lost."""
    if fault is None:
        return fact_of(attempt, vote)
    reason = f"shard {vote.shard.name} of rank {rank}: {fault}"
    return fact_of(attempt, RankCheckpointFailed(checkpoint_id=vote.checkpoint_id, reason=reason))


def trace_fact(attempt: Attempt, rank: int, said: RankTraced | RankTraceFailed) -> Fact:
    """What became of the trace that a rank was told to record."""
    job_id, fence, node_id = attempt.job_id, attempt.fence, attempt.node_id
    fields = {"job_id": job_id, "fence": fence, "node_id": node_id, "rank": rank}
    fields |= said.model_dump(exclude={"kind"})
    if isinstance(said, RankTraceFailed):
        return TraceFailed.model_validate(fields)
    path = trace_file(attempt.storage_root, job_id, said.trace_id, rank)
    return TraceRecorded.model_validate({**fields, "path": str(path)})


def fact_of(attempt: Attempt, said: _Told) -> Fact:
    """What a rank said, as its agent tells it to the controller."""
    job_id, fence, node_id = attempt.job_id, attempt.fence, attempt.node_id
    fields = said.model_dump(exclude={"kind"})
    match said:
        case RankCheckpointBegan():
            return CheckpointBegan(job_id=job_id, fence=fence, node_id=node_id, **fields)
        case RankVote():
            return CheckpointVoted(job_id=job_id, fence=fence, node_id=node_id, **fields)
        case RankCheckpointWaits():
            return CheckpointWaits(job_id=job_id, fence=fence, node_id=node_id, **fields)
        case RankCheckpointFailed():
            return CheckpointLost(job_id=job_id, fence=fence, node_id=node_id, **fields)
        case RankFoundCorrupt():
            return CheckpointCorrupt(job_id=job_id, fence=fence, node_id=node_id, **fields)
        case RankEvaluated():
            return Evaluated(job_id=job_id, fence=fence, node_id=node_id, **fields)
