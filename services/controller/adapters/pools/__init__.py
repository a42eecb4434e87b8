"""Pools on schedulers that exist: Slurm, Ray, Kubernetes."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from services.controller.adapters.pools.pools_file import (
    SlurmPoolConfig,
    agents_of,
    read_pools_file,
)
from services.controller.adapters.pools.slurm import SlurmPool
from services.controller.ports.pools import NodePool, RunnablePool


def open_pools(path: Path, variables: Mapping[str, str]) -> Sequence[RunnablePool]:
    """The pools that a file names, in its order. Nothing is contacted yet.

    Args:
        path: Of the file.
        variables: Of the controller's environment, for those of the agents.

    Raises:
        PoolsFileError: It cannot be used.
    """
    file = read_pools_file(path)
    pools = [_open(config, file.owner) for config in file.pools]
    return [RunnablePool(pool, agents_of(file.agent, pool.limits, variables)) for pool in pools]


def _open(config: SlurmPoolConfig, owner: str) -> NodePool:
    return SlurmPool(config, owner)
