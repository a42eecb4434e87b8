"""Looking at jobs, changing their course, and forgetting them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from services.contract.states import JobState, NodeState
from services.contract.views import AttemptList, JobPage, JobView
from services.controller.domain.errors import RecordUnreadableError, StateConflictError
from services.controller.domain.events import JobEvent, PurgeAsked
from services.controller.domain.history import Occurrence
from services.controller.domain.job import Job
from services.controller.domain.purging import refuse_unless_ended
from services.controller.ports.jobs import Actor, Place, Stored
from services.controller.ports.office import Ports
from services.controller.use_cases import cursors
from services.controller.use_cases.change import apply_events
from services.controller.use_cases.clone import release_all_held_for, release_origin
from services.controller.use_cases.present import attempt_views, job_view
from services.controller.use_cases.progress import STEPS_FOR_ETA

_CHUNK: Final = 200


@dataclass(frozen=True)
class JobFilter:
    """Which jobs are asked for. ``labels`` as ``key=value`` or ``key``; ``text`` in id or name."""

    states: frozenset[JobState] = frozenset()
    labels: tuple[str, ...] = ()
    text: str | None = None
    owner: str | None = None

    def matches(self, job: Job) -> bool:
        """Whether the job is among them."""
        if self.states and job.state not in self.states:
            return False
        if self.owner is not None and job.owner != self.owner:
            return False
        if self.text and self.text.lower() not in f"{job.id} {job.spec.name}".lower():
            return False
        return all(_has_label(job, label) for label in self.labels)


async def get_job(ports: Ports, job_id: str) -> JobView:
    """One job.

    Raises:
        NotFoundError: There is none.
    """
    stored = await ports.jobs.load(job_id)
    return (await _views(ports, [stored]))[0]


async def list_jobs(ports: Ports, wanted: JobFilter, cursor: str | None, limit: int) -> JobPage:
    """A page of jobs, newest first.

    Raises:
        InvalidRequestError: The cursor is none of ours.
    """
    place = cursors.to_place(cursor)
    found: list[Stored] = []
    is_last = False
    while len(found) <= limit and not is_last:
        chunk = await ports.jobs.page(place, _CHUNK)
        is_last = len(chunk) < _CHUNK
        found += [stored for stored in chunk if wanted.matches(stored.job)]
        if chunk:
            place = Place(chunk[-1].job.created_ms, chunk[-1].job.id)
    items = found[:limit]
    next_cursor = None
    if len(found) > limit:
        last = items[-1].job
        next_cursor = cursors.from_place(Place(last.created_ms, last.id))
    return JobPage(items=tuple(await _views(ports, items)), next_cursor=next_cursor)


async def change_course(ports: Ports, job_id: str, wish: JobEvent, actor: Actor) -> JobView:
    """Fulfil a person's wish: pause, resume, cancel, kill, take a checkpoint.

    Raises:
        NotFoundError: There is no such job.
        StateConflictError, InvalidRequestError: It cannot be fulfilled.
    """
    now_ms = await ports.clock.now_ms()
    stored = await apply_events(ports, job_id, [Occurrence(wish, now_ms)], actor)
    return (await _views(ports, [stored]))[0]


async def delete_job(ports: Ports, job_id: str, actor: Actor) -> None:
    """Forget a job that has ended; its checkpoints stay in storage.

    Raises:
        NotFoundError: There is no such job.
        StateConflictError: It has not ended.
    """
    try:
        stored = await ports.jobs.load(job_id)
    except RecordUnreadableError:
        # Whether it has ended is in the record; nobody drives it any more in any case.
        await release_all_held_for(ports, job_id, actor)
        await ports.jobs.delete_unread(job_id)
        return
    refuse_unless_ended(stored.job)
    await release_origin(ports, stored.job, actor)
    await ports.jobs.delete(stored)


async def purge_job(ports: Ports, job_id: str, actor: Actor) -> JobView | None:
    """Have an agent remove the job's checkpoints; the job is forgotten once they are gone.

    None if there was nothing to remove: the job is forgotten already.

    Raises:
        NotFoundError: There is no such job.
        StateConflictError: It has not ended, clones begin with its checkpoints, or no node lives
            that could remove them.
    """
    job = (await ports.jobs.load(job_id)).job
    # Of one that was found again in storage the attempts are forgotten, not the files.
    if job.is_terminal and job.fence == 0:
        await delete_job(ports, job_id, actor)
        return None
    nodes = [node for node in await ports.nodes.nodes() if node.state == NodeState.READY]
    leases = await ports.nodes.leases([node.id for node in nodes])
    living = [n.id for n in nodes if n.id in leases and leases[n.id].incarnation == n.incarnation]
    if not living:
        refuse_unless_ended(job)
        raise StateConflictError(
            "no node lives whose agent could remove the checkpoints; try again when one is back, "
            "or delete the job without purge_checkpoints"
        )
    chosen = job.head_node if job.head_node in living else living[0]
    return await change_course(ports, job_id, PurgeAsked(chosen), actor)


async def list_attempts(ports: Ports, job_id: str) -> AttemptList:
    """A job's tries, oldest first.

    Raises:
        NotFoundError: There is no such job.
    """
    stored = await ports.jobs.load(job_id)
    return AttemptList(items=attempt_views(stored.job))


async def _views(ports: Ports, stored: Sequence[Stored]) -> list[JobView]:
    names = [entry.job.id for entry in stored if entry.job.attempts]
    records = await ports.telemetry.last_steps(names, STEPS_FOR_ETA)
    samples = await ports.telemetry.samples(names)
    return [
        job_view(entry.job, records.get(entry.job.id, ()), samples.get(entry.job.id, {}))
        for entry in stored
    ]


def _has_label(job: Job, wanted: str) -> bool:
    key, equals, value = wanted.partition("=")
    return key in job.spec.labels and (not equals or job.spec.labels[key] == value)
