"""The agent, whole: what it is made of, how it starts, and how it stops."""

import asyncio
import contextlib
import secrets
from functools import partial
from typing import Final

import structlog

from services.contract.messages.facts import Inventory
from services.contract.messages.probing import DeviceType
from services.contract.messages.warm_channel import NODE_MARK
from services.contract.redis.lease_keeper import LeaseKeeper
from services.contract.redis.redis_keys import NODE_LEASE_MS, node_lease
from services.worker.agent.departure import Commits, empty_node
from services.worker.agent.gangs.leftovers import Leftover, find_leftovers, forget_leftovers
from services.worker.agent.host.devices import take_inventory
from services.worker.agent.host.folders import NodeFolder
from services.worker.agent.host.left_memory import free_left_memory
from services.worker.agent.host.network import Network, NoRouteError, find_network
from services.worker.agent.host.processes import sweep
from services.worker.agent.host.reserve import take_reserve
from services.worker.agent.host.sentinel_keeper import SentinelKeeper
from services.worker.agent.node_commands import NodeCommands
from services.worker.agent.probes.prober import Prober
from services.worker.agent.probes.programs import ProgramRunner
from services.worker.agent.probes.self_test import SelfTest
from services.worker.agent.ranks.code_cache import CodeCache, forget_drafts
from services.worker.agent.ranks.launch import Launcher
from services.worker.agent.ranks.template_link import Imported
from services.worker.agent.ranks.warm_keeper import WarmKeeper
from services.worker.agent.session import LeaseTakenError, Life, Session
from services.worker.agent.settings import AgentSettings, rank_environment, sentinel_environment
from services.worker.agent.storage.exporter import Exporter
from services.worker.agent.storage.job_storage import Storage
from services.worker.agent.storage.journal import Journal
from services.worker.agent.storage.records import RecordKeeper
from services.worker.agent.storage.rounds import EVERY_S, Holdings, StorageRounds
from services.worker.agent.storage.shared_files import SharedFiles, shared_files
from services.worker.agent.storage.storage_watch import look, watch_storage
from services.worker.agent.streams.inbox import Inbox
from services.worker.agent.streams.outbox import Outbox
from services.worker.agent.streams.redis_clients import (
    REDIS_AWAY,
    Connections,
    waiting_client,
    writing_client,
)
from services.worker.agent.supervisor import Supervisor

_ENTERED_BY_OTHERS: Final = 0o711
_LOOKS_FOR_A_WAY_EVERY_S: Final = 0.5
_RANKS_GONE_WITHIN_S: Final = 5.0
_TOLD_WITHIN_S: Final = 2.0
_log = structlog.get_logger()


async def run_agent(settings: AgentSettings, stop: asyncio.Event) -> None:
    """Be this node's agent until ``stop`` is set.

    Raises:
        NodeBusyError: Another agent works in the node's folder.
        NoHomeError: There cannot be one.
        NetworkError: The node has no such interface or address as the settings name.
        LeaseTakenError: Another agent elsewhere has the node id.
    """
    take_reserve()
    folder = NodeFolder(settings.home, settings.node_id)
    with folder.locked():
        if settings.ranks_are is not None:
            _let_ranks_pass(settings)
        leftovers = await asyncio.to_thread(find_leftovers, folder, settings.node_id)
        await asyncio.to_thread(forget_drafts, folder.code)
        files = shared_files(
            settings.checkpoint_root, settings.checkpoint_folder, settings.most_copies_bytes
        )
        inventory = await asyncio.to_thread(_look_over, settings.cpu_slots, files)
        network = await _network(settings, stop)
        if network is None:
            return
        async with contextlib.AsyncExitStack() as clients:
            redis = await _connections(settings, clients)
            agent = Agent(settings, files, folder, inventory, network, redis)
            try:
                await agent.serve(leftovers, stop)
            except* LeaseTakenError as taken:
                raise _first(taken) from None
            finally:
                # The sentinel did it already, unless somebody killed the sentinel.
                await asyncio.to_thread(sweep, folder.mark)
                folder.remove_board_root()


