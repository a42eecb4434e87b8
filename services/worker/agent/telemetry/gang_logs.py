"""What the ranks of a gang write: read, and started over where it is too long, beside the agent's loop.

A rank decides how long its file is, of how many pieces, and what else is done with it at a moment. Some file systems,
XFS among them, have who reads a file wait for who changes it: one call of a rank can take a minute there, and the
loop renews the lease of the node. While ranks train it does not even ask how long a file is: a home on a server that
does not answer for some seconds would cost the node its lease.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from functools import partial
from typing import ClassVar, Final, Literal

from services.contract.messages.rank_pipe import RankSeat
from services.contract.messages.telemetry import LogLine
from services.contract.system.mask import Mask
from services.worker.agent.host.folders import AttemptFolder
from services.worker.agent.telemetry.log_tail import IN_USE_WITHIN_S, LogTail

LINES_PER_BEAT: Final = 1_000
_LINES_PER_READ: Final = 250
_READ_WITHIN_S: Final = 0.05
_WAITS_AGAIN_S: Final = 0.5
LOOK_EVERY_S: Final = 1.0
"""So often it is looked whether a file is too long."""
_STREAMS: Final[tuple[Literal["stdout", "stderr"], ...]] = ("stdout", "stderr")


class _Reading:
    """Lines that a thread reads; ``lines`` are there once it is ``done``."""

    def __init__(self) -> None:
        self.done = threading.Event()
        self.lines: tuple[LogLine, ...] = ()
        self.is_slow = False


class GangLogs:
    """The output of the ranks of one attempt on this node.

    Args:
        folder: Where the files lie.
        seats: The ranks.
        beside: Has something done that may take long; may raise RuntimeError, as a thread that cannot start.

    Attributes:
        mask: Takes secrets out of what the ranks say: all have the same.
    """

    # For lines of a gang the agent's loop waits a moment, but not for those of one gang after another.
    _waits_from: ClassVar = 0.0

    def __init__(
        self,
        folder: AttemptFolder,
        seats: Mapping[int, RankSeat],
        beside: Callable[[Callable[[], None]], None],
    ) -> None:
        self._beside = beside
        one = next(iter(seats.values()))
        self._fence = one.fence
        self.mask = Mask(one.secrets)
        self._tails = {
            (rank, stream): LogTail(folder.log(rank, stream), self.mask)
            for rank in seats
            for stream in _STREAMS
        }
        self._long = deque(self._tails.values())
        self._is_cutting = False
        self._look_at = 0.0
        self._reading: _Reading | None = None
        self._was_slow = False
        self._ended_at: float | None = None

    def take(self, *, last: bool) -> tuple[LogLine, ...]:
        """Lines that were not taken before; none while it takes long to read them.

        ``last`` says that no rank writes any more.
        """
        if self._reading is None:
            self._reading = self._begun(last=last)
        if not self._reading.done.is_set():
            return ()
        lines, self._was_slow, self._reading = self._reading.lines, self._reading.is_slow, None
        return lines

    def drained(self) -> bool:
        """Whether there is nothing left to take, or it takes too long."""
        if self._reading is not None and (self._reading.done.is_set() or not self._is_late()):
            return False
        return all(tail.at_end() for tail in self._tails.values())

    def end(self) -> None:
        """All ranks are dead: what others write from now on is not read."""
        self._ended_at = time.monotonic()
        for tail in self._tails.values():
            tail.end()

    def cut_back(self) -> None:
        """Have logs started over that are too long, if it is time to look."""
        now = time.monotonic()
        if self._is_cutting or now < self._look_at:
            return
        self._look_at = now + LOOK_EVERY_S
        self._is_cutting = True
        try:
            self._beside(self._cut_in_turns)
        except RuntimeError:  # ranks may have taken all threads: the next look tries again
            self._is_cutting = False

    def _begun(self, *, last: bool) -> _Reading:
        reading = _Reading()
        try:
            self._beside(partial(self._read, reading, last=last))
        except RuntimeError:  # ranks may have taken all threads
            self._read(reading, last=last, waits=False)
        # In the loop: for each of many gangs whose ranks write what takes long that would be seconds at each beat.
        is_due = not self._was_slow and time.monotonic() >= GangLogs._waits_from
        if is_due and not reading.done.wait(_READ_WITHIN_S):
            GangLogs._waits_from = time.monotonic() + _WAITS_AGAIN_S
        return reading

    def _is_late(self) -> bool:
        return self._ended_at is not None and time.monotonic() > self._ended_at + IN_USE_WITHIN_S

    def _cut_in_turns(self) -> None:
        """Start them over; at a look the last part of one is kept, in turns."""
        try:
            self._long.rotate()
            has_kept = False
            for tail in filter(LogTail.is_too_long, self._long):
                has_kept = tail.cut_back(may_keep=not has_kept) or has_kept
        finally:
            self._is_cutting = False

    def _read(self, into: _Reading, *, last: bool, waits: bool = True) -> None:
        lines: list[LogLine] = []
        began = time.monotonic()
        # In turns, so that one rank's flood does not silence the others.
        reading = deque(self._tails)
        try:
            while reading and len(lines) < LINES_PER_BEAT:
                rank, stream = key = reading.popleft()
                budget = min(_LINES_PER_READ, LINES_PER_BEAT - len(lines))
                tailed = self._tails[key].read(budget, last=last, waits=waits)
                now = time.time_ns() // 1_000_000
                lines += [
                    LogLine(
                        rank=rank,
                        fence=self._fence,
                        stream=stream,
                        level=line.level,
                        time_ms=now,
                        text=line.text,
                    )
                    for line in tailed
                ]
                if len(tailed) == budget:
                    reading.append(key)
        finally:
            into.lines = tuple(lines)
            into.is_slow = time.monotonic() - began > _READ_WITHIN_S
            into.done.set()
