"""Metrics as TensorBoard's event files, one an attempt.

TensorBoard that is pointed at a job's folder shows each attempt as a run of its own: where a later
attempt made steps again, the curves of both are there, and neither has a step twice.
"""

import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from tensorboardX.proto.event_pb2 import Event  # type: ignore[import-untyped]  # it has no types
from tensorboardX.proto.summary_pb2 import Summary  # type: ignore[import-untyped]  # it has no types
from tensorboardX.record_writer import masked_crc32c  # type: ignore[import-untyped]  # it has no types

from services.worker.rank.metrics.bounded_file import BoundedFile
from services.worker.rank.metrics.points import Point

_VERSION: Final = "brain.Event:2"


class EventFile:
    """The event file of one attempt: a scalar a metric.

    TensorBoard draws no values that are no finite numbers; they are written as they are, and it
    marks them.

    Args:
        path: The file.
    """

    def __init__(self, path: Path) -> None:
        self._file = BoundedFile(path)
        self._has_begun = False

    @property
    def name(self) -> str:
        """The file's."""
        return str(self._file.path)

    def write(self, points: Sequence[Point]) -> None:
        """Appends an event for each point."""
        for point in self._file.share(points):
            if not self._has_begun:
                self._add(Event(wall_time=point.time_s, file_version=_VERSION))
                self._has_begun = True
            values = [Summary.Value(tag=tag, simple_value=v) for tag, v in point.values.items()]
            self._add(Event(wall_time=point.time_s, step=point.step, summary=Summary(value=values)))
        self._file.flush()

    def close(self) -> None:
        """Closes the file."""
        self._file.close()

    def _add(self, event: Event) -> None:
        """As a record of TFRecord: the length and its checksum, the data and its checksum."""
        data = event.SerializeToString()
        length = struct.pack("<Q", len(data))
        framed = length + _checksum(length) + data + _checksum(data)
        self._file.add(framed)


def _checksum(data: bytes) -> bytes:
    return struct.pack("<I", masked_crc32c(data))
