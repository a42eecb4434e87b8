"""Figures of the whole cluster and of running jobs, for monitoring."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from services.contract.messages.telemetry import RankSample
from services.contract.words.states import JobState, RankPhase, ReservationState
from services.controller.domain.job.job import Job
from services.controller.domain.scheduling.queue import in_order
from services.controller.domain.scheduling.reservations import PoolLimits, Reservation
from services.controller.ports.coordination import Ports
from services.controller.use_cases.progress import if_it_answers, measure
from services.controller.use_cases.queue import waits_since_ms
from services.controller.use_cases.waiting import current_usages, reservations_now

MOST_JOBS: Final = 100
"""So many running jobs have series of their own, the newest ones: their number must stay bounded."""
_STEPS: Final = 4
_LIVE: Final = tuple(state.value for state in ReservationState if not state.is_over)


@dataclass(frozen=True)
class PoolFigures:
    """Reservations of a pool that have not ended, and their nodes, by the reservation's state."""

    name: str
    max_nodes: int
    reservations: dict[str, int]
    nodes: dict[str, int]


@dataclass(frozen=True)
class ClusterFigures:
    """Counts over all jobs and nodes. ``queue_age_s``: how long the job waits that waits longest."""

    jobs: dict[JobState, int]
    ranks: dict[str, int]
    queued: int
    queue_age_s: float
    nodes: dict[str, int]
    slots: dict[str, int]
    slots_free: dict[str, int]
    pools: tuple[PoolFigures, ...]


@dataclass(frozen=True)
class JobFigures:
    """One running job. None: not known. Memory in bytes of the rank that has most."""

    job_id: str
    name: str
    owner: str
    unit: str
    step: int
    restarts: int
    loss: float | None
    throughput: float | None
    step_s: float | None
    memory_bytes: int | None
    straggler_score: float | None
    checkpoint_s: float | None
    checkpoint_age_s: float | None
    phases: dict[str, int] = field(default_factory=dict)


async def cluster_figures(ports: Ports) -> ClusterFigures:
    """Counted now. Raises StoreUnavailableError."""
    now_ms = await ports.clock.now_ms()
    counts = await ports.jobs.counts()
    jobs = [stored.job for stored in await ports.jobs.active()]
    usages = await current_usages(ports, jobs)
    queue = list(in_order(jobs))
    ranks = {"cpu": 0, "cuda": 0}
    for job in jobs:
        if job.plan is not None and _runs(job):
            ranks[job.plan.device_type] += job.plan.world_size
    waited_ms = max((now_ms - waits_since_ms(job) for job in queue), default=0)
    return ClusterFigures(
        jobs=counts,
        ranks=ranks,
        queued=len(queue),
        queue_age_s=max(waited_ms, 0) / 1000,
        nodes=dict(Counter(usage.node.shown_state.value for usage in usages)),
        slots={device: sum(u.capacity(device) for u in usages) for device in ("cpu", "cuda")},
        slots_free={device: sum(u.free(device) for u in usages) for device in ("cpu", "cuda")},
        pools=_pool_figures(ports.pools, await reservations_now(ports)),
    )


async def job_figures(ports: Ports) -> tuple[Sequence[JobFigures], int]:
    """The newest running jobs, and how many more run. Raises StoreUnavailableError."""
    now_ms = await ports.clock.now_ms()
    running = [s.job for s in await ports.jobs.active() if _runs(s.job)]
    chosen = sorted(running, key=lambda job: job.created_ms)[-MOST_JOBS:]
    ids = [job.id for job in chosen]
    all_samples = await if_it_answers(ports.telemetry.samples(ids))
    steps = await if_it_answers(ports.telemetry.last_steps(ids, _STEPS))
    figures = []
    for job in chosen:
        samples = all_samples.get(job.id, {})
        ranks = [s for s in samples.values() if s.fence == job.fence]
        progress = measure(job, steps.get(job.id, ()), samples)
        scores = [s.straggler_score for s in ranks if s.straggler_score is not None]
        duration_s, age_s = _checkpoint(job, now_ms)
        figures.append(
            JobFigures(
                job_id=job.id,
                name=job.spec.name,
                owner=job.owner,
                unit=progress.throughput_unit,
                step=progress.step,
                restarts=job.restarts,
                loss=progress.loss,
                throughput=progress.tokens_per_s,
                step_s=progress.step_time_s,
                memory_bytes=_largest_memory(ranks),
                straggler_score=max(scores, default=None),
                checkpoint_s=duration_s,
                checkpoint_age_s=age_s,
                phases=dict(Counter(_phase(sample) for sample in ranks)),
            )
        )
    return figures, len(running) - len(chosen)


def _pool_figures(
    pools: Sequence[PoolLimits], reservations: Sequence[Reservation]
) -> tuple[PoolFigures, ...]:
    figures = []
    for pool in pools:
        counts, nodes = dict.fromkeys(_LIVE, 0), dict.fromkeys(_LIVE, 0)
        for each in reservations:
            if each.pool == pool.name:
                counts[each.state] += 1
                nodes[each.state] += len(each.node_ids)
        figures.append(PoolFigures(pool.name, pool.max_nodes, counts, nodes))
    return tuple(figures)


def _runs(job: Job) -> bool:
    return job.attempt is not None and bool(job.attempt.live_nodes)


def _phase(sample: RankSample) -> str:
    """Its phase, by one of so many names: agents report it as text."""
    return sample.phase if sample.phase in RankPhase.__members__ else "other"


def _largest_memory(ranks: Sequence[RankSample]) -> int | None:
    return max((sample.memory_bytes for sample in ranks), default=None)


def _checkpoint(job: Job, now_ms: int) -> tuple[float | None, float | None]:
    """Of the newest committed checkpoint: seconds from its begin to its commit, and since then."""
    committed = [c for c in job.checkpoints.values() if c.committed_ms is not None]
    newest = max(committed, key=lambda c: c.committed_ms or 0, default=None)
    if newest is None or newest.committed_ms is None:
        return None, None
    return (
        (newest.committed_ms - newest.created_ms) / 1000,
        max(now_ms - newest.committed_ms, 0) / 1000,
    )
