"""What sharding costs the host besides computation: CPU time for each unit, its growth, and memory.

    python -m benchmarks.engine_costs [python] [growth] [memory]

`python` is CPU time of one rank for each unit and step, less that of the same model unsharded: on a process
group of one rank, and as one rank of eight whose collectives do nothing. `growth` is that time as units,
parameters and ranks grow, and the exponent of a power law through it. `memory` is the peak of what all
ranks on this host hold together, pages that they share counted once, above what they held before the model.
"""

from __future__ import annotations

import argparse
import gc
import math
import os
import statistics
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from time import process_time

import torch
import torch.distributed as dist
from click import echo
from torch import nn
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # PyTorch does not list it
from torch.distributed import fsdp as reference
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

import fsdp_core
from benchmarks.engine import SHAPES, WAYS, Training

_WARM_UP = 3
_SHARD: dict[str, Callable[..., object]] = {
    "FSDP2": reference.fully_shard,
    "ours": fsdp_core.fully_shard,
}


@contextmanager
def _one_rank_of(world: int) -> Iterator[DeviceMesh]:
    if world == 1:
        store = TCPStore("127.0.0.1", 0, is_master=True, timeout=timedelta(seconds=60))
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    else:
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world)
    try:
        yield init_device_mesh("cpu", (world,))
    finally:
        dist.destroy_process_group()


class Stack(nn.Module):
    """Units of several small vectors, each multiplied with the stream: hardly any computation."""

    def __init__(self, units: int, params: int, ranks: int) -> None:
        super().__init__()
        self.units = nn.ModuleList(_Scales(params, ranks) for _ in range(units))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The stream ``[1]``."""
        for unit in self.units:
            x = unit(x)
        return x


class _Scales(nn.Module):
    def __init__(self, params: int, ranks: int) -> None:
        super().__init__()
        self.scales = nn.ParameterList(torch.ones(ranks) for _ in range(params))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``[1]`` to ``[1]``."""
        for scale in self.scales:
            x = x * scale[:1]
        return x


def _sharded(
    model: nn.Module, units: nn.ModuleList, shard: Callable[..., object], mesh: DeviceMesh
) -> nn.Module:
    for unit in units:
        shard(unit, mesh=mesh)
    shard(model, mesh=mesh)
    return model


