"""Which files of metrics an attempt has, beside the logs of its ranks."""

from pathlib import Path
from typing import NamedTuple

from services.worker.rank.metrics.bounded_file import open_early


class MetricFiles(NamedTuple):
    """Where they lie: JSON lines, and TensorBoard's events, with the fence in their name."""

    json_lines: Path
    events: Path

    @classmethod
    def of(cls, folder: Path, fence: int) -> "MetricFiles":
        """Those of an attempt whose logs are in ``folder``."""
        # TensorBoard looks for "tfevents" in a name, and sorts the files of a run by it.
        name = f"events.out.tfevents.{fence:010d}.attempt-{fence}"
        return cls(folder / "metrics.jsonl", folder / "tensorboard" / name)

    def open_early(self) -> None:
        """Open them while this process may write there: it is about to become another user."""
        for path in self:
            open_early(path)
