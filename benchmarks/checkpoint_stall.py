"""What a checkpoint costs the training beside it: ours, against ``torch.distributed.checkpoint``.

    python -m benchmarks.checkpoint_stall [--ranks 2] [--parameters 25] [--tokens 256] [--rounds 9]

The ranks train a decoder, and save it with its AdamW by each way in turns: written while training
waits, and beside training. DCP's ``async_save`` is taken as it comes, and with a stager that copies
in a thread into memory which it keeps, for which training waits before its next update. Each save
follows some steps without one, whose median is the usual step. Of each save:

- *waits*: for how long the training thread stood still, for the save and before the update;
- *next step*: from the save to the end of the step after it, less a usual step. Beside the waits
  that holds what the copies took from the step's own work;
- *until durable*: the same over all steps until every rank's bytes are synced, which hold what
  digesting and writing took besides.

A synchronous write is what its training thread waits. Each figure is the longest of all ranks, the
median of the rounds, with the lowest and highest; a share is that of the two medians.
"""

import argparse
import contextlib
import dataclasses
import multiprocessing
import shutil
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

import torch
import torch.distributed as dist

from benchmarks.ways_to_save import (
    DCPAsync,
    DCPSave,
    Ours,
    Way,
    staging_in_a_thread,
    state_of,
)
from fsdp_core.plan.model import MeshPlan, ShardingPlan, UnitPlan
from services.contract.jobs.plans import GangPlan, RankPlacement
from services.contract.jobs.specs import JobSpec
from services.contract.messages.board import BoardWriter
from services.contract.messages.rank_pipe import RankSeat
from services.contract.words.ids import new_job_id
from services.worker.rank.gang.control import CONTROL_GROUP
from services.worker.rank.gang.groups import joined, mesh_axes
from services.worker.rank.loop.board_watch import BoardWatch
from services.worker.rank.loop.run import Run, build
from services.worker.rank.loop.step import train_step

JOB = new_job_id(1_700_000_000_000, bytes(10))
MIB: Final = 1 << 20
USUAL_STEPS: Final = 6


def main() -> None:
    """Runs the ranks and waits for them."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--parameters", type=int, default=25, help="millions, roughly")
    parser.add_argument("--tokens", type=int, default=256, help="of a rank in a step")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--folder", type=Path, help="where to write; a temporary one by default")
    wanted = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    with contextlib.ExitStack() as stack:
        folder = wanted.folder or Path(
            stack.enter_context(tempfile.TemporaryDirectory(prefix="meshloom-stall-"))
        )
        with socket.create_server(("127.0.0.1", 0)) as probe:
            port = probe.getsockname()[1]
        ranks = [
            context.Process(target=measure, args=(rank, wanted, folder, port))
            for rank in range(wanted.ranks)
        ]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join()
        sys.exit(max(abs(process.exitcode or 0) for process in ranks))


def measure(rank: int, wanted: argparse.Namespace, folder: Path, port: int) -> None:
    """One rank: builds, trains, and saves by each way in turns."""
    torch.set_num_threads(1)
    seat = seat_of(rank, wanted, folder, port)
    board = BoardWriter.create(Path(seat.board_path), seat.fence)
    watch = BoardWatch(
        board, (*mesh_axes(seat.plan.sharding.mesh), CONTROL_GROUP), torch.device(seat.device)
    )
    with joined(seat, None, watch) as gang:
        run = build(seat, gang, watch)
        train_step(run, 1, nothing)
        group = dist.new_group(backend="gloo")
        ways: dict[str, Way] = {
            "our write": Ours(run, seat, "sync"),
            "ours": Ours(run, seat, "async"),
            "DCP write": DCPSave(run, folder, group),
            "async_save": DCPAsync(run, folder, group, stager=None),
            "its stager": DCPAsync(run, folder, group, stager=staging_in_a_thread()),
        }
        training = Training(run, (folder / "dcp", Path(seat.storage_root) / JOB))
        figures: dict[str, list[Costs]] = {name: [] for name in ways}
        for _ in range(wanted.rounds + 1):
            for name, way in ways.items():
                figures[name].append(training.costs(way))
        if rank == 0:
            report(run, figures)


def nothing() -> None:
    """Before an update for which no copies are awaited."""


@dataclasses.dataclass(frozen=True)
class Costs:
    """Of one save, in seconds; ``usual`` is a step beside no save, ``steps`` until durable."""

    usual: float
    waits: float
    next_step: float
    until_durable: float
    steps: float


class Training:
    """Trains, with and without a save, and tells the difference.

    Args:
        run: What is trained.
        written: Folders of what earlier saves wrote, removed before each.
    """

    def __init__(self, run: Run, written: Sequence[Path]) -> None:
        self._run = run
        self._written = written
        self._step = 1

    def costs(self, way: Way) -> Costs:
        """Of one save by ``way``, the longest of all ranks."""
        if self._run.gang.rank == 0:
            for folder in self._written:
                shutil.rmtree(folder, ignore_errors=True)
        self._run.gang.control.meet()
        usual = statistics.median(self._timed(nothing, lambda: False) for _ in range(USUAL_STEPS))
        waited = Stopwatch()
        began = time.perf_counter()
        waited.time(lambda: way.save(self._step))
        steps = [self._timed(lambda: waited.time(way.release), lambda: not way.is_durable())]
        next_step = time.perf_counter() - began
        while self._goes_on:
            steps.append(self._timed(nothing, lambda: not way.is_durable()))
        durable = time.perf_counter() - began
        way.finish()
        mine = [usual, waited.seconds, next_step, durable, len(steps)]
        usual, waits, next_step, durable, made = self._longest(mine)
        return Costs(usual, waits, next_step - usual, durable - made * usual, made)

    def _timed(self, before_update: Callable[[], None], goes_on: Callable[[], bool]) -> float:
        """Makes a step; the ranks agree on whether one more is to follow, as the trainer's do."""
        began = time.perf_counter()
        self._step += 1
        train_step(self._run, self._step, before_update)
        requests = torch.tensor([goes_on()], dtype=torch.int32)
        self._goes_on = bool(self._run.gang.control.all_reduce(requests, dist.ReduceOp.MAX).wait())
        return time.perf_counter() - began

    def _longest(self, mine: Sequence[float]) -> list[float]:
        seconds = torch.tensor(mine, dtype=torch.float64)
        longest = self._run.gang.control.all_reduce(seconds, dist.ReduceOp.MAX).wait()
        return [float(value) for value in longest]


