"""Rank processes that live for the whole test session, one gang per world size.

A test ships a module-level function by its qualified name; every rank imports and calls it with
a `RankContext`. A failure in any rank ends the gang and is raised in the test with that rank's
traceback; so does a time-out, with the names of the ranks that are missing.
"""

from __future__ import annotations

import faulthandler
import gc
import importlib
import os
import pickle
import signal
import sys
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import connection
from pathlib import Path
from time import monotonic
from typing import Concatenate, ParamSpec, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import (  # type: ignore[attr-defined]  # PyTorch does not list the stores
    ProcessGroupGloo,
    Store,
    TCPStore,
    _functional_collectives,
    distributed_c10d,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from fsdp_core.comm import collectives
from tests.forking import forking

P = ParamSpec("P")
R = TypeVar("R")

ROOT = str(Path(__file__).parents[2])


@dataclass(frozen=True)
class RankContext:
    """What a function that runs in a rank may use."""

    rank: int
    world: int
    device: torch.device
    mesh: DeviceMesh

    def batch(self, step: int, *shape: int) -> torch.Tensor:
        """This rank's own input of a step, the same in every call."""
        generator = torch.Generator().manual_seed(1000 * step + self.rank)
        return torch.randn(*shape, generator=generator).to(self.device)


class GangError(Exception):
    """A rank raised, died, or did not answer in time."""


class Gang:
    """`world` rank processes with one process group."""

    def __init__(self, world: int, device: str) -> None:
        # The store's server lives here, on a port that the kernel chose: no race for one.
        self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        forks = forking()
        self._pipes: list[connection.Connection] = []
        self._processes = []
        for rank in range(world):
            ours, theirs = forks.Pipe()
            process = forks.Process(
                target=_serve, args=(theirs, rank, world, self._store.port, device), daemon=True
            )
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)

    @property
    def is_alive(self) -> bool:
        return all(process.is_alive() for process in self._processes)

    def run(
        self,
        function: Callable[Concatenate[RankContext, P], R],
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> list[R]:
        """Calls `function` in every rank; returns the results by rank."""
        self._send((function.__module__, function.__qualname__, args, kwargs))
        return self._collect(function.__qualname__, timeout_s=200.0)

    def close(self) -> None:
        try:
            self._send(None)
            self._collect("close", timeout_s=10.0)
        except (GangError, OSError):
            self.kill()
        for process in self._processes:
            process.join()

    def _print_stacks(self) -> None:
        """Ends the ranks in a way in which they print where each of their threads is."""
        for process in self._processes:
            assert process.pid is not None
            os.kill(process.pid, signal.SIGABRT)
            process.join(timeout=30.0)  # one after the other: so that the stacks are not mixed
        self.kill()

    def kill(self) -> None:
        for process in self._processes:
            process.kill()
            process.join()

    def _send(self, message: object) -> None:
        payload = pickle.dumps(message)
        for pipe in self._pipes:
            pipe.send_bytes(payload)

    def _collect(self, what: str, timeout_s: float) -> list[R]:
        answers: dict[int, R] = {}
        deadline = monotonic() + timeout_s
        while len(answers) < len(self._pipes):
            waiting = {p: r for r, p in enumerate(self._pipes) if r not in answers}
            ready = connection.wait(list(waiting), timeout=max(0.0, deadline - monotonic()))
            if not ready:
                self._print_stacks()
                raise GangError(f"{what}: no answer from ranks {sorted(waiting.values())}")
            for pipe in (p for p in self._pipes if p in ready):
                rank = waiting[pipe]
                try:
                    result, failure = pickle.loads(pipe.recv_bytes())  # noqa: S301 - our own child's
                except EOFError:
                    self.kill()
                    raise GangError(f"{what}: rank {rank} died") from None
                if failure is not None:
                    self.kill()
                    raise GangError(f"{what}: rank {rank} of {len(self._pipes)}:\n{failure}")
                answers[rank] = result
        return [answers[rank] for rank in range(len(self._pipes))]


# A rank holds 400 MB, and several test processes run at once.
MOST_RANKS = 7


class Gangs:
    """Starts gangs when they are first asked for, and again when one has died.

    At most `MOST_RANKS` processes live at a time: the gang that was used longest ago goes first.
    """

    def __init__(self, device: str) -> None:
        self._device = device
        self._gangs: dict[int, Gang] = {}

    def __call__(self, world: int) -> Gang:
        gang = self._gangs.pop(world, None)
        if gang is None or not gang.is_alive:
            while self._gangs and sum(self._gangs) + world > MOST_RANKS:
                self._close(next(iter(self._gangs)))
            gang = Gang(world, self._device)
        self._gangs[world] = gang  # behind the others: used last
        return gang

    def close(self) -> None:
        for world in list(self._gangs):
            self._close(world)

    def _close(self, world: int) -> None:
        gang = self._gangs.pop(world)
        if gang.is_alive:
            gang.close()


def _serve(pipe: connection.Connection, rank: int, world: int, port: int, device: str) -> None:
    faulthandler.enable()
    # A crash in a thread without Python, such as gloo's, would leave no trace of where it was.
    torch._C._set_print_stack_traces_on_fatal_signal(True)  # noqa: FBT003 - positional alone
    sys.path.insert(0, ROOT)
    torch.set_num_threads(1)
    collectives.by_group_on_one_rank = device == "cuda"  # so that one GPU runs NCCL
    context = _join(rank, world, port, device)
    gc.freeze()  # what was imported is no garbage, and half a million objects to look at each time
    warnings.simplefilter("error")
    while True:
        message = pickle.loads(pipe.recv_bytes())  # noqa: S301 - our own parent's
        if message is None:
            pipe.send_bytes(pickle.dumps((None, None)))
            # The tear-down of gloo's threads aborts now and then; nothing is left to save.
            os._exit(0)
        pipe.send_bytes(pickle.dumps(_answer(context, *message)))


def _join(rank: int, world: int, port: int, device: str) -> RankContext:
    store = TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=60))
    if device == "cuda":
        torch.cuda.set_device(rank % torch.cuda.device_count())
    _share_one_loop()
    has_own = device == "cuda" and world <= torch.cuda.device_count()
    if device == "cuda" and not has_own:
        _share_gpus()
    dist.init_process_group("nccl" if has_own else "gloo", store=store, rank=rank, world_size=world)
    mesh = init_device_mesh(device, (world,))
    here = torch.device(device, torch.cuda.current_device()) if device == "cuda" else "cpu"
    return RankContext(rank, world, torch.device(here), mesh)


