"""The Python stacks of ranks: asked for by a signal, read from the files that ranks write.

Of a rank that does not answer, what ``stack_reader`` can see.
"""

import asyncio
import os
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from services.contract.messages.rank_stacks import STACKS_SIGNAL, stacks_path
from services.contract.system.durable import open_plain
from services.contract.system.mask import Mask
from services.worker.agent.host.stack_reader import TEXT_KEPT, spied_frames, spy

ANSWERED_WITHIN_S: Final = 1.5
_LOOK_EVERY_S: Final = 0.02
_QUIET_S: Final = 0.06
_FRAMES_KEPT: Final = 12
_PARTS_OF_A_PATH: Final = 3
_THREAD: Final = re.compile(r"^(?:Current thread|Thread) ", re.MULTILINE)
_FRAME: Final = re.compile(r'^  File "(?P<path>[^"]*)", line (?P<line>[0-9]{1,9}) in (?P<name>.*)$')


@dataclass(frozen=True)
class Stacks:
    """What a rank wrote or was seen to do, and the frames of its training thread, innermost first."""

    text: str
    frames: tuple[str, ...]


async def collect(folder: Path, pids: Mapping[int, int], mask: Mask) -> dict[int, Stacks]:
    """Ask all ranks at once; those that do not answer are missing.

    Args:
        folder: The attempt's.
        pids: The live processes, by rank.
        mask: Takes secrets out: code that was loaded from a URL has that as its file.
    """
    files = {rank: stacks_path(folder, rank) for rank in pids}
    # A rank that has not made its file yet would be ended by the signal.
    sizes = {rank: size for rank, path in files.items() if (size := _size(path)) is not None}
    for rank in sizes:
        _ask(pids[rank])
    deadline = time.monotonic() + ANSWERED_WITHIN_S
    grown = dict(sizes)
    quiet_since = time.monotonic()
    while time.monotonic() < deadline:
        await asyncio.sleep(_LOOK_EVERY_S)
        now = {rank: _size(files[rank]) or 0 for rank in sizes}
        if now != grown:
            grown, quiet_since = now, time.monotonic()
        answered = all(grown[rank] > sizes[rank] for rank in sizes)
        if answered and time.monotonic() - quiet_since > _QUIET_S:
            break
    # In a thread: some file systems have who reads a file wait for who changes it, as the rank may for long.
    # Whatever ends them, too much or that a rank has not written more yet, may be within a secret.
    texts = await asyncio.to_thread(
        lambda: {rank: mask.cut_text(_read(files[rank], sizes[rank])) for rank in sizes}
    )
    told = {rank: Stacks(text, training_frames(text)) for rank, text in texts.items() if text}
    return told | await _seen({rank: pid for rank, pid in pids.items() if rank not in told}, mask)


async def _seen(silent: Mapping[int, int], mask: Mask) -> dict[int, Stacks]:
    said = await asyncio.gather(*map(spy, silent.values()))
    texts = [None if text is None else mask.cut_text(text) for text in said]
    return {
        rank: Stacks(
            text, tuple(_shown(*frame) for frame in spied_frames(text, pid)[:_FRAMES_KEPT])
        )
        for (rank, pid), text in zip(silent.items(), texts, strict=True)
        if text is not None
    }


def training_frames(text: str) -> tuple[str, ...]:
    """The frames of the thread that trains, innermost first, as ``path:line in function``.

    faulthandler writes the youngest thread first: the one that the process began with is last.
    """
    *_, last = _THREAD.split(text)
    found = (_FRAME.match(line) for line in last.splitlines())
    return tuple(_shown(m["path"], int(m["line"]), m["name"]) for m in found if m is not None)[
        :_FRAMES_KEPT
    ]


def _shown(path: str, line: int, name: str) -> str:
    return f"{'/'.join(Path(path).parts[-_PARTS_OF_A_PATH:])}:{line} in {name}"


def _ask(pid: int) -> None:
    try:
        os.kill(pid, STACKS_SIGNAL)
    except (ProcessLookupError, PermissionError):  # it may have become a program of another user
        return


def _size(path: Path) -> int | None:
    try:
        return path.lstat().st_size
    except OSError:
        return None


def _read(path: Path, start: int) -> str:
    try:
        with open(open_plain(path), "rb") as file:  # noqa: PTH123 a descriptor, not a path
            file.seek(start)
            return file.read(TEXT_KEPT).decode(errors="replace")
    except OSError:
        return ""
