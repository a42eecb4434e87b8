"""An agent without ranks: a test says what a real one would say, on the real streams."""

from collections.abc import Iterable
from typing import Final, TypeVar

from pydantic import BaseModel
from redis import Redis

from fsdp_core.plan.model import NodeFacts
from services.contract.messages.base import OfAttempt
from services.contract.messages.commands import COMMAND, Command, CommitCheckpoint, LaunchGang
from services.contract.messages.facts import (
    CheckpointBegan,
    CheckpointLinked,
    CheckpointVoted,
    GangEnded,
    GangLaunched,
    GangProgressed,
    Inventory,
    NodeJoined,
    NodeLeft,
    RankExit,
    RunningGang,
)
from services.contract.messages.probing import (
    ModelProbed,
    NodeMeasured,
    ProbeFailure,
    ProbeModel,
)
from services.contract.messages.telemetry import LogLine, MetricRecord, RankSample, StepRecord
from services.contract.redis import redis_keys as keys
from services.contract.storage.manifests import ShardFile
from services.contract.words.ids import checkpoint_id
from tests.controller.profiles import FACTS, answer_to
from tests.waiting import until

C = TypeVar("C", bound=BaseModel)
LONG_MS: Final = 600_000


def append_fact(redis: Redis, node_id: str, body: str | bytes) -> None:
    """As the agent of that node adds it."""
    with redis.pipeline(transaction=True) as pipe:
        pipe.rpush(keys.node_facts(node_id), body)
        pipe.rpush(keys.FACT_SENDERS, node_id)
        pipe.execute()