def _share_gpus() -> None:
    """Let more ranks than GPUs exchange by gloo, as NCCL refuses two on one.

    PyTorch's own functional gather of CUDA tensors by gloo ends the process (seen in 2.11): DTensors are
    gathered on the host here.
    """

    def gather(
        tensor: torch.Tensor, gather_dim: int, group: tuple[DeviceMesh, int], tag: str = ""
    ) -> torch.Tensor:
        del tag
        mesh, mesh_dim = group
        known = mesh.get_group(mesh_dim)
        here = tensor.cpu().contiguous()
        parts = [torch.empty_like(here) for _ in range(known.size())]
        dist.all_gather(parts, here, group=known)
        return torch.cat(parts, gather_dim).to(tensor.device)

    _functional_collectives.all_gather_tensor = gather  # type: ignore[assignment]  # in this rank


def _share_one_loop() -> None:
    """Have all of this rank's groups on gloo share a device.

    A device has a thread that wakes a hundred times a second, and groups of meshes live as long as
    the rank. With a device each, the hundred groups of a gang would take a third of a core for the
    rest of the session, whoever uses them.
    """
    device = ProcessGroupGloo.create_default_device()

    class OnSharedDevice(ProcessGroupGloo):
        def __init__(self, store: Store, rank: int, size: int, timeout: timedelta) -> None:
            options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # not in its stubs
            options._devices = [device]
            options._timeout = timeout
            super().__init__(store, rank, size, options)

    distributed_c10d.ProcessGroupGloo = OnSharedDevice  # type: ignore[misc]  # in this rank


def _answer(
    context: RankContext,
    module: str,
    qualname: str,
    args: tuple[object, ...],
    kwargs: dict[str, object],
) -> tuple[object, str | None]:
    try:
        function = importlib.import_module(module)
        for name in qualname.split("."):
            function = getattr(function, name)
        torch.manual_seed(0)
        return function(context, *args, **kwargs), None  # type: ignore[operator]  # found by name
    except BaseException:  # noqa: BLE001 - whatever it is belongs to the test
        return None, traceback.format_exc()
