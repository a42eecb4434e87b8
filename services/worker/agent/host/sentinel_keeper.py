"""Keeps one sentinel beside this life of the agent."""

import asyncio
import contextlib
import os
import sys
from asyncio.subprocess import DEVNULL, Process
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Final

import structlog

from services.contract.system.durable import append_plain

_PAUSE_S: Final = 0.5
_LEAVES_WITHIN_S: Final = 5.0
_log = structlog.get_logger()


class SentinelKeeper:
    """The sentinel of one life of an agent, restarted where somebody kills it.

    Args:
        environment: What it may know; without any mark.
        mark: What the processes carry that it is to end.
        log_path: Where its output goes: the agent's own may be a pipe that must end with the agent.
    """

    def __init__(self, environment: dict[str, str], mark: str, log_path: Path) -> None:
        self._environment = environment
        self._mark = mark
        self._log_path = log_path

    @contextlib.asynccontextmanager
    async def standing(self) -> AsyncIterator[None]:
        """Have a sentinel until the block ends; with it ends all that carries the mark.

        Raises:
            OSError: It could not be started.
        """
        reading, writing = os.pipe()
        keeping: asyncio.Task[None] | None = None
        self._process = await self._start(reading)
        try:
            keeping = asyncio.create_task(self._keep(reading))
            yield
        finally:
            if keeping is not None:
                keeping.cancel()
                await asyncio.wait({keeping})
            os.close(writing)  # the sentinel cannot tell this from a death, nor need it
            os.close(reading)
            try:
                async with asyncio.timeout(_LEAVES_WITHIN_S):
                    await self._process.wait()
            except TimeoutError:
                _log.warning("sentinel_still_ends_processes", pid=self._process.pid)

    async def _keep(self, reading: int) -> None:
        while True:
            code = await self._process.wait()
            _log.warning("sentinel_gone", pid=self._process.pid, code=code)
            await asyncio.sleep(_PAUSE_S)
            try:
                self._process = await self._start(reading)
            except OSError as error:
                _log.error("sentinel_not_started", why=str(error))

    async def _start(self, reading: int) -> Process:
        log = append_plain(self._log_path)
        try:
            return await asyncio.create_subprocess_exec(
                sys.executable,
                *("-P", "-m", "services.worker.agent.host.sentinel"),
                *("--pipe", str(reading), "--mark", self._mark),
                env=self._environment,
                stdin=DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=(reading,),
                start_new_session=True,  # what ends a terminal's processes must not end it
            )
        finally:
            os.close(log)
