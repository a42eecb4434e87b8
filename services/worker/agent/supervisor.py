"""Carries out commands, and has every gang of this node seen to its end."""

import asyncio
import contextlib
import itertools
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Coroutine, Iterator, Sequence
from typing import Final, Protocol

import structlog

from services.contract.messages.commands import (
    CloseRecords,
    Command,
    CommitCheckpoint,
    DiagnoseGang,
    ExportCheckpoint,
    KeepStanding,
    LaunchGang,
    LoadCheckpoint,
    PurgeJob,
    RecallRecords,
    RecordTrace,
    RemoveTraces,
    RetireCheckpoint,
    ReturnReplica,
    SetReplicas,
    StopGang,
    TakeCheckpoint,
    VerifyCheckpoint,
)
from services.contract.messages.facts import (
    OLDER_COPY,
    Fact,
    GangEnded,
    LaunchLoads,
    LaunchRefused,
    RunningGang,
    TraceFailed,
)
from services.contract.messages.probing import (
    PROBES_WAITED_FOR,
    DeviceType,
    MeasureNode,
    NodeMeasured,
    ProbeModel,
)
from services.contract.messages.telemetry import RankSample
from services.contract.messages.warm_channel import RankForked, RankReaped
from services.contract.storage.commit_chain import ChainError, FencedError
from services.contract.system.durable import CHECKPOINT_DISK, node_condition
from services.contract.system.long_work import Turns
from services.worker.agent.gangs.events import (
    CheckpointAsked,
    Condemned,
    DiagnosisAsked,
    Event,
    LaunchAsked,
    ReplicasSet,
    StopAsked,
    TraceAsked,
)
from services.worker.agent.gangs.runtime import GangRuntime
from services.worker.agent.host.folders import NoBoardsError, NodeFolder
from services.worker.agent.host.reserve import in_storage_thread
from services.worker.agent.node_commands import NodeCommands, Question
from services.worker.agent.ranks.launch import Launcher, LaunchError
from services.worker.agent.storage.job_storage import Storage
from services.worker.agent.storage.loading import Loading, Loadings
from services.worker.agent.telemetry.beat import GangKey, LearnedNames
from services.worker.agent.telemetry.gang_telemetry import Records

TICK_S: Final = 0.1
# Devices are measured for whoever plans.
_NOBODY: Final = ""
_HOME_DISK: Final = "the disk of the agent's own files"
_BOARDS: Final = "the shared memory, which has the boards,"
_log = structlog.get_logger()