def _let_ranks_pass(settings: AgentSettings) -> None:
    """Ranks of another user enter what of the home leads to checkpoints and to code; nothing there can be read."""
    leading = settings.checkpoint_folder.parents
    between = [folder for folder in reversed(leading) if settings.home in folder.parents]
    for folder in (settings.home, *between):
        folder.mkdir(exist_ok=True)
        folder.chmod(_ENTERED_BY_OTHERS)


def _look_over(cpu_slots: int, files: SharedFiles) -> Inventory:
    files.forget_copies()
    return take_inventory(cpu_slots, *look(files))


async def _connections(settings: AgentSettings, clients: contextlib.AsyncExitStack) -> Connections:
    enter = clients.enter_async_context
    writing = await enter(writing_client(settings.redis_address))
    waiting = await enter(waiting_client(settings.redis_address))
    apart = settings.telemetry_redis_address
    return Connections(
        writing, waiting, writing if apart is None else await enter(writing_client(apart))
    )


async def _network(settings: AgentSettings, stop: asyncio.Event) -> Network | None:
    """Where other nodes reach this one; waits for a way to Redis. None: ``stop`` was set first.

    A node whose network comes up after its agent must not give others an address of loopback for good.
    """
    is_told = False
    while not stop.is_set():
        try:
            found = await asyncio.to_thread(
                find_network, settings.interface, settings.address, settings.redis_url
            )
        except NoRouteError as error:
            if not is_told:
                _log.warning("no_network", why=str(error))
            is_told = True
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_LOOKS_FOR_A_WAY_EVERY_S):
                    await stop.wait()
        else:
            _log.info("network", address=found.address, interface=found.interface)
            return found
    return None


def _devices_of(inventory: Inventory) -> tuple[DeviceType, ...]:
    """The kinds of devices on which the node runs ranks."""
    found: dict[DeviceType, bool] = {
        "cuda": bool(inventory.accelerators),
        "cpu": bool(inventory.cpu_slots),
    }
    return tuple(kind for kind, is_there in found.items() if is_there)


