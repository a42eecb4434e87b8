"""Histories of real runs, decided again."""

from services.controller.domain.decisions.history import HistoryEntry, replay
from services.controller.domain.job.job import Job
from services.controller.ports.coordination import Ports
from services.controller.ports.machines import Log

_CHUNK = 1_000


async def history(ports: Ports, job_id: str) -> list[HistoryEntry]:
    """All that was decided about a job."""
    entries: list[HistoryEntry] = []
    after = None
    while page := await ports.telemetry.read(job_id, Log.HISTORY, after, _CHUNK):
        entries += [HistoryEntry.model_validate_json(entry.body) for entry in page]
        after = page[-1].id
    return entries


async def replay_all(ports: Ports) -> list[Job]:
    """Every job that is kept, each proved to be what its history makes of it."""
    return [await _replayed(ports, s.job.id) for s in await ports.jobs.page(None, 1_000)]


async def _replayed(ports: Ports, job_id: str) -> Job:
    while True:
        before = await ports.jobs.load(job_id)
        told = await history(ports, job_id)
        if await ports.jobs.load(job_id) == before:
            break  # else it changed between the two reads
    again = replay(told)
    assert again == before.job, f"{job_id} is not what its {len(told)} entries make of it"
    return again
