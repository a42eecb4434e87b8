"""How far a job is, from what its ranks tell."""

import statistics
from collections.abc import Awaitable, Mapping, Sequence
from types import MappingProxyType
from typing import Final, TypeVar

from services.contract.api.views import Progress
from services.contract.messages.telemetry import MetricRecord, RankProgress, StepRecord
from services.contract.words.bounds import METRIC_NAMES_KEPT
from services.contract.words.states import JobState
from services.controller.domain.errors import TelemetryUnavailableError
from services.controller.domain.job.job import Job

STEPS_FOR_ETA: Final = 32
METRICS_FOR_NEWEST: Final = 4
"""The newest values of a job's metrics are looked for in so many records."""
_MOVING_STATES: Final = frozenset({JobState.RUNNING, JobState.PAUSING, JobState.CANCELLING})
_T = TypeVar("_T")


async def if_it_answers(reading: Awaitable[Mapping[str, _T]]) -> Mapping[str, _T]:
    """What was read of telemetry; nothing where it has a server of its own that does not answer."""
    try:
        return await reading
    except TelemetryUnavailableError:
        return MappingProxyType({})


def measure(
    job: Job,
    records: Sequence[StepRecord],
    samples: Mapping[int, RankProgress],
    metrics: Sequence[MetricRecord] = (),
) -> Progress:
    """The progress of the newest attempt.

    Args:
        job: The job.
        records: Its last step records, oldest first.
        samples: The last sample of each rank.
        metrics: Its last records of the user's metrics, oldest first.
    """
    current = [record for record in records if record.fence == job.fence]
    boards = [sample for sample in samples.values() if sample.fence == job.fence]
    start = job.attempts[-1] if job.attempts else None
    reached = [0 if start is None else max(start.resumed_step, start.last_step)]
    reached += [record.step for record in current] + [sample.step for sample in boards]
    step = max(reached)
    newest = max(current, key=lambda record: record.step, default=None)
    median = statistics.median(r.step_time_s for r in current) if current else None
    steps = steps_of(job, records)
    is_moving = job.state in _MOVING_STATES and median is not None and steps is not None
    remaining = max((steps or 0) - step, 0)
    return Progress(
        step=step,
        of=steps,
        loss=None if newest is None else newest.loss,
        # A script need not say how many samples a step has: that is told as 0.
        tokens_per_s=None if newest is None else newest.tokens_per_s or None,
        throughput_unit=job.throughput_unit,
        loss_unit=job.loss_unit,
        step_time_s=None if newest is None else newest.step_time_s,
        mfu=None if newest is None else utilisation(job, _world(job), newest.step_time_s),
        metrics=newest_values(metrics),
        eta_s=round(remaining * median, 3) if is_moving and median is not None else None,
    )


def steps_of(job: Job, records: Sequence[StepRecord]) -> int | None:
    """How many steps the job makes: by its spec, or as its script told last (records, oldest first)."""
    told = (record.of for record in reversed(records) if record.of is not None)
    return job.spec.steps if job.spec.steps is not None else next(told, None)


def utilisation(job: Job, world: int | None, step_time_s: float) -> float | None:
    """Model FLOPs utilisation of a step, from 0 to 1; see ``StepView``.

    Args:
        job: The job.
        world: How many ranks made the step; None: that is not known any more.
        step_time_s: How long they took.
    """
    known = job.estimate
    if known is None or world is None or step_time_s <= 0:
        return None
    if known.model_flops is None or not known.peak_flops:
        return None
    return float(f"{known.model_flops / (step_time_s * world * known.peak_flops):.4g}")


def newest_values(records: Sequence[MetricRecord]) -> dict[str, float | None]:
    """The newest value of each of the user's metrics, by name; ``records`` oldest first."""
    found: dict[str, float | None] = {}
    for record in records:
        found |= record.values
    return {name: found[name] for name in sorted(found)[:METRIC_NAMES_KEPT]}


def _world(job: Job) -> int | None:
    return None if job.plan is None else job.plan.world_size
