"""Starts this node's ranks of a gang: their seats, their pipes, the rendezvous socket."""

import asyncio
import contextlib
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

import psutil

from services.contract.jobs.plans import GangPlan, RankPlacement
from services.contract.messages.base import Address
from services.contract.messages.board import BoardReader
from services.contract.messages.commands import LaunchGang
from services.contract.messages.rank_pipe import RankSeat
from services.contract.system.pipe_end import PipeEnd
from services.worker.agent.host.folders import AttemptFolder
from services.worker.agent.host.network import Network
from services.worker.agent.host.processes import kill_group
from services.worker.agent.ranks.admission import Admission, NotAdmittedError
from services.worker.agent.ranks.code_cache import CodeCache, NoCodeError
from services.worker.agent.ranks.template_link import WarmGoneError
from services.worker.agent.ranks.warm_keeper import WarmKeeper
from services.worker.agent.ranks.warm_link import WarmLink

_LOOPBACK: Final = "127.0.0.1"
_BACKLOG: Final = 4096  # every rank of the gang connects at about the same moment


class LaunchError(Exception):
    """This node cannot start the gang as asked; the message says why."""


@dataclass(frozen=True)
class Crew:
    """The live ranks of a gang on this node, by rank; ``store`` where rank 0 of it listens.

    ``stores``: where the first rank of each replica listens, of those that may be lost alone.
    ``addresses``: those by which its ranks may connect to ranks of other nodes. ``boards`` and ``pipes``
    are open, and of whoever has the crew.
    """

    seats: Mapping[int, RankSeat]
    store: Address | None
    pids: dict[int, int]
    pipes: Mapping[int, PipeEnd]
    boards: Mapping[int, BoardReader]
    addresses: tuple[str, ...] = ()
    stores: Mapping[int, Address] = field(default_factory=dict)

    def give_up(self) -> None:
        """Kill its ranks, and close what is open of them: nobody has a use for them any more."""
        for pid in self.pids.values():
            kill_group(pid)
        for pipe in self.pipes.values():
            pipe.close()
        for board in self.boards.values():
            board.close()


