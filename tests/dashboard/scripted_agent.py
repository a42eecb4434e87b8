"""An agent without ranks: it says to Redis what a real one would say, when a test wants it said."""

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeVar, cast

from pydantic import BaseModel
from redis import Redis

from services.contract.messages.base import OfAttempt
from services.contract.messages.commands import (
    COMMAND,
    Command,
    CommitCheckpoint,
    ExportCheckpoint,
    LaunchGang,
)
from services.contract.messages.facts import (
    CheckpointBegan,
    CheckpointExported,
    CheckpointLinked,
    CheckpointVoted,
    Evaluated,
    GangEnded,
    GangLaunched,
    GangProgressed,
    Inventory,
    NodeJoined,
    NodeLeft,
    RankExit,
)
from services.contract.messages.probing import NodeMeasured, ProbeModel
from services.contract.messages.telemetry import LogLine, MetricRecord, RankSample, StepRecord
from services.contract.redis import redis_keys
from services.contract.storage.exports import EXPORT_MANIFEST, ExportedFile, ExportManifest
from services.contract.storage.manifests import Manifest, ShardFile
from services.contract.words import ids
from services.contract.words.states import RankPhase
from tests.controller.agent_double import append_fact
from tests.controller.profiles import FACTS, answer_to
from tests.waiting import until

_LEASE_MS: Final = 600_000  # longer than any test: nothing renews it
_FIRST_STEP_MS: Final = 1_750_000_000_000
_C = TypeVar("_C", bound=BaseModel)


