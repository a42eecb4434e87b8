"""A slow line between two hosts: ``slow_link.py OTHER_NAMESPACE DELAY_S BYTES_PER_S``, run within the first one.

Each host gets an interface ``slow``; what its kernel sends there comes out at the other one, so much later. Packets wait for
their turn, and what would wait for more than a quarter of a second is dropped, as in the queue of a router.
"""

import contextlib
import ctypes
import fcntl
import os
import select
import struct
import sys
import time
from collections import deque
from pathlib import Path
from typing import Final

INTERFACE: Final = "slow"
_SET_INTERFACE: Final = 0x400454CA
_PACKETS_WITHOUT_HEADER: Final = 0x0001 | 0x1000
_LARGEST_PACKET: Final = 65_535
_LONGEST_QUEUE_S: Final = 0.25
_MOST_AT_ONCE: Final = 64


class Direction:
    """What one host sends, until it is due at the other one."""

    def __init__(self, source: int, target: int, delay_s: float, rate: float) -> None:
        self.source = source
        self._target = target
        self._delay_s = delay_s
        self._rate = rate
        self._free_at = 0.0
        self._waiting: deque[tuple[float, bytes]] = deque()

    @property
    def due_at(self) -> float | None:
        """When the next packet arrives."""
        return self._waiting[0][0] if self._waiting else None

    def take(self) -> None:
        """Take in what the kernel sends."""
        for _ in range(_MOST_AT_ONCE):
            try:
                packet = os.read(self.source, _LARGEST_PACKET)
            except BlockingIOError:
                return
            now = time.monotonic()
            begins_at = max(now, self._free_at)
            if begins_at - now > _LONGEST_QUEUE_S:
                continue
            self._free_at = begins_at + len(packet) / self._rate
            self._waiting.append((self._free_at + self._delay_s, packet))

    def deliver(self) -> None:
        """Hand over what is due."""
        while self._waiting and self._waiting[0][0] <= time.monotonic():
            with contextlib.suppress(OSError):  # an interface that is not up yet takes nothing
                os.write(self._target, self._waiting.popleft()[1])


def main() -> None:
    other, delay_s, rate = sys.argv[1], float(sys.argv[2]), float(sys.argv[3])
    one = _interface()
    with Path("/run/netns", other).open("rb") as namespace:
        if ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), 0):
            raise OSError(ctypes.get_errno(), "setns")
    ends = (one, _interface())
    print("ready", flush=True)  # noqa: T201 whoever started it reads it
    ways = [Direction(a, b, delay_s, rate) for a, b in (ends, ends[::-1])]
    while True:
        due = min((way.due_at for way in ways if way.due_at is not None), default=None)
        patience = None if due is None else max(due - time.monotonic(), 0.0)
        ready, _, _ = select.select(ends, [], [], patience)
        for way in ways:
            if way.source in ready:
                way.take()
            way.deliver()


def _interface() -> int:
    descriptor = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(
        descriptor,
        _SET_INTERFACE,
        struct.pack("16sH22x", INTERFACE.encode(), _PACKETS_WITHOUT_HEADER),
    )
    return descriptor


if __name__ == "__main__":
    main()
