"""Specs, plans and facts for tests of pure decisions."""

from collections.abc import Iterable, Sequence

from services.contract.jobs.specs import JobSpec
from services.contract.messages.commands import Command, KeepStanding
from services.contract.messages.facts import (
    CheckpointBegan,
    CheckpointLinked,
    CheckpointVoted,
    Device,
    ExitStanding,
    GangEnded,
    GangLaunched,
    GangProgressed,
    Inventory,
    RankExit,
)
from services.contract.storage.manifests import Manifest, ShardFile
from services.contract.words.ids import checkpoint_id, new_job_id
from services.contract.words.states import JobState, NodeState
from services.controller.domain.decisions.dispatch import decide
from services.controller.domain.job.effects import Decision
from services.controller.domain.job.events import GangPlaced, JobEvent
from services.controller.domain.job.job import Job
from services.controller.domain.plans import default_plan
from services.controller.domain.scheduling.node import Node
from services.controller.domain.scheduling.placement import GangRequest, NodeUsage, Placed, place

NOW = 1_000_000
NODE = "loom-1"
STEPS = 100


def spec(**changes: object) -> JobSpec:
    """A job of two ranks and 100 steps."""
    fields: dict[str, object] = {
        "model": {"factory": "decoder"},
        "data": {"factory": "stdlib_bytes"},
        "train": {"steps": STEPS, "global_batch": 12},
        "resources": {"ranks": 2},
        "checkpoint": {"keep_last": 2},
    }
    return JobSpec.model_validate(fields | changes)


def new_job(**changes: object) -> Job:
    return Job(id=new_job_id(NOW, bytes(10)), spec=spec(**changes), created_ms=NOW, updated_ms=NOW)


def node(
    name: str = NODE, *, slots: int = 4, gpus: int = 0, state: NodeState = NodeState.READY
) -> Node:
    devices = tuple(Device(index=i, name="H200", memory_bytes=1 << 37) for i in range(gpus))
    inventory = Inventory(
        hostname=name, cpu_slots=slots, cpu_count=8, memory_bytes=1 << 34, accelerators=devices
    )
    return Node(
        id=name, state=state, incarnation="life-1", inventory=inventory, joined_ms=1, fact_id="1-0"
    )


def placed(job: Job, incarnation: str = "life-1") -> GangPlaced:
    outcome = place(GangRequest.of(job.spec), [NodeUsage(node(slots=64))])
    assert isinstance(outcome, Placed)
    return GangPlaced(default_plan.gang(job.spec, outcome), {NODE: incarnation})


def play(job: Job, events: Iterable[JobEvent], now_ms: int = NOW) -> Decision:
    """All decisions on ``events`` as one."""
    decision = Decision(job)
    for event in events:
        decision = decision.then(decide(decision.job, event, now_ms))
    return decision


def commands(decision: Decision) -> list[Command]:
    """What agents are told to do, but for what storage is to remember."""
    sent = [send.command for send in decision.sends]
    return [command for command in sent if not isinstance(command, KeepStanding)]


def kept_standings(decision: Decision) -> list[JobState]:
    """Where storage is to remember that the job stands."""
    sent = [send.command for send in decision.sends]
    return [command.standing for command in sent if isinstance(command, KeepStanding)]


def running(**changes: object) -> Job:
    """A job whose first attempt has done its first step."""
    job = new_job(**changes)
    return play(job, [placed(job), launched(job), progressed(job)]).job


def _world(job: Job) -> int:
    return job.spec.worlds[0] if job.plan is None else job.plan.world_size


def launched(job: Job, fence: int = 1) -> GangLaunched:
    pids = {rank: 100 + rank for rank in range(_world(job))}
    return GangLaunched(job_id=job.id, fence=fence, node_id=NODE, pids=pids)


def progressed(job: Job, step: int = 1, fence: int = 1) -> GangProgressed:
    return GangProgressed(job_id=job.id, fence=fence, node_id=NODE, step=step)


def shard(rank: int) -> ShardFile:
    return ShardFile(rank=rank, name=f"rank-{rank}.bin", bytes=10, sha256=f"{rank:064x}")


def began(job: Job, step: int, fence: int = 1) -> CheckpointBegan:
    name = checkpoint_id(job.id, step, fence)
    return CheckpointBegan(job_id=job.id, fence=fence, node_id=NODE, checkpoint_id=name, step=step)


def vote(job: Job, step: int, rank: int, fence: int = 1, digest: str = "") -> CheckpointVoted:
    return CheckpointVoted(
        job_id=job.id,
        fence=fence,
        node_id=NODE,
        checkpoint_id=checkpoint_id(job.id, step, fence),
        step=step,
        shard=shard(rank),
        loss=2.0,
        data_digest=digest,
    )


def votes(job: Job, step: int, fence: int = 1) -> list[CheckpointVoted]:
    return [vote(job, step, rank, fence) for rank in range(_world(job))]


def linked(job: Job, step: int, fence: int = 1, number: int = 2) -> CheckpointLinked:
    manifest = Manifest(
        job_id=job.id,
        checkpoint_id=checkpoint_id(job.id, step, fence),
        fence=fence,
        step=step,
        world_size=_world(job),
        loss=2.0,
        shards=tuple(shard(rank) for rank in range(_world(job))),
    )
    return CheckpointLinked(
        job_id=job.id, fence=fence, node_id=NODE, number=number, manifest=manifest
    )


def saved(job: Job, step: int, fence: int = 1, number: int = 2) -> list[JobEvent]:
    """A checkpoint from its beginning to its commit."""
    return [
        began(job, step, fence),
        *votes(job, step, fence),
        linked(job, step, fence, number),
    ]


def ended(job: Job, exits: Sequence[RankExit], fence: int = 1) -> GangEnded:
    last = max(gone.step for gone in exits)
    return GangEnded(job_id=job.id, fence=fence, node_id=NODE, exits=tuple(exits), last_step=last)


def finished(job: Job, fence: int = 1, *, step: int = STEPS, drained: bool = False) -> GangEnded:
    exits = [
        RankExit(
            rank=rank,
            pid=100 + rank,
            exit_code=0,
            order=rank,
            step=step,
            phase="FINISHED",
            finished=True,
            drained=drained,
        )
        for rank in range(_world(job))
    ]
    return ended(job, exits, fence)


def crashed(
    job: Job,
    error: str,
    fence: int = 1,
    step: int = 5,
    standing: ExitStanding = ExitStanding.OWN_FAILURE,
) -> GangEnded:
    """Rank 1 raised; its agent killed the others."""
    exits = [
        RankExit(
            rank=rank,
            pid=100 + rank,
            exit_code=1 if rank == 1 else None,
            signal=None if rank == 1 else 9,
            order=0 if rank == 1 else 1 + rank,
            standing=standing if rank == 1 else ExitStanding.VICTIM,
            step=step,
            phase="FORWARD",
            error=error if rank == 1 else "killed by its agent: another rank of the gang failed",
            traceback=f"Traceback…\n{error}" if rank == 1 else None,
        )
        for rank in range(_world(job))
    ]
    return ended(job, exits, fence)


def killed(job: Job, fence: int = 1, step: int = 5) -> GangEnded:
    """Rank 0 was ended by SIGKILL from outside."""
    exits = [
        RankExit(
            rank=rank,
            pid=100 + rank,
            signal=9,
            order=rank,
            step=step,
            phase="FORWARD",
            error="ended by SIGKILL",
        )
        for rank in range(_world(job))
    ]
    return ended(job, exits, fence)
