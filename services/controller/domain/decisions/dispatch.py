"""The one door to all decisions about a job: ``decide(job, event, now) -> decision``."""

from collections.abc import Callable, Collection, Sequence
from typing import Any, Final, TypeVar

from services.contract.messages.facts import (
    ChainDamaged,
    CheckpointBegan,
    CheckpointCorrupt,
    CheckpointExported,
    CheckpointLinked,
    CheckpointLost,
    CheckpointRetired,
    CheckpointUnread,
    CheckpointVerified,
    CheckpointVoted,
    CheckpointWaits,
    EpochBroken,
    Evaluated,
    ExportFailed,
    GangDiagnosed,
    GangEnded,
    GangLaunched,
    GangProgressed,
    JobPurged,
    LaunchLoads,
    LaunchRefused,
    RankExit,
    ReplicaLost,
    ReplicaReady,
    TraceFailed,
    TraceOrdered,
    TraceRecorded,
)
from services.contract.messages.findings import Findings, RankFinding
from services.contract.storage.manifests import Manifest
from services.contract.words.ids import job_of_checkpoint, step_and_fence
from services.controller.domain.decisions import (
    attempt_events,
    awaited_plan,
    checkpoint_facts,
    checkpoint_requests,
    migration,
    patch,
    purge,
    recovery,
    replicas,
    requests,
    retention,
    tracing,
)
from services.controller.domain.job.effects import Decision, Draft
from services.controller.domain.job.events import (
    AnswerOverdue,
    CancelAsked,
    CheckpointAsked,
    ClockSetBack,
    DiagnosisAsked,
    ExportAsked,
    FoundInStorage,
    GangFact,
    GangPlaced,
    HoldAsked,
    HoldReleased,
    JobEvent,
    KillAsked,
    MoveAsked,
    NodeLost,
    OriginReleased,
    PatchAsked,
    PauseAsked,
    PinAsked,
    PlacementDelayed,
    PlanAsked,
    PlanMade,
    PlanMissed,
    PlanRefused,
    PurgeAsked,
    RanksSeen,
    RemovalAsked,
    ResumeAsked,
    SpecFaulted,
    TraceAsked,
    TraceOverdue,
    VerifyAsked,
)
from services.controller.domain.job.job import Job

_Handler = Callable[[Any, Draft], None]
_OfRank = TypeVar("_OfRank", RankExit, RankFinding)

_HANDLERS: Final[dict[type, _Handler]] = {
    PauseAsked: requests.on_pause,
    CancelAsked: requests.on_cancel,
    KillAsked: requests.on_kill,
    ResumeAsked: requests.on_resume,
    CheckpointAsked: requests.on_checkpoint,
    DiagnosisAsked: requests.on_diagnosis,
    TraceAsked: tracing.on_asked,
    TraceOverdue: tracing.on_overdue,
    PinAsked: checkpoint_requests.on_pin,
    VerifyAsked: checkpoint_requests.on_verify,
    ExportAsked: checkpoint_requests.on_export,
    RemovalAsked: checkpoint_requests.on_removal,
    FoundInStorage: recovery.on_found,
    GangPlaced: attempt_events.on_placed,
    PlacementDelayed: attempt_events.on_delayed,
    PlanAsked: awaited_plan.on_asked,
    PlanMade: awaited_plan.on_made,
    PlanMissed: awaited_plan.on_missed,
    PlanRefused: awaited_plan.on_refused,
    SpecFaulted: awaited_plan.on_faulted,
    NodeLost: attempt_events.on_node_lost,
    AnswerOverdue: attempt_events.on_overdue,
    RanksSeen: attempt_events.on_ranks_seen,
    ClockSetBack: attempt_events.on_clock_set_back,
    PatchAsked: patch.on_patch,
    PurgeAsked: purge.on_purge,
    JobPurged: purge.on_purged,
    MoveAsked: migration.on_move,
    HoldAsked: retention.on_hold,
    HoldReleased: retention.on_released,
    OriginReleased: retention.on_origin_released,
    GangLaunched: attempt_events.on_launched,
    LaunchLoads: attempt_events.on_loads,
    LaunchRefused: attempt_events.on_refused,
    GangProgressed: attempt_events.on_progressed,
    Evaluated: attempt_events.on_evaluated,
    GangDiagnosed: attempt_events.on_diagnosed,
    GangEnded: attempt_events.on_ended,
    ReplicaReady: replicas.on_ready,
    ReplicaLost: replicas.on_lost,
    EpochBroken: replicas.on_broken,
    CheckpointBegan: checkpoint_facts.on_began,
    CheckpointVoted: checkpoint_facts.on_voted,
    CheckpointWaits: checkpoint_facts.on_waits,
    CheckpointLinked: checkpoint_facts.on_linked,
    CheckpointLost: checkpoint_facts.on_lost,
    CheckpointRetired: checkpoint_facts.on_retired,
    CheckpointVerified: checkpoint_facts.on_verified,
    CheckpointCorrupt: checkpoint_facts.on_corrupt,
    CheckpointUnread: checkpoint_facts.on_unread,
    CheckpointExported: checkpoint_requests.on_exported,
    ExportFailed: checkpoint_requests.on_export_failed,
    TraceOrdered: tracing.on_ordered,
    TraceRecorded: tracing.on_recorded,
    TraceFailed: tracing.on_failed,
    ChainDamaged: checkpoint_facts.on_damaged,
}

