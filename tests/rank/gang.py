"""Real rank processes, with the test in the agent's place: it holds pipes and boards."""

import os
import selectors
import shutil
import socket
import sys
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.context import ForkServerContext, ForkServerProcess
from multiprocessing.reduction import DupFd
from pathlib import Path
from typing import Any, TypeVar

import torch

from fsdp_core.plan.model import MeshPlan, Precision, ShardingPlan, UnitPlan
from services.contract.jobs.plans import GangPlan, RankPlacement
from services.contract.jobs.specs import JobSpec
from services.contract.messages.board import BoardReader, BoardStep
from services.contract.messages.rank_pipe import (
    RANK_MESSAGE,
    RankFailed,
    RankMessage,
    RankOrder,
    RankSeat,
    RankVote,
    TraceOrder,
)
from services.contract.storage.commit_chain import CommitChain
from services.contract.storage.manifests import Manifest
from services.contract.system.pipe_end import PipeEnd
from services.contract.words.ids import new_job_id
from services.controller.domain.plans import default_plan
from services.worker.rank.process.seat import DEFAULT_TRAINER, take_seat
from tests.forking import forking, imported

M = TypeVar("M")

JOB = new_job_id(1_700_000_000_000, bytes(10))
BLOCKS = (UnitPlan(("blocks.*",)),)
_PATIENCE_S = 120.0
_READ_BYTES = 65_536


def spec_of(library: Path, **parts: dict[str, Any]) -> JobSpec:
    """A job that trains in a second; ``parts`` are merged into its sections."""
    base: dict[str, dict[str, Any]] = {
        "model": {"factory": "decoder", "args": {"dim": 16, "layers": 2, "heads": 2}},
        "data": {
            "factory": "stdlib_bytes",
            "args": {
                "seq_len": 16,
                "library": str(library),
                "validation_sequences": 6,
                "validation_batch": 2,
            },
        },
        "optimizer": {"factory": "adamw", "args": {"lr": 1e-2}},
        "schedule": {"factory": "warmup_cosine", "args": {"warmup_steps": 2}},
        "train": {"steps": 6, "global_batch": 12, "seed": 7},
        "checkpoint": {"every_steps": 3},
    }
    merged = {name: {**base.get(name, {}), **part} for name, part in parts.items()}
    return JobSpec.model_validate({**base, **merged})


