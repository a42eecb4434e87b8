"""How a job is forgotten together with all that storage holds of it.

An agent removes its folder; only when that is told is the job's own record deleted. Until then it
stays as it is, says so, and cannot be resumed.
"""

from services.contract.messages.commands import PurgeJob
from services.contract.messages.facts import JobPurged
from services.controller.domain.errors import StateConflictError
from services.controller.domain.job.effects import Draft
from services.controller.domain.job.events import PurgeAsked
from services.controller.domain.job.job import Job


def on_purge(event: PurgeAsked, draft: Draft) -> None:
    """Command the removal; asked again, command it again.

    Raises:
        StateConflictError: The job has not ended, clones begin with its checkpoints, or one is
            pinned.
    """
    job = draft.job
    refuse_unless_ended(job)
    if job.holds:
        holders = ", ".join(sorted({name for names in job.holds.values() for name in names}))
        raise StateConflictError(
            f"clones without a checkpoint of their own start from those of this job: "
            f"{holders}; delete them first, or wait for their first checkpoint"
        )
    pinned = sorted(c.id for c in job.checkpoints.values() if c.pinned)
    if pinned:
        raise StateConflictError(f"{', '.join(pinned)}: pinned; unpin them first")
    draft.send(PurgeJob(job_id=job.id, fence=job.fence), [event.node_id])
    if job.purge_node != event.node_id:
        words = f"its checkpoints are being removed by {event.node_id}; then the job is deleted"
        draft.change(purge_node=event.node_id, reason=words)
        draft.note("job.purging", words)


def on_purged(fact: JobPurged, draft: Draft) -> None:
    """Say so if it failed; if not, nothing is left to be said."""
    if draft.job.purge_node == fact.node_id and fact.error is not None:
        words = f"its checkpoints could not all be removed by {fact.node_id}: {fact.error}"
        draft.change(purge_node=None, reason=words)
        draft.note("job.purge_failed", words)


def is_purged(job: Job, fact: JobPurged) -> bool:
    """Whether the job's record may be deleted now: the node that was told to remove the rest says that it has."""
    return (
        job.purge_node == fact.node_id
        and job.is_terminal
        and fact.fence == job.fence
        and fact.error is None
    )


def refuse_while_purged(job: Job) -> None:
    """Raise StateConflictError while the job's checkpoints are being removed."""
    if job.purge_node is not None:
        raise StateConflictError(
            f"the checkpoints of {job.id} are being removed by {job.purge_node}"
        )


def refuse_unless_ended(job: Job) -> None:
    """Raise StateConflictError unless the job has ended."""
    if not job.is_terminal:
        raise StateConflictError(
            f"the job is {job.state}: only ended jobs can be deleted; cancel it first"
        )
