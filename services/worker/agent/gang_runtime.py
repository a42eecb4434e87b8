"""One gang on this node: hears its ranks, performs what ``gang`` decides, and sees it to its end."""

import asyncio
import signal
import socket
import time
from collections.abc import Callable, Mapping
from typing import Final

import structlog

from services.contract.mask import Mask
from services.contract.messages.facts import Fact, GangEnded, RunningGang
from services.contract.messages.findings import Findings
from services.contract.messages.rank_pipe import RankMessage, RankReady, RankSeat
from services.contract.messages.telemetry import RankSample
from services.worker.agent.folders import AttemptFolder
from services.worker.agent.gang import (
    Condemned,
    Event,
    Exited,
    GangState,
    Instruct,
    Kill,
    LookedAt,
    LookedInto,
    LookInto,
    MessageCame,
    RankState,
    Stepped,
    Tell,
    Ticked,
    decide,
)
from services.worker.agent.memory_events import oom_kills
from services.worker.agent.processes import is_dying, kill_group, sweep_sessions
from services.worker.agent.rank_link import RankLink
from services.worker.agent.stacks import collect
from services.worker.agent.telemetry import GangTelemetry, Records
from services.worker.agent.verdict import exits

_PIPE_END_S: Final = 2.0
_SIGKILL: Final = int(signal.SIGKILL)
_log = structlog.get_logger()


