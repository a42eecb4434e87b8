"""How a gang makes room, leaves its node or changes its size: a checkpoint, and the job goes on."""

from typing import Final

from services.controller.domain.decisions.attempt_events import stop_command
from services.controller.domain.job.effects import Draft
from services.controller.domain.job.events import MoveAsked
from services.controller.domain.job.job import Stop

_KINDS: Final = {
    "preempted": "job.preempting",
    "node_drained": "job.moving",
    "resized": "job.resizing",
}


def on_move(event: MoveAsked, draft: Draft) -> None:
    """Have the gang take a checkpoint and end; a job that is stopping already is left to that."""
    job, attempt = draft.job, draft.job.attempt
    if attempt is None or not job.can_migrate:
        return
    draft.change(
        stop=Stop(
            kind="move",
            grace_s=event.grace_s,
            asked_ms=draft.now_ms,
            cause=event.cause,
            by=event.by,
        ),
        reason=event.words,
    )
    draft.note(_KINDS[event.cause], event.words, by=event.by)
    draft.send(stop_command(draft.job, attempt, draft.now_ms), attempt.live_nodes)
