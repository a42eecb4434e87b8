"""Child processes that die with this one, and are started again when they die alone."""

import asyncio
import contextlib
import ctypes
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from rich.console import Console

from services.local.settings import child_environment

_PR_SET_PDEATHSIG: Final = 1
_STOP_TIMEOUT_S: Final = 30
_RESTART_PAUSE_S: Final = 0.5
_SETTLED_S: Final = 10.0
"""One that has lived so long and ends again ends for another reason."""
_FULL_BYTES: Final = 1 << 20
"""A disk with less room than this is called full: whatever ended for want of more has left some."""
MOST_LOG_BYTES: Final = 64 << 20
"""A log that is longer is started over; one older is kept beside it, as ``NAME.log.1``."""
LOOK_EVERY_S: Final = 10.0
_TAIL_BYTES: Final = 2_000
CONFIGURATION_ERROR: Final = 2
_console = Console(stderr=True, markup=False, emoji=False, highlight=False, soft_wrap=True)


class ChildFailedError(Exception):
    """A child said that it cannot run as configured; starting it again would not help."""


def die_with_parent() -> None:
    """In a child before exec: be killed when the parent's thread that started it ends."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


@dataclass(frozen=True)
class Program:
    """What to run, and a file for its output.

    It inherits the environment, ``without`` these variables and with those of ``environment``.
    """

    name: str
    command: Sequence[str | Path]
    log: Path
    environment: dict[str, str]
    without: frozenset[str] = frozenset()


class Child:
    """One supervised child. ``run`` keeps it alive until it is cancelled, then ends it."""

    def __init__(self, program: Program) -> None:
        self._program = program

    async def run(self) -> None:
        """Run the program, again and again.

        Raises:
            ChildFailedError: It exited with the code of a configuration error.
        """
        told = ""
        while True:
            began = time.monotonic()
            try:
                code = await self._run_once()
                ended = f"ended with code {code} and is started again"
            except OSError as error:  # no room for its log, or none for another process
                code, ended = 0, f"cannot be started: {error}"
            if code == CONFIGURATION_ERROR:
                raise ChildFailedError(f"{self._program.name}: {self._last_words()}")
            lived_s = time.monotonic() - began
            # Once for each reason: what cannot run is tried twice a second.
            if ended != told or lived_s > _SETTLED_S:
                _console.print(f"{self._program.name} {ended}; {self._where_to_look()}")
                told = ended
            # One that has lived for a while starts again at once; one that cannot start waits.
            await asyncio.sleep(max(0.0, _RESTART_PAUSE_S - lived_s))

    async def _run_once(self) -> int:
        with self._program.log.open("ab") as log:
            process = await asyncio.create_subprocess_exec(
                *self._program.command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=child_environment(without=self._program.without, **self._program.environment),
                # A session of its own: Ctrl-C reaches the owner alone, who ends all in order.
                start_new_session=True,
                preexec_fn=die_with_parent,
            )
        try:
            while True:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(LOOK_EVERY_S):
                        return await process.wait()
                await asyncio.to_thread(self._start_long_log_over)
        finally:
            if process.returncode is None:
                await _end(process)

    def _start_long_log_over(self) -> None:
        log = self._program.log
        with contextlib.suppress(OSError):  # a full disk, or somebody has removed it
            if log.stat().st_size > MOST_LOG_BYTES:
                try:
                    shutil.copyfile(log, log.with_name(f"{log.name}.1"))
                finally:
                    # The child appends: what it writes next is at the start. What it wrote since the copy is lost.
                    os.truncate(log, 0)

    def _where_to_look(self) -> str:
        folder = self._program.log.parent
        with contextlib.suppress(OSError):  # it may be gone
            if shutil.disk_usage(folder).free < _FULL_BYTES:
                return f"the disk of {folder} is full"
        return f"its log is {self._program.log}"

    def _last_words(self) -> str:
        tail = self._program.log.read_bytes()[-_TAIL_BYTES:].decode(errors="replace")
        lines = tail.strip().splitlines()
        return lines[-1] if lines else f"it exited at once; see {self._program.log}"


async def _end(process: asyncio.subprocess.Process) -> None:
    process.terminate()
    try:
        async with asyncio.timeout(_STOP_TIMEOUT_S):
            await process.wait()
    except TimeoutError:
        process.kill()
        await process.wait()
