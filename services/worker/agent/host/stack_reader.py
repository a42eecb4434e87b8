"""The stack of a process that cannot answer any more, read from its memory by py-spy.

A stopped process handles no signal, so faulthandler is silent; its memory can still be read, where
the kernel lets the agent do so: ranks allow their agent (Yama), and a container needs no more than
its default rights. Where it is not allowed, or py-spy is not installed, there is just no stack.
"""

import asyncio
import contextlib
import resource
import shutil
import sys
from asyncio.subprocess import Process
from pathlib import Path
from typing import Final

TEXT_KEPT: Final = 24_000
"""Of the stacks of a rank the first so many characters are read."""
_WITHIN_S: Final = 4.0
_MOST_SAID: Final = 8 << 20
_LINE_DIGITS: Final = 9
_MOST_MEMORY: Final = 256 << 20


async def spy(pid: int) -> str | None:
    """All Python stacks of a process; None where they cannot be had."""
    program = shutil.which("py-spy", path=str(Path(sys.executable).parent)) or shutil.which(
        "py-spy"
    )
    if program is None:
        return None
    # It may not stop the process: what is frozen would be set going again afterwards.
    try:
        dump = await asyncio.create_subprocess_exec(
            *(program, "dump", "--nonblocking", "--pid", str(pid)),
            # Unlike the agent's, its environment can be read by other processes of its user: ranks, where they have it.
            env={},
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
        )
    except OSError:  # no more processes or descriptors are to be had
        return None
    _limit(dump.pid)
    try:
        async with asyncio.timeout(_WITHIN_S):
            said = await _beginning(dump)
            if said is not None:
                await dump.wait()
    except TimeoutError:
        said = None
    if said is None:
        with contextlib.suppress(ProcessLookupError, TimeoutError):
            dump.kill()
            # The kernel may hold it for as long as the memory that it reads does not answer.
            async with asyncio.timeout(_WITHIN_S):
                await dump.wait()
        return None
    return said.decode(errors="replace")[:TEXT_KEPT] if dump.returncode == 0 else None


def _limit(pid: int) -> None:
    """Limit its memory: a rank may map a file that calls itself Python and has no end of names in it."""
    with contextlib.suppress(OSError):  # it has ended already
        _, most = resource.prlimit(pid, resource.RLIMIT_DATA)
        own = _MOST_MEMORY if most == resource.RLIM_INFINITY else min(_MOST_MEMORY, most)
        resource.prlimit(pid, resource.RLIMIT_DATA, (own, most))


async def _beginning(dump: Process) -> bytes | None:
    """What it says; None where that is more than any stacks: a rank can lie about its memory."""
    if dump.stdout is None:
        return b""
    said = bytearray()
    while part := await dump.stdout.read(_MOST_SAID):
        said += part
        if len(said) > _MOST_SAID:
            return None
    return bytes(said)


def spied_frames(text: str, pid: int) -> tuple[tuple[str, int, str], ...]:
    """Path, line and function of the main thread's frames, innermost first."""
    _, _, own = text.partition(f"Thread {pid} ")
    block = own.partition("\nThread ")[0]
    found = map(_frame, block.splitlines())
    return tuple(frame for frame in found if frame is not None)


def _frame(line: str) -> tuple[str, int, str] | None:
    """What ``    name (path:line)`` says; the code of a rank may have any name and any path."""
    if not (line.startswith(" ") and line.endswith(")")):
        return None
    place, _, number = line[:-1].rpartition(":")
    name, _, path = place.strip().partition(" (")
    is_number = number.isascii() and number.isdigit() and len(number) <= _LINE_DIGITS
    return (path, int(number), name) if path and is_number else None
