"""How long training stands still for a checkpoint: ours, against ``torch.distributed.checkpoint``.

    python -m benchmarks.checkpoint_stall [--ranks 2] [--parameters 25] [--rounds 7] [--folder F]

Both save the same state (a decoder and its AdamW) of the same ranks, in turns, into the same folder.
The stall is the time for which the training thread waits, the longest of all ranks; a write is done
when all is durable. Each figure is the median of the rounds with the lowest and highest.
"""

import argparse
import contextlib
import multiprocessing
import shutil
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict_saver import async_save
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from fsdp_core.checkpoint import model_state, optimizer_state
from fsdp_core.plan.model import MeshPlan, ShardingPlan, UnitPlan
from services.contract.ids import new_job_id
from services.contract.messages.rank_pipe import RankMessage, RankSeat
from services.contract.plans import GangPlan, RankPlacement
from services.contract.rank_channel import BoardWriter
from services.contract.specs import JobSpec
from services.worker.rank.board_watch import BoardWatch
from services.worker.rank.checkpoint_writer import CheckpointWriter
from services.worker.rank.control import CONTROL_GROUP
from services.worker.rank.groups import joined, mesh_axes
from services.worker.rank.run import Run, build
from services.worker.rank.step import train_step
from services.worker.rank.training_state import capture

JOB = new_job_id(1_700_000_000_000, bytes(10))
MIB = 1 << 20


def main() -> None:
    """Runs the ranks and waits for them."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--parameters", type=int, default=25, help="millions, roughly")
    parser.add_argument("--rounds", type=int, default=7)
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
    """One rank: builds, trains a step, and saves in turns."""
    torch.set_num_threads(1)
    seat = seat_of(rank, wanted, folder, port)
    board = BoardWriter.create(Path(seat.board_path), seat.fence)
    watch = BoardWatch(
        board, (*mesh_axes(seat.plan.sharding.mesh), CONTROL_GROUP), torch.device(seat.device)
    )
    with joined(seat, None, watch) as gang:
        run = build(seat, gang, watch)
        train_step(run, 1)
        rounds = Rounds(run, seat, folder)
        names = ["our write", "our stall", "DCP write", "DCP stall"]
        savers = [rounds.our_write, rounds.our_stall, rounds.dcp_write, rounds.dcp_stall]
        figures: dict[str, list[float]] = {name: [] for name in names}
        for _ in range(wanted.rounds + 1):
            for name, save in zip(names, savers, strict=True):
                figures[name].append(rounds.longest(save))
        if rank == 0:
            report(run, figures)


class Rounds:
    """Saves one state in four ways; each returns the seconds for which training stood still."""

    def __init__(self, run: Run, seat: RankSeat, folder: Path) -> None:
        self._run = run
        self._seat = seat
        self._dcp = folder / "dcp"
        self._step = 1
        self._writers = {mode: self._writer(mode) for mode in ("sync", "async")}
        self._group = dist.new_group(backend="gloo")

    def our_write(self) -> float:
        """Until it is durable."""
        return self._save("sync")

    def our_stall(self) -> float:
        """Until training may go on."""
        stalled = self._save("async")
        self._writers["async"].finish(self._step)
        return stalled

    def dcp_write(self) -> float:
        """The same by ``dcp.save``, whose files are synced too."""
        began = time.perf_counter()
        dcp_save(self._state(), checkpoint_id=self._dcp / "sync", process_group=self._group)
        return time.perf_counter() - began

    def dcp_stall(self) -> float:
        """The same by ``dcp.async_save``."""
        began = time.perf_counter()
        pending = async_save(
            self._state(), checkpoint_id=self._dcp / "async", process_group=self._group
        )
        stalled = time.perf_counter() - began
        pending.result()  # type: ignore[union-attr]  # a future, for no type was asked for
        return stalled

    def longest(self, save: Callable[[], float]) -> float:
        """The longest of all ranks; they begin together, on an empty folder."""
        if self._run.gang.rank == 0:
            shutil.rmtree(self._dcp, ignore_errors=True)
            shutil.rmtree(Path(self._seat.storage_root) / JOB, ignore_errors=True)
        self._run.gang.control.meet()
        seconds = torch.tensor([save()], dtype=torch.float64)
        return float(self._run.gang.control.all_reduce(seconds, dist.ReduceOp.MAX).wait())

    def _save(self, mode: str) -> float:
        self._step += 1
        began = time.perf_counter()
        self._writers[mode].save(capture(self._run, self._step, None))
        return time.perf_counter() - began

    def _writer(self, mode: str) -> CheckpointWriter:
        told: list[RankMessage] = []
        return CheckpointWriter(
            self._seat,
            told.append,
            "sync" if mode == "sync" else "async",
            data_digest="",
            resumed_step=0,
        )

    def _state(self) -> dict[str, torch.Tensor]:
        run = self._run
        return {**model_state(run.model), **optimizer_state(run.model, run.optimizer)}


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
            "data": {"factory": "stdlib_bytes", "args": {"seq_len": 16}},
            "train": {"steps": 1, "global_batch": wanted.ranks},
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


def report(run: Run, figures: dict[str, list[float]]) -> None:
    """Prints the medians and what part of a synchronous write each stall is."""
    state = {**model_state(run.model), **optimizer_state(run.model, run.optimizer)}
    size = sum(tensor.numel() * tensor.element_size() for tensor in state.values())
    out = sys.stdout.write
    out(f"{run.gang.world_size} ranks on {run.gang.device.type}, {size / MIB:,.0f} MiB of state, ")
    out(f"{len(figures['our stall']) - 1} rounds after one that is not counted\n")
    for name, seconds in figures.items():
        first, *counted = seconds
        low, mid, high = min(counted), statistics.median(counted), max(counted)
        out(f"{name:10} {mid * 1000:8.1f} ms ({low * 1000:.1f} to {high * 1000:.1f}; ")
        out(f"the first {first * 1000:.1f})\n")
    for whose in ("our", "DCP"):
        pairs = zip(figures[f"{whose} stall"][1:], figures[f"{whose} write"][1:], strict=True)
        shares = [stall / write for stall, write in pairs]
        out(f"{whose} stall is {statistics.median(shares):.1%} of {whose} synchronous write ")
        out(f"({min(shares):.1%} to {max(shares):.1%})\n")
    ours, theirs = (statistics.median(figures[f"{w} stall"][1:]) for w in ("our", "DCP"))
    out(f"our stall is {ours / theirs:.2f} of DCP's\n")


if __name__ == "__main__":
    main()
