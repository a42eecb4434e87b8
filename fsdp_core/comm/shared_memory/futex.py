"""Words of shared memory on which one process waits for another: Linux's futexes.

Python has no atomic operations on shared memory, so each word has a single writer. A word is four
aligned bytes, which every supported processor writes and reads at once.
"""

from __future__ import annotations

import ctypes
import platform
import threading
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from mmap import mmap

_SYSCALLS: Final = {"x86_64": 202, "aarch64": 98}
_NUMBER: Final = _SYSCALLS.get(platform.machine())
_WAIT: Final = 0
_WAKE: Final = 1
_EVERYONE: Final = 0x7FFFFFFF
_MODULUS: Final = 1 << 32
_NEVER_COUNTED: Final = 1 << 30
"""More than any wait is ahead of or behind the word that it waits for."""
_SPINS: Final = 40
"""Looks before the kernel is asked: about as long as one system call takes."""

_syscall = ctypes.CDLL(None, use_errno=True).syscall
_lock = threading.RLock()  # garbage may be collected, and `leave` be called, while it is held


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


def are_supported() -> bool:
    """Whether this platform has futexes, under a number that is known here."""
    return _NUMBER is not None and platform.system() == "Linux"


class Counters:
    """Words that count upwards and wrap around at 2**32; each is written by one process.

    Args:
        memory: Shared by all who write or wait.
        offset: Where the first word is, a multiple of 4.
        count: How many there are.
    """

    def __init__(self, memory: mmap, offset: int, count: int) -> None:
        self._words = (ctypes.c_uint32 * count).from_buffer(memory, offset)
        self._address = ctypes.addressof(self._words)

    def publish(self, index: int, value: int) -> None:
        """Sets a word and wakes all who wait for it; what was written before is seen by them."""
        _order_memory()
        self._words[index] = value % _MODULUS
        self._call(index, _WAKE, _EVERYONE, None)

    def set(self, index: int, value: int) -> None:
        """Sets a word that nobody waits for yet."""
        self._words[index] = value % _MODULUS

    def leave(self) -> None:
        """This process counts no more: whatever others wait for in its words has been reached."""
        for index, value in enumerate(self._words):
            self.publish(index, value + _NEVER_COUNTED)

    def has_reached(self, index: int, value: int) -> bool:
        """Whether a word has been set to `value` or a later one."""
        return (self._words[index] - value) % _MODULUS < _MODULUS // 2

    def wait(self, index: int, value: int, seconds: float) -> bool:
        """Waits until a word has reached `value`, `seconds` at most; tells whether it has.

        It may return earlier without: the caller looks around and waits again.
        """
        for _ in range(_SPINS):
            if self.has_reached(index, value):
                _order_memory()
                return True
        seen = self._words[index]
        if (seen - value) % _MODULUS >= _MODULUS // 2:
            at_most = _Timespec(int(seconds), int(seconds % 1 * 1e9))
            # The kernel compares once more: what was published in between is not slept through.
            self._call(index, _WAIT, seen, ctypes.byref(at_most))
        if not self.has_reached(index, value):
            return False
        _order_memory()
        return True

    def _call(self, index: int, operation: int, value: int, timeout: object) -> None:
        word = ctypes.c_void_p(self._address + 4 * index)
        _syscall(_NUMBER, word, operation, ctypes.c_uint32(value), timeout, None, 0)


def _order_memory() -> None:
    """Keeps this thread's reads and writes before the call before those after it.

    Releasing a lock orders what was before, acquiring it again orders what comes after. Without
    it a processor of weak memory order could show a word before what it announces.
    """
    with _lock:
        pass
    with _lock:
        pass