def _cpu_seconds(steps: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Median CPU time of each step; they are done in turns."""
    taken: dict[str, list[float]] = {name: [] for name in steps}
    gc.collect()
    gc.disable()
    for turn in range(_WARM_UP + rounds):
        for name, step in steps.items():
            began = process_time()
            step()
            if turn >= _WARM_UP:
                taken[name].append(process_time() - began)
    gc.enable()
    return {name: statistics.median(seconds) for name, seconds in taken.items()}


def _backward_of(model: nn.Module, x: torch.Tensor) -> Callable[[], object]:
    def step() -> None:
        torch.autograd.backward(model(x).square().mean())
        for param in model.parameters():
            param.grad = None

    return step


def python_time(rounds: int) -> None:
    """Prints microseconds for each unit and step."""
    echo("CPU time for each unit and step, microseconds (48 blocks of 12 parameters)")
    shape = SHAPES["many small blocks"]
    for world in (1, 8):
        with _one_rank_of(world) as mesh:
            tokens = torch.randint(256, (shape.batch, shape.length))
            steps: dict[str, Callable[[], object]] = {}
            for name, shard in (("unsharded", None), *_SHARD.items()):
                torch.manual_seed(0)
                model = WAYS["no communication"](shape, mesh)
                if shard is not None:
                    _sharded(model, model.blocks, shard, mesh)  # type: ignore[arg-type]  # a list
                steps[name] = _backward_of(model, tokens)
            own = _cpu_seconds(steps, rounds)
            cost = {name: 1e6 * (own[name] - own["unsharded"]) / shape.blocks for name in _SHARD}
            ratio = cost["ours"] / cost["FSDP2"]
            where = "process group of one rank" if world == 1 else f"one rank of {world}"
            echo(
                f"  {where:<26} FSDP2 {cost['FSDP2']:7.0f}  ours {cost['ours']:7.0f}  ratio {ratio:.2f}"
            )


def growth(rounds: int) -> None:
    """Prints CPU time as one figure grows, and exponents."""
    echo(
        "CPU time of a step in milliseconds as one figure grows (one rank of many, others constant)"
    )
    cases: dict[str, list[tuple[int, tuple[int, int, int]]]] = {
        "units": [(n, (n, 2, 8)) for n in (10, 32, 100, 316, 1000)],
        "parameters of a unit": [(n, (10, n, 8)) for n in (2, 6, 20, 63, 200)],
        "ranks": [(n, (50, 4, n)) for n in (8, 64, 512, 4096)],
    }
    for figure, sizes in cases.items():
        for name, shard in _SHARD.items():
            points = []
            for size, (units, params, ranks) in sizes:
                with _one_rank_of(ranks) as mesh:
                    model = Stack(units, params, ranks)
                    _sharded(model, model.units, shard, mesh)
                    step = _backward_of(model, torch.ones(1, requires_grad=True))
                    points.append((size, _cpu_seconds({name: step}, rounds)[name]))
            row = "  ".join(f"{size}: {1e3 * seconds:.1f}" for size, seconds in points)
            echo(f"  {figure:<21} {name:<6} {row}  exponent {_exponent(points):.2f}")


def _exponent(points: list[tuple[int, float]]) -> float:
    slope, _ = statistics.linear_regression(
        [math.log(size) for size, _ in points], [math.log(seconds) for _, seconds in points]
    )
    return slope


def memory(ranks: int, steps: int) -> None:
    """Prints the peak of all ranks together."""
    echo(f"Peak of {ranks} ranks together, MB, above what they held before the model")
    for shape in ("communication-bound", "many small blocks", "compute-bound", "tiny"):
        peaks = {
            way: _peak_mb(way, shape, ranks, steps) for way in WAYS if way != "no communication"
        }
        row = "  ".join(f"{way}: {peak:.0f}" for way, peak in peaks.items())
        ratio = peaks["ours, shared storage"] / peaks["FSDP2"]
        echo(f"  {shape:<20} {row}  shared storage / FSDP2 {ratio:.2f}")


def _peak_mb(way: str, shape: str, ranks: int, steps: int) -> float:
    """Of fresh processes: what one way leaves in the allocator is not another's."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    context = get_context("spawn")
    ends = [context.Pipe() for _ in range(ranks)]
    processes = [
        context.Process(target=_train, args=(end, (rank, ranks, store.port), way, shape, steps))
        for rank, (_, end) in enumerate(ends)
    ]
    for process in processes:
        process.start()
    for ours, _ in ends:
        ours.recv()  # ready
    pids = [process.pid for process in processes if process.pid is not None]
    before = _held_mb(pids)
    peak = before
    for ours, _ in ends:
        ours.send("train")
    # To look takes the lock of the rank's mappings: between two looks it gets on.
    while not all(ours.poll(0.01) for ours, _ in ends):
        peak = max(peak, _held_mb(pids))
    for ours, _ in ends:
        ours.send("end")
    for process in processes:
        process.join()
    return peak - before


def _held_mb(pids: list[int]) -> float:
    """Of each page the share of those that map it: all shares of a shared page are one page."""
    held = 0
    for pid in pids:
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                held += int(line.split()[1])
    return held / 1024


def _train(end: Connection, place: tuple[int, int, int], way: str, shape: str, steps: int) -> None:
    rank, ranks, port = place
    torch.set_num_threads(1)
    store = TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
    mesh = init_device_mesh("cpu", (ranks,))
    Training.by(
        WAYS[way], SHAPES["tiny"], mesh, is_fused=True
    ).step()  # all code and groups are loaded
    gc.collect()
    end.send("ready")
    end.recv()
    training = Training.by(WAYS[way], SHAPES[shape], mesh, is_fused=True)
    for _ in range(steps):
        training.step()
    end.send("trained")
    end.recv()
    os._exit(0)  # the tear-down of gloo's threads aborts now and then


def main() -> None:
    """Measures what is asked for, or all."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    kinds = ("python", "growth", "memory")
    parser.add_argument("kinds", nargs="*", choices=[*kinds, []])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--ranks", type=int, default=2, help="of `memory`")
    chosen = parser.parse_args()
    asked = chosen.kinds or kinds
    torch.set_num_threads(1)  # others would wait in a loop, which CPU time counts
    if "python" in asked:
        python_time(chosen.rounds)
    if "growth" in asked:
        growth(max(3, chosen.rounds // 3))
    if "memory" in asked:
        memory(chosen.ranks, steps=4)


if __name__ == "__main__":
    main()
