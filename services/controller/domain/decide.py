"""The one door to all decisions about a job: ``decide(job, event, now) -> decision``."""

from collections.abc import Callable
from typing import Any, Final

from services.contract.ids import job_of_checkpoint
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
    Evaluated,
    ExportFailed,
    GangDiagnosed,
    GangEnded,
    GangLaunched,
    GangProgressed,
    JobPurged,
    LaunchRefused,
    TraceFailed,
    TraceOrdered,
    TraceRecorded,
)
from services.controller.domain import (
    commits,
    finding,
    gang,
    holds,
    keeping,
    moves,
    patching,
    planning,
    purging,
    tracing,
    wishes,
)
from services.controller.domain.effects import Decision, Draft
from services.controller.domain.events import (
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
    RemovalAsked,
    ResumeAsked,
    SpecFaulted,
    TraceAsked,
    TraceOverdue,
    VerifyAsked,
)
from services.controller.domain.job import Job

_Handler = Callable[[Any, Draft], None]

_HANDLERS: Final[dict[type, _Handler]] = {
    PauseAsked: wishes.on_pause,
    CancelAsked: wishes.on_cancel,
    KillAsked: wishes.on_kill,
    ResumeAsked: wishes.on_resume,
    CheckpointAsked: wishes.on_checkpoint,
    DiagnosisAsked: wishes.on_diagnosis,
    TraceAsked: tracing.on_asked,
    TraceOverdue: tracing.on_overdue,
    PinAsked: keeping.on_pin,
    VerifyAsked: keeping.on_verify,
    ExportAsked: keeping.on_export,
    RemovalAsked: keeping.on_removal,
    FoundInStorage: finding.on_found,
    GangPlaced: gang.on_placed,
    PlacementDelayed: gang.on_delayed,
    PlanAsked: planning.on_asked,
    PlanMade: planning.on_made,
    PlanMissed: planning.on_missed,
    PlanRefused: planning.on_refused,
    SpecFaulted: planning.on_faulted,
    NodeLost: gang.on_node_lost,
    AnswerOverdue: gang.on_overdue,
    ClockSetBack: gang.on_clock_set_back,
    PatchAsked: patching.on_patch,
    PurgeAsked: purging.on_purge,
    JobPurged: purging.on_purged,
    MoveAsked: moves.on_move,
    HoldAsked: holds.on_hold,
    HoldReleased: holds.on_released,
    OriginReleased: holds.on_origin_released,
    GangLaunched: gang.on_launched,
    LaunchRefused: gang.on_refused,
    GangProgressed: gang.on_progressed,
    Evaluated: gang.on_evaluated,
    GangDiagnosed: gang.on_diagnosed,
    GangEnded: gang.on_ended,
    CheckpointBegan: commits.on_began,
    CheckpointVoted: commits.on_voted,
    CheckpointWaits: commits.on_waits,
    CheckpointLinked: commits.on_linked,
    CheckpointLost: commits.on_lost,
    CheckpointRetired: commits.on_retired,
    CheckpointVerified: commits.on_verified,
    CheckpointCorrupt: commits.on_corrupt,
    CheckpointUnread: commits.on_unread,
    CheckpointExported: keeping.on_exported,
    ExportFailed: keeping.on_export_failed,
    TraceOrdered: tracing.on_ordered,
    TraceRecorded: tracing.on_recorded,
    TraceFailed: tracing.on_failed,
    ChainDamaged: commits.on_damaged,
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
        event: A wish, a finding of the reconciler, or an agent's fact.
        now_ms: When it happened, in milliseconds of Redis's clock.

    Raises:
        StateConflictError, InvalidRequestError: A wish cannot be fulfilled.
    """
    draft = Draft(job, now_ms)
    if not is_stale(job, event) and not is_foreign(job, event):
        _HANDLERS[type(event)](event, draft)
        draft.keep_standing()
    return draft.decision()


def is_stale(job: Job, event: JobEvent) -> bool:
    """Whether an event speaks of an attempt that is no longer the newest one."""
    fence: int | None = getattr(event, "fence", None)
    return fence is not None and fence != job.fence and not isinstance(event, _TRUE_AT_ANY_FENCE)


def is_foreign(job: Job, event: JobEvent) -> bool:
    """Whether a fact speaks of another job's checkpoint, which only a loading attempt may do.

    An attempt that is to load one, of whichever job, may find it corrupt.
    """
    if not isinstance(event, GangFact):
        return False
    manifest = event.manifest if isinstance(event, CheckpointLinked) else None
    named = getattr(event if manifest is None else manifest, "checkpoint_id", None)
    if named is None or job_of_checkpoint(named) == job.id:
        return False
    return not (isinstance(event, CheckpointCorrupt) and was_told_to_load(job, event))


def was_told_to_load(job: Job, found: CheckpointCorrupt) -> bool:
    """Whether the attempt that found a checkpoint corrupt is one that was to load it."""
    return any(
        attempt.fence == found.fence and attempt.resumed_from == found.checkpoint_id
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
