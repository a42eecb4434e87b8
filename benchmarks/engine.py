"""How long a step takes with each engine, side by side in one run.

    python -m benchmarks.engine [--ranks 2] [--rounds 7] [--shapes tiny ...] [--optimizer default] [--hosts 2]
    python -m benchmarks.engine --full

The ranks train one model by each way in turns, a step at a time, with AdamW: without any communication (each
rank alone: the limit), DDP, PyTorch's FSDP2, and `fsdp_core` over the process group and in shared memory.
Printed are median milliseconds of rank 0, and how many times as fast as FSDP2 each way was: the median
over rounds of the two steps of a round, and the range in which half of the rounds lie. The losses of all
sharded ways are compared; on two ranks they are equal.

`--full` runs it on two ranks with both optimizers, on four as two hosts, then `benchmarks.engine_costs`.
`--chart` prints a chart of the ratios besides, in Mermaid's language.

With `--hosts` the ranks are divided into so many parts that share no memory with each other, and another way
exchanges through memory within a part and by gloo between them; both are on this machine, so that the
network between hosts is as fast as its loopback.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from time import perf_counter

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # PyTorch does not list it
from torch.distributed import fsdp as reference
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.multiprocessing.spawn import spawn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

import fsdp_core

_VOCABULARY = 256
_WARM_UP = 3
_PEER = "FSDP2"


@dataclass(frozen=True)
class Shape:
    """A decoder and its batch.

    Attributes:
        blocks: Each a unit of its own.
        dim: Width.
        batch: Sequences of a rank.
        length: Tokens of each.
        is_bf16: Whether parameters are gathered in bf16, and gradients reduced in fp32.
    """

    blocks: int
    dim: int
    batch: int
    length: int
    is_bf16: bool = False


SHAPES = {
    "communication-bound": Shape(8, 512, 1, 16),
    "communication-bound, bf16": Shape(8, 512, 1, 16, is_bf16=True),
    "many small blocks": Shape(48, 64, 1, 16),
    "compute-bound": Shape(6, 384, 4, 128),
    "tiny": Shape(4, 128, 1, 16),
}
GPU_SHAPES = {
    "compute-bound": Shape(12, 2048, 8, 1024, is_bf16=True),
    "many small blocks": Shape(48, 256, 2, 64, is_bf16=True),
    "few wide blocks": Shape(4, 4096, 1, 256, is_bf16=True),
    "fp32": Shape(12, 1024, 4, 512),
}


class Block(nn.Module):
    """Attention and a feed-forward layer."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.heads = dim // 32
        self.first_norm = nn.LayerNorm(dim)
        self.projections = nn.Linear(dim, 3 * dim)
        self.mixed = nn.Linear(dim, dim)
        self.second_norm = nn.LayerNorm(dim)
        self.up = nn.Linear(dim, 4 * dim)
        self.down = nn.Linear(4 * dim, dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """One step of the stream ``[B, T, D]``."""
        parts = self.projections(self.first_norm(x)).chunk(3, dim=-1)
        query, key, value = (p.unflatten(-1, (self.heads, -1)).transpose(1, 2) for p in parts)
        attended = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.mixed(attended.transpose(1, 2).flatten(2))
        fed: torch.Tensor = x + self.down(functional.gelu(self.up(self.second_norm(x))))
        return fed


class Decoder(nn.Module):
    """Tokens ``[B, T]`` to logits."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embedding = nn.Embedding(_VOCABULARY, shape.dim)
        self.blocks = nn.ModuleList(Block(shape.dim) for _ in range(shape.blocks))
        self.norm = nn.LayerNorm(shape.dim)
        self.head = nn.Linear(shape.dim, _VOCABULARY, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Logits ``[B, T, vocabulary]``."""
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        logits: torch.Tensor = self.head(self.norm(x))
        return logits


Way = Callable[[Shape, DeviceMesh], nn.Module]


def _alone(shape: Shape, mesh: DeviceMesh) -> nn.Module:
    del mesh
    model = Decoder(shape)
    return model.to(torch.bfloat16) if shape.is_bf16 else model


def _ddp(shape: Shape, mesh: DeviceMesh) -> nn.Module:
    return DistributedDataParallel(_alone(shape, mesh))


def _fsdp2(shape: Shape, mesh: DeviceMesh) -> nn.Module:
    policy = reference.MixedPrecisionPolicy(*_dtypes(shape))
    return _sharded(shape, partial(reference.fully_shard, mesh=mesh, mp_policy=policy))


def _ours(
    shape: Shape, mesh: DeviceMesh, shared: fsdp_core.SharedMemoryPolicy | None = None
) -> nn.Module:
    policy = fsdp_core.MixedPrecisionPolicy(*_dtypes(shape))
    shard = partial(fsdp_core.fully_shard, mesh=mesh, mp_policy=policy, shared_memory=shared)
    return _sharded(shape, shard)


def _sharded(shape: Shape, shard: Callable[[nn.Module], object]) -> nn.Module:
    model = Decoder(shape)
    for block in model.blocks:
        shard(block)
    shard(model)
    return model


def _dtypes(shape: Shape) -> tuple[torch.dtype | None, torch.dtype | None]:
    return (torch.bfloat16, torch.float32) if shape.is_bf16 else (None, None)


def _on_hosts(hosts: int, shape: Shape, mesh: DeviceMesh) -> nn.Module:
    # What a group's hosts are is found out once: not of the one that the other ways share.
    everyone = dist.new_group()
    assert everyone is not None  # noqa: S101 - of all ranks
    part = str(mesh.get_rank() * hosts // mesh.size())
    policy = fsdp_core.SharedMemoryPolicy(part_of_host=part)
    return _ours(shape, DeviceMesh.from_group(everyone, "cpu"), policy)


WAYS: dict[str, Way] = {
    "no communication": _alone,
    "DDP": _ddp,
    _PEER: _fsdp2,
    "ours, process group": _ours,
    "ours, shared memory": partial(_ours, shared=fsdp_core.SharedMemoryPolicy()),
    "ours, shared storage": partial(_ours, shared=fsdp_core.SharedMemoryPolicy(share_storage=True)),
}
SHARDED = tuple(WAYS)[2:]


@dataclass
class Training:
    """A model, its optimizer, and its own stream of batches."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    shape: Shape
    generator: torch.Generator

    @classmethod
    def by(cls, way: Way, shape: Shape, mesh: DeviceMesh, *, is_fused: bool) -> Training:
        """With the same values and batches whatever the way; AdamW fused, or as it is by default."""
        torch.manual_seed(0)
        with torch.device(mesh.device_type):
            model = way(shape, mesh)
        generator = torch.Generator().manual_seed(1 + mesh.get_rank())
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=is_fused or None)
        return cls(model, optimizer, shape, generator)

    def batch(self) -> torch.Tensor:
        """The next tokens ``[B, T + 1]``, on the host."""
        shape = (self.shape.batch, self.shape.length + 1)
        return torch.randint(_VOCABULARY, shape, generator=self.generator)

    def step(self) -> tuple[float, float]:
        """One step; seconds, and its loss."""
        tokens = self.batch()
        dist.barrier()
        began = perf_counter()
        loss = self.train(tokens)
        return perf_counter() - began, loss.item()

    def train(self, tokens: torch.Tensor) -> torch.Tensor:
        """The loss of tokens ``[B, T + 1]`` before an update on them."""
        logits = self.model(tokens[:, :-1])
        loss = functional.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())
        torch.autograd.backward(loss)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()


def measure(
    shape: Shape, mesh: DeviceMesh, rounds: int, *, is_fused: bool = True, hosts: int = 1
) -> dict[str, list[float]]:
    """Seconds of each step by each way, in turns.

    Raises:
        AssertionError: On two ranks, a sharded way had other losses than FSDP2.
    """
    ways: dict[str, Way] = dict(WAYS)
    if hosts > 1:
        ways[f"ours, {hosts} hosts"] = partial(_on_hosts, hosts)
    trainings = {
        name: Training.by(way, shape, mesh, is_fused=is_fused) for name, way in ways.items()
    }
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(_WARM_UP + rounds):
        losses = {}
        for name, training in trainings.items():
            took, losses[name] = training.step()
            if turn >= _WARM_UP:
                seconds[name].append(took)
        if mesh.size() == 2:  # noqa: PLR2004 - of three and more the order of a sum matters
            assert len({losses[name] for name in SHARDED}) == 1, losses  # noqa: S101 - the check itself
    return seconds


def _table(name: str, seconds: dict[str, list[float]]) -> str:
    lines = [f"{name}", f"  {'':<22} {'ms':>8}   times as fast as {_PEER}"]
    for way, own in seconds.items():
        ratios = [peer / mine for peer, mine in zip(seconds[_PEER], own, strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4)
        lines.append(
            f"  {way:<22} {1e3 * statistics.median(own):8.1f}   {middle:.2f} ({low:.2f} to {high:.2f})"
        )
    return "\n".join(lines)


def _chart(shapes: Sequence[str], speed_ups: dict[str, list[float]]) -> str:
    """Bars of one copy for all ranks, and a line of the limit, by shape."""

    def row(way: str) -> str:
        return ", ".join(f"{ratio:.2f}" for ratio in speed_ups[way])

    names = ", ".join(f'"{shape}"' for shape in shapes)
    return (
        "```mermaid\nxychart-beta\n"
        f'  title "times as fast as FSDP2: shared storage (bars), no communication (line)"\n'
        f"  x-axis [{names}]\n  bar [{row('ours, shared storage')}]\n  line [{row('no communication')}]\n```\n"
    )


def _rank(rank: int, world: int, port: int, chosen: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    store = TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    mesh = init_device_mesh("cpu", (world,))
    speed_ups: dict[str, list[float]] = {}
    is_fused = chosen.optimizer == "fused"
    for name in chosen.shapes:
        seconds = measure(SHAPES[name], mesh, chosen.rounds, is_fused=is_fused, hosts=chosen.hosts)
        if rank == 0:
            sys.stdout.write(_table(name, seconds) + "\n")
            sys.stdout.flush()
            for way, own in seconds.items():
                ratio = statistics.median(
                    peer / mine for peer, mine in zip(seconds[_PEER], own, strict=True)
                )
                speed_ups.setdefault(way, []).append(ratio)
    if rank == 0:
        sys.stdout.write("geometric mean over shapes, times as fast as FSDP2\n")
        for way, ratios in speed_ups.items():
            sys.stdout.write(f"  {way:<22} {statistics.geometric_mean(ratios):.2f}\n")
        if chosen.chart:
            sys.stdout.write(_chart(chosen.shapes, speed_ups))
        sys.stdout.flush()
    dist.barrier()
    os._exit(0)  # the tear-down of gloo's threads aborts now and then


def main() -> None:
    """Starts the ranks."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=7, help="steps by each way, after warm-up")
    parser.add_argument("--shapes", nargs="+", choices=list(SHAPES), default=list(SHAPES))
    parser.add_argument(
        "--optimizer",
        choices=["fused", "default"],
        default="fused",
        help="AdamW as one kernel, or parameter by parameter as it is without further options",
    )
    parser.add_argument(
        "--hosts", type=int, default=1, help="parts of the machine to count as hosts"
    )
    parser.add_argument("--chart", action="store_true", help="print a chart, too")
    parser.add_argument("--full", action="store_true", help="everything; takes half an hour")
    chosen = parser.parse_args()
    if not chosen.full:
        _run(chosen)
        return
    for ranks, optimizer, hosts in ((2, "fused", 1), (2, "default", 1), (4, "fused", 2)):
        sys.stdout.write(f"\n{ranks} ranks, {optimizer} AdamW\n")
        sys.stdout.flush()
        own = {**vars(chosen), "ranks": ranks, "optimizer": optimizer, "hosts": hosts}
        _run(argparse.Namespace(**own))
    subprocess.run([sys.executable, "-m", "benchmarks.engine_costs"], check=True)


def _run(chosen: argparse.Namespace) -> None:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    spawn(  # type: ignore[no-untyped-call]  # PyTorch's
        _rank,
        (chosen.ranks, store.port, chosen),
        nprocs=chosen.ranks,
    )


if __name__ == "__main__":
    main()
