"""Where jobs are kept: read with a version, written by comparing it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, Protocol

from services.contract.jobs.specs import HIGHEST_PRIORITY
from services.contract.words.problems import Fault
from services.contract.words.states import JobState
from services.controller.domain.decisions.history import HistoryEntry
from services.controller.domain.errors import TooManyJobsError
from services.controller.domain.job.checkpoint import Checkpoint
from services.controller.domain.job.effects import Decision, Send
from services.controller.domain.job.job import Job
from services.controller.domain.record import Record


@dataclass(frozen=True)
class Stored:
    """A job with its checkpoints, and the version under which it was read."""

    job: Job
    version: int


@dataclass(frozen=True)
class Actor:
    """Who causes a change: a person's request, an agent, the controller.

    ``most_priority``: the highest that it may give a job.
    """

    name: str
    request_id: str | None = None
    most_priority: int = HIGHEST_PRIORITY

    def priority_faults(self, priority: int) -> list[Fault]:
        """What is wrong with giving a job this priority."""
        if priority <= self.most_priority:
            return []
        detail = (
            f"priority: {self.name} may give jobs a priority of up to {self.most_priority} "
            "(MESHLOOM_MAX_PRIORITY of the controller); ask an operator for a higher one"
        )
        return [Fault(pointer="/priority", detail=detail, code="priority_not_allowed")]


_LABELS_KEPT: Final = 512
"""Characters: labels may have 20 000, and the feed keeps 20 000 events."""


class EventRecord(Record):
    """A line of a job's event log. Its time is that of its place in the log.

    ``owner`` and ``labels`` are the job's at that time, by which its events are found when it is deleted. None: an older
    version wrote the line, or the labels are too long to be kept with each event.
    """

    kind: str
    message: str
    actor: str
    request_id: str | None = None
    data: dict[str, Any]
    owner: str | None = None
    labels: dict[str, str] | None = None


@dataclass(frozen=True)
class Quota:
    """How many jobs one owner may have: that have not ended, and in all.

    ``spec_bytes``: so large may the specs of those that have not ended be together, in their records. A controller
    has them in memory, where those that consist of many small lists take thirty times as much.
    """

    not_ended: int = 2_000
    kept: int = 50_000
    spec_bytes: int = 16 << 20

    def exceeded_by(self, not_ended: int, kept: int = 0, spec_bytes: int = 0) -> str:
        """Which of them a further job would exceed, ``spec_bytes`` with its own; an empty text: none."""
        if not_ended >= self.not_ended:
            return "not_ended"
        if kept >= self.kept:
            return "kept"
        return "spec_bytes" if spec_bytes > self.spec_bytes else ""

    def refuse(self, exceeded: str, owner: str) -> None:
        """Refuse a further job of ``owner`` where it would exceed one of them.

        Raises:
            TooManyJobsError: It would.
        """
        if exceeded == "not_ended":
            raise TooManyJobsError(
                f"{owner} has {self.not_ended} jobs that have not ended, the most allowed: cancel "
                "some, or wait until some end (MESHLOOM_MAX_UNFINISHED_JOBS of the controller)"
            )
        if exceeded == "kept":
            raise TooManyJobsError(
                f"{owner} has {self.kept} jobs, the most that are kept: delete some that have ended "
                "(DELETE /v1/jobs/{id}; MESHLOOM_MAX_JOBS of the controller)"
            )
        if exceeded == "spec_bytes":
            raise TooManyJobsError(
                f"with this one the specs of {owner}'s jobs that have not ended would have more than "
                f"{self.spec_bytes} bytes, the most allowed: have long values read from files, or wait until some "
                "jobs end (MESHLOOM_MAX_UNFINISHED_SPEC_BYTES of the controller)"
            )


DEFAULT_QUOTA: Final = Quota()


@dataclass(frozen=True)
class Change:
    """A decision on a stored job, ready to be committed as a whole.

    ``history`` tells what was decided. ``deletes``: another job that is deleted with it, as by
    ``JobStore.delete``; both happen, or neither.
    """

    before: Stored
    decision: Decision
    actor: Actor
    history: tuple[HistoryEntry, ...] = ()
    deletes: Stored | None = None

    @property
    def begins_again(self) -> bool:
        """Whether a job that had ended goes on, as one more that has not."""
        return self.before.job.is_terminal and not self.decision.job.is_terminal

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to commit."""
        decision = self.decision
        return decision.job == self.before.job and not (decision.sends or decision.notes)

    @property
    def events(self) -> tuple[EventRecord, ...]:
        """The lines for the event log."""
        return event_records(self.decision, self.actor)

    @property
    def changed_checkpoints(self) -> tuple[Checkpoint, ...]:
        """Those to be written."""
        known = self.before.job.checkpoints
        pairs = ((known.get(c.id), c) for c in self.decision.job.checkpoints.values())
        # There may be thousands, nearly all of them the very same.
        return tuple(c for before, c in pairs if before is not c and before != c)

    @property
    def removed_checkpoints(self) -> tuple[str, ...]:
        """The ids of those to be removed."""
        kept = self.decision.job.checkpoints
        return tuple(name for name in self.before.job.checkpoints if name not in kept)


