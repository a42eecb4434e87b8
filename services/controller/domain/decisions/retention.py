"""How a clone keeps the checkpoint with which it begins, until it has one of its own."""

from services.contract.words.problems import Fault
from services.contract.words.states import CheckpointState
from services.controller.domain.decisions.checkpoint_facts import retire_surplus
from services.controller.domain.decisions.purge import refuse_while_purged
from services.controller.domain.errors import InvalidRequestError
from services.controller.domain.job.effects import Draft
from services.controller.domain.job.events import HoldAsked, HoldReleased, OriginReleased


def on_hold(event: HoldAsked, draft: Draft) -> None:
    """Keep the checkpoint for a clone.

    Raises:
        InvalidRequestError: It is not a committed one of this job.
        StateConflictError: The job's checkpoints are being removed.
    """
    job = draft.job
    refuse_while_purged(job)
    known = job.checkpoints.get(event.checkpoint_id)
    if known is None or known.state != CheckpointState.COMMITTED:
        raise InvalidRequestError(
            [
                Fault(
                    pointer="/from_checkpoint",
                    detail=f"{event.checkpoint_id} is not a committed checkpoint of {job.id}; "
                    f"GET /v1/jobs/{job.id}/checkpoints lists them",
                    code="unknown_checkpoint",
                )
            ]
        )
    holders = job.holds.get(known.id, ())
    if event.holder in holders:
        return
    draft.change(holds={**job.holds, known.id: (*holders, event.holder)})
    draft.note(
        "checkpoint.held",
        f"checkpoint of step {known.step} is kept for {event.holder}, which begins with it",
        checkpoint=known.id,
        holder=event.holder,
    )


def on_released(event: HoldReleased, draft: Draft) -> None:
    """The clone has one of its own, or is gone: retention may have this one again."""
    holders = draft.job.holds.get(event.checkpoint_id, ())
    if event.holder not in holders:
        return
    left = tuple(name for name in holders if name != event.holder)
    others = {k: v for k, v in draft.job.holds.items() if k != event.checkpoint_id}
    draft.change(holds=others | ({event.checkpoint_id: left} if left else {}))
    draft.note(
        "checkpoint.released",
        f"checkpoint {event.checkpoint_id} is no longer kept for {event.holder}",
        checkpoint=event.checkpoint_id,
        holder=event.holder,
    )
    retire_surplus(draft)


def on_origin_released(_event: OriginReleased, draft: Draft) -> None:
    """From its first own commit on, a clone never goes back to the job that it was cloned from."""
    origin = draft.job.origin
    if origin is not None and origin.held and draft.job.latest_checkpoint is not None:
        draft.change(origin=origin.model_copy(update={"held": False}))