class Supervisor:
    """All gangs of a node.

    Args:
        node_id: The node.
        folder: Its files.
        storage: The checkpoints of all jobs.
        node_commands: Carries out what no gang does.
        launcher: Forks the ranks of a gang.
        tell: Takes the facts, in order.

    Attributes:
        urgent: Set when there is something that the next beat should not wait for.
        telemetry_names: Of the jobs that were launched here.
    """

    def __init__(
        self,
        node_id: str,
        folder: NodeFolder,
        storage: Storage,
        node_commands: NodeCommands,
        launcher: Launcher,
        tell: Callable[[Fact], None],
    ) -> None:
        self.urgent = asyncio.Event()
        self.telemetry_names = LearnedNames()
        self._node_id = node_id
        self._folder = folder
        self._storage = storage
        self._node_commands = node_commands
        self._launcher = launcher
        self._tell = tell
        self._gangs: dict[GangKey, GangRuntime] = {}
        self._coming: set[GangKey] = set()
        self._loadings = Loadings()
        self._silent: set[GangKey] = set()
        self._swept: dict[GangKey, asyncio.Task[None]] = {}
        self._early: dict[int, RankReaped] = {}
        self._unrecorded: dict[GangKey, GangEnded] = {}
        self._under_way: set[asyncio.Task[None]] = set()
        # One at a time and in order: what concerns a job's gang, and what concerns its storage,
        # which may be slow and must not hold up a kill, nor a removal a commit.
        self._lanes: defaultdict[tuple[str, str], asyncio.Lock] = defaultdict(asyncio.Lock)
        # Long readings hold up neither. They, and questions about models and devices, are one at a time for all jobs, as
        # disks and threads are not many; one who asks for hundreds makes others wait for one of them.
        self._reading = Turns()
        self._asking = Turns()
        self._stirred = asyncio.Event()
        self._empty = asyncio.Event()
        self._empty.set()

    async def handle(self, command: Command) -> None:
        """Carry a command out; one that was carried out before changes nothing."""
        if isinstance(command, StopGang):
            # The lane is free once it has ended.
            self._loadings.stop((command.job_id, command.fence))
        came = time.monotonic()
        async with self._turn(command):
            waited_s = time.monotonic() - came
            if isinstance(command, ProbeModel) and waited_s > command.timeout_s * PROBES_WAITED_FOR:
                # All who asked have given up, and others wait behind it.
                _log.warning("probe_passed_over", probe=command.probe_id, waited_s=waited_s)
                return
            await self._carry_out(command)

    def _turn(self, command: Command) -> contextlib.AbstractAsyncContextManager[None]:
        """Within, it may be carried out."""
        match command:
            case ProbeModel():
                return self._asking.of(command.owner)
            case MeasureNode():
                return self._asking.of(_NOBODY)
            case VerifyCheckpoint() | ExportCheckpoint():
                return self._reading.of(command.owner)
            case _:
                return self._lanes[_lane(command)]

    async def _carry_out(self, command: Command) -> None:
        match command:
            case LaunchGang():
                await self._launch(command)
            case LoadCheckpoint():
                await self._load(command)
            case StopGang():
                self._happen(command, StopAsked(command))
            case SetReplicas():
                self._happen(command, ReplicasSet(command.replicas))
            case ReturnReplica():
                await self._return(command)
            case TakeCheckpoint():
                self._happen(command, CheckpointAsked())
            case DiagnoseGang():
                self._happen(command, DiagnosisAsked())
            case RecordTrace():
                self._happen(command, TraceAsked(command))
            case PurgeJob():
                # One at a time: ranks can leave folders of which each takes minutes to remove.
                async with self._lanes[command.job_id, "removing"], self._lanes["", "purging"]:
                    await self._answer(command)
            case _:
                await self._answer(command)

    async def _answer(self, command: Question) -> None:
        for fact in await self._node_commands.to(command, self._has_ranks):
            self._tell(fact)

    def refuse(self, body: str, why: str) -> None:
        """Tell that a command cannot be read, so that nobody waits for what it asked."""
        fact = self._node_commands.refusal(body, why)
        if isinstance(fact, LaunchRefused):
            key = (fact.job_id, fact.fence)
            if key in self._gangs or key in self._coming:
                return  # it was sent again, and could be read before
            fact = self._ended(key) or self._refuse(key, fact.reason)
        if fact is not None:
            self._tell(fact)

    async def run(self, is_full: Callable[[], bool]) -> None:
        """Watch all gangs until cancelled.

        Args:
            is_full: Whether so many facts wait for Redis that ranks must wait, too.
        """
        for first in itertools.count():
            # Each in its turn is the first: where ranks say more than is heard, the first ones are heard.
            gangs = [*self._gangs.items()]
            start = first % max(len(gangs), 1)
            for key, gang in (*gangs[start:], *gangs[:start]):
                gang.tick(pauses=is_full())
                if key not in self._silent | self._swept.keys() and gang.silent():
                    # Beside the others: it looks at all processes of the machine.
                    self._swept[key] = asyncio.create_task(self._sweep(key, gang))
            self._settle(only_fenced=True)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(TICK_S if self._gangs else None):
                    await self._stirred.wait()
            self._stirred.clear()

    async def _sweep(self, key: GangKey, gang: GangRuntime) -> None:
        try:
            await gang.sweep(self._folder.mark)
        except OSError as error:  # no descriptor is left; the next look tries again
            _log.warning("not_swept", job=key[0], fence=key[1], why=str(error))
        else:
            self._silent.add(key)
            self.urgent.set()
        finally:
            del self._swept[key]

    def rank_told(self, told: RankForked | RankReaped) -> None:
        """The warm process forked a rank, or reaped one; in this order for each process id."""
        if isinstance(told, RankForked):
            # One that was reaped before had the same number: its fork was for nothing.
            self._early.pop(told.pid, None)
        else:
            self._reaped(told)

    def _reaped(self, reaped: RankReaped) -> None:
        for gang in self._gangs.values():
            if gang.has(reaped.pid):
                gang.reaped(reaped.pid, reaped.exit_code, reaped.signal)
                break
        else:  # it died before its launch was complete
            self._early[reaped.pid] = reaped
        self._stirred.set()

    def warm_process_gone(self, reason: str) -> None:
        """The warm process died and the kernel kills all of its ranks."""
        for gang in self._gangs.values():
            gang.forker_gone(reason)

    async def measure_when_idle(self, devices: Sequence[DeviceType], idle_s: float) -> None:
        """Measure the node's devices once, before a plan asks for it.

        What fails because ranks start is tried again when they have ended, and is not reported: a plan
        that is asked for meanwhile has it tried by itself.

        Args:
            devices: Their kinds.
            idle_s: Seconds to wait first, so that a job that waits for the node starts undisturbed.
        """
        for command in [MeasureNode(device_type=each) for each in devices]:
            is_open = True
            while is_open:
                await asyncio.sleep(idle_s)
                await self.emptied()
                async with self._turn(command):
                    facts = await self._node_commands.to(command, self._has_ranks)
                found = [each for each in facts if isinstance(each, NodeMeasured) and each.facts]
                for fact in found:
                    self._tell(fact)
                is_open = not found and self._has_ranks()

    async def retry_removals(self, every_s: float) -> None:
        """Remove checkpoints that the storage refused to remove, until it does; until cancelled.

        The controller commands it again with later commits, which a job that has ended does not have.

        Args:
            every_s: Seconds between two rounds; one ends where the storage refuses again.
        """
        while True:
            await asyncio.sleep(every_s)
            for command in self._node_commands.refused_removals:
                try:
                    await self._remove_again(command)
                except Exception:  # noqa: BLE001 the agent outlives any one command
                    _log.exception("removal_failed", checkpoint=command.checkpoint_id)
                if command in self._node_commands.refused_removals:
                    break

    async def _remove_again(self, command: RetireCheckpoint) -> None:
        async with self._lanes[_lane(command)]:
            for fact in await self._node_commands.remove_again(command):
                self._tell(fact)

    def condemn_all(self, reason: str) -> None:
        """Kill all gangs."""
        for gang in self._gangs.values():
            gang.happen(Condemned(reason))

    def fence_off(self, fenced: list[GangKey]) -> None:
        """Redis said that newer attempts of these gangs' jobs are open, or that the job is gone."""
        for key in fenced:
            if key in self._gangs:
                self._gangs[key].fence_off()

    @property
    def is_idle(self) -> bool:
        """Whether there is no gang."""
        return not self._gangs

    async def emptied(self) -> None:
        """Return once there is no gang, nor one to report, and their boards are removed."""
        await self._empty.wait()

    def running(self) -> tuple[RunningGang, ...]:
        """The gangs with live ranks."""
        return tuple(
            gang.living
            for gang in self._gangs.values()
            if gang.living is not None and not gang.fenced
        )

    def newest_gangs(self) -> dict[str, tuple[RunningGang, int]]:
        """By job, its newest gang with live ranks, and the last step on their boards."""
        found: dict[str, tuple[RunningGang, int]] = {}
        for gang in sorted(self._gangs.values(), key=lambda gang: gang.fence):
            if gang.living is not None and not gang.fenced:
                steps = [sample.step for sample in gang.samples()]
                found[gang.job_id] = (gang.living, max(steps, default=0))
        return found

    def samples(self) -> dict[GangKey, list[RankSample]]:
        """Where every rank stands."""
        return {key: gang.samples() for key, gang in self._gangs.items() if not gang.fenced}

    def take_records(self, *, only_ended: bool = False) -> list[Records]:
        """Steps and log lines that were not taken before; to be appended exactly once.

        ``only_ended``: of gangs whose processes are all dead.
        """
        keys = self._silent if only_ended else self._gangs
        gangs = [self._gangs[key] for key in keys]
        return [gang.take_records() for gang in gangs if not gang.fenced]

    def records_written(self, held_back: Collection[GangKey] = ()) -> None:
        """All records that were taken are in Redis: gangs without further ones are reported.

        Not those whose records were ``held_back``.
        """
        self._settle(only_fenced=False, besides=held_back)
        if self._silent:
            self.urgent.set()

    async def _launch(self, command: LaunchGang) -> None:
        key = (command.job_id, command.fence)
        self.telemetry_names.learn(command.job_id, command.telemetry_name)
        if key in self._gangs:
            self._asked_again(self._gangs[key], command)
            return
        folder = self._folder.attempt(*key)
        ended = self._ended(key)
        if ended is not None:
            self._tell(ended)
            return
        disk = CHECKPOINT_DISK
        try:
            with self._making_room(key):
                with self._loads(key) as loading:
                    found = await in_storage_thread(self._storage.open_attempt, command, loading)
                for fact in found:
                    self._tell(fact)
                disk = _HOME_DISK
                crew = await self._launcher.launch(command, folder)
        except (LaunchError, ChainError, OSError) as error:
            _log.warning("launch_refused", job=command.job_id, fence=command.fence, why=str(error))
            disk = _BOARDS if isinstance(error, NoBoardsError) else disk
            condition = node_condition(error, self._node_id, disk)
            if isinstance(error, FencedError):
                condition = OLDER_COPY
            await asyncio.to_thread(self._folder.attempt(*key).remove_boards)
            self._tell(self._refuse(key, str(error), condition))
            return
        except Exception as error:  # noqa: BLE001 whoever waits for an answer gets one
            _log.exception("launch_failed", job=command.job_id, fence=command.fence)
            self._tell(self._refuse(key, f"its agent failed: {type(error).__name__}: {error}"))
            return
        if command.store is None:  # its ranks begin the attempt: one node is enough
            self._begin(self._put_together(*key))
        gang = GangRuntime(crew, self._node_id, folder, self._storage.files, self._tell)
        self._gangs[key] = gang
        self._empty.clear()
        self._stirred.set()
        self.urgent.set()
        self._tell(gang.launched)
        gang.connect()
        for pid in crew.pids.values():
            if pid in self._early:
                self._reaped(self._early.pop(pid))

    def _asked_again(self, gang: GangRuntime, command: LaunchGang) -> None:
        """What it said did not arrive, or Redis is back with an older copy and gives its number again."""
        if gang.living is None:
            return  # its end is told once all that its ranks said is written
        if gang.is_of(command):
            self._tell(gang.launched)
            gang.happen(LaunchAsked())
            return
        # The controller learns from its end that this number is taken, and gives the next one.
        _log.warning("number_given_again", job=command.job_id, fence=command.fence)
        gang.happen(Condemned(OLDER_COPY))

    async def _load(self, command: LoadCheckpoint) -> None:
        key = (command.job_id, command.fence)
        if key in self._gangs:
            return
        try:
            with self._loads(key) as loading:
                await in_storage_thread(
                    self._storage.bring, command.job_id, command.checkpoint_id, loading
                )
        except (LaunchError, ChainError, OSError) as error:  # the launch tries again, or is refused
            _log.warning("not_loaded", checkpoint=command.checkpoint_id, why=str(error))

    def _loads(self, key: GangKey) -> contextlib.AbstractContextManager[Loading]:
        """Within, the checkpoint of an attempt is loaded: the controller is told how far that is."""
        loop, (job_id, fence), node_id = asyncio.get_running_loop(), key, self._node_id

        def tell(loaded: int, total: int) -> None:
            fact = LaunchLoads(job_id=job_id, fence=fence, node_id=node_id, bytes=loaded, of=total)
            loop.call_soon_threadsafe(self._tell, fact)

        return self._loadings.begun(key, tell)

    async def _return(self, command: ReturnReplica) -> None:
        gang = self._gangs.get((command.job_id, command.fence))
        seats = {} if gang is None else gang.seats_to_return(command.replica, command.life)
        if gang is None or not seats:
            return
        folder = self._folder.attempt(command.job_id, command.fence)
        try:
            crew = await self._launcher.launch_again(seats, folder)
        except (LaunchError, OSError) as error:
            if not gang.ended:
                gang.not_returned(command.replica, command.life, str(error))
            return
        if gang.ended:
            # The others finished meanwhile, and it may be reported: nobody would see to these.
            crew.give_up()
            self._begin(asyncio.to_thread(folder.remove_boards))
            return
        gang.returned(command.replica, command.life, crew)
        for pid in crew.pids.values():
            if pid in self._early:
                self._reaped(self._early.pop(pid))

    @contextlib.contextmanager
    def _making_room(self, key: GangKey) -> Iterator[None]:
        """Within, ranks start: what would disturb them ends, and does not begin."""
        self._coming.add(key)
        self._node_commands.give_way()
        try:
            yield
        finally:
            self._coming.discard(key)

    def _has_ranks(self) -> bool:
        return bool(self._gangs or self._coming)

    def _happen(
        self,
        command: StopGang | SetReplicas | TakeCheckpoint | DiagnoseGang | RecordTrace,
        event: Event,
    ) -> None:
        key = (command.job_id, command.fence)
        gang = self._gangs.get(key)
        if gang is not None:
            gang.happen(event)
            return
        if isinstance(command, StopGang):
            # Its launch would have come before: it was stopped too early, and must not come later.
            self._tell(self._ended(key) or self._refuse(key, "it was stopped before its launch"))
        elif isinstance(command, RecordTrace):
            self._tell(
                TraceFailed(
                    job_id=command.job_id,
                    fence=command.fence,
                    node_id=self._node_id,
                    trace_id=command.trace_id,
                    reason="no rank of this attempt runs on this node",
                )
            )

    def _refuse(self, key: GangKey, reason: str, condition: str | None = None) -> LaunchRefused:
        job_id, fence = key
        self._storage.files.release(job_id)
        refusal = LaunchRefused(
            job_id=job_id,
            fence=fence,
            node_id=self._node_id,
            reason=reason,
            condition=condition,
        )
        with contextlib.suppress(OSError):
            self._folder.attempt(*key).close(refusal)
        return refusal

    def _ended(self, key: GangKey) -> GangEnded | LaunchRefused | None:
        return self._unrecorded.get(key) or self._folder.attempt(*key).ended()

    def _settle(self, *, only_fenced: bool, besides: Collection[GangKey] = ()) -> None:
        for key in self._silent.difference(besides):
            gang = self._gangs[key]
            if gang.drained() and (gang.fenced or not only_fenced):
                self._conclude(key, gang)
                self._launcher.give_code_back(gang.code)
                self._silent.discard(key)
                del self._gangs[key]
        self._note_if_empty()

    def _note_if_empty(self) -> None:
        if not self._gangs and not self._under_way:
            self._empty.set()

    def _conclude(self, key: GangKey, gang: GangRuntime) -> None:
        end = gang.end()
        self._storage.files.release(key[0])
        try:
            gang.conclude(end)
        except OSError as error:  # the controller must learn of it whatever the disk says
            self._unrecorded[key] = end
            _log.error("end_not_recorded", job=key[0], fence=key[1], why=str(error))
        self._tell(end)
        _log.info("gang_ended", job=key[0], fence=key[1])
        # A rank may have put any number of files beside its board: the lease must not wait for them.
        self._begin(asyncio.to_thread(self._folder.attempt(*key).remove_boards))

    async def _put_together(self, job_id: str, fence: int) -> None:
        async with self._lanes[job_id, "records"]:
            await self._node_commands.put_together(job_id, fence)

    def _begin(self, work: Coroutine[None, None, None]) -> None:
        """Have it done while gangs go on; the agent does not leave before."""
        task = asyncio.create_task(work)
        self._under_way.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: "asyncio.Task[None]") -> None:
        self._under_way.discard(task)
        self._note_if_empty()


class _OfJob(Protocol):
    """A command that concerns one job."""

    @property
    def job_id(self) -> str: ...


def _lane(command: _OfJob) -> tuple[str, str]:
    match command:
        case CommitCheckpoint() | KeepStanding() | PurgeJob():
            return command.job_id, "storage"
        case RetireCheckpoint() | RemoveTraces():
            return command.job_id, "removing"
        case CloseRecords() | RecallRecords():
            return command.job_id, "records"
        case _:
            return command.job_id, "gang"
