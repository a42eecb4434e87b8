"""Nodes by Ray core (https://docs.ray.io): a placement group for each reservation, an agent in each bundle."""

import asyncio
import contextlib
import json
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any, Final

from services.contract.words.ids import NodeId
from services.contract.words.states import PoolKind
from services.controller.adapters.pools.pools_file import RayPoolConfig, limits_of
from services.controller.domain.scheduling.reservations import PoolLimits, Sighting
from services.controller.ports.pools import AgentProcess, PoolError, PoolRefusedError

_ANSWER_S: Final = 30.0
_LONGEST_ANSWER: Final = 1 << 24
_LATE_S: Final = 10.0
"""So long after its grace a reservation that was told to end is removed."""


class RayPool:
    """The port ``NodePool``. Ray is spoken to by a process of its own: see ``ray_driver``.

    Args:
        config: Of the pool.
        owner: The namespace of our actors, and the beginning of our placement groups' names.
        variables: Of the environment of that process.
    """

    def __init__(self, config: RayPoolConfig, owner: str, variables: Mapping[str, str]) -> None:
        self._config = config
        self._owner = owner
        self._limits = limits_of(config, PoolKind.RAY)
        self._variables = {
            name: value for name, value in variables.items() if not name.startswith("MESHLOOM_")
        }
        self._driver: asyncio.subprocess.Process | None = None
        self._one_at_a_time = asyncio.Lock()
        self._told: dict[str, float] = {}

    @property
    def limits(self) -> PoolLimits:
        """See ``NodePool.limits``."""
        return self._limits

    async def provision(self, reservation_id: str, agents: Mapping[NodeId, AgentProcess]) -> None:
        """See ``NodePool.provision``."""
        resources: dict[str, float] = dict(self._config.resources)
        if not resources:
            resources = {"CPU": 1}
            if self._config.accelerators:
                resources["GPU"] = self._config.accelerators
        await self._ask(
            "provision",
            id=reservation_id,
            agents={
                name: {"command": agent.command, "environment": dict(agent.environment)}
                for name, agent in agents.items()
            },
            resources=resources,
        )

    async def release(self, reservation_id: str) -> None:
        """See ``NodePool.release``."""
        now = time.monotonic()
        told = self._told.setdefault(reservation_id, now)
        is_late = now > told + self._config.grace_s + _LATE_S
        await self._ask("release", id=reservation_id, grace_s=self._config.grace_s, now=is_late)

    async def sightings(self) -> Sequence[Sighting]:
        """See ``NodePool.sightings``."""
        rows = await self._ask("sightings")
        names = {row["id"] for row in rows}
        self._told = {name: told for name, told in self._told.items() if name in names}
        return [
            Sighting(
                row["id"],
                tuple(row["node_ids"]),
                is_held=True,
                is_whole=row["is_whole"],
                reason=row["reason"],
            )
            for row in rows
        ]

    async def close(self) -> None:
        """See ``NodePool.close``."""
        driver, self._driver = self._driver, None
        if driver is not None:
            with contextlib.suppress(ProcessLookupError):
                driver.kill()
            await driver.wait()

    async def _ask(self, what: str, **fields: object) -> Any:  # noqa: ANN401 JSON
        request = {"do": what, "pool": self._config.name, **fields}
        async with self._one_at_a_time:
            try:
                async with asyncio.timeout(_ANSWER_S):
                    answer = await self._answer(json.dumps(request))
            except TimeoutError:
                await self.close()
                raise PoolError(
                    f"Ray at {self._config.address} did not answer within {_ANSWER_S:g} s"
                ) from None
            except asyncio.CancelledError:
                await self.close()  # its answer would be taken for that of the next request
                raise
        if "refused" in answer:
            raise PoolRefusedError(answer["refused"])
        if "failed" in answer:
            raise PoolError(answer["failed"])
        return answer["ok"]

    async def _answer(self, request: str) -> dict[str, Any]:
        if self._driver is None or self._driver.returncode is not None:
            self._driver = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "services.controller.adapters.pools.ray_driver"),
                *(self._config.address, self._owner),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.DEVNULL,
                env=self._variables,
                limit=_LONGEST_ANSWER,
                start_new_session=True,
            )
        stdin, stdout = self._driver.stdin, self._driver.stdout
        if stdin is None or stdout is None:
            raise PoolError("the process that speaks to Ray has no pipes")
        with contextlib.suppress(ConnectionError):
            stdin.write(request.encode() + b"\n")
            await stdin.drain()
        line = await stdout.readline()
        if not line:
            await self.close()
            raise PoolError(f"the process that speaks to Ray at {self._config.address} has ended")
        answer: dict[str, Any] = json.loads(line)
        if "failed" in answer:
            await self.close()  # it may have lost its cluster
        return answer
