"""One gang on this node: hears its ranks, performs what ``gang`` decides, and sees it to its end."""

import asyncio
import contextlib
import dataclasses
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Coroutine, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Final

import structlog

from services.contract.jobs.plans import GangPlan
from services.contract.jobs.specs import JobSpec
from services.contract.messages.commands import LaunchGang
from services.contract.messages.facts import (
    Fact,
    GangEnded,
    GangLaunched,
    RankExit,
    ReplicaLost,
    RunningGang,
    TraceRecorded,
)
from services.contract.messages.findings import Findings, in_brief
from services.contract.messages.rank_pipe import (
    RankMessage,
    RankMetrics,
    RankReady,
    RankSeat,
    RankVote,
)
from services.contract.messages.telemetry import RankSample
from services.contract.system.pipe_end import PipeEnd
from services.contract.words.bounds import within_room
from services.worker.agent.gangs.decisions import decide
from services.worker.agent.gangs.events import (
    CheckVote,
    Condemned,
    Event,
    Exited,
    Instruct,
    Kill,
    LookedAt,
    LookedInto,
    LookInto,
    MessageCame,
    Misbehaved,
    ReplicaLaunched,
    Stepped,
    Tell,
    TellLost,
    Ticked,
    VoteChecked,
    VoteWaits,
)
from services.worker.agent.gangs.exit_order import aborted_for_memory, exits, lost_thread
from services.worker.agent.gangs.state import GangState, RankState
from services.worker.agent.gangs.trace_files import TraceFiles
from services.worker.agent.gangs.vote_check import VoteCheck
from services.worker.agent.host.connections import unanswered
from services.worker.agent.host.folders import AttemptFolder
from services.worker.agent.host.memory_events import oom_kills
from services.worker.agent.host.processes import (
    STOPPED,
    is_dying,
    kill_group,
    kill_tracers,
    process_state,
    sweep_sessions,
)
from services.worker.agent.host.stacks import collect
from services.worker.agent.ranks.launch import Crew
from services.worker.agent.ranks.rank_link import RankLink
from services.worker.agent.storage.shared_files import SharedFiles
from services.worker.agent.telemetry.cut_links import CutLinks
from services.worker.agent.telemetry.gang_telemetry import GangTelemetry, Records
from services.worker.agent.telemetry.hang import Mark

_PIPE_END_S: Final = 2.0
_REAPED_WITHIN_S: Final = 1.0
_HELD_LOOKS: Final = 120
_FOUND_BYTES: Final = 3 << 20  # of a fact; one that is too long is not taken
_SIGKILL: Final = int(signal.SIGKILL)
# What may be changed of a spec after the job was submitted: ranks that live go on as they are.
_PATCHED: Final[Mapping[str, bool | set[str]]] = {
    "priority": True,
    "labels": True,
    "checkpoint": {"keep_last", "keep_best"},
    "faults": {"max_restarts"},
    "resources": {"world"},
    "train": {"micro_batch"},  # one that was chosen gives way to new bounds
}
_log = structlog.get_logger()


