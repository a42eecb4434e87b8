"""Metrics as JSON lines: one object a point, for `jq`, pandas and the like."""

import json
from collections.abc import Sequence
from pathlib import Path

from services.worker.rank.metrics.bounded_file import BoundedFile
from services.worker.rank.metrics.points import Point


class JsonLines:
    """The file of JSON lines.

    A line has ``step``, ``attempt``, ``time`` (seconds since 1970) and the values by name; null
    where a value is no finite number.

    Args:
        path: The file; appended to.
        fence: Of the attempt.
    """

    def __init__(self, path: Path, fence: int) -> None:
        self._file = BoundedFile(path)
        self._fence = fence

    @property
    def name(self) -> str:
        """The file's."""
        return str(self._file.path)

    def write(self, points: Sequence[Point]) -> None:
        """Appends their lines."""
        for point in self._file.share(points):
            line = {"step": point.step, "attempt": self._fence, "time": round(point.time_s, 3)}
            # As where the API answers a step with its metrics in one row.
            users = {f"user/{n}" if n in line else n: value for n, value in point.finite.items()}
            self._file.add(json.dumps(line | users).encode() + b"\n")
        self._file.flush()

    def close(self) -> None:
        """Closes the file."""
        self._file.close()
