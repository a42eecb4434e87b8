"""The most that a memory allocator gave out at once, within operators and by all threads."""

from __future__ import annotations

import ctypes
import os
import re
from typing import Any, Final, Protocol

import torch

# glibc's mallopt(3): how much the heap grows beyond what is asked for, and from which size on a
# block that finds no room in the heap is a mapping of its own. By itself that size moves up to the
# last of these; once set, it does not move.
_TOP_PAD: Final = -2
_USUAL_PAD: Final = 1 << 17
_MMAP_THRESHOLD: Final = -3
_USUAL_BYTES: Final = 1 << 25
_PAGE: Final = 4096
_MOST_MAPPED: Final = re.compile(rb"max mmap bytes\s*=\s*(\d+)")
_STDERR: Final = 2
_STATS_BYTES: Final = 1 << 16


class AllocatorPeak(Protocol):
    """Measures from `begin` to `end`. Bytes are over what was given out at `begin`."""

    def has_room(self, nbytes: int) -> bool:
        """Whether so much, and as much again for a kernel, may be tried."""

    def begin(self) -> None:
        """Starts over."""

    def held(self) -> int:
        """What is given out now."""

    def most(self) -> int:
        """The most that was given out since `begin`."""

    def end(self) -> None:
        """Undoes what measuring takes."""


def allocator_peak(device_type: str) -> AllocatorPeak | None:
    """That of a type of device; None where none can be read."""
    if device_type == "cuda":
        return DevicePeak()
    return HostPeak() if HostPeak.is_possible() else None


class DevicePeak:
    """What PyTorch's caching allocator gives out, without the fragments that it keeps."""

    def __init__(self) -> None:
        self._before = 0

    def has_room(self, nbytes: int) -> bool:
        """Half of what is free is left to the ranks that may train there."""
        free, _ = torch.cuda.mem_get_info()
        return 4 * nbytes <= free

    def begin(self) -> None:
        """Sets the allocator's mark back."""
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        self._before = torch.cuda.memory_allocated()

    def held(self) -> int:
        """By the allocator's count."""
        return torch.cuda.memory_allocated() - self._before

    def most(self) -> int:
        """By the allocator's mark."""
        return torch.cuda.max_memory_allocated() - self._before

    def end(self) -> None:
        """Gives the device what the allocator keeps: ranks may want it."""
        torch.cuda.empty_cache()


class HostPeak:
    """What glibc's malloc maps for blocks of `smallest` bytes and more.

    While it measures, each such block is a mapping of its own: what is free in the heap is taken
    first, so that none finds room there. glibc counts the bytes of mappings, in whole pages, and
    the most that there ever were (malloc_stats(3)). That mark cannot be set back; so what is
    missing to it is mapped, too. None of this is written to. The kernel's mark of resident memory,
    other than this, counts Python's objects and the code of libraries, and leaves out what a
    kernel asks for and does not use.

    Only one can measure at a time.
    """

    def __init__(self, smallest: int = _PAGE) -> None:
        self._libc: Any = ctypes.CDLL(None)
        self._libc.mallinfo2.restype = _Counts
        self._libc.malloc.restype = ctypes.c_void_p
        self._libc.malloc.argtypes = [ctypes.c_size_t]
        self._libc.free.argtypes = [ctypes.c_void_p]
        self._smallest = smallest
        self._taken: list[int] = []
        self._before = _Counts()

    @staticmethod
    def is_possible() -> bool:
        """Whether the C library counts so."""
        libc = ctypes.CDLL(None)
        return all(hasattr(libc, name) for name in ("mallopt", "mallinfo2", "malloc_stats"))

    def has_room(self, nbytes: int) -> bool:  # noqa: ARG002 - the protocol's
        """Yes: the kernel refuses what is too much."""
        return True

    def begin(self) -> None:
        """Fills the heap, and mappings up to the mark.

        Raises:
            MemoryError: The process may not map what is missing.
        """
        self._free_taken()
        self._libc.mallopt(_TOP_PAD, 0)
        self._libc.mallopt(_MMAP_THRESHOLD, self._smallest)
        self._fill_heap()
        missing = self._most_mapped() - int(self._mapped().hblkhd)
        if missing > _PAGE:
            self._taken.append(self._malloc(missing - _PAGE))
        self._before = self._mapped()

    def held(self) -> int:
        """By glibc's count, less the page that a mapping takes for its head."""
        now = self._mapped()
        return now.hblkhd - self._before.hblkhd - self._heads(now)

    def most(self) -> int:
        """By glibc's mark; of mappings that are gone the heads count."""
        now = self._mapped()
        return max(self._most_mapped(), now.hblkhd) - self._before.hblkhd - self._heads(now)

    def _heads(self, now: _Counts) -> int:
        return _PAGE * (now.hblks - self._before.hblks)

    def end(self) -> None:
        """Frees what was taken."""
        self._free_taken()
        self._libc.mallopt(_TOP_PAD, _USUAL_PAD)
        self._libc.mallopt(_MMAP_THRESHOLD, _USUAL_BYTES)

    def _fill_heap(self) -> None:
        size = _USUAL_BYTES
        while size >= self._smallest:
            mappings = self._mapped().hblks
            block = self._malloc(size)
            if self._mapped().hblks == mappings:
                self._taken.append(block)
            else:
                self._libc.free(block)
                size //= 2

    def _malloc(self, nbytes: int) -> int:
        block: int | None = self._libc.malloc(nbytes)
        if block is None:
            raise MemoryError(f"no {nbytes} bytes to measure an allocator's peak")
        return block

    def _free_taken(self) -> None:
        while self._taken:
            self._libc.free(self._taken.pop())

    def _mapped(self) -> _Counts:
        counts: _Counts = self._libc.mallinfo2()
        return counts

    def _most_mapped(self) -> int:
        """From what glibc prints on the standard error stream: it returns it nowhere."""
        kept = os.dup(_STDERR)
        printed = os.memfd_create("malloc_stats")
        try:
            os.dup2(printed, _STDERR)
            self._libc.malloc_stats()
        finally:
            os.dup2(kept, _STDERR)
            os.close(kept)
            text = os.pread(printed, _STATS_BYTES, 0)
            os.close(printed)
        found = _MOST_MAPPED.search(text)
        return int(found[1]) if found else 0


class _Counts(ctypes.Structure):
    """What mallinfo2(3) returns."""

    hblks: int
    hblkhd: int

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
            *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
        )
    ]
