"""Nodes by Ray core (https://docs.ray.io): a placement group for each reservation, an agent in each bundle."""

import asyncio
import contextlib
import json
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any, Final

from services.contract.words.ids import NodeId
from services.contract.words.states import PoolKind
from services.controller.adapters.pools.pools_file import RayPoolConfig, limits_of
from services.controller.domain.scheduling.reservations import PoolLimits, Sighting
from services.controller.ports.pools import AgentProcess, PoolError, PoolRefusedError

_DRIVER: Final = "services.controller.adapters.pools.ray_driver"
_CONNECTED_S: Final = 90.0
_ANSWER_S: Final = 30.0
_LONGEST_ANSWER: Final = 1 << 24
_LATE_S: Final = 10.0
"""So long after its grace a reservation that was told to end is removed."""


class RayPool:
    """The port ``NodePool``. Ray is spoken to by a process of its own: see ``ray_driver``.

    Args:
        config: Of the pool.
        owner: The namespace of our actors, and the beginning of our placement groups' names.
        variables: Of the controller's environment; that process gets what is not Meshloom's.
        answer_s: Seconds in which Ray has to answer.
    """

    def __init__(
        self,
        config: RayPoolConfig,
        owner: str,
        variables: Mapping[str, str],
        answer_s: float = _ANSWER_S,
    ) -> None:
        self._config = config
        self._owner = owner
        self._limits = limits_of(config, PoolKind.RAY)
        self._variables = {
            name: value for name, value in variables.items() if not name.startswith("MESHLOOM_")
        }
        self._answer_s = answer_s
        self._driver: subprocess.Popen[str] | None = None
        self._one_at_a_time = threading.Lock()
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
                # What ends because it was told to is no news.
                reason="" if row["id"] in self._told else row["reason"],
            )
            for row in rows
        ]

    async def close(self) -> None:
        """See ``NodePool.close``."""
        driver, self._driver = self._driver, None
        if driver is not None:
            await asyncio.to_thread(_end, driver)

    async def _ask(self, what: str, **fields: object) -> Any:  # noqa: ANN401 JSON
        request = {"do": what, "pool": self._config.name, **fields}
        answer = await asyncio.to_thread(self._answer, json.dumps(request))
        if "refused" in answer:
            raise PoolRefusedError(answer["refused"])
        if "failed" in answer:
            raise PoolError(answer["failed"])
        return answer["ok"]

    def _answer(self, request: str) -> dict[str, Any]:
        with self._one_at_a_time:
            if self._driver is None:
                self._driver = self._start()
                connected = self._line(self._driver, "", _CONNECTED_S)
                if "failed" in connected:
                    return connected
            return self._line(self._driver, request, self._answer_s)

    def _start(self) -> "subprocess.Popen[str]":
        return subprocess.Popen(  # noqa: S603 our own program
            [sys.executable, "-m", _DRIVER, self._config.address, self._owner],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=self._variables,
            text=True,
            start_new_session=True,
        )

    def _line(
        self, driver: "subprocess.Popen[str]", request: str, seconds: float
    ) -> dict[str, Any]:
        """What the driver answers; one that fails is ended, for it may have lost its cluster."""
        ends = threading.Timer(seconds, driver.kill)
        ends.start()
        line = ""
        with contextlib.suppress(OSError):
            if request and driver.stdin is not None:
                print(request, file=driver.stdin, flush=True)
            if driver.stdout is not None:
                line = driver.stdout.readline(_LONGEST_ANSWER)
        ends.cancel()
        if line.endswith("\n"):
            answer: dict[str, Any] = json.loads(line)
            if "failed" not in answer:
                return answer
        else:
            why = f"Ray at {self._config.address} did not answer within {seconds:g} s"
            answer = {"failed": why}
        self._driver = None
        _end(driver)
        return answer


def _end(driver: "subprocess.Popen[str]") -> None:
    with driver:
        driver.kill()
