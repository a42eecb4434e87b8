"""What an agent takes at its start, so that ranks which take all of it later do not end the agent.

A rank may fork until its user, or the container, may have no process or thread more. The agent then
has still to kill it, which takes threads: reading the storage and all processes of a machine would
hold up its loop. And it has to see processes of its own end, which takes none here.
"""

import asyncio
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from functools import partial
from typing import Final, ParamSpec, TypeVar

THREADS: Final = 16
_STORAGE: Final = ThreadPoolExecutor(THREADS, thread_name_prefix="storage")
_REMOVING_THREADS: Final = 8
_REMOVING: Final = ThreadPoolExecutor(_REMOVING_THREADS, thread_name_prefix="removing")
REMOVED_WITHIN_S: Final = 2.0
"""For so long a launch, and a round through the storage, waits for what it has removed."""
# Who waits has a thread of the storage, which commits need, too.
_WAITING: Final = threading.BoundedSemaphore(4)
_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")


async def in_storage_thread(
    work: Callable[_Arguments, _Result], *args: _Arguments.args, **kwargs: _Arguments.kwargs
) -> _Result:
    """``asyncio.to_thread`` for what waits for the storage, in threads of its own.

    A storage that does not answer takes all of them, and gangs must end meanwhile.
    """
    loop = asyncio.get_running_loop()
    return await loop.run_in_executor(_STORAGE, partial(work, *args, **kwargs))


async def in_removing_thread(
    work: Callable[_Arguments, _Result], *args: _Arguments.args, **kwargs: _Arguments.kwargs
) -> _Result:
    """The same for what removes files that ranks wrote: some take minutes, and launches and commits must not wait for them."""
    loop = asyncio.get_running_loop()
    return await loop.run_in_executor(_REMOVING, partial(work, *args, **kwargs))


def removed_soon(remove: Callable[[], None]) -> bool:
    """Have something removed, and wait for that, not for long, and not where four wait already; it goes on. Blocking.

    Args:
        remove: Removes it; what it raises meanwhile is raised here.

    Returns:
        Whether that has ended.
    """
    removing = _REMOVING.submit(remove)
    if _WAITING.acquire(blocking=False):
        try:
            wait([removing], REMOVED_WITHIN_S)
        finally:
            _WAITING.release()
    has_ended = removing.done()
    if has_ended:
        removing.result()
    return has_ended


def take_reserve() -> None:
    """Start all threads that ``asyncio.to_thread`` of the running loop, the storage and removals use. Blocking, briefly.

    Raises:
        RuntimeError: The system has not so many threads left.
    """
    executor = ThreadPoolExecutor(THREADS, thread_name_prefix="agent")
    for each, count in ((executor, THREADS), (_STORAGE, THREADS), (_REMOVING, _REMOVING_THREADS)):
        met = threading.Barrier(count)
        for meeting in [each.submit(met.wait) for _ in range(count)]:
            meeting.result()
    asyncio.get_running_loop().set_default_executor(executor)
    if sys.version_info < (3, 12):  # later ones do so by themselves
        watcher = asyncio.PidfdChildWatcher()
        watcher.attach_loop(asyncio.get_running_loop())
        asyncio.set_child_watcher(watcher)