class Agent:
    """All parts of one life of an agent, put together."""

    def __init__(
        self,
        settings: AgentSettings,
        files: SharedFiles,
        folder: NodeFolder,
        inventory: Inventory,
        network: Network,
        redis: Connections,
    ) -> None:
        writing, waiting = redis.writing, redis.waiting
        node_id = settings.node_id
        self._grace_s = settings.stop_grace_s
        self._measure_idle_s = settings.measure_idle_s
        self._devices = _devices_of(inventory)
        self._ranks_are = settings.ranks_are
        self._incarnation = secrets.token_hex(8)
        # Of this life alone: a sentinel that is slow must not end what the next agent starts.
        mark = f"{folder.mark}/{self._incarnation}"
        self._folder = folder
        self._sentinel = SentinelKeeper(sentinel_environment(), mark, folder.sentinel_log)
        self._outbox = Outbox(writing, node_id)
        imported = Imported(
            rank_environment(settings, mark, network.interface),
            settings.trainer,
            settings.user_path,
            settings.template_linger_s,
            settings.rank_user,
        )
        self._warm = WarmKeeper(imported, mark, folder)
        storage = Storage(files, node_id, settings.ranks_are)
        runner = ProgramRunner(self._warm.fork_program, mark, folder.path)
        codes = CodeCache(writing, folder.code, files, settings.ranks_are)
        self._journal = Journal(files, f"{node_id}.{self._incarnation}")
        node_commands = NodeCommands(
            node_id,
            storage,
            Exporter(storage, node_id, sentinel_environment() | {NODE_MARK: mark}),
            Prober(node_id, settings.admission, runner, codes),
            SelfTest(folder, node_id, self._incarnation, inventory, runner),
            RecordKeeper(redis, node_id, files, self._journal),
        )
        self._commits = Commits(self._outbox.tell)
        self._supervisor = Supervisor(
            node_id,
            folder,
            storage,
            node_commands,
            Launcher(
                node_id,
                network,
                files.root,
                self._warm,
                settings.admission,
                codes,
            ),
            self._commits.tell,
        )
        self._lease = LeaseKeeper(
            settings.redis_address, node_lease(node_id), NODE_LEASE_MS, _note_late_loop
        )
        self._session = Session(
            redis,
            Life(node_id, self._incarnation, inventory),
            self._supervisor,
            self._outbox.tell,
            self._journal,
            self._lease,
        )
        self._watch_storage = partial(
            watch_storage,
            files,
            (inventory.storage_id, inventory.storage_fault),
            self._session.storage_is,
        )
        self._rounds = StorageRounds(
            writing,
            Holdings(node_id, storage, folder, self._supervisor.newest_gangs),
            self._outbox.tell,
        )
        self._inbox = Inbox(
            waiting,
            node_id,
            self._supervisor.handle,
            self._supervisor.refuse,
            self._outbox.acknowledge,
        )

    async def serve(self, leftovers: list[Leftover], stop: asyncio.Event) -> None:
        """Join, work until ``stop`` is set, leave.

        Raises:
            ExceptionGroup: With the LeaseTakenError that ended this agent.
        """
        async with self._sentinel.standing(), self._lease.keeping(), asyncio.TaskGroup() as group:
            supervisor = self._supervisor
            warm = self._warm.run(supervisor.rank_told, supervisor.warm_process_gone)
            background = [group.create_task(warm)]
            stopping = group.create_task(stop.wait())
            joining = group.create_task(self._join(leftovers))
            await asyncio.wait({stopping, joining}, return_when=asyncio.FIRST_COMPLETED)
            joined = joining.done()
            if joined:
                await joining
                background += [
                    group.create_task(self._outbox.run()),
                    group.create_task(self._session.run()),
                    group.create_task(self._journal.run()),
                    group.create_task(self._supervisor.run(self._outbox.is_full)),
                    group.create_task(self._rounds.run(self._session.loss_suspected)),
                    group.create_task(supervisor.retry_removals(EVERY_S)),
                    group.create_task(self._watch_storage()),
                ]
                if self._ranks_are is not None:
                    environment = sentinel_environment()
                    freeing = free_left_memory(
                        self._ranks_are, environment, lambda: supervisor.is_idle
                    )
                    background.append(group.create_task(freeing))
                if self._measure_idle_s:
                    measuring = supervisor.measure_when_idle(self._devices, self._measure_idle_s)
                    background.append(group.create_task(measuring))
                reading = group.create_task(self._inbox.run())
                await stopping
                had_gangs = await empty_node(
                    self._session, self._supervisor, self._commits, self._grace_s
                )
                reading.cancel()
                await self._wind_down(keeps_lease=had_gangs)
            joining.cancel()
            for task in background:
                task.cancel()

    async def _join(self, leftovers: list[Leftover]) -> None:
        await self._session.take_lease(self._folder.previous_incarnation())
        try:
            self._folder.record_incarnation(self._incarnation)
        except OSError as error:  # the next agent waits until the lease has run out
            _log.warning("incarnation_not_recorded", why=str(error))
        for leftover in leftovers:
            self._supervisor.telemetry_names.learn(leftover.fact.job_id, leftover.telemetry_name)
        await self._session.hand_over([leftover.records for leftover in leftovers])
        for leftover in leftovers:
            self._outbox.tell(leftover.fact)
        await asyncio.to_thread(forget_leftovers, self._folder, leftovers)
        self._session.join()
        _log.info("node_joined", incarnation=self._incarnation)

    async def _wind_down(self, *, keeps_lease: bool) -> None:
        """Leave; a lease that is kept runs out by itself.

        A controller that has not read yet how gangs ended would take the lease's end for a loss of the node.
        """
        # Told first: else the next attempt would be placed here as soon as this one has ended.
        self._session.leave()
        self._supervisor.condemn_all("the agent was stopped")
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_RANKS_GONE_WITHIN_S):
                await self._supervisor.emptied()
        try:
            async with asyncio.timeout(_TOLD_WITHIN_S):
                await self._outbox.emptied()
                if not keeps_lease:
                    await self._session.release_lease()
                await self._journal.flush()
                await self._journal.publish()
        except (TimeoutError, *REDIS_AWAY) as error:
            _log.warning("left_without_telling", why=str(error) or "Redis is unreachable")
        else:
            _log.info("node_left")


def _note_late_loop(late_s: float) -> None:
    _log.warning("loop_is_late", late_s=round(late_s, 1))


def _first(group: BaseExceptionGroup[LeaseTakenError]) -> LeaseTakenError:
    error = group.exceptions[0]
    return error if isinstance(error, LeaseTakenError) else _first(error)
