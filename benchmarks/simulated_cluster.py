"""Nodes, agents and jobs for benchmarks of the control plane, as agents and controllers leave them in Redis.

Records are made by the controller's own decisions and written by its own store; what agents would tell is
written in the messages of the contract. No rank runs.
"""

import asyncio
import contextlib
import os
from collections.abc import Coroutine, Iterable, Sequence
from typing import Any, Final

from redis import Redis

from services.contract.jobs.specs import JobSpec
from services.contract.messages.facts import (
    CheckpointBegan,
    CheckpointLinked,
    CheckpointVoted,
    GangEnded,
    GangLaunched,
    GangProgressed,
    Inventory,
    RankExit,
)
from services.contract.messages.telemetry import RankSample, StepRecord
from services.contract.redis import redis_keys as keys
from services.contract.storage.manifests import Manifest, ShardFile
from services.contract.words.ids import checkpoint_id, new_job_id
from services.contract.words.states import NodeState
from services.controller.domain.decisions.dispatch import decide, first_decision
from services.controller.domain.errors import StoreUnavailableError
from services.controller.domain.job.effects import Decision
from services.controller.domain.job.events import GangPlaced, JobEvent
from services.controller.domain.job.job import Job
from services.controller.domain.plans import default_plan
from services.controller.domain.scheduling.node import Node
from services.controller.domain.scheduling.placement import GangRequest, NodeUsage, Placed, place
from services.controller.ports.coordination import Ports
from services.controller.ports.jobs import Actor

STEPS: Final = 100
NODES_A_JOB: Final = 2
SPARE_NODE: Final = "spare"
_ACTOR: Final = Actor("benchmark")
_LIFE: Final = "life-1"
_LEASE_MS: Final = 3_600_000
_STEPS_TOLD: Final = 40
_AT_ONCE: Final = 32
_TRIES: Final = 10
_DIGEST: Final = "ab" * 32


def spec(ranks: int, **changes: object) -> JobSpec:
    """A job of so many CPU ranks whose layout is not open, so that nobody profiles its model."""
    fields: dict[str, object] = {
        "name": "benchmark",
        "model": {"factory": "decoder"},
        "data": {"factory": "stdlib_bytes"},
        "train": {"steps": STEPS, "global_batch": ranks},
        "resources": {"ranks": ranks},
        "plan": "default",
        "labels": {"team": "benchmark"},
    }
    return JobSpec.model_validate(fields | changes)


