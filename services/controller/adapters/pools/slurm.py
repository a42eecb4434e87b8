"""Nodes by Slurm (https://slurm.schedmd.com): a batch job for each reservation, an agent on each node."""

from collections.abc import Mapping, Sequence
from typing import Final

from services.contract.words.ids import NodeId
from services.contract.words.states import PoolKind
from services.controller.adapters.pools.pools_file import SlurmPoolConfig, limits_of
from services.controller.domain.scheduling.reservations import PoolLimits, Sighting
from services.controller.ports.pools import AgentProcess

_ANSWER_S: Final = 30.0
_HELD: Final = frozenset(
    {"PENDING", "CONFIGURING", "RUNNING", "SUSPENDED", "REQUEUED", "RESIZING", "SIGNALING"}
)


class SlurmPool:
    """The port ``NodePool``.

    Args:
        config: Of the pool.
        owner: Stands in the names of our batch jobs.
    """

    def __init__(self, config: SlurmPoolConfig, owner: str = "meshloom") -> None:
        self._config = config
        self._owner = owner
        self._limits = limits_of(config, PoolKind.SLURM)

    @property
    def limits(self) -> PoolLimits:
        """See ``NodePool.limits``."""
        return self._limits

    async def provision(self, reservation_id: str, agents: Mapping[NodeId, AgentProcess]) -> None:
        """See ``NodePool.provision``."""
        raise NotImplementedError

    async def release(self, reservation_id: str) -> None:
        """See ``NodePool.release``."""
        raise NotImplementedError

    async def sightings(self) -> Sequence[Sighting]:
        """See ``NodePool.sightings``."""
        raise NotImplementedError

    async def close(self) -> None:
        """See ``NodePool.close``."""
