"""How long a step takes on a GPU with each engine, side by side in one run.

    python -m benchmarks.engine_on_gpu [--worlds 1 8 64] [--rounds 15] [--shapes fp32 ...]

One process trains one decoder by each way in turns, a step at a time, with fused AdamW: unsharded (the limit),
DDP, PyTorch's FSDP2, and `fsdp_core`. In a world of one it is a rank of NCCL, and the losses of all
sharded ways must be equal. In a larger one it is the first of so many ranks whose collectives do nothing: kernels,
copies, memory and the host's work are real, values are not, and a wire takes no time.

Printed are medians: milliseconds of a step until the device has finished it, and until the host has issued it;
how many times as fast as FSDP2 the step was, with the range in which half of the rounds lie; and the most MiB that
the step held in addition to parameters and optimizer.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from time import perf_counter

import torch
import torch.distributed as dist
from click import echo
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # PyTorch does not list it
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from benchmarks.engine import GPU_SHAPES, WAYS, Shape, Training

_WARM_UP = 5
_PEER = "FSDP2"
_ALONE = ("no communication", "DDP", _PEER, "ours, process group")
_AMONG_OTHERS = ("no communication", _PEER, "ours, process group")


@dataclass(frozen=True)
class Step:
    """What one step took: seconds, seconds until the host had issued it, and bytes; and its loss."""

    seconds: float
    issued: float
    held: int
    loss: float


@contextmanager
def _one_rank_of(world: int) -> Iterator[DeviceMesh]:
    if world == 1:
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        device = torch.device("cuda", 0)
        dist.init_process_group("nccl", store=store, rank=0, world_size=1, device_id=device)
    else:
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world)
    try:
        yield init_device_mesh("cuda", (world,))
    finally:
        dist.destroy_process_group()


def _step(training: Training) -> Step:
    tokens = training.batch().cuda()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    began = perf_counter()
    loss = training.train(tokens)
    issued = perf_counter() - began
    torch.cuda.synchronize()
    seconds = perf_counter() - began
    return Step(seconds, issued, torch.cuda.max_memory_allocated() - before, loss.item())


def measure(shape: Shape, world: int, rounds: int) -> dict[str, list[Step]]:
    """Steps by each way, in turns.

    Raises:
        AssertionError: In a world of one, `fsdp_core` had other losses than FSDP2.
    """
    with _one_rank_of(world) as mesh:
        names = _ALONE if world == 1 else _AMONG_OTHERS
        trainings = {name: Training.by(WAYS[name], shape, mesh, is_fused=True) for name in names}
        steps: dict[str, list[Step]] = {name: [] for name in names}
        for turn in range(_WARM_UP + rounds):
            torch.use_deterministic_algorithms(mode=turn < _WARM_UP)
            taken = {name: _step(training) for name, training in trainings.items()}
            if world == 1 and turn < _WARM_UP:
                theirs, ours = taken[_PEER].loss, taken["ours, process group"].loss
                assert theirs == ours, (theirs, ours)  # noqa: S101 - the check itself
            if turn >= _WARM_UP:
                for name, step in taken.items():
                    steps[name].append(step)
        return steps


def _table(title: str, steps: dict[str, list[Step]]) -> str:
    columns = f"{'ms':>8} {'issued':>8} {'MiB':>8}"
    lines = [title, f"  {'':<22} {columns}   times as fast as {_PEER}"]
    for way, own in steps.items():
        ratios = [peer.seconds / mine.seconds for peer, mine in zip(steps[_PEER], own, strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4)
        took = 1e3 * statistics.median(step.seconds for step in own)
        issued = 1e3 * statistics.median(step.issued for step in own)
        held = statistics.median(step.held for step in own) / (1 << 20)
        lines.append(
            f"  {way:<22} {took:8.2f} {issued:8.2f} {held:8.1f}   {middle:.2f} ({low:.2f} to {high:.2f})"
        )
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints the tables."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--worlds", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--rounds", type=int, default=15, help="steps by each way, after warm-up")
    parser.add_argument("--shapes", nargs="+", choices=list(GPU_SHAPES), default=list(GPU_SHAPES))
    chosen = parser.parse_args(arguments)
    echo(f"{torch.cuda.get_device_name()}, PyTorch {torch.__version__}")
    for world in chosen.worlds:
        for name in chosen.shapes:
            steps = measure(GPU_SHAPES[name], world, chosen.rounds)
            echo(_table(f"one rank of {world}, {name}", steps))


if __name__ == "__main__":
    main()
