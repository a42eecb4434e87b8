"""Follows one file that a rank writes and turns what is new into log lines.

The file is the buffer: what is not asked for stays there and is read later. Only when it runs
far ahead is the middle passed over, with a line that says so. A file that has grown to
``FILE_BYTES`` is started over, with such a line, and its last part is kept beside it.
"""

import contextlib
import math
import os
import re
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, Final, Literal, NamedTuple

from services.contract.system.durable import open_plain
from services.contract.system.mask import NOTHING_MASKED, Mask

Level = Literal["debug", "info", "warning", "error"]

LINE_CHARACTERS: Final = 4_000
BACKLOG_BYTES: Final = 1 << 20
FILE_BYTES: Final = 64 << 20
"""What a rank writes to one stream is cut back to nothing once it is longer than this."""
PREVIOUS_BYTES: Final = 16 << 20
"""So much of it is kept in the file of the same name that ends in ``.1``."""
KEPT_EVERY_S: Final = 10.0
"""It is kept so often at most: a rank can make its file long at no cost, as often as it likes."""
IN_USE_WITHIN_S: Final = 2.0
"""For so long after the end of all ranks a file is waited for that another thread reads or starts over."""
ONE_AT_A_TIME: Final = threading.Lock()
"""Held while lines are made of a log of which that took long, or may, which is work of the processor: of many threads that do so at
once each has the agent's loop wait for its turn, at whatever that does."""
ONE_OF_THE_OTHERS: Final = threading.Lock()
"""Held while lines are made of any other, which may turn out to take long, and is left for the next time then."""
_LOOKS_FOR_THE_END_S: Final = 0.25
_LONG_S: Final = 0.05
_TURN_S: Final = 0.25
# The first one that is longer may take seconds, with a secret of hundreds of lines, before it is known that the log takes long.
_LONG_LINE_BYTES: Final = 1 << 15
_LONG_FOR_S: Final = 60.0  # a rank decides what it writes next
_LOOKS_FOR_GROWTH: Final = 10
_LOOK_S: Final = 0.01
_BLOCK: Final = 512
_KEPT_BYTES: Final = 1 << 18
_CHUNK_BYTES: Final = 1 << 18
_PARTIAL_BYTES: Final = 1 << 16
# More is not read to be counted: a rank makes its log as long at no cost, and all gangs wait meanwhile.
_COUNTED_BYTES: Final = 4 << 20
_CONTROL: Final = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b.|[\x00-\x08\x0b-\x1f\x7f]")
_LEVELS: Final[tuple[tuple[Level, re.Pattern[str]], ...]] = (
    ("error", re.compile(r"^Traceback \(most recent call last\):|^[\w.]+(Error|Exception)(:|$)")),
    ("error", re.compile(r"^.{0,40}\b(ERROR|CRITICAL|FATAL)\b|^Fatal Python error:")),
    ("warning", re.compile(r"^.{0,40}\b(WARNING|WARN)\b|^.{0,200}\b[A-Z]\w*Warning: ")),
    ("debug", re.compile(r"^.{0,40}\bDEBUG\b")),
)


class TailedLine(NamedTuple):
    """A line and how serious it looks."""

    level: Level
    text: str


