"""The slots that there are, and why jobs wait for some, worked out when somebody asks.

It follows from who runs and who goes first, so each end of a job changes it for all that wait: a
record that kept it would be rewritten each time.
"""

import asyncio
import contextlib
from collections.abc import Mapping, Sequence
from typing import Final

from services.controller.domain.errors import StoreUnavailableError
from services.controller.domain.job.job import WAITING_STATES, Job
from services.controller.domain.scheduling.placement import NodeUsage, Placed, usages_of
from services.controller.domain.scheduling.queue import Turn
from services.controller.domain.scheduling.reservations import (
    Reservation,
    reserved_nodes,
    why_waiting,
)
from services.controller.domain.scheduling.survey import Snapshot, Survey
from services.controller.ports.coordination import Ports
from services.controller.use_cases.outlook import expect

# To hand so few to a thread takes longer than to go through them.
_FEW_JOBS: Final = 64


async def current_usages(
    ports: Ports, active: Sequence[Job] | None = None
) -> tuple[NodeUsage, ...]:
    """The nodes with what is taken of them by ``active``: all active jobs, read if they are not given."""
    if active is None:
        active = [stored.job for stored in await ports.jobs.active()]
    nodes = await ports.nodes.nodes()
    leases = await ports.nodes.leases([node.id for node in nodes])
    return usages_of(nodes, active, leases, reserved_nodes(await reservations_now(ports)))


async def reservations_now(ports: Ports) -> Sequence[Reservation]:
    """All that there are; nobody makes any where no pool is configured."""
    return await ports.reservations.reservations() if ports.pools else ()


async def survey(
    ports: Ports, snapshot: Snapshot, now_ms: int, last: Survey | None = None
) -> Survey:
    """The schedule of the queue; ``last`` itself where that still holds."""
    if last is not None and last.holds(snapshot, now_ms):
        return last
    outlook = await expect(ports, snapshot.jobs, now_ms)
    if len(snapshot.jobs) <= _FEW_JOBS:
        return Survey.of(snapshot, outlook, now_ms)
    # Beside the event loop, which also renews the lead: thousands that wait for a hundred nodes take
    # a fifth of a second.
    return await asyncio.to_thread(Survey.of, snapshot, outlook, now_ms)


async def turns_now(ports: Ports, active: Sequence[Job]) -> Mapping[str, Turn]:
    """What is to become of each job that has a turn now, by id; ``active``: all active jobs.

    All who ask at once are answered by one survey.
    """
    nodes = await ports.nodes.nodes()
    leases = await ports.nodes.leases([node.id for node in nodes])
    reserved = reserved_nodes(await reservations_now(ports))
    snapshot = Snapshot(tuple(active), tuple(nodes), leases, reserved)
    async with ports.surveyed.lock:
        now_ms = await ports.clock.now_ms()
        ports.surveyed.last = await survey(ports, snapshot, now_ms, ports.surveyed.last)
        return ports.surveyed.last.turns


async def with_reasons(ports: Ports, jobs: Sequence[Job]) -> list[Job]:
    """The same jobs; those that wait for slots say why, as it is now.

    Others, and all of them while Redis does not tell who runs, say what their records say.
    """
    if not any(_has_turn(job) for job in jobs):
        return list(jobs)
    found: Mapping[str, Turn] = {}
    coming: Sequence[Reservation] = ()
    with contextlib.suppress(StoreUnavailableError):
        active = [stored.job for stored in await ports.jobs.active()]
        coming = await reservations_now(ports)
        found = await turns_now(ports, active)
    return [_saying(job, found.get(job.id), coming) if _has_turn(job) else job for job in jobs]


def reason_of(turn: Turn, reservations: Sequence[Reservation] = ()) -> str:
    """Why the job still waits, in a sentence."""
    said = why_waiting(turn.job.id, reservations)
    if said is not None:
        return said
    if isinstance(turn.outcome, Placed):
        return f"there are free slots on {', '.join(turn.outcome.incarnations)}: it is placed next"
    return turn.outcome.reason


def _saying(job: Job, turn: Turn | None, coming: Sequence[Reservation]) -> Job:
    return job if turn is None else job.model_copy(update={"reason": reason_of(turn, coming)})


def _has_turn(job: Job) -> bool:
    return job.state in WAITING_STATES and job.attempt is None and job.planning is None
