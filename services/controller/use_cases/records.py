"""A job's curve and output, where the store has not all of it: an agent brings the rest from storage."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Final

import structlog

from services.contract.words.states import NodeState
from services.controller.domain.errors import RecordsAwayError
from services.controller.domain.job.job import Job
from services.controller.ports.coordination import Ports

PATIENCE_S: Final = 10.0
"""So long a request waits for them, where the store has nothing of them."""
IMPATIENCE_S: Final = 2.0
"""The same where the store has some, which are answered then."""
_LOOK_EVERY_S: Final = 0.05
_AreThere = Callable[[], Awaitable[bool]]
_log = structlog.get_logger()


async def bring_back(ports: Ports, job: Job) -> None:
    """Have the store hold all that is kept of a job's steps, metrics and output.

    What it has is all there is to be told where no node lives, or where one does not answer in time.

    Raises:
        RecordsAwayError: The same, and it has nothing.
    """

    async def are_there() -> bool:
        return await ports.telemetry.whole(job.id) is not None

    if job.fence == 0 or await are_there():
        return
    # An answer that came too late for who asked is there for the next.
    if await ports.telemetry.put_together(job.id, has_ended=job.is_terminal):
        return
    why = await _bring(ports, job, are_there)
    if why is not None and await ports.telemetry.is_empty(job.id):
        raise RecordsAwayError(f"steps, metrics and output of {job.id} are in storage; {why}")


async def await_records(ports: Ports, job_id: str) -> None:
    """Have them brought back before a turn for which others wait: agents may take long, or never answer.

    Raises:
        NotFoundError: There is no such job.
        RecordsAwayError: As ``bring_back``.
    """
    await bring_back(ports, (await ports.jobs.load(job_id)).job)


async def await_events(ports: Ports, job_id: str) -> None:
    """The same of a job's events.

    Raises:
        NotFoundError: There is no such job.
        RecordsAwayError: As ``bring_events_back``.
    """
    await bring_events_back(ports, (await ports.jobs.load(job_id)).job)


@contextlib.asynccontextmanager
async def brought_back(ports: Ports, job: Job) -> AsyncIterator[None]:
    """While what ``bring_back`` has the store hold is read, in however many parts.

    Raises:
        RecordsAwayError: As ``bring_back``, or because all of it was there and went meanwhile.
    """
    await bring_back(ports, job)
    whole = await ports.telemetry.whole(job.id)
    yield
    await refuse_gone(ports, job.id, whole)


async def refuse_gone(ports: Ports, job_id: str, whole: str | None) -> None:
    """What was read since ``Telemetry.whole`` answered ``whole`` may end where the rest of it went.

    Raises:
        RecordsAwayError: All was there, and is not any more.
    """
    if whole is not None and await ports.telemetry.whole(job_id) != whole:
        raise RecordsAwayError(
            f"steps, metrics and output of {job_id} went while they were read: retry"
        )


async def bring_events_back(ports: Ports, job: Job) -> None:
    """Have the store hold all of a job's events: they are told whole or not at all.

    Raises:
        RecordsAwayError: Storage has some of them, and no agent has brought them back yet.
    """

    async def are_there() -> bool:
        return not await ports.telemetry.lacks_events(job.id)

    if not await are_there():
        why = await _bring(ports, job, are_there)
        if why is not None:
            raise RecordsAwayError(f"the older events of {job.id} are in storage; {why}")


async def _bring(ports: Ports, job: Job, are_there: _AreThere) -> str | None:
    """Why nothing was brought back; None where all was."""
    nodes = await living_nodes(ports)
    if not nodes:
        return "no live agent can read them: retry when a node is back"
    chosen = job.head_node if job.head_node in nodes else nodes[0]
    if await _brought_back(ports, job, chosen, are_there):
        return None
    return f"the agent of {chosen} has not brought them back yet: retry"


async def _brought_back(ports: Ports, job: Job, node_id: str, are_there: _AreThere) -> bool:
    telemetry = ports.telemetry
    is_first = await telemetry.ask_back(job.id, job.fence, node_id)
    has_some = not await telemetry.is_empty(job.id)
    # Whom nobody answered is not waited for again by each request that has something to tell.
    patience_s = (IMPATIENCE_S if is_first else 0.0) if has_some else PATIENCE_S
    deadline = time.monotonic() + patience_s
    # Of all who wait one puts them together: for the others they are there.
    while not await telemetry.put_together(job.id, has_ended=job.is_terminal):
        if await are_there():
            return True
        if time.monotonic() >= deadline:
            _log.warning("records_not_back", job_id=job.id, node_id=node_id)
            return False
        await asyncio.sleep(_LOOK_EVERY_S)
    return True


async def living_nodes(ports: Ports) -> list[str]:
    """The ids of nodes that are ready and whose agents live."""
    nodes = [node for node in await ports.nodes.nodes() if node.state == NodeState.READY]
    leases = await ports.nodes.leases([node.id for node in nodes])
    return [n.id for n in nodes if n.id in leases and leases[n.id].incarnation == n.incarnation]
