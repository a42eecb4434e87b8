"""Values of metrics at a step."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

VALIDATION: Final = "validation/"
"""What the names of values of a validation pass begin with."""


@dataclass(frozen=True)
class Point:
    """What was reported at once.

    Attributes:
        step: After which.
        values: By name; of a validation pass the names begin with ``VALIDATION``.
        time_s: When, in seconds since 1970.
    """

    step: int
    values: Mapping[str, float]
    time_s: float

    @property
    def finite(self) -> dict[str, float | None]:
        """The values; None where one is no finite number, for which JSON has no word."""
        return {
            name: value if math.isfinite(value) else None for name, value in self.values.items()
        }

    @property
    def is_validation(self) -> bool:
        """Whether it is of a validation pass: such points are few."""
        return any(name.startswith(VALIDATION) for name in self.values)


def thinned(points: Sequence[Point], most: int) -> list[Point]:
    """At most ``most`` (2 or more) of the training's points, evenly chosen, the newest among them.

    All points of validation passes stay.
    """
    training = [place for place, point in enumerate(points) if not point.is_validation]
    if len(training) <= most:
        return list(points)
    last = len(training) - 1
    kept = {training[round(i * last / (most - 1))] for i in range(most)}
    return [p for place, p in enumerate(points) if place in kept or p.is_validation]
