"""Read, decide, commit; again if another controller was faster."""

from collections.abc import Sequence
from typing import Final

import structlog

from services.controller.domain.decisions.dispatch import decide, is_foreign, is_stale
from services.controller.domain.decisions.history import Occurrence, entry
from services.controller.domain.errors import NotFoundError, StaleWriteError
from services.controller.domain.job.effects import Decision
from services.controller.domain.job.job import Job
from services.controller.ports.coordination import Ports
from services.controller.ports.jobs import Actor, Change, Stored

_log = structlog.get_logger()
_TRIES: Final = 16


async def apply_events(
    ports: Ports,
    job_id: str,
    occurrences: Sequence[Occurrence],
    actor: Actor,
    epoch: int | None = None,
    *,
    deletes: Stored | None = None,
) -> Stored:
    """Decide on events in their order and commit all decisions together.

    Args:
        ports: The world.
        job_id: The job to which they happen.
        occurrences: At least one event.
        actor: Who causes them.
        epoch: The leadership in whose name this is done; None for a person's request, which the
            version compare alone keeps from overwriting anything.
        deletes: Another job that is deleted with the commit; both happen, or neither.

    Raises:
        NotFoundError: There is no such job.
        StaleWriteError: Another controller was faster each time.
        DeposedError: ``epoch`` is over.
        StateConflictError, InvalidRequestError: A request cannot be fulfilled.
    """
    async with ports.changes.of(job_id, actor.name):
        for _ in range(_TRIES):
            stored = await ports.jobs.load(job_id)
            decision = decide_all(stored.job, occurrences)
            change = Change(stored, decision, actor, tuple(map(entry, occurrences)), deletes)
            if change.is_empty:
                if deletes is not None:
                    await ports.jobs.delete(deletes)
                return stored
            try:
                return await ports.jobs.commit(change, epoch)
            except StaleWriteError:
                _log.debug("stale_write", job_id=job_id)
                if deletes is not None and await _has_changed(ports, deletes):
                    raise
    raise StaleWriteError(f"job {job_id} changes too fast; try again")


def decide_all(job: Job, occurrences: Sequence[Occurrence]) -> Decision:
    """The decisions on several events as one."""
    decision = Decision(job)
    for event, now_ms in occurrences:
        if is_stale(decision.job, event):
            _log.info("stale_fact", job_id=job.id, fence=job.fence, fact=type(event).__name__)
        elif is_foreign(decision.job, event):
            _log.warning(
                "foreign_fact",
                job_id=job.id,
                fact=type(event).__name__,
                node_id=getattr(event, "node_id", None),
                checkpoint=getattr(event, "checkpoint_id", None),
            )
        decision = decision.then(decide(decision.job, event, now_ms))
    return decision


async def _has_changed(ports: Ports, stored: Stored) -> bool:
    try:
        return (await ports.jobs.load(stored.job.id)).version != stored.version
    except NotFoundError:
        return True
