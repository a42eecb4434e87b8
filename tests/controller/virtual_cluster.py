"""The reconciler, honest agents and their ranks on virtual time: a step of every gang a second."""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from services.contract.api.requests import JobPatch
from services.contract.jobs.plans import GangPlan
from services.contract.messages.base import Address
from services.contract.messages.commands import (
    COMMAND,
    Command,
    CommitCheckpoint,
    LaunchGang,
    RetireCheckpoint,
    StopGang,
)
from services.contract.messages.facts import (
    CheckpointBegan,
    CheckpointLinked,
    CheckpointRetired,
    CheckpointVoted,
    ExitStanding,
    GangEnded,
    GangLaunched,
    GangProgressed,
    NodeLeaving,
    RankExit,
)
from services.contract.messages.telemetry import StepRecord
from services.contract.redis.redis_keys import NODE_LEASE_MS
from services.contract.words.ids import checkpoint_id, new_job_id
from services.contract.words.states import JobState
from services.controller.adapters.memory import memory_ports
from services.controller.adapters.memory.server import MemoryServer
from services.controller.domain.decisions.dispatch import first_decision
from services.controller.domain.decisions.history import Occurrence
from services.controller.domain.job.events import GangFact, JobEvent, PatchAsked
from services.controller.domain.job.job import Job
from services.controller.domain.scheduling.node import Lease, set_out
from services.controller.domain.scheduling.reservations import PoolLimits
from services.controller.ports.jobs import Actor
from services.controller.use_cases.change import apply_events
from services.controller.use_cases.reconcile import Reconciler
from tests.controller.histories import NOW, node, shard, spec

_STORE = Address(host="10.0.0.1", port=4711)
_SOMEBODY = Actor("test")


@dataclass
class Gang:
    """An attempt's ranks, as they really are."""

    launch: LaunchGang
    step: int
    nodes: set[str] = field(default_factory=set)
    saved: int = 0
    draining: bool = False

    @property
    def plan(self) -> GangPlan:
        return self.launch.plan

    @property
    def is_whole(self) -> bool:
        return self.nodes == {seat.node_id for seat in self.plan.ranks}


