"""What an agent takes at its start, so that ranks which take all of it later do not end the agent.

A rank may fork until its user, or the container, may have no process or thread more. The agent then
has still to kill it, which takes threads: reading the storage and all processes of a machine would
hold up its loop. And it has to see processes of its own end, which takes none here.
"""

import asyncio
import errno
import sys
import threading
from collections.abc import Callable, Hashable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import partial
from typing import Final, ParamSpec, TypeVar

THREADS: Final = 16
_STORAGE: Final = ThreadPoolExecutor(THREADS, thread_name_prefix="storage")
_REMOVING_THREADS: Final = 4
_REMOVING: Final = ThreadPoolExecutor(_REMOVING_THREADS, thread_name_prefix="removing")
REMOVED_WITHIN_S: Final = 2.0
"""For so long whoever has something removed waits for it."""
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


class UnfinishedError(OSError):
    """A removal takes long, and goes on."""

    def __init__(self, what: Hashable) -> None:
        super().__init__(errno.EBUSY, "its removal takes long, and goes on", str(what))


class Removals:
    """Removes what ranks wrote, in few threads of its own.

    A rank may leave so many files, or one of so many pieces, that this takes minutes. In the storage's threads such
    removals of some jobs would keep all others of the node from being launched, and from their commits.
    """

    def __init__(self) -> None:
        self._under_way: dict[Hashable, Future[None]] = {}
        self._lock = threading.Lock()

    def run(self, what: Hashable, remove: Callable[[], None]) -> None:
        """Have it removed, and wait for that, not for long. Blocking.

        Args:
            what: It; if its removal is under way, that one is waited for.
            remove: Removes it; what it raises is raised here.

        Raises:
            UnfinishedError: It takes longer, or waits for others, and goes on. Another call tells what came of it, or
                finds nothing there.
        """

        def removed() -> None:
            try:
                remove()
            finally:
                with self._lock:
                    del self._under_way[what]

        with self._lock:
            if (removing := self._under_way.get(what)) is None:
                removing = self._under_way[what] = _REMOVING.submit(removed)
        wait([removing], REMOVED_WITHIN_S)
        if not removing.done():
            raise UnfinishedError(what)
        removing.result()


def take_reserve() -> None:
    """Start all threads that ``asyncio.to_thread`` of the running loop and the storage use. Blocking, briefly.

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
