"""What an agent takes at its start, so that ranks which take all of it later do not end the agent.

A rank may fork until its user, or the container, may have no process or thread more. The agent then
has still to kill it, which takes threads: reading the storage and all processes of a machine would
hold up its loop. And it has to see processes of its own end, which takes none here.
"""

import asyncio
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Final

THREADS: Final = 16


def take_reserve() -> None:
    """Start all threads of the running loop that ``asyncio.to_thread`` uses. Blocking, briefly.

    Raises:
        RuntimeError: The system has not so many threads left.
    """
    executor = ThreadPoolExecutor(THREADS, thread_name_prefix="agent")
    met = threading.Barrier(THREADS)
    for meeting in [executor.submit(met.wait) for _ in range(THREADS)]:
        meeting.result()
    asyncio.get_running_loop().set_default_executor(executor)
    if sys.version_info < (3, 12):  # later ones do so by themselves
        watcher = asyncio.PidfdChildWatcher()
        watcher.attach_loop(asyncio.get_running_loop())
        asyncio.set_child_watcher(watcher)
