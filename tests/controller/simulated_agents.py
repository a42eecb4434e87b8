"""Agents whose ranks are numbers: the real inbox, outbox and beats, and no process.

So one process can be the agents of a cluster.
"""

import asyncio
import contextlib
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Final

from services.contract.jobs.plans import RankPlacement
from services.contract.messages.commands import Command, CommitCheckpoint, LaunchGang
from services.contract.messages.facts import (
    CheckpointBegan,
    CheckpointLinked,
    CheckpointVoted,
    Fact,
    GangEnded,
    GangLaunched,
    GangProgressed,
    Inventory,
    NodeJoined,
    RankExit,
)
from services.contract.messages.telemetry import RankSample, StepRecord
from services.contract.storage.manifests import ShardFile
from services.contract.words.ids import checkpoint_id
from services.worker.agent.streams.inbox import Inbox
from services.worker.agent.streams.outbox import Outbox
from services.worker.agent.streams.redis_clients import (
    REDIS_AWAY,
    waiting_client,
    while_away,
    writing_client,
)
from services.worker.agent.telemetry.beat import Beat, GangKey
from services.worker.agent.telemetry.gang_telemetry import Records

_FIRST_PID: Final = 100


class SimulatedAgent:
    """The agent of one node in one life; run ``run`` as a task.

    Args:
        url: Of Redis.
        node_id: The node.
        slots: How many CPU ranks it takes.
        incarnation: The life, where its records are written already.
        gangs: Seats on this node that are taken already; their ranks train for ever.
            Of other jobs the ranks are done as soon as they were launched.
        beat_s: Seconds between two beats, each with a step and a sample of every rank.

    Attributes:
        starts: How often the ranks of an attempt were started.
        ended: The attempts whose ranks ended, a checkpoint at their last step being linked.
        beats: How many beats Redis has taken.
        step: The last step that all ranks told.
        telemetry_url: Where telemetry goes; unless it is set before ``run``, to the same Redis.
    """

    def __init__(
        self,
        url: str,
        node_id: str,
        slots: int,
        *,
        incarnation: str = "life-1",
        gangs: Mapping[GangKey, Sequence[RankPlacement]] | None = None,
        beat_s: float = 0.5,
    ) -> None:
        self.starts: Counter[GangKey] = Counter()
        self.ended: list[GangKey] = []
        self.beats = 0
        self.step = 0
        self._url = url
        self.telemetry_url = url
        self._node_id = node_id
        self._slots = slots
        self._incarnation = incarnation
        self._gangs = dict(gangs or {})
        self._open: dict[GangKey, list[RankPlacement]] = {}
        self._beat_s = beat_s

    async def run(self) -> None:
        """Join, unless it has ranks already, beat, and carry commands out; until cancelled."""
        async with (
            writing_client(self._url) as writing,
            waiting_client(self._url) as waiting,
            writing_client(self.telemetry_url) as telemetry,
        ):
            beat = Beat(writing, telemetry, self._node_id, self._incarnation)
            outbox = Outbox(writing, self._node_id)
            inbox = Inbox(
                waiting, self._node_id, self._handler(outbox), _refuse, outbox.acknowledge
            )
            async for attempt in while_away(_say_away):
                with attempt:
                    await self._beat_once(beat)
            if not self._gangs:
                outbox.tell(self._joined())
            async with asyncio.TaskGroup() as group:
                group.create_task(outbox.run())
                group.create_task(inbox.run())
                while True:
                    await asyncio.sleep(self._beat_s)
                    with contextlib.suppress(*REDIS_AWAY):  # the next one is the same again
                        await self._beat_once(beat)

    def _joined(self) -> NodeJoined:
        inventory = Inventory(
            hostname=self._node_id,
            cpu_slots=self._slots,
            cpu_count=self._slots,
            memory_bytes=1 << 40,
        )
        return NodeJoined(node_id=self._node_id, incarnation=self._incarnation, inventory=inventory)

    async def _beat_once(self, beat: Beat) -> None:
        step = self.step + 1
        samples = {key: [self._sample(key, s, step) for s in g] for key, g in self._gangs.items()}
        records = [
            Records(*key, steps=(_record(key[1], step),), logs=())
            for key, seats in self._gangs.items()
            if seats[0].rank == 0
        ]
        answer = await beat.renew(samples)
        if answer.taken_by is not None or answer.fenced or answer.unknown:
            raise AssertionError(f"the beat of {self._node_id} was refused: {answer}")
        await beat.write(self.beats + 1, answer.now_ms, samples, records)
        self.beats += 1
        self.step = step

    def _handler(self, outbox: Outbox) -> Callable[[Command], Awaitable[None]]:
        async def handle(command: Command) -> None:
            match command:
                case LaunchGang():
                    for fact in self._launched(command):
                        outbox.tell(fact)
                case CommitCheckpoint():
                    for fact in self._finished(command):
                        outbox.tell(fact)
                case _:
                    pass

        return handle

    def _launched(self, command: LaunchGang) -> list[Fact]:
        """The facts until the votes for the checkpoint at the last step, of which one is ordered."""
        key = (command.job_id, command.fence)
        if key in self.starts:  # it was sent again
            return []
        self.starts[key] += 1
        seats = [seat for seat in command.plan.ranks if seat.node_id == self._node_id]
        self._open[key] = seats
        about = {"job_id": command.job_id, "fence": command.fence, "node_id": self._node_id}
        step = command.spec.steps or 1
        saved = {"checkpoint_id": checkpoint_id(command.job_id, step, command.fence), "step": step}
        pids = {seat.rank: _FIRST_PID + seat.rank for seat in seats}
        return [
            GangLaunched.model_validate(about | {"pids": pids}),
            GangProgressed.model_validate(about | {"step": 1}),
            CheckpointBegan.model_validate(about | saved),
            *(
                CheckpointVoted.model_validate(about | saved | {"shard": _shard(seat), "loss": 2.0})
                for seat in seats
            ),
        ]

    def _finished(self, command: CommitCheckpoint) -> list[Fact]:
        """That the checkpoint at the last step is linked, and that the ranks have ended."""
        key = (command.job_id, command.fence)
        seats = self._open.pop(key, None)
        if seats is None:
            return []
        about = {"job_id": command.job_id, "fence": command.fence, "node_id": self._node_id}
        step = command.manifest.step
        self.ended.append(key)
        return [
            CheckpointLinked.model_validate(about | {"number": 2, "manifest": command.manifest}),
            GangEnded.model_validate(
                about | {"exits": [_exit(seat, step) for seat in seats], "last_step": step}
            ),
        ]

    def _sample(self, key: GangKey, seat: RankPlacement, step: int) -> RankSample:
        return RankSample(
            rank=seat.rank,
            local_rank=seat.local_rank,
            fence=key[1],
            node_id=self._node_id,
            device=seat.device,
            pid=_FIRST_PID + seat.rank,
            phase="FORWARD",
            unit="blocks.3",
            step=step,
            loss=2.0,
            step_time_s=1.0,
            memory_bytes=1 << 30,
            peak_bytes=1 << 30,
            issued={"dp_shard": 40 * step},
            completed={"dp_shard": 40 * step - 1},
        )


def _record(fence: int, step: int) -> StepRecord:
    return StepRecord(step=step, fence=fence, loss=2.0, tokens_per_s=1e6, step_time_s=1.0)


def _shard(seat: RankPlacement) -> ShardFile:
    return ShardFile(rank=seat.rank, name=f"rank-{seat.rank}.bin", bytes=7, sha256="ab" * 32)


def _exit(seat: RankPlacement, step: int) -> RankExit:
    return RankExit(
        rank=seat.rank,
        pid=_FIRST_PID + seat.rank,
        exit_code=0,
        order=seat.rank,
        step=step,
        phase="FINISHED",
        finished=True,
    )


def _say_away(_why: str) -> None:
    """Others say it."""


def _refuse(body: str, why: str) -> None:
    raise AssertionError(f"a command cannot be read: {why}: {body[:200]}")