class SimulatedCluster:
    """What a cluster leaves in Redis.

    Args:
        redis: The same Redis as that of ``ports``.
        ports: The controller's.
        ranks: How many ranks each job that runs or waits has.
    """

    def __init__(self, redis: Redis, ports: Ports, ranks: int) -> None:
        self._redis = redis
        self._ports = ports
        self._ranks = ranks
        self.running: list[Job] = []

    async def fill(self, epoch: int, *, ended: int, waiting: int, running: int) -> None:
        """Write so many jobs more, and the nodes for those that run, in the name of ``epoch``."""
        await self._add_nodes(epoch, running)
        await self._add_running(epoch, running)
        await self._add_ended(epoch, ended)
        await self.add_waiting(waiting)

    async def add_waiting(self, count: int) -> None:
        """Queue so many jobs more, each as large as those that run."""
        now_ms = await self._ports.clock.now_ms()

        async def add(number: int) -> None:
            job = _new_job(spec(self._ranks), now_ms + number)
            await self._ports.jobs.create(first_decision(job), _ACTOR, None)

        await _in_turns(add(number) for number in range(count))

    def end(self, job: Job) -> None:
        """Tell the controller, as the agents do, that a job that runs has finished its last step."""
        for node_id in _nodes_of(job):
            self._redis.rpush(keys.node_facts(node_id), _ended(job, node_id).model_dump_json())
            self._redis.rpush(keys.FACT_SENDERS, node_id)

    async def _add_nodes(self, epoch: int, running: int) -> None:
        slots = -(-self._ranks // NODES_A_JOB)
        nodes = [simulated_node(name, slots) for name in _node_names(running)]
        nodes.append(simulated_node(SPARE_NODE, 64))
        for node in nodes:
            await self._ports.nodes.put(node, epoch, None)
            self._redis.set(keys.node_lease(node.id), _LIFE, px=_LEASE_MS)

    async def _add_running(self, epoch: int, count: int) -> None:
        now_ms = await self._ports.clock.now_ms()
        first, second = _node_names(1)
        template = _trained(_new_job(spec(self._ranks), now_ms), (first, second), now_ms)
        for number, names in enumerate(_pairs(_node_names(count))):
            new = _renamed(
                template, now_ms + number, dict(zip((first, second), names, strict=True))
            )
            await self._restore(new, epoch)
            self._tell_telemetry(new)
            self.running.append(new)

    async def _add_ended(self, epoch: int, count: int) -> None:
        now_ms = await self._ports.clock.now_ms() - count
        names = _node_names(1)
        template = _trained(_new_job(spec(2), now_ms), names, now_ms)
        for name in names:
            template = decide(template, _ended(template, name), now_ms).job
        if not template.is_terminal:
            raise AssertionError(f"the template of jobs that have ended is {template.state}")

        async def add(number: int) -> None:
            new = _renamed(template, now_ms + number, {})
            await self._restore(new, epoch)

        await _in_turns(add(number) for number in range(count))

    async def _restore(self, job: Job, epoch: int) -> None:
        """Write it; again if Redis did not answer in time, for one that is there stays as it is."""
        for _ in range(_TRIES):
            with contextlib.suppress(StoreUnavailableError):
                await self._ports.jobs.restore(Decision(job), _ACTOR, epoch)
                return
        raise StoreUnavailableError(f"Redis did not take {job.id} in {_TRIES} tries")

    def _tell_telemetry(self, job: Job) -> None:
        seats = () if job.plan is None else job.plan.ranks
        with self._redis.pipeline(transaction=False) as pipe:
            for seat in seats:
                sample = RankSample(
                    rank=seat.rank,
                    local_rank=seat.local_rank,
                    fence=job.fence,
                    node_id=seat.node_id,
                    device=seat.device,
                    pid=100 + seat.rank,
                    phase="FORWARD",
                    unit="blocks.3",
                    step=_STEPS_TOLD,
                    loss=2.0,
                    step_time_s=1.0,
                    memory_bytes=1 << 30,
                    peak_bytes=1 << 30,
                    issued={"dp_shard": 4_000},
                    completed={"dp_shard": 3_999},
                    seen_ms=job.updated_ms,
                )
                pipe.hset(keys.job_ranks(job.id), str(seat.rank), sample.model_dump_json())
            for step in range(1, _STEPS_TOLD + 1):
                record = StepRecord(
                    step=step, fence=job.fence, loss=2.0, tokens_per_s=1e6, step_time_s=1.0
                )
                pipe.xadd(keys.job_steps(job.id), {keys.MESSAGE_FIELD: record.model_dump_json()})
            pipe.execute()


async def _in_turns(work: Iterable[Coroutine[Any, Any, None]]) -> None:
    """Do all of it, some at a time."""
    places = asyncio.Semaphore(_AT_ONCE)

    async def one(each: Coroutine[Any, Any, None]) -> None:
        async with places:
            await each

    await asyncio.gather(*(one(each) for each in work))


def _new_job(wanted: JobSpec, now_ms: int) -> Job:
    return Job(
        id=new_job_id(now_ms, os.urandom(10)),
        spec=wanted,
        reason="queued",
        created_ms=now_ms,
        updated_ms=now_ms,
    )


def _trained(job: Job, names: Sequence[str], now_ms: int) -> Job:
    """The job after two checkpoints, the second at its last step; its ranks have not ended yet."""
    ranks = job.spec.worlds[0]
    placed = place(
        GangRequest.of(job.spec),
        [NodeUsage(simulated_node(name, -(-ranks // len(names)))) for name in names],
    )
    if not isinstance(placed, Placed):
        raise TypeError(f"the benchmark's nodes do not hold its job: {placed.reason}")
    events: list[JobEvent] = [GangPlaced(default_plan.gang(job.spec, placed), placed.incarnations)]
    about: dict[str, Any] = {"job_id": job.id, "fence": 1}
    for name in names:
        pids = {seat.rank: 100 + seat.rank for seat in placed.ranks if seat.node_id == name}
        events.append(GangLaunched(**about, node_id=name, pids=pids))
    events += [GangProgressed(**about, node_id=name, step=1) for name in names]
    for number, step in enumerate((STEPS // 2, STEPS), 2):
        its = about | {"checkpoint_id": checkpoint_id(job.id, step, 1), "step": step}
        shards = tuple(
            ShardFile(rank=r, name=f"rank-{r:05d}.safetensors", bytes=1 << 20, sha256=_DIGEST)
            for r in range(ranks)
        )
        events.append(CheckpointBegan(**its, node_id=names[0]))
        events += [
            CheckpointVoted(**its, node_id=seat.node_id, shard=shards[seat.rank], loss=2.0)
            for seat in placed.ranks
        ]
        manifest = Manifest(**its, world_size=ranks, loss=2.0, shards=shards)
        events.append(CheckpointLinked(**about, node_id=names[0], number=number, manifest=manifest))
    for event in events:
        job = decide(job, event, now_ms).job
    return job


def _renamed(template: Job, created_ms: int, nodes: dict[str, str]) -> Job:
    """The same job under another id, on other nodes."""
    new_id = new_job_id(created_ms, os.urandom(10))

    def rename(text: str) -> str:
        text = text.replace(template.id.removeprefix("job_"), new_id.removeprefix("job_"))
        for old, new in nodes.items():
            text = text.replace(f'"{old}"', f'"<{new}>"')
        return text.replace('"<', '"').replace('>"', '"')

    job = Job.model_validate_json(rename(template.model_dump_json()))
    kind = type(next(iter(template.checkpoints.values())))
    indexed = [
        kind.model_validate_json(rename(c.model_dump_json())) for c in template.checkpoints.values()
    ]
    changes = {"checkpoints": {c.id: c for c in indexed}, "created_ms": created_ms}
    return job.model_copy(update=changes)


def _ended(job: Job, node_id: str) -> GangEnded:
    seats = () if job.plan is None else job.plan.ranks
    exits = tuple(
        RankExit(
            rank=seat.rank,
            pid=100 + seat.rank,
            exit_code=0,
            order=seat.rank,
            step=STEPS,
            phase="FINISHED",
            finished=True,
        )
        for seat in seats
        if seat.node_id == node_id
    )
    return GangEnded(job_id=job.id, fence=job.fence, node_id=node_id, exits=exits, last_step=STEPS)


def _nodes_of(job: Job) -> tuple[str, ...]:
    return () if job.attempt is None else tuple(job.attempt.incarnations)


def _node_names(jobs: int) -> list[str]:
    return [f"sim-{number:05d}" for number in range(jobs * NODES_A_JOB)]


def _pairs(names: Sequence[str]) -> Iterable[Sequence[str]]:
    return (names[n : n + NODES_A_JOB] for n in range(0, len(names), NODES_A_JOB))


def simulated_node(name: str, slots: int) -> Node:
    """A node that is ready, with so many CPU slots."""
    inventory = Inventory(hostname=name, cpu_slots=slots, cpu_count=slots, memory_bytes=1 << 40)
    return Node(
        id=name,
        state=NodeState.READY,
        incarnation=_LIFE,
        inventory=inventory,
        joined_ms=1,
        fact_id="1-0",
    )
