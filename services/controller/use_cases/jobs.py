"""Looking at jobs, changing their course, and forgetting them."""

from collections.abc import Mapping, Sequence, Set
from typing import Final

from services.contract.api.views import AttemptList, JobPage, JobView
from services.contract.messages.telemetry import MetricRecord, RankProgress, StepRecord
from services.contract.system.long_work import GiveWay, at_once
from services.contract.words.bounds import MOST_RANKS
from services.controller.domain.decisions.history import Occurrence
from services.controller.domain.decisions.purge import refuse_unless_ended
from services.controller.domain.errors import (
    RecordUnreadableError,
    StateConflictError,
    TelemetryUnavailableError,
)
from services.controller.domain.job.events import JobEvent, PurgeAsked
from services.controller.domain.job.job import Job
from services.controller.ports.coordination import Ports
from services.controller.ports.jobs import Actor, Stored
from services.controller.use_cases import listing
from services.controller.use_cases.change import apply_events
from services.controller.use_cases.clone import delete_with_holds, release_all_held_for
from services.controller.use_cases.listing import NEWEST_FIRST, JobFilter, JobOrder
from services.controller.use_cases.present import attempt_views, job_view
from services.controller.use_cases.progress import METRICS_FOR_NEWEST, STEPS_FOR_ETA
from services.controller.use_cases.records import living_nodes
from services.controller.use_cases.waiting import with_reasons

_RANKS_LISTED: Final = 64
"""To read the samples of a page of jobs of 1 024 ranks takes most of a second, each time anybody looks."""
SILENT_MS: Final = 30_000
"""Agents write samples each second: after so long without one, they write elsewhere."""
_FROM_TELEMETRY: Final = frozenset({"progress", "estimate"})


async def get_job(ports: Ports, job_id: str) -> JobView:
    """One job.

    Raises:
        NotFoundError: There is none.
    """
    stored = await ports.jobs.load(job_id)
    return (await _views(ports, [stored]))[0]


async def list_jobs(  # noqa: PLR0913 what a list may be asked for, and how
    ports: Ports,
    wanted: JobFilter,
    cursor: str | None,
    limit: int,
    order: JobOrder = NEWEST_FIRST,
    *,
    fields: Set[str] | None = None,
    give_way: GiveWay = at_once,
) -> JobPage:
    """A page of jobs in an order; the newest first by default.

    Of jobs with many ranks no samples are read: progress is as of the last step that all ranks made,
    and the measured peak is not told. ``fields``: where none of these comes from telemetry, none is
    read (None: all are wanted). ``give_way``: as of ``listing.page``.

    Raises:
        InvalidRequestError: The cursor is none of ours, or of a list in another order.
    """
    items, next_cursor = await listing.page(ports, wanted, order, cursor, limit, give_way)
    if fields is not None and not fields & _FROM_TELEMETRY:
        jobs = await with_reasons(ports, [entry.job for entry in items])
        return JobPage(items=tuple(job_view(job, (), {}) for job in jobs), next_cursor=next_cursor)
    views = await _views(ports, items, most_ranks=_RANKS_LISTED)
    return JobPage(items=tuple(views), next_cursor=next_cursor)


async def change_course(ports: Ports, job_id: str, request: JobEvent, actor: Actor) -> JobView:
    """Fulfil a person's request: pause, resume, cancel, kill, take a checkpoint.

    Raises:
        NotFoundError: There is no such job.
        StateConflictError, InvalidRequestError: It cannot be fulfilled.
    """
    now_ms = await ports.clock.now_ms()
    stored = await apply_events(ports, job_id, [Occurrence(request, now_ms)], actor)
    return (await _views(ports, [stored]))[0]


async def delete_job(ports: Ports, job_id: str, actor: Actor) -> None:
    """Delete a finished job; its checkpoints stay in storage.

    Raises:
        NotFoundError: There is no such job.
        StateConflictError: It has not ended.
    """
    try:
        stored = await ports.jobs.load(job_id)
    except RecordUnreadableError:
        # Whether it has ended is in the record; nobody drives it any more in any case.
        await ports.jobs.delete_unread(job_id)
        await release_all_held_for(ports, job_id, actor)
        return
    refuse_unless_ended(stored.job)
    await delete_with_holds(ports, stored, actor)


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
    living = await living_nodes(ports)
    if not living:
        refuse_unless_ended(job)
        raise StateConflictError(
            "no live agent can remove the checkpoints; retry when a node is back, "
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
    return AttemptList(items=attempt_views(stored.job), left_out=stored.job.attempts_left_out)


async def _views(
    ports: Ports, stored: Sequence[Stored], most_ranks: int = MOST_RANKS
) -> list[JobView]:
    """``most_ranks``: the samples of larger jobs are not read."""
    tried = [entry.job for entry in stored if entry.job.attempts]
    names = [job.id for job in tried]
    small = [job for job in tried if job.plan is None or job.plan.world_size <= most_ranks]
    is_away = False
    records: Mapping[str, list[StepRecord]] = {}
    samples: Mapping[str, dict[int, RankProgress]] = {}
    metrics: Mapping[str, list[MetricRecord]] = {}
    try:
        records = await ports.telemetry.last_steps(names, STEPS_FOR_ETA)
        samples = await ports.telemetry.progress([job.id for job in small])
        metrics = await ports.telemetry.last_metrics(names, METRICS_FOR_NEWEST)
    except TelemetryUnavailableError:
        is_away = True
    silent = await _silent(ports, [job for job in small if not _is_seen(job, samples)])
    jobs = await with_reasons(ports, [entry.job for entry in stored])
    return [
        job_view(
            job,
            records.get(job.id, ()),
            samples.get(job.id, {}),
            metrics.get(job.id, ()),
            telemetry_away=job.id in silent or (is_away and bool(job.attempts)),
        )
        for job in jobs
    ]


def _is_seen(job: Job, samples: Mapping[str, Mapping[int, RankProgress]]) -> bool:
    return any(sample.fence == job.fence for sample in samples.get(job.id, {}).values())


async def _silent(ports: Ports, unseen: Sequence[Job]) -> Set[str]:
    """Those of which ranks have trained for long."""
    living = [job for job in unseen if job.attempt is not None and not job.attempt.is_over]
    stepped = {job.id: job.attempts[-1].first_step_ms for job in living}
    known = {name: at_ms for name, at_ms in stepped.items() if at_ms is not None}
    latest = await ports.clock.now_ms() - SILENT_MS if known else 0
    return {name for name, at_ms in known.items() if at_ms <= latest}