class GangRuntime:
    """The live side of a gang.

    Args:
        seats: The seats of this node's ranks.
        pids: Their processes, by rank.
        node_id: This node.
        folder: The attempt's files.
        tell: Takes the facts, in order.
    """

    def __init__(
        self,
        seats: Mapping[int, RankSeat],
        pids: Mapping[int, int],
        node_id: str,
        folder: AttemptFolder,
        tell: Callable[[Fact], None],
    ) -> None:
        seat = next(iter(seats.values()))
        self.job_id = seat.job_id
        self.fence = seat.fence
        self.fenced = False
        self._node_id = node_id
        self._folder = folder
        self._tell = tell
        asked = seat.spec.faults.hang_timeout_s
        self._state = GangState(
            job_id=seat.job_id,
            fence=seat.fence,
            node_id=node_id,
            ranks={rank: RankState(rank, pid) for rank, pid in pids.items()},
            hang_timeout_s=None if asked == "auto" else asked,
        )
        self._mask = Mask(seat.secrets)
        self._telemetry = GangTelemetry(seats, pids, node_id, folder)
        self._links: dict[int, RankLink] = {}
        self._died_alone: set[int] = set()
        self._forker_gone = False
        self._ended_at: float | None = None
        self._looking: set[asyncio.Task[None]] = set()
        self._oom_kills_before = oom_kills()
        self._first_exit_at: float | None = None

    @property
    def pids(self) -> dict[int, int]:
        """The processes of all ranks, by rank."""
        return {rank.rank: rank.pid for rank in self._state.ranks.values()}

    @property
    def living(self) -> RunningGang | None:
        """The ranks that still live; None without any."""
        ranks = tuple(rank.rank for rank in self._state.ranks.values() if not rank.ended)
        if not ranks:
            return None
        return RunningGang(job_id=self.job_id, fence=self.fence, ranks=ranks)

    def connect(self, pipes: Mapping[int, socket.socket]) -> None:
        """Hear the ranks on these ends of their pipes, owned from now on."""
        for rank, channel in pipes.items():
            self._links[rank] = RankLink(channel, self._hearing(rank), self._mask)
        for link in self._links.values():
            link.listen()

    def reaped(self, pid: int, exit_code: int | None, ended_by: int | None) -> None:
        """One of the processes is dead."""
        if self._first_exit_at is None:
            self._first_exit_at = time.monotonic()
        for rank in self._state.ranks.values():
            if rank.pid == pid:
                # What it said before it died counts before its death.
                self._links[rank.rank].hear()
                by_itself = rank.rank in self._died_alone and not self._forker_gone
                self.happen(Exited(rank.rank, exit_code, ended_by, by_itself=by_itself))

    def forker_gone(self, reason: str) -> None:
        """The warm process died: the kernel kills the ranks, and nobody reaps them for us."""
        self._forker_gone = True
        self.happen(Condemned(reason))

    def fence_off(self) -> None:
        """A newer attempt is open: kill the ranks and report none of their doings any more."""
        if not self.fenced:
            _log.warning("gang_fenced", job=self.job_id, fence=self.fence)
            self.fenced = True
            self.happen(Condemned("a newer attempt of the job is open"))

    def happen(self, event: Event) -> None:
        """Decide upon an event and perform the effects."""
        self._state, effects = decide(self._state, event, time.monotonic())
        for effect in effects:
            match effect:
                case Tell(fact=fact):
                    if not self.fenced:
                        self._tell(fact)
                case Instruct(ranks=ranks, order=order):
                    for rank in ranks:
                        self._links[rank].send(order)
                case Kill(ranks=ranks):
                    for rank in ranks:
                        self._kill(rank)
                case LookInto():
                    task = asyncio.create_task(self._look_into(effect))
                    self._looking.add(task)
                    task.add_done_callback(self._looking.discard)

    def tick(self) -> None:
        """Look at the boards and the clock; to be called about ten times a second."""
        self._watch()
        if self._forker_gone:
            for rank in self._state.ranks.values():
                if not rank.ended and is_dying(rank.pid):
                    self.reaped(rank.pid, None, _SIGKILL)
        self.happen(LookedAt(self._telemetry.marks(), self._telemetry.usual_step_s()))
        self.happen(Ticked())

    def silent(self) -> bool:
        """Whether all ranks are reaped and all that they said on their pipes is heard.

        A process that a rank left behind can hold its pipe open: that is waited for briefly only.
        """
        if not self._state.ended:
            return False
        if self._ended_at is None:
            self._ended_at = time.monotonic()
        for link in self._links.values():
            link.hear()
        if all(link.closed for link in self._links.values()):
            return True
        return time.monotonic() > self._ended_at + _PIPE_END_S

    async def sweep(self, mark: str) -> None:
        """Kill what the ranks left behind, then read their boards to the end."""
        left = await asyncio.to_thread(sweep_sessions, mark, set(self.pids.values()))
        if left:
            _log.warning("left_by_ranks", job=self.job_id, pids=left)
        self._watch()

    def samples(self) -> list[RankSample]:
        """Where each rank stands."""
        return self._telemetry.samples(self._ready())

    def take_records(self) -> Records:
        """The steps and log lines for the next beat."""
        return self._telemetry.take(last=self._state.ended)

    def drained(self) -> bool:
        """Whether all steps and log lines were taken."""
        return self.fenced or self._telemetry.drained()

    def end(self) -> GangEnded:
        """How the gang ended."""
        seen = self._telemetry.last_seen()
        first = self._first_exit_at
        return GangEnded(
            job_id=self.job_id,
            fence=self.fence,
            node_id=self._node_id,
            exits=exits(self._state, seen),
            last_step=max(0, *(board.step for board in seen.values())),
            hang=self._state.hang,
            oom_kills=max(oom_kills() - self._oom_kills_before, 0),
            first_exit_s=None if first is None else time.monotonic() - first,
        )

    def conclude(self, end: GangEnded) -> None:
        """Record how the gang ended; its boards are given back.

        Raises:
            OSError: It could not be recorded.
        """
        for link in self._links.values():
            link.close()
        self._telemetry.close()
        try:
            self._folder.close(end)
        finally:
            self._folder.remove_boards()

    def _hearing(self, rank: int) -> Callable[[RankMessage], None]:
        def hear(message: RankMessage) -> None:
            self._watch()  # what its board showed before it spoke is told before
            self.happen(MessageCame(rank, message))

        return hear

    def _watch(self) -> None:
        for rank, step in self._telemetry.watch(self._ready()).items():
            self.happen(Stepped(rank, step))

    async def _look_into(self, wanted: LookInto) -> None:
        living = {r.rank: r.pid for r in self._state.ranks.values() if not r.ended}
        stacks = await collect(self._folder.path, living)
        ready = self._ready()
        found = [self._telemetry.find(r, ready[r], stacks.get(r)) for r in living]
        findings = Findings(
            why=wanted.why,
            still_s=wanted.stall.still_s,
            allowed_s=wanted.stall.allowed_s,
            ranks=tuple(found),
        )
        self.happen(LookedInto(findings))

    def _ready(self) -> dict[int, RankReady | None]:
        return {number: rank.ready for number, rank in self._state.ranks.items()}

    def _kill(self, rank: int) -> None:
        pid = self._state.ranks[rank].pid
        if is_dying(pid):
            self._died_alone.add(rank)
        kill_group(pid)