class AgentDouble:
    """The agent of one node of four CPU slots."""

    def __init__(self, redis: Redis, node_id: str = "loom-1") -> None:
        self._redis = redis
        self.node_id = node_id

    def join(
        self,
        incarnation: str = "life-1",
        *,
        slots: int = 4,
        lease_ms: int = LONG_MS,
        gangs: tuple[RunningGang, ...] = (),
    ) -> None:
        self._redis.set(keys.node_lease(self.node_id), incarnation, px=lease_ms)
        inventory = Inventory(hostname="loom", cpu_slots=slots, cpu_count=8, memory_bytes=1 << 34)
        self.tell(
            NodeJoined(
                node_id=self.node_id, incarnation=incarnation, inventory=inventory, gangs=gangs
            )
        )

    def leave(self, incarnation: str = "life-1") -> None:
        """Say farewell; the lease lives until the ranks are gone."""
        self.tell(NodeLeft(node_id=self.node_id, incarnation=incarnation))

    def lose_lease(self) -> None:
        self._redis.delete(keys.node_lease(self.node_id))

    def tell(self, fact: BaseModel) -> None:
        append_fact(self._redis, self.node_id, fact.model_dump_json())

    def commands(self) -> list[Command]:
        entries = self._redis.xrange(keys.node_inbox(self.node_id)) or []
        return [
            COMMAND.validate_json(fields[keys.MESSAGE_FIELD]) for _, fields in entries if fields
        ]

    def awaits(self, kind: type[C], job_id: str, fence: int = 1) -> C:
        """The newest such command, once it is there."""

        def look() -> C | None:
            for command in reversed(self.commands()):
                if (
                    isinstance(command, kind)
                    and isinstance(command, OfAttempt)
                    and command.job_id == job_id
                    and command.fence == fence
                ):
                    return command
            return None

        return until(look, every_s=0.01)

    def is_asked(self, number: int = 1) -> ProbeModel:
        """The question to profile a model, once that was asked so often."""

        def look() -> ProbeModel | None:
            asked = [c for c in self.commands() if isinstance(c, ProbeModel)]
            return asked[-1] if len(asked) >= number else None

        return until(look, every_s=0.01)

    def measures(self, facts: NodeFacts | None = FACTS, incarnation: str = "life-1") -> None:
        """Tell what its CPUs do."""
        self.tell(
            NodeMeasured(
                node_id=self.node_id, incarnation=incarnation, device_type="cpu", facts=facts
            )
        )

    def profiles(self, question: ProbeModel) -> None:
        """Answer with the profile of the small decoder, whatever was asked for."""
        self.tell(answer_to(question, self.node_id))

    def fails_to_profile(self, question: ProbeModel, failure: ProbeFailure) -> None:
        self.tell(
            ModelProbed(
                probe_id=question.probe_id, node_id=self.node_id, took_s=2.0, failure=failure
            )
        )

    def launches(self, job_id: str, fence: int = 1) -> LaunchGang:
        launch = self.awaits(LaunchGang, job_id, fence)
        pids = {seat.rank: 100 + seat.rank for seat in launch.plan.ranks}
        self.tell(GangLaunched(job_id=job_id, fence=fence, node_id=self.node_id, pids=pids))
        return launch

    def trains(self, gang: LaunchGang, steps: Iterable[int]) -> None:
        numbers = list(steps)
        for step in numbers:
            record = StepRecord(
                step=step,
                fence=gang.fence,
                loss=5.0 / step,
                tokens_per_s=1000,
                step_time_s=0.5,
            )
            self._append(keys.job_steps(gang.job_id), record)
        self.tell(
            GangProgressed(
                job_id=gang.job_id, fence=gang.fence, node_id=self.node_id, step=numbers[0]
            )
        )

    def tells_metrics(self, gang: LaunchGang, *records: MetricRecord) -> None:
        for record in records:
            told = record.model_copy(update={"fence": gang.fence})
            self._append(keys.job_metrics(gang.job_id), told)

    def samples(
        self,
        gang: LaunchGang,
        issued: Iterable[int],
        step: int = 3,
        scores: Iterable[float] | None = None,
        **memory: int,
    ) -> None:
        late = dict(enumerate(scores or ()))
        for seat, number in zip(gang.plan.ranks, issued, strict=True):
            sample = RankSample(
                rank=seat.rank,
                local_rank=seat.local_rank,
                fence=gang.fence,
                node_id=self.node_id,
                device=seat.device,
                pid=100 + seat.rank,
                phase="FORWARD",
                step=step,
                issued={"dp_shard": number},
                straggler_score=late.get(seat.rank),
                seen_ms=1_700_000_000_000,
                **{name: nbytes + seat.rank for name, nbytes in memory.items()},
            )
            self._redis.hset(keys.job_ranks(gang.job_id), str(seat.rank), sample.model_dump_json())

    def writes(
        self, gang: LaunchGang, rank: int, text: str, *, is_error: bool = False, time_ms: int = 1
    ) -> None:
        line = LogLine(
            rank=rank,
            fence=gang.fence,
            stream="stderr" if is_error else "stdout",
            level="error" if is_error else "info",
            time_ms=time_ms,
            text=text,
        )
        self._append(keys.job_logs(gang.job_id), line)

    def saves(self, gang: LaunchGang, step: int, number: int = 2, **figures: object) -> str:
        """Write, vote, wait for the command, link. ``figures`` are fields of each vote."""
        name = self.votes(gang, step, **figures)

        def look() -> CommitCheckpoint | None:
            for command in self.commands():
                if isinstance(command, CommitCheckpoint) and command.manifest.checkpoint_id == name:
                    return command
            return None

        commit = until(look, every_s=0.01)
        self.tell(
            CheckpointLinked(
                job_id=gang.job_id,
                fence=gang.fence,
                node_id=self.node_id,
                number=number,
                manifest=commit.manifest,
            )
        )
        return name

    def votes(self, gang: LaunchGang, step: int, **figures: object) -> str:
        name = checkpoint_id(gang.job_id, step, gang.fence)
        about = {
            "job_id": gang.job_id,
            "fence": gang.fence,
            "node_id": self.node_id,
            "checkpoint_id": name,
            "step": step,
        }
        self.tell(CheckpointBegan.model_validate(about))
        for seat in gang.plan.ranks:
            shard = ShardFile(
                rank=seat.rank, name=f"rank-{seat.rank}.bin", bytes=7, sha256="ab" * 32
            )
            self.tell(
                CheckpointVoted.model_validate(about | {"shard": shard, "loss": 1.0} | figures)
            )
        return name

    def ends(self, gang: LaunchGang, step: int, **how: object) -> None:
        """End all ranks alike: ``how`` are fields of their exits."""
        exits = tuple(
            RankExit.model_validate(
                {
                    "rank": seat.rank,
                    "pid": 100 + seat.rank,
                    "order": seat.rank,
                    "step": step,
                    "phase": "FORWARD",
                }
                | (how or {"exit_code": 0, "finished": True})
            )
            for seat in gang.plan.ranks
        )
        self.tell(
            GangEnded(
                job_id=gang.job_id,
                fence=gang.fence,
                node_id=self.node_id,
                exits=exits,
                last_step=step,
            )
        )

    def _append(self, stream: str, message: BaseModel) -> None:
        self._redis.xadd(stream, {keys.MESSAGE_FIELD: message.model_dump_json()})
