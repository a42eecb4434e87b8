"""The agent's end of the pipe to one rank: one JSON object a line, both ways.

A rank may write anything, at any rate, and so may what it leaves behind. So an agent reads no more
of each pipe than an allowance that grows with time, and a rank that writes faster waits: its pipe
holds some hundred lines. That is no fault, for a toy model that evaluates at every step does so. What
is no message of ours is a fault of that rank.
"""

import asyncio
import contextlib
import fcntl
import os
import struct
import termios
import time
from collections.abc import Callable
from typing import ClassVar, Final

from pydantic import ValidationError

from services.contract.messages.rank_pipe import LINE_BYTES, RANK_MESSAGE, RankMessage, RankOrder
from services.contract.system.long_work import uncollected
from services.contract.system.mask import Mask
from services.contract.system.pipe_end import PipeEnd

_READ_BYTES: Final = 16_384
# An error with its traceback. Hundreds of ranks may end at once, and each kilobyte may take the tenth of a millisecond.
_LITTLE_BYTES: Final = 8_192
# Most lines become facts, which the one controller takes in turn, those of all jobs: each counts as
# so many bytes.
_BYTES_A_LINE: Final = 16_384
READ_BYTES_PER_S: Final = 1 << 20
_MOST_ALLOWED: Final = 8 * READ_BYTES_PER_S
# To take the secrets out of a line of a megabyte may take half a second, out of a short one a hundredth, and a user
# may have many ranks.
LONG_S: Final = 0.05
# A line takes longer where the machine is busy, which is not its rank's fault, and more is a host that stood still. A
# second counts as 16 MiB that were read: else the first of many such ranks would be the first after each rest, and
# others never be heard.
_MOST_CHARGED_S: Final = 0.5
_MOST_RESTED_S: Final = 5.0
_CHARGED_BYTES_PER_S: Final = 16 * READ_BYTES_PER_S
_PIPE_BYTES: Final = 16 * os.sysconf("SC_PAGE_SIZE")  # of a pipe as the kernel makes it
_COUNT: Final = struct.Struct("i")


class _Share:
    """Half of the loop's time at most: it has more to do than to hear what ranks say, such as the node's lease."""

    def __init__(self) -> None:
        self._rests_until = 0.0
        self._heard_s = 0.0
        """For so long ranks were heard, less the time that the loop has had for all else since."""
        self._heard_at = 0.0

    def rests(self, now: float) -> bool:
        """Whether the loop has more to do now."""
        return now < self._rests_until

    def note(self, began: float, now: float) -> None:
        """Ranks were heard in this time.

        Many lines that each take a hundredth of a second are one that takes long.
        """
        # All of it, however busy the machine is: what else the loop has to do takes longer there, too.
        took_s = min(now - began, _MOST_RESTED_S)
        self._heard_s = max(self._heard_s - max(began - self._heard_at, 0.0), 0.0) + took_s
        self._heard_at = now
        if self._heard_s > LONG_S:
            self._rests_until = now + self._heard_s