class Launcher:
    """Forks gangs.

    Args:
        node_id: This node.
        network: Where other nodes reach this one.
        storage_root: Where ranks keep checkpoints.
        warm: What forks.
        admission: What jobs may have here.
        codes: The code that was uploaded for jobs; whoever sees a gang to its end gives it back.
    """

    def __init__(
        self,
        node_id: str,
        network: Network,
        storage_root: Path,
        warm: WarmKeeper,
        admission: Admission,
        codes: CodeCache,
    ) -> None:
        self._codes = codes
        self._admission = admission
        self._node_id = node_id
        self._network = network
        self._storage_root = storage_root
        self._warm = warm

    def give_code_back(self, digest: str | None) -> None:
        """A gang whose ranks imported from it has ended."""
        if digest is not None:
            self._codes.release(digest)

    async def launch(self, command: LaunchGang, folder: AttemptFolder) -> Crew:
        """Fork all ranks that the plan places here, or none.

        Raises:
            LaunchError: The plan does not suit this node, or what forks is gone.
            OSError: A file, a socket or a process could not be made.
        """
        placements = self._placements_here(command)
        try:
            secrets = self._admission.admit(command.spec)
            code = await self._code_of(command)
        except (NotAdmittedError, NoCodeError) as error:
            raise LaunchError(str(error)) from error
        granted = {"secrets": secrets, "code_folder": None if code is None else str(code)}
        try:
            return await self._launch(command, folder, placements, granted)
        except BaseException:
            self.give_code_back(command.spec.code)
            raise

    async def _code_of(self, command: LaunchGang) -> Path | None:
        digest = command.spec.code
        return None if digest is None else await self._codes.acquire(digest, command.job_id)

    async def _launch(
        self,
        command: LaunchGang,
        folder: AttemptFolder,
        placements: tuple[RankPlacement, ...],
        granted: Mapping[str, object],
    ) -> Crew:
        try:
            warm = await self._warm.ready()
        except WarmGoneError as error:
            raise LaunchError(f"no rank can be forked: {error}") from error
        # In a thread: what others have put there goes first, and may be any number of files.
        boards = await asyncio.to_thread(folder.open, placements, command.telemetry_name)
        if boards is None:
            raise LaunchError("an earlier agent of this node had launched the attempt")
        with contextlib.ExitStack() as stack, contextlib.ExitStack() as unless_launched:
            for board in boards.values():
                unless_launched.callback(board.close)
            listening: dict[int, socket.socket] = {}
            store = command.store
            if command.spec.continues_without_replicas:
                return await self._launch_replicas(
                    command, folder, placements, (warm, boards, granted, unless_launched)
                )
            if store is None:
                listening[0] = stack.enter_context(self._listen(command.plan))
                store = _address(listening[0])
            seats = {
                placement.rank: self._seat(
                    command, placement, folder, store, len(placements)
                ).model_copy(update=granted)
                for placement in placements
            }
            crew = await _fork_all(warm, seats, boards, listening)
            unless_launched.pop_all()
            crew = replace(crew, addresses=self._network.addresses)
            return replace(crew, store=store) if listening else crew

    async def _launch_replicas(
        self,
        command: LaunchGang,
        folder: AttemptFolder,
        placements: tuple[RankPlacement, ...],
        given: tuple[
            WarmLink, Mapping[int, BoardReader], Mapping[str, object], contextlib.ExitStack
        ],
    ) -> Crew:
        """Each replica is a world of its own, whose first rank listens for the others."""
        warm, boards, granted, unless_launched = given
        refuse_spread(command.plan)
        size = command.plan.replica_size
        with contextlib.ExitStack() as stack:
            listening = {
                each.rank: stack.enter_context(self._listen(command.plan))
                for each in placements
                if each.rank % size == 0
            }
            stores = {rank // size: _address(end) for rank, end in listening.items()}
            seats = {
                each.rank: self._seat(
                    command, each, folder, stores[each.rank // size], len(placements)
                ).model_copy(update=granted)
                for each in placements
            }
            crew = await _fork_all(warm, seats, boards, listening)
            unless_launched.pop_all()
            addresses = self._network.addresses
            return replace(crew, store=stores.get(0), stores=stores, addresses=addresses)

    async def launch_again(self, lost: Mapping[int, RankSeat], folder: AttemptFolder) -> Crew:
        """Fork the ranks of a lost replica, or none.

        Args:
            lost: Their seats before.
            folder: Of the attempt.

        Raises:
            LaunchError: What forks is gone.
            OSError: A file, a socket or a process could not be made.
        """
        try:
            warm = await self._warm.ready()
        except WarmGoneError as error:
            raise LaunchError(f"no rank can be forked: {error}") from error
        plan = next(iter(lost.values())).plan
        head = min(lost)
        with contextlib.ExitStack() as unless_launched, self._listen(plan) as listening:
            boards = await asyncio.to_thread(folder.renew_boards, tuple(lost))
            for board in boards.values():
                unless_launched.callback(board.close)
            store = _address(listening)
            changed = {
                "store_host": store.host,
                "store_port": store.port,
                "resume_from": None,
                "returns": True,
            }
            seats = {rank: seat.model_copy(update=changed) for rank, seat in lost.items()}
            crew = await _fork_all(warm, seats, boards, {head: listening})
            unless_launched.pop_all()
            return replace(crew, stores={head // plan.replica_size: store})

    def _placements_here(self, command: LaunchGang) -> tuple[RankPlacement, ...]:
        here = tuple(p for p in command.plan.ranks if p.node_id == self._node_id)
        if not here:
            raise LaunchError(f"the plan places no rank on node {self._node_id}")
        if command.store is None and all(p.rank != 0 for p in here):
            raise LaunchError(f"node {self._node_id} did not receive the address of rank 0")
        return here

    def _listen(self, plan: GangPlan) -> socket.socket:
        """The socket of the store, which nobody outside can reach unless ranks are there."""
        is_alone = {p.node_id for p in plan.ranks} == {self._node_id}
        host = _LOOPBACK if is_alone else self._network.address
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, 0), family=family, backlog=_BACKLOG)

    def _seat(
        self,
        command: LaunchGang,
        placement: RankPlacement,
        folder: AttemptFolder,
        store: Address,
        count: int,
    ) -> RankSeat:
        return RankSeat(
            job_id=command.job_id,
            fence=command.fence,
            rank=placement.rank,
            local_rank=placement.local_rank,
            device=placement.device,
            spec=command.spec,
            plan=command.plan,
            resume_from=command.resume_from,
            storage_root=str(self._storage_root),
            board_path=str(folder.board(placement.rank)),
            log_folder=str(folder.path),
            store_host=store.host,
            store_port=store.port,
            data_roots=tuple(map(str, self._admission.data_roots)),
            private_folders=tuple(map(str, self._admission.private)),
            threads=max(1, (psutil.cpu_count() or 1) // count),
            hears_metrics=True,
        )


async def _fork_all(
    warm: WarmLink,
    seats: Mapping[int, RankSeat],
    boards: Mapping[int, BoardReader],
    listening: Mapping[int, socket.socket],
) -> Crew:
    ours: dict[int, PipeEnd] = {}
    theirs: dict[int, PipeEnd] = {}
    with contextlib.ExitStack() as closing:
        with contextlib.ExitStack() as handed_over:
            for rank in seats:
                ours[rank], theirs[rank] = PipeEnd.pair()
                closing.callback(ours[rank].close)
                handed_over.callback(theirs[rank].close)
            answers = await asyncio.gather(
                *(
                    warm.fork(seat, _descriptors(theirs[rank], listening.get(rank)))
                    for rank, seat in seats.items()
                ),
                return_exceptions=True,
            )
        forked = {r: pid for r, pid in zip(seats, answers, strict=True) if isinstance(pid, int)}
        failures = [answer for answer in answers if isinstance(answer, BaseException)]
        if failures:
            for pid in forked.values():
                kill_group(pid)
            if isinstance(failures[0], WarmGoneError):
                raise LaunchError(str(failures[0])) from failures[0]
            raise failures[0]
        closing.pop_all()
    return Crew(seats=seats, store=None, pids=forked, pipes=ours, boards=boards)


def _address(listening: socket.socket) -> Address:
    host, port = listening.getsockname()[:2]
    return Address(host=host, port=port)


def refuse_spread(plan: GangPlan) -> None:
    """A replica whose ranks are on several nodes cannot be started again by one agent.

    Raises:
        LaunchError: The plan has one.
    """
    for first in range(0, plan.world_size, plan.replica_size):
        ranks = plan.ranks[first : first + plan.replica_size]
        nodes = sorted({each.node_id for each in ranks})
        if len(nodes) > 1:
            raise LaunchError(
                f"replica {first // plan.replica_size} has ranks on {', '.join(nodes)}: with "
                "faults.on_replica_loss: continue all ranks of a replica must be on one node; lower "
                "mesh.dp_shard x mesh.tp to what a node has"
            )


def _descriptors(end: PipeEnd, listening: socket.socket | None) -> tuple[int, ...]:
    if listening is not None:
        return (end.reading, end.writing, listening.fileno())
    return (end.reading, end.writing)
