"""How far a job is, from what its ranks tell."""

import statistics
from collections.abc import Mapping, Sequence
from typing import Final

from services.contract.messages.telemetry import RankSample, StepRecord
from services.contract.states import JobState
from services.contract.views import Progress
from services.controller.domain.job import Job

STEPS_FOR_ETA: Final = 32
_MOVING_STATES: Final = frozenset({JobState.RUNNING, JobState.PAUSING, JobState.CANCELLING})


def measure(job: Job, records: Sequence[StepRecord], samples: Mapping[int, RankSample]) -> Progress:
    """The progress of the newest attempt.

    Args:
        job: The job.
        records: Its last step records, oldest first.
        samples: The last sample of each rank.
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
        tokens_per_s=None if newest is None else newest.tokens_per_s,
        step_time_s=None if newest is None else newest.step_time_s,
        eta_s=round(remaining * median, 3) if is_moving and median is not None else None,
    )


def steps_of(job: Job, records: Sequence[StepRecord]) -> int | None:
    """How many steps the job makes: by its spec, or as its script told last (records, oldest first)."""
    told = (record.of for record in reversed(records) if record.of is not None)
    return job.spec.steps if job.spec.steps is not None else next(told, None)