class LogTail:
    """A place in a growing file.

    Args:
        path: The file; it need not exist yet.
        mask: Takes secrets out of the lines: native code writes past the mask that ranks have.
    """

    def __init__(self, path: Path, mask: Mask = NOTHING_MASKED) -> None:
        self._path = path
        self._mask = mask
        self._offset = 0
        self._inside_cut_line = False
        self._broken_at = -1
        self._unreadable = False
        self._end: int | None = None
        self._kept_at: float | None = None
        self._ended_at: float | None = None
        self._in_use = threading.Lock()
        self._takes_long_until: float | None = None
        self._times_started_over = 0

    def read(self, limit: int, *, last: bool = False, waits: bool = True) -> list[TailedLine]:
        """At most ``limit`` of the lines that were not read before.

        A line without its end is held back until it has one or is too long, except where
        ``last`` says that nobody writes any more. While another thread reads the file or starts it over there are
        none. Where its file system has who reads wait for who writes, as XFS does, a rank can make this last a minute.
        If it ``waits``, lines are made of one log at a time, and beside it of one of which that took long; what takes
        longer than a turn is made later.
        """
        if not self._in_use.acquire(blocking=False):
            return []
        try:
            lines, chunk, last = self._read(limit, last=last)
            times = self._times_started_over
        finally:
            self._in_use.release()
        if not chunk:
            return lines
        # It is not in use while it waits, so that it can be started over; what was read is read again then.
        takes_long = self._takes_long() or max(map(len, chunk.split(b"\n"))) > _LONG_LINE_BYTES
        with self._turn(ONE_AT_A_TIME if takes_long else ONE_OF_THE_OTHERS, waits=waits):
            if not self._in_use.acquire(blocking=False):
                return lines
            try:
                if times == self._times_started_over:
                    lines += self._lines(chunk, limit - len(lines), last=last)
            finally:
                self._in_use.release()
        return lines

    def _read(self, limit: int, *, last: bool) -> tuple[list[TailedLine], bytes, bool]:
        """What there is to say of it, what follows in it, and whether that is the last of it."""
        lines: list[TailedLine] = []
        try:
            size = self._size()
            if size < self._offset and self._end is None:
                self._start_over()
            if size <= self._offset or limit <= 0:
                return lines, b"", last
            with open(open_plain(self._path), "rb") as file:  # noqa: PTH123 a descriptor
                if size - self._offset > BACKLOG_BYTES:
                    dropped = self._pass_over(file, size - _KEPT_BYTES)
                    lines.append(TailedLine("warning", dropped))
                file.seek(self._offset)
                chunk = file.read(min(_CHUNK_BYTES, size - self._offset))
        except FileNotFoundError:
            return lines, b"", last
        except OSError:  # a fault of the disk must not hold up the end of a gang
            self._unreadable = True
            return lines, b"", last
        self._unreadable = False
        return lines, chunk, last and self._offset + len(chunk) >= size

    @contextlib.contextmanager
    def _turn(self, turn: threading.Lock, *, waits: bool) -> Iterator[None]:
        """Within, lines are made. Once its ranks have ended it waits no longer: its gang would end without them."""
        has_turn = False
        while waits and self._ended_at is None and not has_turn:
            has_turn = turn.acquire(timeout=_LOOKS_FOR_THE_END_S)
        # Not by the clock: beside others that take long every log would seem to.
        began_s = time.thread_time()
        try:
            yield
        finally:
            if time.thread_time() - began_s > _LONG_S:
                self._takes_long_until = time.monotonic() + _LONG_FOR_S
            if has_turn:
                turn.release()

    def _takes_long(self) -> bool:
        return self._takes_long_until is not None and time.monotonic() < self._takes_long_until

    def is_too_long(self) -> bool:
        """Whether the file is to be started over."""
        try:
            return _takes_much(self._path.lstat())
        except OSError:
            return False

    def cut_back(self, *, may_keep: bool = True) -> bool:
        """Start the file over if it is too long; to be called often, whoever reads or not, in any one thread.

        Answers whether its last part was kept, which takes as long as to read and write 16 MiB. Where
        that is due and not ``may_keep``, the file stays as it is for now. To empty a file may take minutes
        that a rank has put there in a hundred thousand pieces.

        The rank goes on to append to the same file. What it writes while this is done, within
        some milliseconds, may be lost, and of the line that it goes on with then nothing is shown; what was not
        read yet, up to ``BACKLOG_BYTES``, is not lost.
        """
        with self._in_use:
            return self._cut_back(may_keep=may_keep)

    def _cut_back(self, *, may_keep: bool) -> bool:
        try:
            now = time.monotonic()
            is_kept = self._kept_at is None or now >= self._kept_at + KEPT_EVERY_S
            if not _takes_much(self._path.lstat()) or (is_kept and not may_keep):
                return False
            # A link in its place was made by the rank: it is not followed, nor is a pipe waited for.
            flags = os.O_RDWR | os.O_APPEND | os.O_NOFOLLOW | os.O_NONBLOCK
            descriptor = os.open(self._path, flags)
            with os.fdopen(descriptor, "r+b", buffering=0) as file:
                is_written = _grows(descriptor)
                size = os.fstat(descriptor).st_size
                unread = min(max(size - self._offset, 0), BACKLOG_BYTES)
                wanted = min(max(unread, PREVIOUS_BYTES if is_kept else 1), size)
                file.seek(size - wanted)
                last = file.read(wanted)
                words = f"… {size} bytes until here"
                if is_kept:
                    self._kept_at = now
                    words += f"; the last of them are in {self._keep(last[-PREVIOUS_BYTES:])}"
                rest = last[len(last) - unread :]
                is_part = False
                if (broken := self._broken_at - (size - unread)) >= 0:  # nobody has read it yet
                    begins, ends = rest.rfind(b"\n", 0, broken) + 1, rest.find(b"\n", broken)
                    is_part = ends < 0
                    rest = rest[:begins] + (b"" if is_part else rest[ends + 1 :])
                if unread < size - self._offset or self._inside_cut_line:
                    # A part of a line, in which there may be half a secret.
                    _, line_end, rest = rest.partition(b"\n")
                    # The rank goes on with it, unless it has only made its file longer.
                    is_part = is_part or (not line_end and not last.endswith(b"\0"))
                # Of the line that it goes on with, something may be lost.
                is_part = is_part or is_written or os.fstat(descriptor).st_size != size
                os.ftruncate(descriptor, 0)
                kept = f"{words}\n".encode() + rest
                file.write(kept)
                place = file.tell()
        except OSError:
            return False  # it is not there yet, or the next call tries again
        self._start_over()
        self._offset = max(place - len(kept), 0)  # what was written before our words is lost, too
        if is_part or self._offset:
            self._broken_at = place
        return is_kept

    def _keep(self, last: bytes) -> str:
        """Put what a file held last beside it; answers under which name."""
        previous = self._path.with_name(f"{self._path.name}.1")
        previous.unlink(missing_ok=True)
        with previous.open("xb") as kept:  # a pipe that a rank puts there is not waited for
            kept.write(last)
        return previous.name

    def at_end(self) -> bool:
        """Whether everything that is in the file now was read, or cannot be."""
        if self._in_use.locked():  # by another thread; that must not hold up the end of a gang
            return time.monotonic() > (self._ended_at or math.inf) + IN_USE_WITHIN_S
        try:
            return self._unreadable or self._size() <= self._offset
        except OSError:
            return True

    def end(self) -> None:
        """Read nothing that is written from now on: what a rank left behind may write forever."""
        self._ended_at = time.monotonic()
        self._end = 0
        with contextlib.suppress(OSError):
            self._end = self._path.lstat().st_size
            if self._end < self._offset:
                self._start_over()

    def _start_over(self) -> None:
        """Somebody cut the file: what it holds now is new."""
        self._offset = 0
        self._inside_cut_line = False
        self._broken_at = -1
        self._times_started_over += 1

    def _size(self) -> int:
        size = self._path.lstat().st_size
        return size if self._end is None else min(size, self._end)

    def _lines(self, chunk: bytes, limit: int, *, last: bool) -> list[TailedLine]:
        lines: list[TailedLine] = []
        start = 0
        within_s = _TURN_S if self._takes_long() else _LONG_S
        began_s = time.thread_time()
        while len(lines) < limit and start < len(chunk):
            if time.thread_time() - began_s > within_s:
                break
            end = chunk.find(b"\n", start)
            if end < 0 and not last and len(chunk) - start < _PARTIAL_BYTES:
                break
            stop = end if end >= 0 else len(chunk)
            is_cut = end < 0 and not last
            is_broken = self._offset + start <= self._broken_at <= self._offset + stop
            if not (self._inside_cut_line or is_broken):
                line = chunk[start:stop]
                if is_cut and b"\r" in line:  # what stands behind the last return is overwritten
                    line = line[: line.rindex(b"\r")]
                # It may be cut within a secret; so may be the last line of a rank that was killed.
                lines.append(_tailed(line, self._mask, is_part=end < 0))
            self._inside_cut_line = end < 0
            start = stop + 1 if end >= 0 else stop
        self._offset += start
        return lines

    def _pass_over(self, file: BinaryIO, target: int) -> str:
        skipped = target - self._offset
        file.seek(self._offset if skipped <= _COUNTED_BYTES else target)
        count = 0
        left = target - file.tell()
        # It may be cut while it is read: then there is nothing up to the target, however often one reads.
        while left > 0 and (part := file.read(min(left, _CHUNK_BYTES))):
            count += part.count(b"\n")
            left -= len(part)
        # To the end of a line: in what follows of one there may be half a secret.
        rest = file.readline(_PARTIAL_BYTES)
        count += rest.count(b"\n")
        self._inside_cut_line = not rest.endswith(b"\n")
        self._offset = file.tell()
        what = f"{count} lines" if skipped <= _COUNTED_BYTES else f"{skipped} bytes"
        return f"… {what} dropped here: the rank writes faster than its log is followed"


