"""Pools on schedulers that exist: Slurm, Ray, Kubernetes."""

from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path

from services.controller.adapters.pools.pools_file import (
    AnyPoolConfig,
    KubernetesPoolConfig,
    PoolsFileError,
    RayPoolConfig,
    agents_of,
    read_pools_file,
)
from services.controller.adapters.pools.ray import RayPool
from services.controller.adapters.pools.slurm import SlurmPool
from services.controller.ports.pools import NodePool, RunnablePool


def open_pools(path: Path, variables: Mapping[str, str]) -> Sequence[RunnablePool]:
    """The pools that a file names, in its order. Nothing is contacted yet.

    Args:
        path: Of the file.
        variables: Of the controller's environment, for those of the agents and for Slurm's commands.

    Raises:
        PoolsFileError: It cannot be used.
    """
    file = read_pools_file(path)
    opened = [(_open(config, file.owner, variables), config.grace_s) for config in file.pools]
    return [
        RunnablePool(pool, agents_of(file.agent, pool.limits, grace_s, variables))
        for pool, grace_s in opened
    ]


def _open(config: AnyPoolConfig, owner: str, variables: Mapping[str, str]) -> NodePool:
    if isinstance(config, RayPoolConfig):
        if find_spec("ray") is None:
            raise PoolsFileError(
                f"pool {config.name}: Ray is not installed: pip install 'meshloom[ray]'"
            )
        return RayPool(config, owner, variables)
    if isinstance(config, KubernetesPoolConfig):
        if find_spec("kubernetes") is None:
            raise PoolsFileError(
                f"pool {config.name}: Kubernetes's client is not installed: pip install 'meshloom[kubernetes]'"
            )
        # A large package, which only controllers with such a pool need.
        from services.controller.adapters.pools.kubernetes import KubernetesPool  # noqa: PLC0415

        return KubernetesPool(config, owner)
    return SlurmPool(config, owner, variables=variables)
