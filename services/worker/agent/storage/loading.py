"""How far a node is with loading a checkpoint, while others wait for it: told every few seconds, and ended on demand."""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from typing import Final, Protocol

from services.worker.agent.ranks.launch import LaunchError

TOLD_EVERY_S: Final = 5.0


class Progress(Protocol):
    """Is told, in threads, what is loaded."""

    def begin(self, total: int) -> None:
        """So many bytes are to be loaded."""
        ...

    def took(self, count: int) -> None:
        """So many more are here; what it raises ends the loading."""
        ...


class Untold:
    """``Progress`` of which nobody wants to know."""

    def begin(self, total: int) -> None:
        """See ``Progress.begin``."""

    def took(self, count: int) -> None:
        """See ``Progress.took``."""


class Loading:
    """``Progress`` that is told every few seconds, if bytes came.

    Args:
        tell: Called in the loading thread with the bytes so far, and all.
        every_s: So often at most.
    """

    def __init__(self, tell: Callable[[int, int], None], every_s: float = TOLD_EVERY_S) -> None:
        self._tell = tell
        self._every_s = every_s
        self._total = self._loaded = 0
        self._told_at = time.monotonic()
        self._is_over = threading.Event()

    def begin(self, total: int) -> None:
        """See ``Progress.begin``."""
        self._total = total

    def took(self, count: int) -> None:
        """See ``Progress.took``.

        Raises:
            LaunchError: The loading was stopped.
        """
        if self._is_over.is_set():
            raise LaunchError("it was stopped while its checkpoint was loaded")
        self._loaded += count
        if time.monotonic() >= self._told_at + self._every_s:
            self._told_at = time.monotonic()
            self._tell(min(self._loaded, self._total), self._total)

    def stop(self) -> None:
        """Nobody waits for it any more."""
        self._is_over.set()


class Loadings:
    """Those of a node that are under way, by job and attempt."""

    def __init__(self) -> None:
        self._under_way: dict[tuple[str, int], Loading] = {}

    @contextlib.contextmanager
    def begun(self, key: tuple[str, int], tell: Callable[[int, int], None]) -> Iterator[Loading]:
        """Within, the checkpoint of this attempt is loaded."""
        self._under_way[key] = Loading(tell)
        try:
            yield self._under_way[key]
        finally:
            del self._under_way[key]

    def stop(self, key: tuple[str, int]) -> None:
        """Nobody waits for that of this attempt any more."""
        if key in self._under_way:
            self._under_way[key].stop()