@dataclass
class Attempt:
    """A gang of live ranks.

    Attributes:
        messages: By rank, what came over the pipes so far.
    """

    root: Path
    fence: int
    plan: GangPlan
    processes: list[ForkServerProcess]
    pipes: list[PipeEnd]
    messages: dict[int, list[RankMessage]] = field(default_factory=lambda: defaultdict(list))

    def __post_init__(self) -> None:
        self._unread = [b"" for _ in self.pipes]
        self._selector = selectors.DefaultSelector()
        for rank, end in enumerate(self.pipes):
            self._selector.register(end.reading, selectors.EVENT_READ, rank)

    def of_kind(self, rank: int, kind: type[M]) -> list[M]:
        """The rank's messages of one kind so far."""
        return [message for message in self.messages[rank] if isinstance(message, kind)]

    def until(self, seen: Callable[[], bool]) -> None:
        """Reads pipes until ``seen``.

        Raises:
            AssertionError: All ranks ended before, or none spoke for a minute.
        """
        while not seen():
            assert self._selector.get_map(), f"all ranks ended first:\n{self.account()}"
            self._read_some()

    def order(
        self,
        rank: int,
        *,
        checkpoint: bool = False,
        stop: bool = False,
        trace: TraceOrder | None = None,
    ) -> None:
        """Tells one rank, as its agent would."""
        order = RankOrder(checkpoint=checkpoint, stop=stop, trace=trace)
        os.write(self.pipes[rank].writing, order.model_dump_json().encode() + b"\n")

    def ended(self) -> list[int | None]:
        """Reads until every rank has ended; their exit codes."""
        while self._selector.get_map():
            self._read_some()
        for process in self.processes:
            process.join(_PATIENCE_S)
        return [process.exitcode for process in self.processes]

    def succeeded(self) -> "Attempt":
        """Asserts that every rank ends well."""
        codes = self.ended()
        assert codes == [0] * len(codes), self.account()
        return self

    def losses(self, rank: int = 0) -> dict[int, float]:
        """Loss by step, from the rank's board."""
        return {step.step: step.loss for step in self.steps(rank)}

    def losses_after(self, step: int) -> dict[int, float]:
        """Loss of the steps after ``step``, from the board of rank 0."""
        return {number: loss for number, loss in self.losses().items() if number > step}

    def steps(self, rank: int = 0) -> list[BoardStep]:
        """All finished steps on the rank's board."""
        return self.board(rank).steps_after(0)

    def board(self, rank: int) -> BoardReader:
        """The rank's board, which outlives it."""
        return BoardReader.open(_board_path(self.root, self.fence, rank))

    def committed(self, step: int, root: Path | None = None) -> Manifest:
        """Links the checkpoint of ``step``, for which all ranks must have voted, into the chain.

        Args:
            step: After which it was taken.
            root: The storage, where it is a copy of that of the ranks.
        """
        votes = [
            vote
            for rank in range(len(self.pipes))
            for vote in self.of_kind(rank, RankVote)
            if vote.step == step
        ]
        assert len(votes) == len(self.pipes), self.account()
        manifest = Manifest(
            job_id=JOB,
            checkpoint_id=votes[0].checkpoint_id,
            fence=self.fence,
            step=step,
            world_size=len(votes),
            loss=votes[0].loss,
            data_digest=votes[0].data_digest,
            shards=tuple(vote.shard for vote in votes),
        )
        CommitChain(root or self.root, JOB).append(manifest)
        return manifest

    def account(self) -> str:
        """What went wrong, as far as the ranks told."""
        failures = [
            f"rank {rank}: {failure.traceback}"
            for rank in range(len(self.pipes))
            for failure in self.of_kind(rank, RankFailed)
        ]
        return "\n".join(failures) or "no rank reported a failure"

    def close(self) -> None:
        """Leaves no process behind."""
        for process in self.processes:
            process.kill()
            process.join()
        for end in self.pipes:
            end.close()
        self._selector.close()

    def _read_some(self) -> None:
        ready = self._selector.select(_PATIENCE_S)
        assert ready, f"no rank spoke for {_PATIENCE_S} s:\n{self.account()}"
        for key, _ in ready:
            rank = key.data
            received = os.read(self.pipes[rank].reading, _READ_BYTES)
            if not received:
                self._selector.unregister(key.fileobj)
            *lines, self._unread[rank] = (self._unread[rank] + received).split(b"\n")
            self.messages[rank] += [RANK_MESSAGE.validate_json(line) for line in lines]