@dataclass(frozen=True)
class ScriptedAgent:
    """One life of an agent on a node of four CPU slots."""

    redis: Redis
    node_id: str = "loom-1"
    incarnation: str = "first"

    def join(self, slots: int = 4) -> None:
        lease = redis_keys.node_lease(self.node_id)
        self.redis.set(lease, self.incarnation, px=_LEASE_MS)
        inventory = Inventory(
            hostname="loom-1.example",
            cpu_slots=slots,
            cpu_count=slots,
            memory_bytes=16 << 30,
            versions={"torch": "2.13.0"},
        )
        self._tell(
            NodeJoined(node_id=self.node_id, incarnation=self.incarnation, inventory=inventory)
        )

    def launch(self, job_id: str) -> LaunchGang:
        """Wait for the command to launch a job's gang, and say that its ranks live."""
        command = self.command(LaunchGang, job_id)
        pids = {seat.rank: 4_000 + seat.rank for seat in command.plan.ranks}
        self._tell(
            GangLaunched(job_id=job_id, fence=command.fence, node_id=self.node_id, pids=pids)
        )
        return command

    def command(self, kind: type[_C], job_id: str) -> _C:
        """The newest command of a kind for a job, once there is one."""

        def look() -> _C | None:
            found = [
                c
                for c in self._inbox()
                if isinstance(c, kind) and isinstance(c, OfAttempt) and c.job_id == job_id
            ]
            return cast("_C", found[-1]) if found else None

        return until(look)

    def profile(self) -> None:
        """Wait until a model is to be profiled; answer, and tell what the node measured."""

        def look() -> ProbeModel | None:
            return next((c for c in self._inbox() if isinstance(c, ProbeModel)), None)

        question = until(look)
        self._tell(answer_to(question, self.node_id))
        self._tell(
            NodeMeasured(
                node_id=self.node_id,
                incarnation=self.incarnation,
                device_type="cpu",
                facts=FACTS,
            )
        )

    def train(self, gang: LaunchGang, steps: Iterable[int]) -> None:
        """Make steps: their records, and the fact of the first one."""
        numbers = list(steps)
        for step in numbers:
            record = StepRecord(
                step=step,
                fence=gang.fence,
                loss=1.5 + 4.0 / (1 + step / 20) + (0.05 if step % 2 else -0.05),
                grad_norm=1.0,
                learning_rate=1e-3,
                tokens_per_s=5_000.0 + 200 * (step % 5),
                step_time_s=0.31,
                memory_bytes=(1_000 + step) << 20,
                time_ms=_FIRST_STEP_MS + 400 * step,
            )
            self._append(redis_keys.job_steps(gang.job_id), record)
        self._tell(
            GangProgressed(
                job_id=gang.job_id, fence=gang.fence, node_id=self.node_id, step=numbers[0]
            )
        )

    def beat(self, gang: LaunchGang, step: int, phase: RankPhase = RankPhase.FORWARD) -> None:
        """Sample every rank's board; rank 1 is two collectives behind."""
        seconds, micros = self.redis.time()
        told: dict[str, str] = {}
        for seat in gang.plan.ranks:
            sample = RankSample(
                rank=seat.rank,
                local_rank=seat.local_rank,
                fence=gang.fence,
                node_id=self.node_id,
                device=seat.device,
                pid=4_000 + seat.rank,
                phase=phase.name,
                unit="blocks.3",
                step=step,
                loss=2.0,
                tokens_per_s=2_600.0,
                step_time_s=0.31,
                memory_bytes=(1 + seat.rank % 16) << 30,
                issued={"dp_shard": 100 - 2 * (seat.rank % 16)},
                completed={"dp_shard": 100 - 2 * (seat.rank % 16)},
                arrival_lag_s=0.2 * (seat.rank % 16),
                straggler_score=0.6 * (seat.rank == 1),
                seen_ms=seconds * 1000 + micros // 1000,
            )
            told[str(seat.rank)] = sample.model_dump_json()
        pairs = [part for pair in told.items() for part in pair]
        self.redis.hset(redis_keys.job_ranks(gang.job_id), items=pairs)

    def write(self, gang: LaunchGang, rank: int, text: str, *, is_error: bool = False) -> None:
        """Pass on a line that a rank wrote."""
        seconds, _ = self.redis.time()
        line = LogLine(
            rank=rank,
            fence=gang.fence,
            stream="stderr" if is_error else "stdout",
            level="error" if is_error else "info",
            time_ms=seconds * 1000,
            text=text,
        )
        self._append(redis_keys.job_logs(gang.job_id), line)

    def measure(self, gang: LaunchGang, steps: Iterable[int]) -> None:
        """The user's code measures at these steps, and after the last one in validation."""
        told = [(step, {"toString": step / 100, "accuracy": step / 150}) for step in steps]
        told.append((told[-1][0], {"validation/accuracy": 0.5}))
        for step, values in told:
            record = MetricRecord(step=step, fence=gang.fence, values=values)
            self._append(redis_keys.job_metrics(gang.job_id), record)

    def evaluate(self, gang: LaunchGang, step: int, loss: float) -> None:
        self._tell(
            Evaluated(
                job_id=gang.job_id,
                fence=gang.fence,
                node_id=self.node_id,
                step=step,
                loss=loss,
                tokens=60_000,
                baselines={"bigram": 2.43},
            )
        )

    def checkpoint(self, gang: LaunchGang, step: int) -> str:
        """Write, vote, and link when told to; returns the checkpoint's id."""
        name = ids.checkpoint_id(gang.job_id, step, gang.fence)
        self._tell(
            CheckpointBegan(
                job_id=gang.job_id,
                fence=gang.fence,
                node_id=self.node_id,
                checkpoint_id=name,
                step=step,
            )
        )
        for seat in gang.plan.ranks:
            shard = ShardFile(
                rank=seat.rank, name=f"rank-{seat.rank}.bin", bytes=16 << 20, sha256="ab" * 32
            )
            self._tell(
                CheckpointVoted(
                    job_id=gang.job_id,
                    fence=gang.fence,
                    node_id=self.node_id,
                    checkpoint_id=name,
                    step=step,
                    shard=shard,
                    loss=2.0,
                )
            )
        manifest: Manifest = self.command(CommitCheckpoint, gang.job_id).manifest
        assert manifest.checkpoint_id == name
        self._tell(
            CheckpointLinked(
                job_id=gang.job_id,
                fence=gang.fence,
                node_id=self.node_id,
                number=2,
                manifest=manifest,
            )
        )
        return name

    def export(self, job_id: str, root: Path, files: Mapping[str, bytes]) -> None:
        """Wait for the command to export a checkpoint, write these files, and say so."""
        command = self.command(ExportCheckpoint, job_id)
        folder = root / job_id / "exports" / command.checkpoint_id
        folder.mkdir(parents=True)
        named = [
            ExportedFile(name=name, bytes=len(body), sha256=hashlib.sha256(body).hexdigest())
            for name, body in files.items()
        ]
        for name, body in files.items():
            (folder / name).write_bytes(body)
        (folder / EXPORT_MANIFEST).write_text(ExportManifest(files=tuple(named)).model_dump_json())
        self._tell(
            CheckpointExported(
                job_id=job_id,
                fence=command.fence,
                node_id=self.node_id,
                checkpoint_id=command.checkpoint_id,
                files=tuple(files),
                bytes=sum(map(len, files.values())),
            )
        )

    def leave(self) -> None:
        """Say farewell; the lease is over."""
        self._tell(NodeLeft(node_id=self.node_id, incarnation=self.incarnation))
        self.redis.delete(redis_keys.node_lease(self.node_id))

    def crash(self, gang: LaunchGang, step: int, error: str, traceback: str) -> None:
        """End the gang by an exception on rank 1; the others are killed."""
        exits = [
            RankExit(
                rank=seat.rank,
                pid=4_000 + seat.rank,
                exit_code=1 if seat.rank == 1 else None,
                signal=None if seat.rank == 1 else 9,
                order=0 if seat.rank == 1 else 1,
                step=step,
                phase=RankPhase.FORWARD.name,
                error=error if seat.rank == 1 else None,
                traceback=traceback if seat.rank == 1 else None,
            )
            for seat in gang.plan.ranks
        ]
        self._end(gang, exits, step)

    def drain(self, gang: LaunchGang, step: int) -> None:
        """End the gang as a stop command asked."""
        exits = [
            RankExit(
                rank=seat.rank,
                pid=4_000 + seat.rank,
                exit_code=0,
                order=seat.rank,
                step=step,
                phase=RankPhase.FINISHED.name,
                drained=True,
            )
            for seat in gang.plan.ranks
        ]
        self._end(gang, exits, step)

    def _end(self, gang: LaunchGang, exits: list[RankExit], step: int) -> None:
        self._tell(
            GangEnded(
                job_id=gang.job_id,
                fence=gang.fence,
                node_id=self.node_id,
                exits=tuple(exits),
                last_step=step,
            )
        )

    def _inbox(self) -> list[Command]:
        entries = self.redis.xrange(redis_keys.node_inbox(self.node_id)) or []
        return [
            COMMAND.validate_json(fields[redis_keys.MESSAGE_FIELD])
            for _, fields in entries
            if fields
        ]

    def _tell(self, fact: BaseModel) -> None:
        append_fact(self.redis, self.node_id, fact.model_dump_json())

    def _append(self, stream: str, message: BaseModel) -> None:
        self.redis.xadd(stream, {redis_keys.MESSAGE_FIELD: message.model_dump_json()})