class GangRuntime:
    """The live side of a gang.

    Args:
        crew: Its ranks, with what is open of them, owned from now on.
        node_id: This node.
        folder: The attempt's files.
        files: The storage of checkpoints.
        tell: Takes the facts, in order.
    """

    def __init__(
        self,
        crew: Crew,
        node_id: str,
        folder: AttemptFolder,
        files: SharedFiles,
        tell: Callable[[Fact], None],
    ) -> None:
        seat = next(iter(crew.seats.values()))
        self.job_id = seat.job_id
        self.fence = seat.fence
        self.code = seat.spec.code
        self.launched = GangLaunched(
            job_id=seat.job_id,
            fence=seat.fence,
            node_id=node_id,
            pids=crew.pids,
            store=crew.store,
            addresses=crew.addresses,
        )
        self.fenced = False
        self._asked = seat.spec, seat.plan, seat.resume_from
        self._node_id = node_id
        self._folder = folder
        self._tell = tell
        asked = seat.spec.faults.hang_timeout_s
        self._state = GangState(
            job_id=seat.job_id,
            fence=seat.fence,
            node_id=node_id,
            ranks={rank: RankState(rank, pid) for rank, pid in crew.pids.items()},
            storage_root=Path(seat.storage_root),
            resume_from=seat.resume_from,
            hang_timeout_s=None if asked == "auto" else asked,
            is_script=seat.spec.entrypoint is not None,
            replica_size=(seat.plan.replica_size if seat.spec.continues_without_replicas else None),
            lives=dict.fromkeys(crew.stores, 1),
            stores=crew.stores,
        )
        self._seats = dict(crew.seats)
        self._telemetry = GangTelemetry(crew, node_id, folder, _in_a_thread)
        self._votes = VoteCheck(
            files, seat.job_id, len(crew.seats), self._vote_checked, self._vote_waits
        )
        self._pipes = dict(crew.pipes)
        self._links: dict[int, RankLink] = {}
        self._died_alone: set[int] = set()
        self._forker_gone = False
        self._ended_at: float | None = None
        self._lacked_memory: frozenset[int] = frozenset()
        self._looking: set[asyncio.Task[None]] = set()
        self._freeing: set[asyncio.Task[None]] = set()
        self._traces = TraceFiles(files, self._state.storage_root, self._tell_unless_fenced)
        self._oom_kills_before = oom_kills()
        self._first_exit_at: float | None = None
        self._looked_for_dead_at = time.monotonic()
        self._unreaped: Counter[int] = Counter()
        self._reaped: dict[int, tuple[int | None, int | None]] = {}
        self._marks: dict[int, Mark] = {}
        self._cut_links = CutLinks()

    def is_of(self, command: LaunchGang) -> bool:
        """Whether its ranks do what this command asks for; what a patch changes is not for them."""
        asked = command.spec, command.plan, command.resume_from
        return _as_text(*asked) == _as_text(*self._asked)

    def has(self, pid: int) -> bool:
        """Whether a rank that is not reaped yet has this process id."""
        return pid not in self._reaped and any(
            rank.pid == pid and not rank.ended for rank in self._state.ranks.values()
        )

    @property
    def living(self) -> RunningGang | None:
        """The ranks that still live; None without any."""
        ranks = tuple(rank.rank for rank in self._state.ranks.values() if not rank.ended)
        if not ranks:
            return None
        return RunningGang(job_id=self.job_id, fence=self.fence, ranks=ranks)

    @property
    def ended(self) -> bool:
        """Whether no rank lives, and none is to come back: one that was started since must not."""
        return self._state.ended

    def connect(self) -> None:
        """Begin to hear the ranks."""
        for rank, end in self._pipes.items():
            self._connect(rank, end)

    def seats_to_return(self, replica: int, life: int) -> Mapping[int, RankSeat]:
        """The seats of a replica that is to be started for the ``life``-th time; none if it was, or must not be."""
        is_due = replica in self._state.lost and life > self._state.lives[replica]
        if self.fenced or self.ended or self._state.stopped is not None or not is_due:
            return {}
        size = self._state.replica_size or 1
        return {rank: seat for rank, seat in self._seats.items() if rank // size == replica}

    def returned(self, replica: int, life: int, crew: Crew) -> None:
        """The ranks of a lost replica were started again; what is open of them is owned from now on."""
        for rank, end in crew.pipes.items():
            self._links[rank].close()
            self._pipes[rank] = end
        self._died_alone -= set(crew.pids)
        self._seats |= crew.seats
        self._telemetry.replace(crew)
        event = ReplicaLaunched(replica, life, crew.pids, crew.stores[replica])
        self.happen(event)
        for rank, end in crew.pipes.items():
            self._connect(rank, end)

    def not_returned(self, replica: int, life: int, why: str) -> None:
        """The ranks of a lost replica could not be started again."""
        _log.warning("replica_not_launched", job=self.job_id, replica=replica, why=why)
        if not self.fenced:
            self._tell(self._lost(replica, life, ()))

    def _connect(self, rank: int, end: PipeEnd) -> None:
        self._links[rank] = RankLink(
            end, partial(self._heard, rank), partial(self._misbehaved, rank), self._telemetry.mask
        )
        self._links[rank].listen()

    def reaped(self, pid: int, exit_code: int | None, ended_by: int | None) -> None:
        """One of the processes is dead."""
        if self._first_exit_at is None:
            self._first_exit_at = time.monotonic()
        self._reaped[pid] = (exit_code, ended_by)
        self._see_out()

    def _see_out(self) -> None:
        """Take in the ends of ranks, in their order; those that come after last words that took the loop long at a later tick.

        Those that said little last wait for such alone: a job that fails waits for no other that ends with a megabyte.
        """
        while self._reaped:
            pid = next(iter(self._reaped))
            ended = [r.rank for r in self._state.ranks.values() if r.pid == pid and not r.ended]
            if any(self._links[rank].rest_waits() for rank in ended):
                return
            exit_code, ended_by = self._reaped.pop(pid)
            for rank in ended:
                # What it said before it died counts before its death.
                self._links[rank].hear_rest()
                by_itself = rank in self._died_alone and not self._forker_gone
                self.happen(Exited(rank, exit_code, ended_by, by_itself=by_itself))

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
        """Decide about an event and perform the effects."""
        self._state, effects = decide(self._state, event, time.monotonic())
        for effect in effects:
            match effect:
                case Tell() | TellLost():
                    self._say(effect)
                case CheckVote(rank=rank, vote=vote):
                    self._votes.check(rank, vote)
                case Instruct(ranks=ranks, order=order):
                    for rank in ranks:
                        self._links[rank].send(order)
                case Kill(ranks=ranks):
                    for rank in ranks:
                        self._kill(rank)
                case LookInto():
                    _run(self._look_into(effect), self._looking)
                case _:
                    self._traces.drop(effect.rank, effect.trace_id, effect.fact)

    def tick(self, *, pauses: bool = False) -> None:
        """Look at the boards and the clock; to be called about ten times a second.

        Args:
            pauses: Whether to read no pipes for now. Ranks that wait for that do not hang.
        """
        with self._surviving():
            self._see_out()
            self._telemetry.speak_for(self._state.members, self._state.replica_size)
            self._watch()
            for link in self._links.values():
                link.look(pauses=pauses)
            for rank, what in self._telemetry.faults.items():
                if not self._state.ranks[rank].misbehaved:
                    self._misbehaved(rank, what)
            if self._forker_gone:
                for one in self._state.ranks.values():
                    if self.has(one.pid) and is_dying(one.pid):
                        self.reaped(one.pid, None, _SIGKILL)
            self._free_the_dead()
            # A rank that is dead, and whose last words wait, stands still and does not hang.
            if not (pauses or self._reaped):
                marks, usual_s = self._telemetry.marks(), self._telemetry.usual_step_s()
                still = {rank for rank, mark in marks.items() if self._marks.get(rank) == mark}
                self._marks = marks
                pids = {r.rank: r.pid for r in self._state.ranks.values() if not r.ended}
                cut_off = self._cut_links.of(marks, pids)
                self.happen(LookedAt(marks, usual_s, self._stopped(still), cut_off))
            self.happen(Ticked())

    def silent(self) -> bool:
        """Whether all ranks are reaped, all that they said is heard, and their votes are checked.

        What they had not finished of a trace is removed then, too. A process that a rank left behind can
        hold its pipe open: that is waited for briefly only, and so is the rest of a gang that was killed.
        """
        if not self._state.ended:
            return False
        if self._ended_at is None:
            self._ended_at = time.monotonic()
        for link in self._links.values():
            link.hear()
        waits = time.monotonic() <= self._ended_at + _PIPE_END_S
        if waits and not all(link.closed for link in self._links.values()):
            return False
        for link in self._links.values():
            link.close()  # else what was left behind could vote on, and each vote is waited for
        is_idle = self._votes.is_idle and self._traces.is_idle
        return is_idle or (self._state.stopped is not None and not waits)

    async def sweep(self, mark: str) -> None:
        """Kill what the ranks left behind, then read their boards to the end."""
        left = await asyncio.to_thread(
            sweep_sessions, mark, {rank.pid for rank in self._state.ranks.values()}
        )
        if left:
            _log.warning("left_by_ranks", job=self.job_id, pids=left)
        self._lacked_memory = await asyncio.to_thread(self._aborted_for_memory)
        with self._surviving():
            self._telemetry.end()
            self._watch()

    def samples(self) -> list[RankSample]:
        """Where each rank stands."""
        with self._surviving():
            return self._telemetry.samples(self._ready())
        return []

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
        killed = max(oom_kills() - self._oom_kills_before, 0)
        return GangEnded(
            job_id=self.job_id,
            fence=self.fence,
            node_id=self._node_id,
            exits=exits(self._state, seen, killed, self._lacked_memory),
            last_step=max(0, *(board.step for board in seen.values())),
            hang=self._state.hang,
            oom_kills=killed,
            first_exit_s=None if first is None else time.monotonic() - first,
        )

    def _say(self, effect: Tell | TellLost) -> None:
        if self.fenced:
            return
        fact = effect.fact if isinstance(effect, Tell) else self._found_lost(effect.replica)
        if isinstance(fact, TraceRecorded):
            self._traces.publish(fact)
        else:
            self._tell(fact)

    def _tell_unless_fenced(self, fact: Fact) -> None:
        if not self.fenced:
            self._tell(fact)

    def _found_lost(self, replica: int) -> ReplicaLost:
        size = self._state.replica_size or 1
        ranks = self._state.replica_of(replica * size)
        ended = exits(dataclasses.replace(self._state, ranks=ranks), self._telemetry.last_seen())
        _log.warning("replica_lost", job=self.job_id, fence=self.fence, replica=replica)
        return self._lost(replica, self._state.lives[replica], ended)

    def _lost(self, replica: int, life: int, ended: tuple[RankExit, ...]) -> ReplicaLost:
        return ReplicaLost(
            job_id=self.job_id,
            fence=self.fence,
            node_id=self._node_id,
            replica=replica,
            life=life,
            exits=ended,
        )

    def _aborted_for_memory(self) -> frozenset[int]:
        ranks, log = self._state.ranks.values(), self._folder.log
        return frozenset(r.rank for r in ranks if aborted_for_memory(r, log(r.rank, "stderr")))

    def conclude(self, end: GangEnded) -> None:
        """Record how the gang ended; its boards are read no more.

        Raises:
            OSError: It could not be recorded.
        """
        for link in self._links.values():
            link.close()
        self._votes.end()
        self._telemetry.close()
        self._folder.close(end)

    def _heard(self, rank: int, message: RankMessage) -> None:
        with self._surviving():
            if (step := self._telemetry.begun(rank)) is not None:
                self.happen(Stepped(rank, step))  # what its board showed before it spoke
            if isinstance(message, RankMetrics):
                self._telemetry.take_metrics(rank, message)
            else:
                self.happen(MessageCame(rank, message))
        if self._state.ranks[rank].misbehaved:
            self._links[rank].close()

    def _misbehaved(self, rank: int, what: str) -> None:
        _log.warning("rank_misbehaved", job=self.job_id, fence=self.fence, rank=rank, what=what)
        self.happen(Misbehaved(rank, what))

    def _vote_checked(self, rank: int, vote: RankVote, fault: str | None) -> None:
        # Not logged: the job's events say it, and a rank can have 64 a second refused for as long as it lives.
        self.happen(VoteChecked(rank, vote, fault))

    def _vote_waits(self, rank: int, vote: RankVote, condition: str) -> None:
        _log.warning("shard_waits", job=self.job_id, rank=rank, why=condition)
        self.happen(VoteWaits(rank, vote, condition))

    @contextlib.contextmanager
    def _surviving(self) -> Iterator[None]:
        """Within, a fault of the agent's own ends this gang, and neither the agent nor others."""
        try:
            yield
        except Exception as error:  # noqa: BLE001 whatever it is, other gangs go on
            if self._state.stopped is None:
                _log.exception("gang_fault", job=self.job_id, fence=self.fence)
            self.happen(Condemned(f"its agent failed: {type(error).__name__}: {error}"))

    def _watch(self) -> None:
        for rank, step in self._telemetry.watch(self._ready()).items():
            self.happen(Stepped(rank, step))

    async def _look_into(self, wanted: LookInto) -> None:
        living = {r.rank: r.pid for r in self._state.ranks.values() if self.has(r.pid)}
        # First: the signal by which stacks are collected ends the opening of a connection, and another one begins.
        silent = await asyncio.to_thread(lambda: list(map(unanswered, living.values())))
        stacks = await collect(self._folder.path, living, self._telemetry.mask)
        ready = self._ready()
        logs = [self._folder.log(rank, "stderr") for rank in living]
        lost = await asyncio.to_thread(lambda: list(map(lost_thread, logs)))
        found = [
            self._telemetry.find(r, ready[r], stacks.get(r), lost_thread=is_lost).model_copy(
                update={"unanswered": connections}
            )
            for r, is_lost, connections in zip(living, lost, silent, strict=True)
        ]
        findings = Findings(
            why=wanted.why,
            still_s=wanted.stall.still_s,
            allowed_s=wanted.stall.allowed_s,
            ranks=within_room(found, _FOUND_BYTES, in_brief),
        )
        self.happen(LookedInto(findings))

    def _ready(self) -> dict[int, RankReady | None]:
        return {number: rank.ready for number, rank in self._state.ranks.items()}

    def _stopped(self, still: Collection[int]) -> frozenset[int]:
        """The ranks whose processes a signal or a tracer has stopped, of those that stand still."""
        living = (self._state.ranks[rank] for rank in still if not self._state.ranks[rank].ended)
        return frozenset(each.rank for each in living if process_state(each.pid) in STOPPED)

    def _free_the_dead(self) -> None:
        """Have ranks that are dead, or were killed, reaped though somebody traces them.

        One that the kernel holds all the same, in a call to a storage or a device that does not answer, runs
        no code any more; after two minutes its gang ends without it, to go on elsewhere.
        """
        now = time.monotonic()
        if self._freeing or now < self._looked_for_dead_at + _REAPED_WITHIN_S:
            return
        self._looked_for_dead_at = now
        ranks = [rank for rank in self._state.ranks.values() if self.has(rank.pid)]
        unreaped = {rank.pid for rank in ranks if rank.killed or is_dying(rank.pid)}
        if held := unreaped & self._unreaped.keys():
            _run(self._free(held), self._freeing)
        # Looks, not seconds: while the agent is stopped, none passes.
        self._unreaped = Counter({pid: self._unreaped[pid] + 1 for pid in unreaped})
        for rank in ranks:
            if rank.killed and self._unreaped[rank.pid] > _HELD_LOOKS:
                _log.error(
                    "killed_rank_does_not_end", job=self.job_id, rank=rank.rank, pid=rank.pid
                )
                self.happen(Exited(rank.rank, None, _SIGKILL, held=True))

    async def _free(self, pids: Collection[int]) -> None:
        # In a thread: one whose first thread has ended looks dead, and may have thousands of others.
        for pid in pids:
            killed = await asyncio.to_thread(kill_tracers, pid)
            if killed:
                _log.warning("tracers_killed", job=self.job_id, pid=pid, tracers=killed)

    def _kill(self, rank: int) -> None:
        pid = self._state.ranks[rank].pid
        if pid in self._reaped:  # its number may be another's by now
            self._died_alone.add(rank)
            return
        if is_dying(pid):
            self._died_alone.add(rank)
        kill_group(pid)


def _in_a_thread(work: Callable[[], None]) -> None:
    """Of its own: what a rank can make long must not keep the threads that all gangs share.

    Raises:
        RuntimeError: The system has no threads left.
    """
    threading.Thread(target=work, name="logs", daemon=True).start()


def _run(work: Coroutine[None, None, None], among: set[asyncio.Task[None]]) -> None:
    """Begins it, and keeps its task among those that are under way."""
    task = asyncio.create_task(work)
    among.add(task)
    task.add_done_callback(among.discard)


def _as_text(spec: JobSpec, plan: GangPlan, resume_from: str | None) -> str:
    # A spec may hold a number that equals nothing, not even itself.
    return repr((spec.model_dump(exclude=dict(_PATCHED)), plan, resume_from))
