"""Rendezvous: how the ranks of an attempt meet, and how they part."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Final

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from fsdp_core.plan.model import MeshPlan
from services.contract.messages.rank_pipe import RankSeat
from services.worker.rank.gang.control import CollectiveListener, ControlChannel

# Other nodes may still load the checkpoint. Agents end a meeting that cannot succeed sooner.
_MEETING_TIME: Final = timedelta(minutes=30)


class MeshError(ValueError):
    """The plan's mesh cannot be built over the gang."""


COMPARES: Final = "meshloom/compares/"
"""Begins the keys by which ranks tell each other that they compare what they have of their own."""


def mesh_axes(sizes: MeshPlan) -> dict[str, int]:
    """The axes of a gang's mesh and their sizes, outermost first.

    Ranks of one tp group are neighbours, so that they share a node; those that replicate are
    furthest apart. ``dp_shard`` is always there, the others where they have several ranks.
    """
    axes = {"dp_replicate": sizes.dp_replicate, "dp_shard": sizes.dp_shard, "tp": sizes.tp}
    return {name: size for name, size in axes.items() if size > 1 or name == "dp_shard"}


@dataclass(frozen=True)
class Gang:
    """A rank among those that train with it.

    Where a job continues without lost replicas, these are the ranks of one replica.

    Attributes:
        rank: This one.
        world_size: How many there are.
        data_rank: Its place among those that train on different data.
        data_ranks: How many of these there are.
        device: Where this rank computes.
        mesh: Over all ranks, with the axes of ``mesh_axes``; the engine's collectives run on it.
        control: For small CPU tensors beside the engine's collectives.
        replica: Which replica the ranks are, among ``replicas`` that do not know of each other here.
        replicas: How many shares the data has, each for the ranks of one such replica.
        compares: Whether all ranks can compare what they have of their own; those of older versions cannot.
    """

    rank: int
    world_size: int
    data_rank: int
    data_ranks: int
    device: torch.device
    mesh: DeviceMesh
    control: ControlChannel
    replica: int = 0
    replicas: int = 1
    compares: bool = True


def own_mesh(seat: RankSeat) -> MeshPlan:
    """The mesh of the ranks that meet: of all, or of the seat's replica if it can be lost alone."""
    mesh = seat.plan.sharding.mesh
    return replace(mesh, dp_replicate=1) if seat.spec.continues_without_replicas else mesh


@contextlib.contextmanager
def joined(seat: RankSeat, listen_fd: int | None, listener: CollectiveListener) -> Iterator[Gang]:
    """Meets the other ranks, and parts from them when the block ends without an exception.

    After an exception nothing is torn down: the others cannot be waited for, and the process is
    about to end.

    Args:
        seat: Names rank, world, device and the store's address.
        listen_fd: On rank 0, the bound socket on which the store listens: nobody can have taken
            the port in between. None opens ``seat.store_port``.
        listener: Told of the collectives on the control channel.

    Raises:
        MeshError: The plan's mesh has not as many ranks as this gang.
        torch.distributed.DistError: The others did not come within half an hour.
    """
    sizes = seat.plan.sharding.mesh
    world_size = seat.plan.world_size
    if sizes.ranks != world_size:
        raise MeshError(
            f"plan.mesh: dp_replicate {sizes.dp_replicate} x dp_shard {sizes.dp_shard} x "
            f"tp {sizes.tp} is {sizes.ranks} ranks, and the gang has {world_size}"
        )
    replicas = sizes.dp_replicate if seat.spec.continues_without_replicas else 1
    sizes = own_mesh(seat)
    replica, rank, world_size = (*divmod(seat.rank, sizes.ranks), sizes.ranks)
    device = torch.device(seat.device)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    store = dist.TCPStore(  # type: ignore[attr-defined]  # PyTorch exports it implicitly
        seat.store_host,
        seat.store_port,
        world_size,
        is_master=rank == 0,
        timeout=_MEETING_TIME,
        wait_for_workers=False,
        master_listen_fd=listen_fd if rank == 0 else None,
    )
    # A store that outlived an attempt must not introduce its ranks to those of the next.
    own_store = dist.PrefixStore(f"attempt-{seat.fence}", store)  # type: ignore[attr-defined]  # as above
    own_store.set(f"{COMPARES}{rank}", "")
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        store=own_store,
        rank=rank,
        world_size=world_size,
        device_id=device if device.type == "cuda" else None,
    )
    axes = mesh_axes(sizes)
    mesh = init_device_mesh(device.type, tuple(axes.values()), mesh_dim_names=tuple(axes))
    control = ControlChannel(dist.new_group(backend="gloo"), listener)
    yield Gang(
        rank,
        world_size,
        rank // sizes.tp,
        sizes.data_ranks,
        device,
        mesh,
        control,
        replica,
        replicas,
        # All that would tell have told it by now: the control group connects each with all others.
        own_store.check([f"{COMPARES}{each}" for each in range(world_size)]),
    )
    _part(control)


def _part(control: ControlChannel) -> None:
    # All is committed and reported by now: a rank that is gone already is no failure of ours.
    with contextlib.suppress(RuntimeError):
        control.meet()
        dist.destroy_process_group()
