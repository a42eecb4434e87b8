"""A token bucket: so many at once, so many a second forever."""

import math
from dataclasses import dataclass
from typing import Final

_MS: Final = 1000


@dataclass(frozen=True)
class Rate:
    """``per_s`` requests a second in the long run, up to ``burst`` at once."""

    per_s: float
    burst: int

    @property
    def full_after_ms(self) -> int:
        """How long an empty bucket takes to fill."""
        return math.ceil(self.burst / self.per_s * _MS)


@dataclass(frozen=True)
class Bucket:
    """What was left at a moment, in milliseconds."""

    left: float
    at_ms: int


def take(bucket: Bucket | None, rate: Rate, now_ms: int) -> tuple[Bucket, int]:
    """Take one: the bucket after it, and how many ms are to be waited instead (0: it was taken).

    A clock that goes back fills nothing.
    """
    before = bucket or Bucket(rate.burst, now_ms)
    gained = max(0, now_ms - before.at_ms) * rate.per_s / _MS
    left = min(float(rate.burst), before.left + gained)
    if left >= 1:
        return Bucket(left - 1, now_ms), 0
    return Bucket(left, now_ms), math.ceil((1 - left) * _MS / rate.per_s)
