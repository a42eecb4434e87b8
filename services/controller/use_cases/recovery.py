"""Jobs that Redis has lost come back from what agents find in storage."""

import structlog

from services.contract.messages.commands import StopGang
from services.contract.messages.facts import JobFound
from services.controller.domain.decisions.history import Occurrence
from services.controller.domain.decisions.recovery import found_again
from services.controller.domain.errors import NotFoundError, RecordUnreadableError
from services.controller.domain.job.effects import Send
from services.controller.domain.job.events import FoundInStorage
from services.controller.ports.coordination import Ports
from services.controller.ports.jobs import Actor
from services.controller.use_cases.change import apply_events
from services.controller.use_cases.clone import hold_origin

_log = structlog.get_logger()


async def recover_job(ports: Ports, fact: JobFound, now_ms: int, epoch: int) -> None:
    """Make the job again if it is unknown, then take in what storage tells of it.

    Its ranks, where they still train, are adopted; those of a job that people deleted are stopped.
    What a clone among them begins with is held for it again.

    Raises:
        DeposedError: ``epoch`` is over.
    """
    actor = Actor(f"agent:{fact.node_id}")
    if await ports.jobs.restore(found_again(fact, now_ms), actor, epoch):
        _log.warning("job_found_again", job_id=fact.job_id, checkpoints=len(fact.manifests))
    incarnations = {node.id: node.incarnation for node in await ports.nodes.nodes()}
    event = FoundInStorage(fact, incarnations)
    try:
        stored = await apply_events(ports, fact.job_id, [Occurrence(event, now_ms)], actor, epoch)
    except NotFoundError:
        if fact.is_running and await ports.jobs.was_deleted(fact.job_id):
            kill = StopGang(job_id=fact.job_id, fence=fact.fence, mode="kill")
            await ports.jobs.send((Send(fact.node_id, kill),), epoch)
    except RecordUnreadableError:
        _log.warning("found_job_is_unreadable", job_id=fact.job_id)
    else:
        await hold_origin(ports, stored.job, actor, epoch)
