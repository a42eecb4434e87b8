"""A controller that plans jobs, on virtual time, and a node that a test speaks for."""

import asyncio
import math
from collections.abc import Awaitable, Callable

from services.contract.jobs.specs import JobSpec
from services.contract.messages.commands import LaunchGang
from services.contract.messages.probing import ModelProbed, NodeMeasured, ProbeFailure, ProbeModel
from services.controller.adapters.memory import memory_ports
from services.controller.adapters.memory.server import MemoryServer
from services.controller.domain.decisions.history import Occurrence
from services.controller.domain.job.events import (
    JobEvent,
)
from services.controller.domain.job.job import Job
from services.controller.domain.scheduling.node import Lease
from services.controller.ports.jobs import Actor, EventRecord
from services.controller.ports.machines import FactEntry, Log
from services.controller.use_cases.change import apply_events
from services.controller.use_cases.facts import apply_facts
from services.controller.use_cases.plan_jobs import Planner
from services.controller.use_cases.plans import Drawing
from services.controller.use_cases.reconcile import Reconciler
from services.controller.use_cases.submit import Submission, submit
from tests.controller.conftest import ANYTHING, job_body
from tests.controller.histories import NODE, NOW, node
from tests.controller.profiles import ARGS, FACTS, answer_to

ADA = Actor("ada")
DRAWING = Drawing(wait_s=0)


class Office:
    """A controller that leads, and a node that a test speaks for."""

    def __init__(self, *, joined: bool = True) -> None:
        self.now = NOW
        self.server = MemoryServer(lambda: self.now, epoch=1)
        self.ports = memory_ports(self.server)
        if joined:
            self.joins()
        self.new_leader()

    def joins(self, *, memory_bytes: int = 1 << 34) -> None:
        there = node()
        inventory = there.inventory.model_copy(update={"memory_bytes": memory_bytes})
        self.server.nodes[NODE] = there.model_copy(update={"inventory": inventory})
        self.server.leases[NODE] = Lease("life-1", 5_000)

    def new_leader(self, *, part_s: float = math.inf) -> None:
        """Another controller leads, which remembers nothing.

        ``part_s``: as the planner's; without an end, so that no look depends on how fast this machine is.
        """
        self._planner = Planner(self.ports, 1, DRAWING, part_s)
        self._reconciler = Reconciler(self.ports, 1)

    async def submits(self, **changes: object) -> str:
        return await self.gets(ADA, **changes)

    async def gets(self, actor: Actor, **changes: object) -> str:
        """A job of anybody's."""
        self.now += 1
        small = {"model": {"factory": "decoder", "args": ARGS}, "plan": "auto"}
        spec = JobSpec.model_validate(job_body(**small) | changes)
        return (await submit(self.ports, Submission(spec), actor, ANYTHING, DRAWING)).id

    async def plans(self) -> float:
        """The loop of plans looks; after how long it would again."""
        self.now += 100
        return await self._planner.look()

    async def looks(self, times: int = 2) -> None:
        """The loops of the leader look at everything."""
        for _ in range(times):
            self.now += 100
            await self._planner.look()
            await self._reconciler.look()

    async def job(self, job_id: str) -> Job:
        return (await self.ports.jobs.load(job_id)).job

    async def happens(self, job_id: str, event: JobEvent) -> None:
        await apply_events(self.ports, job_id, [Occurrence(event, self.now)], ADA)

    async def hears(self, *facts: ModelProbed | NodeMeasured) -> None:
        for fact in facts:
            self.now += 1
            await apply_facts(
                self.ports, [FactEntry(f"{self.now}-0", fact.model_dump_json(), fact.node_id)], 1
            )

    async def answers(self, question: ProbeModel | None = None, name: str = NODE) -> None:
        """A node profiles the model as it was last asked to; the first one measures itself."""
        known = NodeMeasured(node_id=NODE, incarnation="life-1", device_type="cpu", facts=FACTS)
        await self.hears(answer_to(question or self.asked()[-1], name), known)

    async def fails(self, code: str) -> None:
        failure = ProbeFailure.model_validate({"code": code, "reason": "it went wrong so"})
        asked = self.asked()[-1].probe_id
        await self.hears(ModelProbed(probe_id=asked, node_id=NODE, took_s=3, failure=failure))

    def asked(self) -> list[ProbeModel]:
        return [c for c in self.server.commands(NODE) if isinstance(c, ProbeModel)]

    def launched(self) -> list[LaunchGang]:
        return [c for c in self.server.commands(NODE) if isinstance(c, LaunchGang)]

    async def events(self, job_id: str) -> dict[str, str]:
        """What its log tells, by kind."""
        entries = await self.ports.telemetry.read(job_id, Log.EVENTS, None, 100)
        told = [EventRecord.model_validate_json(entry.body) for entry in entries]
        return {each.kind: each.message for each in told}


def play(course: Callable[[Office], Awaitable[None]], *, joined: bool = True) -> None:
    async def run() -> None:
        await course(Office(joined=joined))

    asyncio.run(run())
