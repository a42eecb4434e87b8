"""Pools: what brings nodes with agents, and the records of what is reserved."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from services.contract.words.ids import NodeId
from services.controller.domain.scheduling.reservations import PoolLimits, Reservation, Sighting

ENDED_KEPT: Final = 100
"""So many reservations that ended are remembered, of all pools together."""


class PoolError(Exception):
    """A pool did not do what it was asked to; the text says why, in its own words."""


class PoolRefusedError(PoolError):
    """It never will: the request itself is wrong."""


@dataclass(frozen=True)
class AgentProcess:
    """How an agent is started on a node.

    Attributes:
        command: Program and arguments.
        environment: Its variables.
    """

    command: tuple[str, ...]
    environment: Mapping[str, str]


class NodePool(Protocol):
    """Brings nodes, each with one agent, and takes them back.

    All calls may be repeated: whoever asked may have ended before it could write down that it had.
    """

    @property
    def limits(self) -> PoolLimits:
        """What it can bring."""
        ...

    async def provision(self, reservation_id: str, agents: Mapping[NodeId, AgentProcess]) -> None:
        """Ask for one node for each agent, all or none; return before they are there.

        Raises:
            PoolRefusedError: It never will.
            PoolError: It does not answer.
        """
        ...

    async def release(self, reservation_id: str) -> None:
        """End the agents of a reservation and give its nodes back; nothing if there is none.

        Agents are told first, and have a while to end their gangs with a checkpoint.

        Raises:
            PoolError: It does not answer.
        """
        ...

    async def sightings(self) -> Sequence[Sighting]:
        """All reservations of ours that it knows; some of those that ended may be among them.

        Raises:
            PoolError: It does not answer.
        """
        ...

    async def close(self) -> None:
        """Let go of connections; reservations stay."""
        ...


@dataclass(frozen=True)
class RunnablePool:
    """A pool, and how the agent of each of its nodes is started."""

    pool: NodePool
    agents: Mapping[NodeId, AgentProcess]


class ReservationStore(Protocol):
    """The records of all reservations that have not been given back, and of the last that were."""

    async def reservations(self) -> list[Reservation]:
        """All of them, by id."""
        ...

    async def put(self, reservation: Reservation, epoch: int, before: Reservation | None) -> None:
        """Write a record in the place of the one that was read; None: of none.

        Raises:
            DeposedError: ``epoch`` is not the present one.
            StaleWriteError: It has changed since it was read.
        """
        ...

    async def ended(self) -> list[Reservation]:
        """The last that were given back or lost, the newest first; ``ENDED_KEPT`` at most."""
        ...

    async def end(self, reservation: Reservation, now_ms: int, epoch: int) -> None:
        """Move a record, as it was read, to those that ended.

        Raises:
            DeposedError: ``epoch`` is not the present one.
            StaleWriteError: It has changed since it was read.
        """
        ...