class RankLink:
    """Hears a rank until it, and whatever inherited its end, is gone.

    Args:
        end: The agent's end of the pipe, owned from now on.
        on_message: Called with each message, in order.
        on_fault: Called at most once, with what the rank did that none of ours does, in words that
            follow "rank 1 …"; nothing is heard any more then.
        mask: Takes secrets out of what it says.
    """

    _of_all: ClassVar[_Share] = _Share()
    _of_little: ClassVar[_Share] = _Share()
    """Of ranks that are dead and said little last: their ends wait for each other's alone."""

    def __init__(
        self,
        end: PipeEnd,
        on_message: Callable[[RankMessage], None],
        on_fault: Callable[[str], None],
        mask: Mask,
    ) -> None:
        self._mask = mask
        self.closed = False
        self._end = end
        self._on_message = on_message
        self._on_fault = on_fault
        self._unread = bytearray()
        self._allowance: float = _MOST_ALLOWED
        self._counted_at = time.monotonic()
        self._is_waiting = False

    def listen(self) -> None:
        """Begin to hear."""
        for descriptor in (self._end.reading, self._end.writing):
            os.set_blocking(descriptor, False)
        asyncio.get_running_loop().add_reader(self._end.reading, self.hear)

    def hear(self) -> None:
        """Take in some of what is there now, if the allowance is not used up."""
        if self.closed or self._is_waiting:
            return
        began = now = time.monotonic()
        if not self._must_wait(began):
            before = self._allowance
            self._take(self._receive(_READ_BYTES))
            now = time.monotonic()
            RankLink._of_all.note(began, now)
            charged = min(now - began, _MOST_CHARGED_S) * _CHARGED_BYTES_PER_S
            self._allowance = min(self._allowance, before - charged)
        if self._must_wait(now) and not self.closed:
            self._is_waiting = True
            asyncio.get_running_loop().remove_reader(self._end.reading)

    def hear_rest(self) -> None:
        """Take in all that is there at this moment, and nothing that is written meanwhile.

        For a rank that is dead. Of one that has made its pipe longer, for as many last words as take an
        agent minutes, no more than a pipe holds as it was made: ``hear`` goes on with the rest.
        """
        says_much = self._says_much()
        rest = 0 if self.closed else min(_waiting_bytes(self._end.reading), _PIPE_BYTES)
        began = time.monotonic()
        while rest > 0 and not self.closed:
            received = self._receive(min(rest, _READ_BYTES))
            rest -= max(len(received), 1)
            self._take(received)
        now = time.monotonic()
        RankLink._of_all.note(began, now)
        if not says_much:
            RankLink._of_little.note(began, now)

    def rest_waits(self) -> bool:
        """Whether the loop has more to do now than to hear what it said last.

        Little waits for nobody's much. But it may be a hundred short lines, which of a hundred ranks take seconds.
        """
        share = RankLink._of_all if self._says_much() else RankLink._of_little
        return share.rests(time.monotonic())

    def _says_much(self) -> bool:
        """Whether what it has said and nobody has heard may take long."""
        waiting = 0 if self.closed else _waiting_bytes(self._end.reading)
        return len(self._unread) + waiting > _LITTLE_BYTES

    def look(self, *, pauses: bool = False) -> None:
        """Go on with a pipe that had to wait, unless it ``pauses``; to be called ten times a second."""
        now = time.monotonic()
        grown = (now - self._counted_at) * READ_BYTES_PER_S
        self._allowance = min(self._allowance + grown, _MOST_ALLOWED)
        self._counted_at = now
        waits = pauses or self._must_wait(now)
        if self.closed or waits is self._is_waiting:
            return
        self._is_waiting = waits
        if waits:
            asyncio.get_running_loop().remove_reader(self._end.reading)
        else:
            asyncio.get_running_loop().add_reader(self._end.reading, self.hear)

    def _must_wait(self, now: float) -> bool:
        return self._allowance <= 0 or RankLink._of_all.rests(now)

    def send(self, order: RankOrder) -> None:
        """Give an order; a rank that is gone, or reads nothing for ages, misses it."""
        if not self.closed:
            with contextlib.suppress(OSError):
                os.write(self._end.writing, order.model_dump_json().encode() + b"\n")

    def close(self) -> None:
        """Hear no more."""
        if not self.closed:
            self.closed = True
            asyncio.get_running_loop().remove_reader(self._end.reading)
            self._end.close()

    def _receive(self, size: int) -> bytes:
        """What is there now, at most ``size`` bytes; at the end of the pipe it is closed."""
        try:
            received = os.read(self._end.reading, size)
        except BlockingIOError:
            return b""
        except OSError:
            received = b""
        if not received:
            self.close()
        return received

    def _take(self, received: bytes) -> None:
        self._allowance -= len(received) + _BYTES_A_LINE * (received.count(b"\n") or 1)
        *lines, rest = received.split(b"\n")
        for line in lines:
            whole = bytes(self._unread + line) if self._unread else line
            self._unread.clear()
            self._read(whole)
            if self.closed:
                return
        self._unread += rest
        if len(self._unread) > LINE_BYTES:
            self._fault(f"wrote a line of more than {LINE_BYTES} bytes to its pipe")

    def _read(self, line: bytes) -> None:
        if len(line) > LINE_BYTES:
            self._fault(f"wrote a line of more than {LINE_BYTES} bytes to its pipe")
            return
        masked = self._mask.message(line)
        try:
            with uncollected():
                message = RANK_MESSAGE.validate_json(masked)
        except ValidationError as error:
            self._fault(f"wrote a line to its pipe that is not a message: {_first_fault(error)}")
            return
        self._on_message(message)

    def _fault(self, what: str) -> None:
        self.close()
        self._on_fault(what)


def _waiting_bytes(reading: int) -> int:
    """How much the kernel holds for the reader."""
    answer = fcntl.ioctl(reading, termios.FIONREAD, _COUNT.pack(0))
    (count,) = _COUNT.unpack(answer)
    return int(count)


def _first_fault(error: ValidationError) -> str:
    """Where and what, without what was written, which may be long."""
    first = error.errors(include_url=False, include_input=False, include_context=False)[0]
    where = "/".join(str(step)[:64] for step in first["loc"][:4])
    return f"{where}: {first['msg']}"[:300] if where else first["msg"][:300]
