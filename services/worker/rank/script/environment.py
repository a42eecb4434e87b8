"""What torchrun tells a script by its environment, for a rank of ours."""

from collections.abc import Mapping, Sequence

from services.contract.jobs.plans import RankPlacement
from services.contract.messages.rank_pipe import RankSeat

_CUDA: str = "CUDA_VISIBLE_DEVICES"


def torchrun_environment(seat: RankSeat, inherited: Mapping[str, str]) -> dict[str, str]:
    """The variables that differ from those that the rank has inherited.

    ``MASTER_ADDR`` and ``MASTER_PORT`` are those of a store that this attempt hosts for the script, so
    that ``init_process_group()`` connects to it (``TORCHELASTIC_USE_AGENT_STORE``). The accelerators
    that the process sees are those of this job's ranks on the node, in the order of ``LOCAL_RANK``.

    Args:
        seat: Of the rank.
        inherited: The environment so far.
    """
    own = next(place for place in seat.plan.ranks if place.rank == seat.rank)
    nodes = list(dict.fromkeys(place.node_id for place in seat.plan.ranks))
    here = sorted(
        (place for place in seat.plan.ranks if place.node_id == own.node_id),
        key=lambda place: place.local_rank,
    )
    world = str(seat.plan.world_size)
    told = {
        "RANK": str(seat.rank),
        "LOCAL_RANK": str(seat.local_rank),
        "ROLE_RANK": str(seat.rank),
        "GROUP_RANK": str(nodes.index(own.node_id)),
        "WORLD_SIZE": world,
        "LOCAL_WORLD_SIZE": str(len(here)),
        "ROLE_WORLD_SIZE": world,
        "GROUP_WORLD_SIZE": str(len(nodes)),
        "ROLE_NAME": "default",
        "MASTER_ADDR": seat.store_host,
        "MASTER_PORT": str(seat.store_port),
        "TORCHELASTIC_RUN_ID": seat.job_id,
        "TORCHELASTIC_RESTART_COUNT": str(seat.fence - 1),
        "TORCHELASTIC_MAX_RESTARTS": str(seat.spec.faults.max_restarts),
        "TORCHELASTIC_USE_AGENT_STORE": str(True),
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": inherited.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"),
        "OMP_NUM_THREADS": inherited.get("OMP_NUM_THREADS", str(seat.threads)),
    }
    if seat.device.startswith("cuda"):
        told[_CUDA] = _visible(here, inherited.get(_CUDA))
    return told


def _visible(here: Sequence[RankPlacement], inherited: str | None) -> str:
    """The accelerators of these ranks; their numbers count those that were visible before."""
    numbers = [int(place.device.partition(":")[2] or 0) for place in here]
    before = inherited.split(",") if inherited else None
    return ",".join(str(n) if before is None else before[n] for n in numbers)