EVENTS: Final = tuple(_HANDLERS)
"""All kinds of events."""

# What storage holds is true whichever attempt put it there.
_TRUE_AT_ANY_FENCE: Final = (
    CheckpointLinked,
    CheckpointLost,
    CheckpointRetired,
    CheckpointVerified,
    CheckpointCorrupt,
    CheckpointUnread,
    CheckpointExported,
    ExportFailed,
    ChainDamaged,
)


def decide(job: Job, event: JobEvent, now_ms: int) -> Decision:
    """What becomes of ``job`` by ``event``, and what is to be done.

    Deciding twice on one event changes nothing the second time.

    Args:
        job: The job with its checkpoints.
        event: A request, a finding of the reconciler, or an agent's fact.
        now_ms: When it happened, in milliseconds of Redis's clock.

    Raises:
        StateConflictError, InvalidRequestError: A request cannot be fulfilled.
    """
    draft = Draft(job, now_ms)
    if not is_stale(job, event) and not is_foreign(job, event):
        _HANDLERS[type(event)](_of_own_ranks(job, event), draft)
        draft.keep_standing()
    return draft.decision()


def _of_own_ranks(job: Job, event: JobEvent) -> JobEvent:
    """A fact without what it says of ranks that its node has not, and what it says of one again."""

    def own(told: Sequence[_OfRank]) -> tuple[_OfRank, ...]:
        ranks = job.ranks_on(getattr(event, "node_id", ""))
        by_rank: dict[int, _OfRank] = {}
        for one in told:
            if one.rank in ranks:
                by_rank.setdefault(one.rank, one)
        return tuple(by_rank.values())

    def looked(found: Findings) -> Findings:
        return found.model_copy(update={"ranks": own(found.ranks)})

    match event:
        case GangEnded(exits=exits, hang=hang):
            found = None if hang is None else looked(hang)
            return event.model_copy(update={"exits": own(exits), "hang": found})
        case ReplicaLost(exits=exits):
            return event.model_copy(update={"exits": own(exits)})
        case GangDiagnosed(findings=findings):
            return event.model_copy(update={"findings": looked(findings)})
    return event


def is_stale(job: Job, event: JobEvent) -> bool:
    """Whether an event speaks of an attempt that is no longer the newest one."""
    fence: int | None = getattr(event, "fence", None)
    return fence is not None and fence != job.fence and not isinstance(event, _TRUE_AT_ANY_FENCE)


