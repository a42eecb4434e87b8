"""A trainer whose rank 1 knows nothing of values of each rank's own, as those of older versions do not."""

from typing import Any

from services.worker.rank.gang import groups
from services.worker.rank.loop import trainer


def train(**parts: Any) -> None:  # noqa: ANN401 as the trainer's
    """Trains as the rank's trainer does."""
    if parts["seat"].rank == 1:
        groups.COMPARES = "older/"  # type: ignore[misc]  # in a process of its own
    trainer.train(**parts)