class VirtualCluster:
    """Nodes of so many CPU slots. All that is asynchronous ends before it returns.

    Attributes:
        now: Milliseconds.
        server: What Redis would hold.
    """

    def __init__(self, slots: Mapping[str, int]) -> None:
        self.now = NOW
        self.server = MemoryServer(lambda: self.now, epoch=1)
        self.ports = memory_ports(self.server)
        self.new_leader()
        self._up: dict[str, str] = {}
        self._lives: dict[str, int] = {}
        self._lease_ends: dict[str, int] = {}
        self._gangs: dict[tuple[str, int], Gang] = {}
        self._links = 1
        for name, count in slots.items():
            self.join(name, count)

    def new_leader(self) -> None:
        """Another controller leads, which remembers nothing."""
        self._reconciler = Reconciler(self.ports, 1)

    def use_pools(self, pools: Sequence[PoolLimits]) -> None:
        """Nodes may be asked of these."""
        self.ports = dataclasses.replace(self.ports, pools=tuple(pools))

    def join(self, name: str, slots: int) -> None:
        """A node comes, or comes back."""
        lives = self._lives[name] = self._lives.get(name, 0) + 1
        life = "life-1" + "+" * (lives - 1)
        self._up[name] = life
        update = {"incarnation": life, "joined_ms": self.now}
        self.server.nodes[name] = node(name, slots=slots).model_copy(update=update)

    def leaving(self, name: str, grace_s: float) -> None:
        """Its agent is told to end, and says so."""
        known = self.server.nodes[name]
        told = NodeLeaving(node_id=name, incarnation=self._up[name], grace_s=grace_s)
        self.server.nodes[name] = set_out(known, told, f"{self.now}-1")

    def lose(self, name: str) -> None:
        """A node is gone, and its ranks with it."""
        del self._up[name]
        for gang in self._gangs.values():
            gang.nodes.discard(name)

    async def crash(self, job_id: str) -> None:
        """A rank of its newest attempt is killed, and its agents end the others."""
        gang = self._gangs[job_id, (await self.job(job_id)).fence]
        await self._end(gang, gang.plan.ranks[0].node_id, signal=9, error="ended by SIGKILL")
        await self._obey()

    async def submit(self, **changes: object) -> str:
        """Queue a job; its id."""
        self.now += 1
        job = Job(
            id=new_job_id(self.now, bytes(10)),
            spec=spec(**changes),
            created_ms=self.now,
            updated_ms=self.now,
        )
        await self.ports.jobs.create(first_decision(job), _SOMEBODY, None)
        return job.id

    async def patch(self, job_id: str, **fields: object) -> None:
        """Change a job's spec."""
        await self._happen(job_id, PatchAsked(JobPatch.model_validate(fields)))

    async def seconds(self, count: int) -> None:
        """Let time pass."""
        for _ in range(count):
            self.now += 1_000
            for name in self._up:
                self._lease_ends[name] = self.now + NODE_LEASE_MS
            self.server.leases = {
                name: Lease(self.server.nodes[name].incarnation, end - self.now)
                for name, end in self._lease_ends.items()
                if end > self.now
            }
            await self._reconciler.look()
            await self._obey()
            await self._train()
            await self._obey()

    async def at_size(self, job_id: str, ranks: int, within_s: int = 30) -> Job:
        """The job once it trains on so many ranks."""
        for _ in range(within_s):
            job = await self.job(job_id)
            if self.size(job) == ranks:
                return job
            await self.seconds(1)
        raise AssertionError(f"not {ranks} ranks within {within_s} s: {(await self.job(job_id))}")

    async def job(self, job_id: str) -> Job:
        return (await self.ports.jobs.load(job_id)).job

    async def present(self, job_id: str) -> int:
        """On how many ranks it trains now."""
        return self.size(await self.job(job_id))

    def size(self, job: Job) -> int:
        """The same of a record; 0 where it does not."""
        return job.attempt.world_size if job.attempt and job.state == JobState.RUNNING else 0

    def nodes_of(self, job: Job) -> list[str]:
        """The node of each of its ranks."""
        return [] if job.plan is None else [seat.node_id for seat in job.plan.ranks]

    async def _happen(self, job_id: str, event: JobEvent) -> None:
        await apply_events(self.ports, job_id, [Occurrence(event, self.now)], _SOMEBODY)

    async def _obey(self) -> None:
        """Every agent that lives carries out all that it is told."""
        while any(self.server.inboxes[name] for name in self._up):
            for name in list(self._up):
                while self.server.inboxes[name]:
                    await self._carry_out(
                        COMMAND.validate_json(self.server.inboxes[name].pop(0)), name
                    )

    async def _carry_out(self, command: Command, name: str) -> None:
        match command:
            case LaunchGang(job_id=job_id, fence=fence):
                resumed = command.resume_from
                step = 0 if resumed is None else int(resumed.rsplit("-", 2)[1][1:])
                gang = self._gangs.setdefault((job_id, fence), Gang(command, step))
                gang.nodes.add(name)
                ranks = [s.rank for s in gang.plan.ranks if s.node_id == name]
                store = _STORE if 0 in ranks else None
                pids = {rank: 100 + rank for rank in ranks}
                await self._tell(gang, GangLaunched(**_by(gang, name), pids=pids, store=store))
            case StopGang(mode="drain", job_id=job_id, fence=fence):
                self._gangs[job_id, fence].draining = True
            case StopGang(job_id=job_id, fence=fence):
                gang = self._gangs[job_id, fence]
                if name in gang.nodes:
                    victim = {"signal": 9, "standing": ExitStanding.VICTIM}
                    await self._end(gang, name, **victim)
            case CommitCheckpoint(manifest=manifest):
                self._links += 1
                gang = self._gangs[manifest.job_id, manifest.fence]
                link = CheckpointLinked(**_by(gang, name), number=self._links, manifest=manifest)
                await self._tell(gang, link)
            case RetireCheckpoint(job_id=job_id, checkpoint_id=checkpoint):
                gang = next(g for (owner, _), g in self._gangs.items() if owner == job_id)
                fact = CheckpointRetired(**_by(gang, name), checkpoint_id=checkpoint)
                await self._tell(gang, fact)

    async def _train(self) -> None:
        for gang in [g for g in self._gangs.values() if g.nodes and g.is_whole]:
            asked = gang.launch.spec
            if gang.draining:
                await self._save(gang)
                await self._end_all(gang, drained=True)
                continue
            gang.step += 1
            record = StepRecord(
                step=gang.step,
                fence=gang.launch.fence,
                loss=1.0,
                tokens_per_s=1.0,
                step_time_s=1.0,
            )
            self.server.steps[gang.launch.job_id].append(record)
            head = gang.plan.ranks[0].node_id
            await self._tell(gang, GangProgressed(**_by(gang, head), step=gang.step))
            every = asked.checkpoint.every_steps
            if gang.step == asked.train.steps or (every and gang.step % every == 0):
                await self._save(gang)
            if gang.step == asked.train.steps:
                await self._end_all(gang)

    async def _save(self, gang: Gang) -> None:
        if gang.saved == gang.step:
            return
        gang.saved = gang.step
        name = checkpoint_id(gang.launch.job_id, gang.step, gang.launch.fence)
        about = {"checkpoint_id": name, "step": gang.step}
        for seat in gang.plan.ranks:
            by = _by(gang, seat.node_id) | about
            await self._tell(gang, CheckpointBegan.model_validate(by))
            await self._tell(gang, CheckpointVoted.model_validate(by | {"shard": shard(seat.rank)}))
        await self._obey()

    async def _end_all(self, gang: Gang, *, drained: bool = False) -> None:
        for name in sorted(gang.nodes):
            await self._end(gang, name, exit_code=0, finished=True, drained=drained)

    async def _end(self, gang: Gang, name: str, **how: object) -> None:
        gang.nodes.discard(name)
        exits = tuple(
            RankExit.model_validate(
                {"rank": s.rank, "pid": 1, "order": s.rank, "step": gang.step, "phase": "x"} | how
            )
            for s in gang.plan.ranks
            if s.node_id == name
        )
        await self._tell(gang, GangEnded(**_by(gang, name), exits=exits, last_step=gang.step))

    async def _tell(self, gang: Gang, fact: GangFact) -> None:
        await self._happen(gang.launch.job_id, fact)


def _by(gang: Gang, name: str) -> dict[str, object]:
    return {"job_id": gang.launch.job_id, "fence": gang.launch.fence, "node_id": name}
