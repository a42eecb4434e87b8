"""Frees the shared memory that ranks of a user of their own have left: it outlives all processes that used it.

``python -P -m services.worker.agent.host.left_memory`` is run as that user, so that it can remove nothing of others.
It removes the user's files in ``/dev/shm``, POSIX message queues, and System V's segments, semaphores and queues, if no
other process of the user lives.
"""

import asyncio
import contextlib
import ctypes
import os
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Final

import structlog

from services.contract.system.rank_user import RankUser
from services.worker.agent.host.removal import remove_what_can_be

EVERY_S: Final = 60.0
_WITHIN_S: Final = 300.0
_FOLDERS: Final = (Path("/dev/shm"), Path("/dev/mqueue"))  # noqa: S108 looked through, not written to
_TABLES: Final = Path("/proc/sysvipc")
_IPC_RMID: Final = 0
_USERS: Final = re.compile(rb"^Uid:\s*([\d\s]+)$", re.MULTILINE)
_log = structlog.get_logger()


async def free_left_memory(
    user: RankUser, environment: Mapping[str, str], is_idle: Callable[[], bool]
) -> None:
    """Look once a minute, while no gang is here, until cancelled.

    Args:
        user: The system user of ranks, who owns nothing else.
        environment: Of the process that removes.
        is_idle: Whether the node has no gang.
    """
    while True:
        try:
            if is_idle() and await asyncio.to_thread(has_left, user.uid):
                await remove_as(user, environment)
        except OSError as error:
            _log.warning("memory_not_freed", why=str(error))
        await asyncio.sleep(EVERY_S)


def has_left(uid: int) -> bool:
    """Whether there is shared memory of a user. Blocking."""
    return any(_files(uid)) or any(_objects(uid))


async def remove_as(user: RankUser, environment: Mapping[str, str]) -> None:
    """Run this module as ``user`` to its end.

    Raises:
        OSError: The process cannot be started, or fails, or takes too long: a rank that starts meanwhile can stop it.
    """
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-P", "-m", __name__),
        env=dict(environment),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.DEVNULL,
        user=user.uid,
        group=user.gid,
        extra_groups=(),
    )
    try:
        async with asyncio.timeout(_WITHIN_S):
            code = await process.wait()
    except (asyncio.CancelledError, TimeoutError) as error:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        if isinstance(error, TimeoutError):  # that one says nothing
            raise TimeoutError(f"the process that frees it took {_WITHIN_S:.0f} s") from error
        raise
    if code:
        raise OSError(f"the process that frees it exited with code {code}")


def remove_own() -> None:
    """Remove all shared memory of this process's user that was there when no other process of the user lived."""
    uid, seen_ns = os.geteuid(), time.time_ns()
    if _lives(uid):
        return
    # A process that came since has what it made since.
    for path, changed_ns in [*_files(uid)]:
        if changed_ns < seen_ns:
            remove_what_can_be(path)
    library = ctypes.CDLL(None)
    for kind, number, changed_s in [*_objects(uid)]:
        if changed_s < seen_ns // 1_000_000_000:
            if kind == "sem":
                library.semctl(number, 0, _IPC_RMID)
            else:
                getattr(library, f"{kind}ctl")(number, _IPC_RMID, None)


def _files(uid: int) -> Iterator[tuple[Path, int]]:
    """The files and folders of a user, and when they were changed."""
    for folder in _FOLDERS:
        # One by one: ranks may have put millions there.
        with contextlib.suppress(OSError), os.scandir(folder) as entries:
            for entry in entries:
                with contextlib.suppress(OSError):
                    about = entry.stat(follow_symlinks=False)
                    if about.st_uid == uid:
                        yield Path(entry.path), about.st_ctime_ns


def _objects(uid: int) -> Iterator[tuple[str, int, int]]:
    """The objects of System V that a user made: kind, number, when they were made."""
    for kind, number in (("shm", "shmid"), ("sem", "semid"), ("msg", "msqid")):
        try:
            headline, *lines = (_TABLES / kind).read_text().splitlines()
        except (OSError, ValueError):  # the kernel has none
            continue
        names = headline.split()
        for line in lines:
            about = dict(zip(names, map(int, line.split()), strict=False))
            if about["cuid"] == uid and not about.get("nattch"):
                yield kind, about[number], about["ctime"]


def _lives(uid: int) -> bool:
    """Whether a process other than this one runs as a user."""
    wanted = str(uid).encode()
    for path in Path("/proc").glob("[0-9]*/status"):
        if path.parent.name != str(os.getpid()):
            with contextlib.suppress(OSError):
                users = _USERS.search(path.read_bytes())
                if users is not None and wanted in users[1].split():
                    return True
    return False


if __name__ == "__main__":
    remove_own()
