# ruff: noqa: SLF001 - private names are what this package is for
"""Process groups: where they met, and memory that they give."""

from __future__ import annotations

import importlib
from collections import Counter
from collections.abc import Callable, Sequence
from hashlib import sha256
from typing import TYPE_CHECKING, Any, Final, cast
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from types import ModuleType

    from torch.distributed import Store  # type: ignore[attr-defined]  # PyTorch does not list it


def default_store() -> Store:
    """The store through which the default process group met; there is no public way to it."""
    return dist.distributed_c10d._get_default_store()


# How many groups of a purpose and of some ranks each world has made, ended ones included: what their ranks
# wrote into the world's store stays there, and a group of the same name would read it.
_made: Final[WeakKeyDictionary[dist.ProcessGroup, Counter[str]]] = WeakKeyDictionary()


def group_of_members(ranks: Sequence[int], purpose: str) -> dist.ProcessGroup:
    """A process group that its members alone make, this rank among them.

    ``new_group(use_local_synchronization=True)`` does so, too, but names it by how many groups a rank has
    by then. Members that have different numbers, as after one made a group for itself, meet under different
    names: each waits for the others until the time-out, of half an hour. The name here is made of what all
    members know alike.

    Args:
        ranks: The members, as ranks of the world, in the order that they have in the group.
        purpose: Its description, and a part of its name.
    """
    c10d = dist.distributed_c10d
    world = c10d._get_default_group()
    made = _made.setdefault(world, Counter())
    among = sha256(",".join(map(str, ranks)).encode()).hexdigest()[:16]
    kind = f"{purpose}/{among}"
    made[kind] += 1
    backend, store = c10d._world.pg_map[world]
    group, _ = c10d._new_process_group_helper(
        len(ranks),
        ranks.index(dist.get_rank()),
        ranks,
        dist.Backend(backend),
        store,
        cast("Any", f"{kind}/{made[kind]}"),  # text to all versions; newer ones have a type for it
        timeout=c10d._get_default_timeout(dist.Backend(backend)),
        device_id=world.bound_device_id,
        group_desc=purpose,
    )
    c10d._world.pg_group_ranks[group] = {each: place for place, each in enumerate(ranks)}
    return cast("dist.ProcessGroup", group)


def group_device_types(group: dist.ProcessGroup) -> list[str]:
    """Device types that the group has a backend for; `DeviceMesh` tells one, a group none."""
    return [device.type for device in group._device_types]


def scaled_sum(factor: float) -> dist.ReduceOp:
    """A sum of which the backend multiplies each summand by `factor` itself: NCCL's, no other's.

    PyTorch makes it by a private function alone.
    """
    make = cast("Callable[[float], dist.ReduceOp]", dist._make_nccl_premul_sum)  # type: ignore[attr-defined]  # private
    return make(factor)


def allocator_of(
    group: dist.ProcessGroup, device: torch.device
) -> Callable[[int, torch.dtype], torch.Tensor] | None:
    """The process group's own allocator of 1D tensors for `device`, if it has one.

    Only the backend behind the group knows it, and PyTorch hands that out under a private name.
    """
    backend = cast("Any", group._get_backend(device))
    if not backend.supports_tensor_alloc(device):
        return None
    return lambda size, dtype: backend.allocate_tensor(size, dtype=dtype, device=device)


def uncounted_reduce(
    tensor: torch.Tensor, op: dist.ReduceOp.RedOpType, group: dist.ProcessGroup
) -> dist.Work:
    """Reduces to the first rank of `group`; neither `CommDebugMode` nor wrappers of torch.distributed see it.

    Every public way passes the dispatcher, where PyTorch counts collectives.
    """
    return cast("dist.Work", _backend(group, tensor).reduce(tensor, 0, op))


def uncounted_broadcast(tensor: torch.Tensor, group: dist.ProcessGroup) -> dist.Work:
    """Broadcasts from the first rank of `group`, as unseen as `uncounted_reduce`."""
    return cast("dist.Work", _backend(group, tensor).broadcast(tensor, 0))


def _backend(group: dist.ProcessGroup, tensor: torch.Tensor) -> Any:  # noqa: ANN401 - PyTorch does not type it
    return group._get_backend(tensor.device)


def store_within(prefix: str, store: Store) -> Store:
    """The part of `store` whose keys begin with `prefix`; PyTorch does not list the class."""
    return dist.PrefixStore(prefix, store)  # type: ignore[attr-defined]  # as the docstring says


class Gloo:
    """A connection of some ranks by gloo that is no process group: nobody else can see or count it.

    Process groups of some ranks can only be made by all ranks, or get names by how many each has made.

    Args:
        store: Through which they meet.
        rank: Of this process among them.
        size: How many they are.
    """

    def __init__(self, store: Store, rank: int, size: int) -> None:
        self._backend = cast("Any", dist.ProcessGroupGloo)(store, rank, size)

    def all_gather(self, output: torch.Tensor, contribution: torch.Tensor) -> dist.Work:
        """Starts to fill `output`, 1D, with all contributions in the order of ranks."""
        return cast("dist.Work", self._backend._allgather_base(output, contribution))

    def all_reduce(self, contribution: torch.Tensor) -> dist.Work:
        """Starts to add all contributions, in place.

        Gloo's reduce-scatter does the same and copies a part, but its work takes no time-out.
        """
        return cast("dist.Work", self._backend.allreduce([contribution], dist.ReduceOp.SUM))


def set_symmetric_backend(name: str) -> None:
    """Chooses who allocates symmetric memory; PyTorch has no public module for it yet."""
    _symmetric_memory().set_backend(name)


def symmetric_pool(device: torch.device) -> torch.cuda.MemPool:
    """Pool of symmetric memory of a device."""
    return cast("torch.cuda.MemPool", _symmetric_memory().get_mem_pool(device))


def meet_in_memory(tensor: torch.Tensor, group: dist.ProcessGroup) -> None:
    """Maps the tensor's symmetric memory into all ranks of the group; collective."""
    _symmetric_memory().rendezvous(tensor, group=group.group_name)


def _symmetric_memory() -> ModuleType:
    # Only where it is used: the module asks the driver when it is imported.
    return importlib.import_module("torch.distributed._symmetric_memory")
