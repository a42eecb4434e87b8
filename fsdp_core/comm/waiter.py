"""Waits that end at a time-out, for works without time-outs."""

from __future__ import annotations

import atexit
import threading
import weakref
from queue import SimpleQueue
from time import monotonic
from typing import TYPE_CHECKING, Final

import torch.distributed as dist

if TYPE_CHECKING:
    from datetime import timedelta


_AWAITED_AT_EXIT_S: Final = 10.0


class Waiter:
    """A thread that waits, one by one, for works of one process group.

    Gloo makes the result of a reduce-scatter in the work's `wait`, which blocks until all ranks have taken
    part, whatever time-out it is given; and the work never says that it has ended. The thread ends with
    this object, or with the process.
    """

    def __init__(self) -> None:
        self._works: SimpleQueue[TimedWork | None] | None = None

    def add(self, work: TimedWork) -> None:
        """Has the thread wait for `work`, after those before it."""
        if self._works is None:
            self._works = SimpleQueue()
            # One that blocks for ever must not keep the process from ending.
            thread = threading.Thread(
                target=_serve, args=(self._works,), name="fsdp_core waits", daemon=True
            )
            thread.start()
            _threads[thread] = self._works
            weakref.finalize(self, self._works.put, None).atexit = False
        self._works.put(work)


_threads: weakref.WeakKeyDictionary[threading.Thread, SimpleQueue[TimedWork | None]] = (
    weakref.WeakKeyDictionary()
)


@atexit.register
def _end_threads() -> None:
    """Ends the threads before Python ends: one that came back from gloo later would abort the process.

    One that waits for ranks of which none goes on is left behind after a while. Most often another rank ends for
    the same reason, and with its connections the wait.
    """
    deadline = monotonic() + _AWAITED_AT_EXIT_S
    for works in _threads.values():
        works.put(None)
    for thread in list(_threads):
        thread.join(max(deadline - monotonic(), 0.0))


def _serve(works: SimpleQueue[TimedWork | None]) -> None:
    while (work := works.get()) is not None:
        work.finish()
        del work  # it refers to the buffers


class TimedWork(dist.Work):
    """A collective whose `wait` ends at its time-out.

    Args:
        work: Whose own does not.
        waiter: Waits in this one's place from the first wait on: sooner it would compete with what
            goes on meanwhile.
    """

    def __init__(self, work: dist.Work, waiter: Waiter) -> None:
        super().__init__()
        self._work = work
        self._waiter: Waiter | None = waiter
        self._ended = threading.Event()
        self._error: BaseException | None = None

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Returns when the collective has ended; after a time-out it may be called again.

        Raises:
            RuntimeError: It has not ended after `timeout`, and goes on; or it failed.
        """
        waiter, self._waiter = self._waiter, None
        if waiter is not None:
            waiter.add(self)
        if not self._ended.wait(None if timeout is None else timeout.total_seconds()):
            raise RuntimeError(f"The collective has not ended after {timeout}.")
        if self._error is not None:
            raise self._error
        return True

    def finish(self) -> None:
        """Waits for however long it takes; called in the thread."""
        try:
            self._work.wait()
        except BaseException as error:  # noqa: BLE001 - whoever waits gets it
            self._error = error
        self._ended.set()
