"""Real replicas of one rank each, with the test in the places of their agent and of the controller."""

import os
import selectors
import signal
import socket
from collections import defaultdict
from collections.abc import Callable
from contextlib import closing
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import TypeVar

from services.contract.jobs.plans import GangPlan, RankPlacement
from services.contract.jobs.specs import JobSpec
from services.contract.messages.board import BoardReader, BoardStep
from services.contract.messages.rank_pipe import (
    RANK_MESSAGE,
    RankFailed,
    RankMessage,
    RankOrder,
    RankReady,
    RankSeat,
    ReplicaSet,
)
from services.contract.system.pipe_end import PipeEnd
from services.controller.domain.plans import default_plan
from services.worker.rank.process.seat import DEFAULT_TRAINER
from tests.forking import forking
from tests.rank.gang import JOB, launched

M = TypeVar("M")
_PATIENCE_S = 120.0
_READ_BYTES = 65_536


class ReplicaJob:
    """An attempt of a job that continues without lost replicas.

    Attributes:
        epoch: Of the newest set of replicas.
        members: Who is in it.
        messages: By rank, what its present and former processes said.
    """

    def __init__(self, root: Path, spec: JobSpec, trainer: str = DEFAULT_TRAINER) -> None:
        self.root = root
        self.spec = spec
        self.epoch = 0
        self.members: tuple[int, ...] = ()
        self.messages: dict[int, list[RankMessage]] = defaultdict(list)
        sharding = default_plan.shard(spec)
        self.size = sharding.mesh.dp_shard * sharding.mesh.tp
        self.replicas = sharding.mesh.dp_replicate
        self.plan = GangPlan(
            device_type="cpu",
            sharding=sharding,
            ranks=tuple(
                RankPlacement(rank=rank, node_id="here", local_rank=rank, device="cpu")
                for rank in range(sharding.mesh.ranks)
            ),
        )
        self._trainer = trainer
        self._context = forking()
        self._selector = selectors.DefaultSelector()
        self._unread: dict[int, bytes] = {}
        self._ports: dict[int, int] = {}
        self._lives: dict[int, int] = defaultdict(int)
        self._pipes: dict[int, PipeEnd] = {}
        self.processes: dict[int, ForkServerProcess] = {}
        self._all: list[ForkServerProcess] = []

    def start(self) -> None:
        """Launches all replicas and has them begin together."""
        for replica in range(self.replicas):
            self.launch(replica)
        for replica in range(self.replicas):
            self.until_ready(replica)
        self.decide(tuple(range(self.replicas)))

    def launch(self, replica: int) -> None:
        """Starts the ranks of a replica."""
        with socket.create_server(("127.0.0.1", 0)) as listener:
            self._ports[replica] = listener.getsockname()[1]
            for place in range(self.size):
                rank = replica * self.size + place
                self._lives[rank] += 1
                process, end = launched(
                    self._context,
                    self._seat(replica, rank),
                    listener if place == 0 else None,
                    self._trainer,
                )
                self.messages[rank] = [
                    told for told in self.messages[rank] if not isinstance(told, RankReady)
                ]
                self.processes[rank] = process
                self._all.append(process)
                self._pipes[rank] = end
                self._unread[rank] = b""
                self._selector.register(end.reading, selectors.EVENT_READ, rank)

    def until_ready(self, replica: int) -> None:
        """Reads until the ranks of a replica have built their models."""
        self.until(lambda: all(self.of_kind(rank, RankReady) for rank in self.ranks_of(replica)))

    def decide(self, members: tuple[int, ...]) -> RankOrder:
        """Tells all members of the next epoch; answers with what they are told."""
        self.epoch += 1
        self.members = members
        told = ReplicaSet(
            epoch=self.epoch,
            members=members,
            host="127.0.0.1",
            port=self._ports[members[-1]],
        )
        order = RankOrder(replicas=told)
        for member in members:
            for rank in self.ranks_of(member):
                self.order(rank, order)
        return order

    def lose(self, replica: int) -> None:
        """SIGKILL to its ranks; the others are told once they are dead."""
        for rank in self.ranks_of(replica):
            pid = self.processes[rank].pid
            assert pid is not None
            os.kill(pid, signal.SIGKILL)
        for rank in self.ranks_of(replica):
            self.processes[rank].join(_PATIENCE_S)
        self.decide(tuple(member for member in self.members if member != replica))

    def cut_off(self, replica: int) -> None:
        """Its ranks stop, and their connections stay open; then the others go on without it."""
        for rank in self.ranks_of(replica):
            pid = self.processes[rank].pid
            assert pid is not None
            os.kill(pid, signal.SIGSTOP)
        self.decide(tuple(member for member in self.members if member != replica))

    def end(self, replica: int) -> None:
        """SIGKILL to its ranks, which are no members any more."""
        for rank in self.ranks_of(replica):
            self.processes[rank].kill()

    def bring_back(self, replica: int) -> None:
        """Starts a lost replica again, and has it get its state from a living one."""
        self.launch(replica)
        self.until_ready(replica)
        self.decide(tuple(sorted((*self.members, replica))))

    def ranks_of(self, replica: int) -> range:
        """Numbers of its ranks."""
        return range(replica * self.size, (replica + 1) * self.size)

    def order(self, rank: int, order: RankOrder) -> None:
        """Tells a rank, as its agent would."""
        os.write(self._pipes[rank].writing, order.model_dump_json().encode() + b"\n")

    def of_kind(self, rank: int, kind: type[M]) -> list[M]:
        """What a rank said so far."""
        return [message for message in self.messages[rank] if isinstance(message, kind)]

    def until(self, seen: Callable[[], bool]) -> None:
        """Reads pipes until ``seen``."""
        while not seen():
            assert self._selector.get_map(), f"all ranks ended first: {self.account()}"
            self._read_some()

    def until_step(self, step: int, rank: int) -> None:
        """Reads until a rank has made so many steps."""
        waiting = 0
        while self.last_step(rank) < step:
            waiting += 1
            assert waiting < 20 * _PATIENCE_S, f"no step {step}: {self.account()}"
            self._read_some(0.05)

    def last_step(self, rank: int) -> int:
        """As the board of its present process shows."""
        path = self._board(rank)
        if not path.exists():
            return 0
        with closing(BoardReader.open(path)) as board:
            shown = board.read()
            return 0 if shown is None else shown.step

    def steps(self, rank: int) -> list[BoardStep]:
        """All steps that its present process made."""
        with closing(BoardReader.open(self._board(rank))) as board:
            return board.steps_after(0)

    def losses(self, rank: int) -> dict[int, float]:
        """By step."""
        return {step.step: step.loss for step in self.steps(rank)}

    def succeeded(self) -> None:
        """Asserts that all members end well."""
        while self._selector.get_map():
            self._read_some()
        for member in self.members:
            for rank in self.ranks_of(member):
                self.processes[rank].join(_PATIENCE_S)
                assert self.processes[rank].exitcode == 0, self.account()

    def account(self) -> str:
        """What went wrong, as far as the ranks told."""
        return "\n".join(
            f"rank {rank}: {failure.traceback}"
            for rank in sorted(self.messages)
            for failure in self.of_kind(rank, RankFailed)
        )

    def close(self) -> None:
        """Leaves no process behind."""
        for process in self._all:
            process.kill()
            process.join()
        for end in self._pipes.values():
            end.close()
        self._selector.close()

    def _read_some(self, patience_s: float = _PATIENCE_S) -> None:
        ready = self._selector.select(patience_s)
        assert ready or patience_s < _PATIENCE_S, f"no rank spoke: {self.account()}"
        for key, _ in ready:
            rank = key.data
            received = os.read(key.fd, _READ_BYTES)
            if not received:
                self._selector.unregister(key.fileobj)
            *lines, self._unread[rank] = (self._unread[rank] + received).split(b"\n")
            self.messages[rank] += [RANK_MESSAGE.validate_json(line) for line in lines]

    def _board(self, rank: int) -> Path:
        return self.root / f"board-{rank}-{self._lives[rank]}"

    def _seat(self, replica: int, rank: int) -> RankSeat:
        return RankSeat(
            job_id=JOB,
            fence=1,
            rank=rank,
            local_rank=rank,
            device="cpu",
            spec=self.spec,
            plan=self.plan,
            storage_root=str(self.root),
            board_path=str(self._board(rank)),
            log_folder=str(self.root),
            store_host="127.0.0.1",
            store_port=self._ports[replica],
            threads=1,
            hears_metrics=True,
            returns=self._lives[rank] > 1,
            data_roots=(str((self.spec.data and self.spec.data.args.get("library")) or self.root),),
        )