@dataclass(frozen=True)
class Claim:
    """An ``Idempotency-Key`` of one subject, and the digest of the body that came with it.

    Two subjects that choose the same key make two claims.
    """

    subject: str
    key: str
    digest: str


class Place(NamedTuple):
    """A record's place in the list of all of its kind: by creation, then by id."""

    created_ms: int
    id: str


class JobSummary(Record):
    """What lists choose and sort jobs by."""

    id: str
    state: JobState
    name: str
    owner: str
    priority: int
    labels: dict[str, str]
    created_ms: int
    updated_ms: int

    @classmethod
    def of(cls, job: Job) -> "JobSummary":
        """The summary of a job."""
        return cls(
            id=job.id,
            state=job.state,
            name=job.spec.name,
            owner=job.owner,
            priority=job.spec.priority,
            labels=dict(job.spec.labels),
            created_ms=job.created_ms,
            updated_ms=job.updated_ms,
        )


@dataclass(frozen=True)
class Among:
    """Which jobs are wanted at most: in any of these states (none: all), of this owner, with all these labels.

    A label is ``key`` or ``key=value``.
    """

    states: frozenset[JobState] = frozenset()
    owner: str | None = None
    labels: tuple[str, ...] = ()


def event_records(decision: Decision, actor: Actor) -> tuple[EventRecord, ...]:
    """A decision's notes as lines of the event log."""
    labels: dict[str, str] | None = decision.job.spec.labels
    if sum(len(key) + len(value) for key, value in decision.job.spec.labels.items()) > _LABELS_KEPT:
        labels = None
    return tuple(
        EventRecord(
            kind=note.kind,
            message=note.message,
            actor=actor.name,
            request_id=actor.request_id,
            data=note.data,
            owner=decision.job.owner,
            labels=labels,
        )
        for note in decision.notes
    )


class JobStore(Protocol):
    """All jobs. ``epoch``: the leadership in whose name a write is made; None for a person's.

    Lists pass over jobs whose records cannot be read: one must not hide all others.
    """

    async def create(self, decision: Decision, actor: Actor, claim: Claim | None) -> Stored:
        """Keep a new job, its events, the beginning of its history and its claim together.

        The same claim again answers the job as it was first created and keeps nothing.

        Raises:
            KeyReusedError: The claim's key came with another digest before.
            TooManyJobsError: Its owner has as many as the store's quota allows.
        """
        ...

    async def claimed(self, claim: Claim) -> Stored | None:
        """The job that was created under this claim, as it was then; None if there is none.

        Raises:
            KeyReusedError: The claim's key came with another digest before.
        """
        ...

    async def restore(self, decision: Decision, actor: Actor, epoch: int) -> bool:
        """Keep a job that storage told of, with its checkpoints and events, together.

        Answers whether it was kept: not if there is such a job, or if people have deleted it.

        Raises:
            DeposedError: ``epoch`` is not the present one.
        """
        ...

    async def was_deleted(self, job_id: str) -> bool:
        """Whether people have deleted this job."""
        ...

    async def load(self, job_id: str) -> Stored:
        """One job.

        Raises:
            NotFoundError: There is none.
            RecordUnreadableError: There is one, but its record makes no sense here.
        """
        ...

    async def commit(self, change: Change, epoch: int | None = None) -> Stored:
        """Write job, checkpoints, events, history and commands together, or nothing.

        Raises:
            StaleWriteError: The job, or the one to be deleted, changed since it was read, or the
                job has a higher fence.
            DeposedError: ``epoch`` is not the present one.
            NotFoundError: The job was deleted.
            TooManyJobsError: It had ended and would go on, and its owner has as many that have not
                ended as the store's quota allows.
        """
        ...

    async def send(self, sends: tuple[Send, ...], epoch: int) -> None:
        """Put commands into inboxes that no job's record tells of.

        Raises:
            DeposedError: ``epoch`` is not the present one.
        """
        ...

    async def delete(self, stored: Stored) -> None:
        """Delete a job and all that is kept with it.

        Raises:
            StaleWriteError: The job changed since it was read.
        """
        ...

    async def delete_unread(self, job_id: str) -> None:
        """Delete a job whose record cannot be read, and all that is kept with it.

        Raises:
            NotFoundError: There is none.
        """
        ...

    async def active(self) -> list[Stored]:
        """All jobs to which something is still to happen, oldest first."""
        ...

    async def page(self, before: Place | None, limit: int) -> list[Stored]:
        """Up to ``limit`` jobs that were created before that place, newest first."""
        ...

    async def summaries(self, among: Among, before: Place | None, limit: int) -> list[JobSummary]:
        """Up to ``limit`` summaries of jobs that were created before that place, newest first.

        None that is wanted is left out. Others may be among them: a store reads the narrowest of its
        indexes.
        """
        ...

    async def summaries_of(self, job_ids: Sequence[str]) -> list[JobSummary]:
        """The summaries of these jobs, in this order, as far as they are there."""
        ...

    async def several(self, job_ids: Sequence[str]) -> list[Stored]:
        """These jobs, in this order, as far as they are there and can be read."""
        ...

    async def index(self) -> int:
        """Have summaries and indexes hold all jobs, those of older versions, too.

        Answers how many jobs were added: none unless records of an older version were found.
        """
        ...

    async def counts(self) -> dict[JobState, int]:
        """How many jobs are in each state."""
        ...