def _takes_much(about: os.stat_result) -> bool:
    # A rank can have the disk keep room for it beyond its end, and XFS does so by itself, for less.
    return about.st_size > FILE_BYTES or about.st_blocks * _BLOCK > 4 * FILE_BYTES


def _grows(descriptor: int) -> bool:
    """Whether a rank writes to its file now; it may be held up for a while in the middle of that."""
    size = os.fstat(descriptor).st_size
    for _ in range(_LOOKS_FOR_GROWTH):
        threading.Event().wait(_LOOK_S)
        if os.fstat(descriptor).st_size != size:
            return True
    return False


def _tailed(line: bytes, mask: Mask, *, is_part: bool) -> TailedLine:
    # What a terminal would show: a progress bar overwrites its own line.
    text = line.decode(errors="replace").rstrip("\r").rpartition("\r")[2]
    text = _CONTROL.sub("", text)
    text = mask.cut_text(text) if is_part else mask.text(text)
    if len(text) > LINE_CHARACTERS:
        cut = len(text) - LINE_CHARACTERS
        text = f"{text[:LINE_CHARACTERS]} … ({cut} characters cut)"
    return TailedLine(level_of(text), text)


def level_of(text: str) -> Level:
    """How serious a line looks; ``info`` unless it says otherwise near its beginning."""
    return next((level for level, pattern in _LEVELS if pattern.search(text)), "info")