class Stopwatch:
    """Sums up the time that calls take."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def time(self, call: Callable[[], None]) -> None:
        """Calls, and adds."""
        began = time.perf_counter()
        call()
        self.seconds += time.perf_counter() - began


def seat_of(rank: int, wanted: argparse.Namespace, folder: Path, port: int) -> RankSeat:
    """The seat of one rank of a job that is made for this."""
    layers = 8
    width = max(64, round((wanted.parameters * 1_000_000 / (12 * layers)) ** 0.5 / 64) * 64)
    spec = JobSpec.model_validate(
        {
            "model": {
                "factory": "decoder",
                "args": {"dim": width, "layers": layers, "heads": width // 64},
            },
            "data": {"factory": "stdlib_bytes", "args": {"seq_len": wanted.tokens}},
            "train": {"steps": 1_000_000, "global_batch": wanted.ranks},
            "resources": {"ranks": wanted.ranks},
        }
    )
    devices = [f"cuda:{r}" if wanted.device == "cuda" else "cpu" for r in range(wanted.ranks)]
    plan = GangPlan(
        device_type=wanted.device,
        sharding=ShardingPlan(MeshPlan(dp_shard=wanted.ranks), (UnitPlan(("blocks.*",)),)),
        ranks=tuple(
            RankPlacement(rank=r, node_id="here", local_rank=r, device=device)
            for r, device in enumerate(devices)
        ),
    )
    return RankSeat(
        job_id=JOB,
        fence=1,
        rank=rank,
        local_rank=rank,
        device=devices[rank],
        spec=spec,
        plan=plan,
        storage_root=str(folder / "ours"),
        board_path=str(folder / f"board-{rank}"),
        log_folder=str(folder),
        store_host="127.0.0.1",
        store_port=port,
        threads=1,
    )


def report(run: Run, figures: dict[str, list[Costs]]) -> None:
    """Prints the costs, and what part of the same library's synchronous write they are."""
    size = sum(tensor.numel() * tensor.element_size() for tensor in state_of(run).values())
    counted = {name: costs[1:] for name, costs in figures.items()}
    usual = [costs.usual for way in counted.values() for costs in way]
    out = sys.stdout.write
    out(f"{run.gang.world_size} ranks on {run.gang.device.type}, {size / MIB:,.0f} MiB of state, ")
    out(f"{len(counted['ours'])} rounds after one that is not counted; {spread(usual)} a step\n")
    for name in ("our write", "DCP write"):
        out(f"{name:10} {spread([costs.waits for costs in counted[name]])}\n")
    for name, write in (("ours", "our"), ("async_save", "DCP"), ("its stager", "DCP")):
        whole = statistics.median(costs.waits for costs in counted[f"{write} write"])
        steps = statistics.median(costs.steps for costs in counted[name])
        for figure, word in (
            ("waits", "waits"),
            ("next_step", "next step"),
            ("until_durable", f"until durable ({steps:.0f} steps)"),
        ):
            seconds = [getattr(costs, figure) for costs in counted[name]]
            share = statistics.median(seconds) / whole
            out(f"{name:10} {word:25} {spread(seconds)}: {share:.1%} of {write} write\n")
    ours, theirs = (statistics.median(c.waits for c in counted[n]) for n in ("ours", "async_save"))
    out(f"ours waits {ours / theirs:.2f} of what async_save waits\n")


def spread(seconds: Sequence[float]) -> str:
    """Median, lowest and highest in milliseconds."""
    low, high = min(seconds) * 1000, max(seconds) * 1000
    return f"{statistics.median(seconds) * 1000:7.1f} ms ({low:.1f} to {high:.1f})"


if __name__ == "__main__":
    main()
