"""One rank of a world of any size: memory, layouts and copies are real, collectives do nothing."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Concatenate, ParamSpec, TypeVar
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from tests.engine.gang import ROOT, RankContext
from tests.forking import forking

P = ParamSpec("P")
R = TypeVar("R")


class FakeRank:
    """A process that is one rank after another."""

    def __init__(self, device: str) -> None:
        self._device = device
        self._process = ProcessPoolExecutor(1, forking(), initializer=_prepare)

    def run(
        self,
        world: int,
        function: Callable[Concatenate[RankContext, P], R],
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> R:
        """Calls `function` as the first rank of `world`."""
        call: Callable[..., R] = partial(_as_rank, self._device, 0, world, function)
        return self._process.submit(call, *args, **kwargs).result()

    def run_last(self, world: int, function: Callable[[RankContext], R]) -> R:
        """Calls `function` as the last rank of `world`."""
        return self._process.submit(_as_rank, self._device, world - 1, world, function).result()

    def close(self) -> None:
        self._process.shutdown()


def _prepare() -> None:
    sys.path.insert(0, ROOT)
    torch.set_num_threads(1)


def _as_rank(
    device: str, rank: int, world: int, function: Callable[..., R], *args: object, **kwargs: object
) -> R:
    # Registers the backend, and is for tests alone.
    from torch.testing._internal.distributed.fake_pg import FakeStore  # noqa: PLC0415

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
    try:
        torch.manual_seed(0)
        # DTensor remembers, by mesh, what this process held as another rank.
        mesh = init_device_mesh(device, (world,), mesh_dim_names=(f"seen_by_{rank}",))
        return function(RankContext(rank, world, torch.device(device), mesh), *args, **kwargs)
    finally:
        dist.destroy_process_group()


@dataclass(frozen=True)
class Call:
    """One collective: its kind, how many ranks, and the elements of what it writes and reads."""

    kind: str
    ranks: int
    numels: tuple[int, ...]


_KINDS = {
    "all_gather_single": "all-gather",
    "all_gather_into_tensor": "all-gather",
    "reduce_scatter_single": "reduce-scatter",
    "reduce_scatter_tensor": "reduce-scatter",
    "all_reduce": "all-reduce",
}


@contextmanager
def calls() -> Iterator[list[Call]]:
    """The collectives that are started within through `torch.distributed`."""
    seen: list[Call] = []

    def noting(kind: str, real: Callable[..., object]) -> Callable[..., object]:
        def call(*args: object, **kwargs: object) -> object:
            tensors = [*args, *kwargs.values()]
            group = kwargs["group"]
            assert isinstance(group, dist.ProcessGroup)
            numels = tuple(t.numel() for t in tensors if isinstance(t, torch.Tensor))
            seen.append(Call(kind, group.size(), numels))
            return real(*args, **kwargs)

        return call

    with ExitStack() as patches:
        for name, kind in _KINDS.items():
            if hasattr(dist, name):
                wrapped = noting(kind, getattr(dist, name))
                patches.enter_context(mock.patch.object(dist, name, wrapped))
        yield seen
