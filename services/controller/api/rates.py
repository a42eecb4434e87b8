"""How often each may ask: token buckets in this process."""

import time
from typing import Final

from services.controller.domain.access.rate import Bucket, Rate, take

_KEPT: Final = 4096
# All are looked through at once, which takes a millisecond: not for each of many new names.
_LOOKED_THROUGH_EVERY_MS: Final = 1_000


def now_ms() -> int:
    """Milliseconds of a clock that never goes back."""
    return int(time.monotonic() * 1000)


class Buckets:
    """One bucket a name.

    Each controller counts by itself: a bucket that all draw from costs a write to Redis a request, and
    protects from nothing more, for what is to be protected is this process's event loop.

    Args:
        rate: Of each name.
    """

    def __init__(self, rate: Rate) -> None:
        self._rate = rate
        self._buckets: dict[str, Bucket] = {}
        self._look_at_ms = 0

    def take(self, name: str) -> int:
        """Take one of ``name``'s: 0, or how many milliseconds to wait before the next try."""
        at_ms = now_ms()
        if len(self._buckets) >= _KEPT and at_ms >= self._look_at_ms:
            self._look_at_ms = at_ms + _LOOKED_THROUGH_EVERY_MS
            self._forget_full(at_ms)
        self._buckets[name], wait_ms = take(self._buckets.get(name), self._rate, at_ms)
        return wait_ms

    def _forget_full(self, at_ms: int) -> None:
        # A bucket that is full again is as one that was never drawn from.
        self._buckets = {
            name: bucket
            for name, bucket in self._buckets.items()
            if at_ms - bucket.at_ms < self._rate.full_after_ms
        }
