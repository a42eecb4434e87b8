"""A file that only grows by whole records, up to a bound; a full disk costs records, never a run."""

import contextlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from services.contract.system.own_process import say
from services.worker.rank.metrics.points import Point, thinned

FILE_BYTES: Final = 64 << 20
"""No file of metrics is longer."""
_POINTS_AT_ONCE: Final = 200


# Of the one process that has them: a rank that becomes another user opens them before.
_OPENED_EARLY: Final[dict[Path, int]] = {}


def open_early(path: Path) -> None:
    """Have a ``BoundedFile`` at ``path`` find it open. What the disk refuses is tried again then."""
    with contextlib.suppress(OSError):
        _OPENED_EARLY[path] = _opened(path)


class BoundedFile:
    """Records appended to a file.

    The fuller it is, the fewer points it takes: when half of its bound is used, every second step,
    when half of the rest is, every fourth, and so on.

    Args:
        path: Where; opened at the first record, in a folder that is made then.
        most: Bytes that it never exceeds.
    """

    def __init__(self, path: Path, most: int = FILE_BYTES) -> None:
        self.path = path
        self._most = most
        self._descriptor: int | None = None
        self._size = 0
        self._waiting = bytearray()
        self._lost = 0

    def share(self, points: Sequence[Point]) -> list[Point]:
        """Those of ``points`` for which it has room: of 200 or more of a second, 200."""
        every = 1
        while self._size > self._most * (1 - 1 / (2 * every)) and every < self._most:
            every *= 2
        taken = [p for p in points if p.is_validation or p.step % every == 0]
        return thinned(taken, _POINTS_AT_ONCE)

    def add(self, record: bytes) -> None:
        """Has a record written at the next ``flush``, unless the bound is reached."""
        if self._size + len(self._waiting) + len(record) <= self._most:
            self._waiting += record

    def flush(self) -> None:
        """Writes what waits: all of it, or, where the disk refuses, nothing."""
        waiting, self._waiting = self._waiting, bytearray()
        if not waiting:
            return
        try:
            if self._descriptor is None:
                self._open()
            self._append(waiting)
        except OSError as error:
            if not self._lost:
                why = error.strerror or str(error)
                say(f"WARNING: metrics are not written to {self.path}: {why}\n", "stderr")
            self._lost += len(waiting)
            return
        if self._lost:
            say(f"WARNING: {self._lost} bytes of {self.path} are lost\n", "stderr")
            self._lost = 0

    def close(self) -> None:
        """Writes the rest."""
        self.flush()
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def _open(self) -> None:
        early = _OPENED_EARLY.pop(self.path, None)
        self._descriptor = _opened(self.path) if early is None else early
        self._size = os.fstat(self._descriptor).st_size

    def _append(self, data: bytes | bytearray) -> None:
        assert self._descriptor is not None  # noqa: S101 opened by the caller
        left = memoryview(data)
        try:
            while left:
                left = left[os.write(self._descriptor, left) :]
        except OSError:
            # Half a record would hide those behind it from readers.
            os.ftruncate(self._descriptor, self._size)
            raise
        self._size += len(data)


def _opened(path: Path) -> int:
    path.parent.mkdir(parents=True, exist_ok=True)
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
    return os.open(path, flags, 0o600)