def is_foreign(job: Job, event: JobEvent) -> bool:
    """Whether a fact comes from a node without ranks of the attempt, or speaks of another job's checkpoint.

    An attempt that is to load a checkpoint, of whichever job, may find it corrupt. What storage holds is
    for nodes of its attempts to tell, and for those that were asked to read it; that a checkpoint is removed, for any.
    """
    if not isinstance(event, GangFact):
        return False
    # It is of another job, whose attempt was told to load this one's checkpoint.
    is_of_clone = isinstance(event, CheckpointCorrupt) and event.job_id != job.id
    if not is_of_clone and event.node_id not in _who_may_tell(job, event):
        return True
    # An end of ranks that a node has not says nothing of those that it has.
    if isinstance(event, GangEnded) and event.exits:
        ranks = job.ranks_on(event.node_id)
        return all(gone.rank not in ranks for gone in event.exits)
    # A rank's vote is told by its own node.
    if isinstance(event, CheckpointVoted) and event.shard.rank not in job.ranks_on(event.node_id):
        return True
    named = _named(event)
    if named is None or job_of_checkpoint(named) == job.id:
        return isinstance(event, CheckpointLinked) and not _is_named_rightly(event.manifest)
    return not (isinstance(event, CheckpointCorrupt) and was_told_to_load(job, event))


def _who_may_tell(job: Job, event: GangFact) -> Collection[str]:
    # Of names that no attempt has, any number could be kept in its record.
    # Of a job that was found again, or of which Redis lost the attempts alone, nobody knows which nodes had its ranks.
    # One that has not begun has nothing in storage: of a checkpoint of it that somebody tells of each of its
    # attempts would wait for the storage to show it.
    are_unknown = not job.attempts and (job.found or job.fence > 0)
    if are_unknown or isinstance(event, CheckpointRetired | JobPurged):
        return (event.node_id,)
    if not job.attempts:
        return job.readers
    if not isinstance(event, _TRUE_AT_ANY_FENCE):
        return job.attempts[-1].incarnations
    if isinstance(event, CheckpointLinked | CheckpointLost):
        return _writers(job, step_and_fence(_named(event) or "")[1])
    # Whether it can be read is for those to tell that read it now: they find what an earlier attempt did not live to tell.
    return job.attempts[-1].incarnations.keys() | job.readers


def _writers(job: Job, fence: int) -> Collection[str]:
    """The nodes of an attempt: of what its ranks write, and of its commit, those alone can tell.

    One that had ranks of another attempt could have the job SUCCEED without its last checkpoint, or commit none. Of an
    attempt to come nobody can know; of one that is kept no more any that had ranks of the job may know.
    """
    if fence > job.fence:
        return ()
    known = next((a for a in job.attempts if a.fence == fence), None)
    return job.attempt_nodes if known is None else known.incarnations


def _is_named_rightly(manifest: Manifest) -> bool:
    return step_and_fence(manifest.checkpoint_id) == (manifest.step, manifest.fence)


def _named(event: GangFact) -> str | None:
    """The checkpoint of which a fact tells, if it tells of one."""
    about = event.manifest if isinstance(event, CheckpointLinked) else event
    return getattr(about, "checkpoint_id", None)


def was_told_to_load(job: Job, found: CheckpointCorrupt) -> bool:
    """Whether the attempt that found a checkpoint corrupt is one that was to load it, and told by a node of it."""
    return any(
        attempt.fence == found.fence
        and attempt.resumed_from == found.checkpoint_id
        and found.node_id in attempt.incarnations
        for attempt in job.attempts
    )


def first_decision(job: Job) -> Decision:
    """The decision that puts a new job into the queue."""
    draft = Draft(job, job.created_ms)
    about: dict[str, object] = {"name": job.spec.name}
    if job.origin is not None:
        about["cloned_from"] = job.origin.model_dump(mode="json", exclude={"held"})
    draft.note("job.queued", job.reason or "queued", **about)
    return draft.decision()
