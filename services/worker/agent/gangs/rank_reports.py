"""What a rank may say, and what its agent then tells the controller: pure functions.

A rank speaks of the checkpoints of its own attempt, votes for its own shard, finds corrupt only
what its attempt was to load, and speaks only of the trace that it was told to record: else one job could
spoil another's checkpoints.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Final, Protocol

from services.contract.jobs.traces import trace_file
from services.contract.messages.facts import (
    CheckpointBegan,
    CheckpointCorrupt,
    CheckpointLost,
    CheckpointVoted,
    CheckpointWaits,
    EpochBroken,
    Evaluated,
    Fact,
    TraceFailed,
    TraceOrdered,
    TraceRecorded,
)
from services.contract.messages.rank_pipe import (
    RankCheckpointBegan,
    RankCheckpointFailed,
    RankCheckpointWaits,
    RankEpochBroken,
    RankEvaluated,
    RankFoundCorrupt,
    RankMessage,
    RankTraced,
    RankTraceFailed,
    RankVote,
)
from services.contract.words.ids import attempt_of_checkpoint, checkpoint_id
from services.worker.agent.gangs.events import VoteChecked, VoteWaits

_Told = (
    RankCheckpointBegan
    | RankVote
    | RankCheckpointWaits
    | RankCheckpointFailed
    | RankFoundCorrupt
    | RankEvaluated
    | RankEpochBroken
    | RankTraced
    | RankTraceFailed
)
_FACTS: Final[Mapping[type[_Told], type[Fact]]] = {
    RankCheckpointBegan: CheckpointBegan,
    RankVote: CheckpointVoted,
    RankCheckpointWaits: CheckpointWaits,
    RankCheckpointFailed: CheckpointLost,
    RankFoundCorrupt: CheckpointCorrupt,
    RankEvaluated: Evaluated,
    RankEpochBroken: EpochBroken,
    RankTraced: TraceRecorded,
    RankTraceFailed: TraceFailed,
}


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
            return f"reported trace {named}, which it was not asked to record ({message.kind})"
        case _:
            return None
    if not is_own:
        return f"reported checkpoint {named}, which is not its attempt's ({message.kind})"
    if isinstance(message, RankVote) and message.shard.rank != rank:
        return f"voted for rank {message.shard.rank}"
    return None


def vote_fact(attempt: Attempt, checked: VoteChecked) -> Fact:
    """A vote whose shard was read; with a fault its checkpoint is lost."""
    rank, vote = checked.rank, checked.vote
    if checked.fault is None:
        return fact_of(attempt, rank, vote)
    reason = f"shard {vote.shard.name} of rank {rank}: {checked.fault}"
    failed = RankCheckpointFailed(checkpoint_id=vote.checkpoint_id, reason=reason)
    return fact_of(attempt, rank, failed)


def waits_fact(attempt: Attempt, waiting: VoteWaits) -> Fact:
    """The shard of a vote cannot be where all nodes see it, for now."""
    named = {"checkpoint_id": waiting.vote.checkpoint_id, "step": waiting.vote.step}
    condition = f"{waiting.condition} (seen from {attempt.node_id})"
    return fact_of(attempt, waiting.rank, RankCheckpointWaits(**named, condition=condition))


def fact_of(attempt: Attempt, rank: int, said: _Told) -> Fact:
    """What ``rank`` said, as its agent tells it to the controller."""
    about = {"job_id": attempt.job_id, "fence": attempt.fence, "node_id": attempt.node_id}
    fields = {**about, **said.model_dump(exclude={"kind"})}
    if isinstance(said, RankTraced | RankTraceFailed):
        fields["rank"] = rank
    if isinstance(said, RankTraced):
        path = trace_file(attempt.storage_root, attempt.job_id, said.trace_id, rank)
        fields["path"] = str(path)
    return _FACTS[type(said)].model_validate(fields)


def trace_ordered(attempt: Attempt, trace_id: str) -> TraceOrdered:
    """The ranks of a trace are told to record."""
    return TraceOrdered(
        job_id=attempt.job_id, fence=attempt.fence, node_id=attempt.node_id, trace_id=trace_id
    )


def no_trace(attempt: Attempt, trace_id: str, rank: int, reason: str) -> TraceFailed:
    """A rank that cannot say so itself records nothing."""
    return TraceFailed(
        job_id=attempt.job_id,
        fence=attempt.fence,
        node_id=attempt.node_id,
        trace_id=trace_id,
        rank=rank,
        reason=reason,
    )
