"""What a decision asks the world to do, as data, and the decision in the making."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from services.contract.messages.commands import CloseRecords, Command, KeepStanding
from services.contract.words.states import TERMINAL_STATES, JobState
from services.controller.domain.job.job import Job
from services.controller.domain.job.lifecycle import TRANSITIONS


@dataclass(frozen=True)
class Send:
    """Put a command into a node's inbox."""

    node_id: str
    command: Command


@dataclass(frozen=True)
class Note:
    """Write a line into the job's event log."""

    kind: str
    message: str
    data: dict[str, Any]


@dataclass(frozen=True)
class Decision:
    """The job as it stands from now on, and what is to be done. All of it, or nothing."""

    job: Job
    sends: tuple[Send, ...] = ()
    notes: tuple[Note, ...] = ()

    def then(self, later: "Decision") -> "Decision":
        """Both decisions as one; ``later`` was made on this one's job."""
        return Decision(later.job, self.sends + later.sends, self.notes + later.notes)


class Draft:
    """A decision in the making: handlers change it, ``decision`` closes it.

    Args:
        job: The job before.
        now_ms: The moment of the event in milliseconds of Redis's clock.
    """

    def __init__(self, job: Job, now_ms: int) -> None:
        self.job = job.rewound(now_ms)
        self.now_ms = max(now_ms, self.job.updated_ms)
        self._before = job
        self._sends: list[Send] = []
        self._notes: list[Note] = []

    def change(self, **fields: object) -> None:
        """Replace fields of the job."""
        self.job = self.job.model_copy(update=fields)

    def change_attempt(self, **fields: object) -> None:
        """Replace fields of the newest attempt."""
        newest = self.job.attempts[-1].model_copy(update=fields)
        self.change(attempts=(*self.job.attempts[:-1], newest))

    def transition(self, state: JobState, reason: str, **fields: object) -> None:
        """Go to another state, and say why; an illegal move is a bug of ours."""
        assert state in TRANSITIONS[self.job.state], f"{self.job.state} → {state}"  # noqa: S101 our own invariant
        self.change(state=state, reason=reason, **fields)
        self.note(f"job.{state.lower()}", reason)

    def note(self, kind: str, message: str, **data: object) -> None:
        """Add a line to the event log."""
        self._notes.append(Note(kind, message, data))

    def send(self, command: Command, nodes: Iterable[str]) -> None:
        """Add a command to the inboxes of ``nodes``."""
        self._sends += [Send(node, command) for node in nodes]
        self.change(commanded_ms=self.now_ms)

    def keep_standing(self) -> None:
        """Have storage remember where the job is to stand, if that is another place than before.

        Of one that has ended it is to have curve and output, too.
        Nothing is known there of a job before its first attempt.
        """
        job, standing = self.job, _standing(self.job.state)
        if job.head_node is None:
            return
        if job.is_terminal and not self._before.is_terminal:
            closing = CloseRecords(job_id=job.id, fence=job.fence)
            self._sends.append(Send(job.head_node, closing))
        if standing == _standing(self._before.state):
            return
        command = KeepStanding(
            job_id=job.id,
            fence=job.fence,
            standing=standing,
            reason=(job.reason or "") if standing != JobState.QUEUED else "",
            exit_reason=job.exit_reason,
        )
        self._sends.append(Send(job.head_node, command))

    def decision(self) -> Decision:
        """The finished decision; a job of which nothing changed keeps its time."""
        if self.job != self._before:
            self.change(updated_ms=self.now_ms)
        return Decision(self.job, tuple(self._sends), tuple(self._notes))


def _standing(state: JobState) -> JobState:
    """Where a job in ``state`` is to stand that Redis loses; QUEUED where it is meant to run."""
    if state in {JobState.PAUSING, JobState.PAUSED}:
        return JobState.PAUSED
    if state in {JobState.CANCELLING, JobState.CANCELLED}:
        return JobState.CANCELLED
    return state if state in TERMINAL_STATES else JobState.QUEUED
