"""What telemetry tells of a job that can no longer tell by itself."""

from typing import NamedTuple

from services.controller.domain.job.job import Job
from services.controller.ports.coordination import Ports
from services.controller.use_cases.progress import STEPS_FOR_ETA, measure


class LastSeen(NamedTuple):
    """The last step of which anything was heard, and when (milliseconds), if a rank was seen."""

    step: int
    seen_ms: int | None


async def last_seen(ports: Ports, job: Job) -> LastSeen:
    """What the newest attempt told last."""
    records = (await ports.telemetry.last_steps([job.id], STEPS_FOR_ETA))[job.id]
    samples = (await ports.telemetry.samples([job.id]))[job.id]
    seen = [s.seen_ms for s in samples.values() if s.fence == job.fence and s.seen_ms]
    return LastSeen(measure(job, records, samples).step, max(seen, default=None))
