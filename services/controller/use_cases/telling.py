"""What telemetry tells of a job that can no longer tell by itself."""

from services.controller.domain.job import Job
from services.controller.ports.office import Ports
from services.controller.use_cases.progress import STEPS_FOR_ETA, measure


async def last_told_step(ports: Ports, job: Job) -> int:
    """The last step of the newest attempt of which anything was heard."""
    records = (await ports.telemetry.last_steps([job.id], STEPS_FOR_ETA))[job.id]
    samples = (await ports.telemetry.samples([job.id]))[job.id]
    return measure(job, records, samples).step
