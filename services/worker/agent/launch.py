"""Starts this node's ranks of a gang: their seats, their pipes, the rendezvous socket."""

import asyncio
import contextlib
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import psutil

from services.contract.messages.commands import LaunchGang
from services.contract.messages.rank_pipe import RankSeat
from services.contract.plans import RankPlacement
from services.worker.agent.admission import Admission, NotAdmittedError
from services.worker.agent.folders import AttemptFolder
from services.worker.agent.processes import kill_group
from services.worker.agent.warm_keeper import WarmKeeper
from services.worker.agent.warm_link import ForkRefusedError, WarmGoneError, WarmLink

_LOOPBACK: Final = "127.0.0.1"


class LaunchError(Exception):
    """This node cannot start the gang as asked; the message says why."""


@dataclass(frozen=True)
class Crew:
    """The live ranks of a gang on this node, by rank."""

    seats: Mapping[int, RankSeat]
    pids: dict[int, int]
    pipes: Mapping[int, socket.socket]


class Launcher:
    """Forks gangs.

    Args:
        node_id: This node.
        storage_root: Where ranks keep checkpoints.
        warm: What forks.
        admission: What jobs may have here.
    """

    def __init__(
        self, node_id: str, storage_root: Path, warm: WarmKeeper, admission: Admission
    ) -> None:
        self._admission = admission
        self._node_id = node_id
        self._storage_root = storage_root
        self._warm = warm

    async def launch(self, command: LaunchGang, folder: AttemptFolder) -> Crew:
        """Fork all ranks that the plan places here, or none.

        Raises:
            LaunchError: The plan does not suit this node, or a fork failed.
            OSError: A file or a socket could not be made.
        """
        placements = self._placements_here(command)
        try:
            secrets = self._admission.admit(command.spec)
            warm = await self._warm.ready()
        except NotAdmittedError as error:
            raise LaunchError(str(error)) from error
        except WarmGoneError as error:
            raise LaunchError(f"no rank can be forked: {error}") from error
        if not folder.open(placements):
            raise LaunchError("an earlier agent of this node had launched the attempt")
        with socket.create_server((_LOOPBACK, 0)) as listening:
            port = listening.getsockname()[1]
            seats = {
                placement.rank: self._seat(
                    command, placement, folder, port, len(placements)
                ).model_copy(update={"secrets": secrets})
                for placement in placements
            }
            return await _fork_all(warm, seats, listening)

    def _placements_here(self, command: LaunchGang) -> tuple[RankPlacement, ...]:
        here = tuple(p for p in command.plan.ranks if p.node_id == self._node_id)
        if not here:
            raise LaunchError(f"the plan places no rank on node {self._node_id}")
        if len(here) < command.plan.world_size:
            raise LaunchError("gangs over several nodes are not supported by this agent")
        return here

    def _seat(
        self,
        command: LaunchGang,
        placement: RankPlacement,
        folder: AttemptFolder,
        port: int,
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
            store_host=_LOOPBACK,
            store_port=port,
            data_roots=tuple(map(str, self._admission.data_roots)),
            threads=max(1, (psutil.cpu_count() or 1) // count),
        )


async def _fork_all(
    warm: WarmLink, seats: Mapping[int, RankSeat], listening: socket.socket
) -> Crew:
    pairs = {rank: socket.socketpair() for rank in seats}
    ours = {rank: pair[0] for rank, pair in pairs.items()}
    with contextlib.ExitStack() as theirs:
        for pair in pairs.values():
            theirs.enter_context(pair[1])
        answers = await asyncio.gather(
            *(
                warm.fork(seat, _descriptors(rank, pairs[rank][1], listening))
                for rank, seat in seats.items()
            ),
            return_exceptions=True,
        )
    forked = {rank: pid for rank, pid in zip(seats, answers, strict=True) if isinstance(pid, int)}
    failures = [answer for answer in answers if isinstance(answer, BaseException)]
    if failures:
        for pid in forked.values():
            kill_group(pid)
        for channel in ours.values():
            channel.close()
        if isinstance(failures[0], WarmGoneError | ForkRefusedError):
            raise LaunchError(str(failures[0])) from failures[0]
        raise failures[0]
    return Crew(seats=seats, pids=forked, pipes=ours)


def _descriptors(rank: int, pipe: socket.socket, listening: socket.socket) -> tuple[int, ...]:
    return (pipe.fileno(), listening.fileno()) if rank == 0 else (pipe.fileno(),)