class Ranks:
    """Starts gangs below one storage root and ends what is left of them.

    Args:
        root: Of the checkpoints.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self._context = forking()
        self._attempts: list[Attempt] = []

    def start(  # noqa: PLR0913 (what an attempt may differ in)
        self,
        spec: JobSpec,
        world: int = 2,
        *,
        fence: int = 1,
        resume_from: str | None = None,
        units: tuple[UnitPlan, ...] = BLOCKS,
        param_dtype: Precision = "fp32",
        trainer: str = DEFAULT_TRAINER,
        code: Path | None = None,
        libraries: tuple[str, ...] = (),
    ) -> Attempt:
        """Launches an attempt of ``world`` ranks, or of those of a fixed job's mesh.

        ``code`` is where uploaded code would lie; ``libraries``, modules that take seconds to import,
        with which ranks begin.
        """
        sharding = ShardingPlan(
            MeshPlan(dp_shard=world),
            units,
            # As the controller plans: parameters are kept in fp32.
            param_dtype=None if param_dtype == "fp32" else param_dtype,
            reduce_dtype="fp32",
            shared_memory="auto",
        )
        if spec.resources.world is not None:
            sharding = default_plan.shard(spec, world)
        elif spec.mesh != "auto":
            sharding = default_plan.shard(spec)
            world = sharding.mesh.ranks
        placements = tuple(
            RankPlacement(rank=rank, node_id="here", local_rank=rank, device="cpu")
            for rank in range(world)
        )
        plan = GangPlan(device_type="cpu", sharding=sharding, ranks=placements)
        processes = []
        ours = []
        with socket.create_server(("127.0.0.1", 0)) as listener:
            for rank in range(world):
                seat = RankSeat(
                    job_id=JOB,
                    fence=fence,
                    rank=rank,
                    local_rank=rank,
                    device="cpu",
                    spec=spec,
                    plan=plan,
                    resume_from=resume_from,
                    storage_root=str(self.root),
                    board_path=str(_board_path(self.root, fence, rank)),
                    log_folder=str(self.root),
                    store_host="127.0.0.1",
                    store_port=listener.getsockname()[1],
                    threads=1,
                    code_folder=None if code is None else str(code),
                    hears_metrics=True,
                    data_roots=(
                        str(spec.data.args.get("library", self.root) if spec.data else self.root),
                    ),
                )
                is_head = rank == 0
                process, end = launched(
                    self._context, seat, listener if is_head else None, trainer, libraries
                )
                processes.append(process)
                ours.append(end)
        attempt = Attempt(self.root, fence, plan, processes, ours)
        self._attempts.append(attempt)
        return attempt

    def close(self) -> None:
        """Ends every attempt."""
        for attempt in self._attempts:
            attempt.close()


class Trained:
    """Runs that nothing disturbs, each trained once however many tests ask for it.

    Args:
        folder: Below it each run has a storage root of its own.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._runs: dict[str, tuple[Ranks, Attempt]] = {}

    def of(
        self,
        spec: JobSpec,
        world: int = 2,
        *,
        units: tuple[UnitPlan, ...] = BLOCKS,
        param_dtype: Precision = "fp32",
    ) -> Attempt:
        """The run of ``spec`` on ``world`` ranks, to its end."""
        key = f"{spec.model_dump_json()} {world} {units} {param_dtype}"
        if key not in self._runs:
            ranks = Ranks(self._folder / str(len(self._runs)))
            ranks.root.mkdir()
            attempt = ranks.start(spec, world, units=units, param_dtype=param_dtype)
            self._runs[key] = ranks, attempt.succeeded()
        return self._runs[key][1]

    def committed(
        self,
        step: int,
        ranks: Ranks,
        spec: JobSpec,
        world: int = 2,
        *,
        units: tuple[UnitPlan, ...] = BLOCKS,
    ) -> Manifest:
        """Copies the run's storage to that of ``ranks`` and commits the checkpoint of ``step``."""
        run = self.of(spec, world, units=units)
        shutil.copytree(run.root / JOB, ranks.root / JOB)
        return run.committed(step, ranks.root)

    def close(self) -> None:
        """Ends what is left of the runs."""
        for ranks, _ in self._runs.values():
            ranks.close()


@contextmanager
def ranks_below(root: Path) -> Iterator[Ranks]:
    """Ranks that are gone when the block ends."""
    ranks = Ranks(root)
    try:
        yield ranks
    finally:
        ranks.close()


def launched(
    context: ForkServerContext,
    seat: RankSeat,
    listener: socket.socket | None,
    trainer: str = DEFAULT_TRAINER,
    libraries: tuple[str, ...] = (),
) -> tuple[ForkServerProcess, PipeEnd]:
    """A live rank, and the agent's end of its pipe."""
    end, theirs = PipeEnd.pair()
    process = context.Process(
        target=_sit,
        args=(seat, _Sent(theirs), listener, trainer),
        daemon=False,  # it may have worker processes of its own
    )
    with imported(*libraries):
        process.start()
    theirs.close()
    return process, end


@dataclass(frozen=True)
class _Sent:
    """The end of a pipe that a process gets for itself when it is started."""

    end: PipeEnd

    def __reduce__(self) -> tuple[Any, ...]:
        return _received, (DupFd(self.end.reading), DupFd(self.end.writing))


def _received(reading: Any, writing: Any) -> _Sent:  # noqa: ANN401 what DupFd makes has no public type
    return _Sent(PipeEnd(reading.detach(), writing.detach()))


def _sit(seat: RankSeat, sent: _Sent, listener: socket.socket | None, trainer: str) -> None:
    log = os.open(Path(seat.log_folder) / f"rank-{seat.rank}.log", os.O_WRONLY | os.O_CREAT)
    for number in (1, 2):
        os.dup2(log, number)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]  # it is a text stream
    torch.set_num_threads(seat.threads)
    warnings.simplefilter("error")
    take_seat(seat, sent.end, None if listener is None else listener.detach(), trainer)


def _board_path(root: Path, fence: int, rank: int) -> Path:
    return root / f"board-{fence}-{rank}"
