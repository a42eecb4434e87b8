"""Garbage collection that does not stop a server with many objects.

A full collection visits every object that can be part of a cycle: with the jobs of a large cluster in
memory that takes a third of a second, in which a request waits and a lease is not renewed. So objects that
survive one full collection are set aside, and the next ones visit only newer objects. Reference counts free
what is set aside as before; a cycle among it stays until the process has grown by a quarter, when one
collection visits everything again.
"""

import gc
import resource
from pathlib import Path
from typing import Final

_GROWTH: Final = 1.25
_SPARE_BYTES: Final = 64 << 20
_FULL: Final = 2
_STATM: Final = Path("/proc/self/statm")


def keep_collections_short(growth: float = _GROWTH, spare_bytes: int = _SPARE_BYTES) -> None:
    """Set aside what survives a full collection, from now on in this process.

    Args:
        growth: How many times larger the process may get until everything is visited again.
        spare_bytes: And by how many bytes at least.
    """
    gc.callbacks.append(_ShortCollections(growth, spare_bytes))


class _ShortCollections:
    def __init__(self, growth: float, spare_bytes: int) -> None:
        self._growth, self._spare_bytes = growth, spare_bytes
        self._bound = 0.0
        self._visits_all = False

    def __call__(self, phase: str, info: dict[str, int]) -> None:
        if info["generation"] != _FULL:
            return
        if phase == "start":
            self._visits_all = _resident_bytes() > self._bound
            if self._visits_all:
                gc.unfreeze()
            return
        gc.freeze()
        if self._visits_all:
            size = _resident_bytes()
            self._bound = max(size * self._growth, size + self._spare_bytes)


def _resident_bytes() -> int:
    return int(_STATM.read_text(encoding="ascii").split()[1]) * resource.getpagesize()
