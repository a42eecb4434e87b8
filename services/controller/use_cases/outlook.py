"""How long jobs are expected to go on: what the queue's estimates rest on."""

import statistics
from collections.abc import Sequence
from typing import Final

from services.contract.messages.telemetry import StepRecord
from services.controller.domain.job.job import WAITING_STATES, Job
from services.controller.ports.coordination import Ports
from services.controller.use_cases.progress import if_it_answers, measure, steps_of

# Of each job that runs, whenever the queue changes.
_STEPS_READ: Final = 8


async def expect(ports: Ports, jobs: Sequence[Job], now_ms: int) -> dict[str, int]:
    """For how many milliseconds each job is expected to need its seats, where that is known.

    Nothing is asked while nobody waits.
    """
    if not any(job.state in WAITING_STATES for job in jobs):
        return {}
    return await estimate(ports, jobs, now_ms)


async def estimate(ports: Ports, jobs: Sequence[Job], now_ms: int) -> dict[str, int]:
    """The same, whoever waits."""
    # Thousands may wait that never ran, of which nothing is known.
    tried = [job for job in jobs if job.attempts]
    # Not from the ranks' samples, too: those of thousands of ranks take a second to read, and are at most
    # a step ahead.
    records = await if_it_answers(
        ports.telemetry.recent_steps([job.id for job in tried], _STEPS_READ)
    )
    found = {job.id: remaining_ms(job, records.get(job.id, ()), now_ms) for job in tried}
    return {name: remaining for name, remaining in found.items() if remaining is not None}


def remaining_ms(job: Job, records: Sequence[StepRecord], now_ms: int) -> int | None:
    """For how long the job goes on by its speed so far, or until a stop takes effect."""
    if job.attempt is None:
        times = [record.step_time_s for record in records]
        steps = steps_of(job, records)
        if steps is None or not times:
            return None
        return int(statistics.median(times) * max(steps - job.resume_point.step, 0) * 1000)
    bounds = []
    eta_s = measure(job, records, {}).eta_s
    if eta_s is not None:
        bounds.append(int(eta_s * 1000))
    if job.stop is not None:
        bounds.append(max(job.stop.asked_ms + int(job.stop.grace_s * 1000) - now_ms, 0))
    return min(bounds, default=None)
