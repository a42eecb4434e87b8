"""How much memory the training steps of a rank take, beside all that its process holds."""

import contextlib
import ctypes
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, Protocol, Self

import torch

from services.worker.rank.process.host_memory import shared_bytes

MEASURED_STEPS: Final = 3
"""So many steps of an attempt are measured on a host: the second is the first with all state."""

_KIB: Final = 1024
_STATUS_BYTES: Final = 8192
# Linux: the high-water mark starts over (man proc_pid_clear_refs).
_RESET_PEAK: Final = b"5"
# glibc's mallopt(3): from which size on a block is a mapping of its own, and how much free memory
# is kept at the end of the heap. Once set they move no more; by themselves they move up to these.
_TRIM_THRESHOLD: Final = -1
_MMAP_THRESHOLD: Final = -3
_MMAPPED_BYTES: Final = 1 << 16
_USUAL_MMAPPED_BYTES: Final = 1 << 25


@dataclass(frozen=True)
class MemoryFigures:
    """Bytes: what the rank holds now, and the most that its steps took.

    ``peak`` is None where the kernel does not tell it. ``fragments``: what the allocator of a GPU
    took of the device over that, None on a host.
    """

    held: int
    peak: int | None
    fragments: int | None = None


class StepMemory(Protocol):
    """The memory of a device, seen from the training thread between steps."""

    def begin_model(self) -> None:
        """What is taken from now on is training's."""
        ...

    def apart(self) -> contextlib.AbstractContextManager[None]:
        """What is taken within, and kept, is not."""
        ...

    def begin_step(self) -> None:
        """A step is about to begin."""
        ...

    def end_step(self, copies: int) -> MemoryFigures:
        """It is over. ``copies``: bytes of checkpoints that lie in the host's memory."""
        ...


def step_memory(device: torch.device) -> StepMemory:
    """That of an accelerator's allocator, else of this process."""
    return DeviceMemory(device) if device.type == "cuda" else HostMemory.of_this_process()


class DeviceMemory:
    """What PyTorch's allocator gave out at most since the process began, and its fragments apart.

    Args:
        device: Of the rank.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def begin_model(self) -> None:
        """Nothing was given out before."""

    def apart(self) -> contextlib.AbstractContextManager[None]:
        """Nothing is kept on the device but for training."""
        return contextlib.nullcontext()

    def begin_step(self) -> None:
        """Changes nothing: the allocator counts by itself."""

    def end_step(self, copies: int) -> MemoryFigures:  # noqa: ARG002 (they lie elsewhere)
        """After a step what its activations took is free again, so both are the most so far."""
        stats = torch.cuda.memory_stats(self._device)
        most = stats["allocated_bytes.all.peak"]
        return MemoryFigures(most, most, stats["reserved_bytes.all.peak"] - most)


class HostMemory:
    """What the kernel counts as resident in the first steps, less what is there without them.

    The most of a step is the kernel's own high-water mark, set back before the step: no operator
    pays for it. From that are taken, as they are after the step, the pages of files, which a
    forked rank maps in as it meets the code of libraries; what the process held without a file
    before it built the model, such as Python's objects; and of memory that ranks share what is
    others' part, for each page counts once over all that map it. Pages that came after the moment of the
    peak make the figure smaller, never larger; so the highest of the measured steps is kept.

    The C allocator would keep what is freed and hand it out in pieces, so that a process holds
    twice what lives in it. Until the last measured step each tensor of 64 KiB and more therefore
    is a mapping of its own, which is gone when it is freed; that costs the page faults that every
    block beyond 32 MiB costs at any time. What was free in the heap before gives its pages back
    first, or tensors that find room there would seem to take none. What kernels and the
    communication library take for themselves is counted; memory that was never written is not, for
    it has no pages.

    Args:
        status: Descriptor of ``/proc/self/status``.
        clear_refs: Of ``/proc/self/clear_refs``; None where it is not to be had.
    """

    def __init__(self, status: int, clear_refs: int | None) -> None:
        self._status = status
        self._clear_refs = clear_refs
        self._before = 0
        self._peak: int | None = None
        self._left = 0

    @classmethod
    def of_this_process(cls) -> Self:
        """That of the caller."""
        status = os.open("/proc/self/status", os.O_RDONLY)
        # Not every kernel offers it, and some containers forbid it.
        clear_refs = None
        with contextlib.suppress(OSError):
            clear_refs = os.open("/proc/self/clear_refs", os.O_WRONLY)
        return cls(status, clear_refs)

    def begin_model(self) -> None:
        """All that is held now was there before; the next steps are measured."""
        self._left = MEASURED_STEPS
        _mapped_from(_MMAPPED_BYTES)
        _give_back()
        self._before = self._look().anonymous

    @contextlib.contextmanager
    def apart(self) -> Iterator[None]:
        """What the process holds more at the end counts as held before."""
        held = self._look().anonymous
        yield
        self._before += max(self._look().anonymous - held, 0)

    def begin_step(self) -> None:
        """Sets the mark back to what is resident now."""
        if self._left and self._clear_refs is not None:
            try:
                os.write(self._clear_refs, _RESET_PEAK)
            except OSError:
                # Without it the mark may be that of making the data, or of anything else.
                self._clear_refs = None

    def end_step(self, copies: int) -> MemoryFigures:
        """Reads the mark; ``copies`` are counted as if all had been there at the peak."""
        seen = self._look()
        if self._left:
            self._left -= 1
            if self._clear_refs is not None:
                others = max(seen.shared - shared_bytes(), 0)
                taken = seen.most - seen.files - others - self._before - copies
                self._peak = max(taken, self._peak or 0)
            if not self._left:
                _mapped_from(_USUAL_MMAPPED_BYTES)
        return MemoryFigures(seen.anonymous + seen.files, self._peak)

    def _look(self) -> "_Status":
        return _Status.of(os.pread(self._status, _STATUS_BYTES, 0))


@dataclass(frozen=True)
class _Status:
    """Bytes resident: at most, and now with a file behind them and without (shared memory too)."""

    most: int
    files: int
    anonymous: int
    shared: int

    @classmethod
    def of(cls, status: bytes) -> "_Status":
        return cls(
            most=_field(status, b"VmHWM:"),
            files=_field(status, b"RssFile:"),
            anonymous=_field(status, b"RssAnon:") + _field(status, b"RssShmem:"),
            shared=_field(status, b"RssShmem:"),
        )


def _field(status: bytes, name: bytes) -> int:
    start = status.index(name) + len(name)
    return int(status[start : status.index(b"kB", start)]) * _KIB


# Only glibc has these two.
def _mapped_from(nbytes: int) -> None:
    """Have the C library map blocks of this size and more."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_MMAP_THRESHOLD, nbytes)
        mallopt(_TRIM_THRESHOLD, 2 * nbytes)


def _give_back() -> None:
    """Have the C library give the pages of free blocks back to the system."""
    malloc_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if malloc_trim is not None:
        malloc_trim(0)
