"""How a gang makes room, leaves its node or changes its size: a checkpoint, and the job goes on."""

from typing import Final

from services.contract.states import JobState
from services.controller.domain.effects import Draft
from services.controller.domain.events import MoveAsked
from services.controller.domain.gang import stop_command
from services.controller.domain.job import Job, Stop

MOVABLE_STATES: Final = frozenset({JobState.PLACING, JobState.STARTING, JobState.RUNNING})

_KINDS: Final = {
    "preempted": "job.preempting",
    "node_drained": "job.moving",
    "resized": "job.resizing",
}


def on_move(event: MoveAsked, draft: Draft) -> None:
    """Have the gang take a checkpoint and end; a job that is stopping already is left to that."""
    job, attempt = draft.job, draft.job.attempt
    if attempt is None or not is_movable(job):
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


def is_movable(job: Job) -> bool:
    """Whether its gang lives and nobody has asked it to stop."""
    attempt = job.attempt
    return (
        attempt is not None
        and not attempt.is_over
        and job.stop is None
        and job.state in MOVABLE_STATES
    )
