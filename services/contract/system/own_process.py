"""What each process of ours does first: its files are private, and its output never raises.

Output goes to files, often on the disk that holds everything else. When that disk is full, a line
that cannot be written must not end the process that writes it, nor the program of a user that
prints. What is lost is counted, and the output says so as soon as it can be written again.
"""

import contextlib
import ctypes
import io
import os
import sys
from collections.abc import Callable
from typing import Any, Final, Literal

_PR_SET_DUMPABLE: Final = 4
_M_MMAP_THRESHOLD: Final = -3
_LARGE_BLOCK_BYTES: Final = 1 << 17
_PRIVATE: Final = 0o077
_LONGEST_LINE: Final = 1 << 16


def set_up_process(*, holds_secrets: bool = False) -> None:
    """Make new files readable by this user alone, and have stdout and stderr never raise.

    Args:
        holds_secrets: As ``hide_process``.
    """
    os.umask(_PRIVATE)
    if holds_secrets:
        hide_process()
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is not None:  # its descriptor may be closed
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
            setattr(sys, name, LossyOutput.text(stream.fileno()))


def hide_process() -> None:
    """Keep environment and memory from other processes of this user: credentials are in them.

    Those with CAP_SYS_PTRACE can still read them. Children that call exec are readable again.
    """
    ctypes.CDLL(None).prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)


def give_large_blocks_back() -> None:
    """Have memory of more than 128 KiB a block return to the system once it is free.

    The C library raises that threshold with what is freed, up to 32 MiB: then large answers of one moment stay.
    """
    library = ctypes.CDLL(None)
    if hasattr(library, "mallopt"):  # musl has none, and no such threshold
        library.mallopt(_M_MMAP_THRESHOLD, _LARGE_BLOCK_BYTES)


def say(text: str, output: Literal["stdout", "stderr"]) -> None:
    """Write to an output of a process that runs user code, which may have put anything in its place.

    What that raises ends nobody: a stream that is closed, None, a class of its own.
    """
    with contextlib.suppress(Exception):
        getattr(sys, output).write(text)


def flush_outputs() -> None:
    """Have both outputs written before such a process ends; what they raise ends nobody, as with `say`."""
    for output in ("stdout", "stderr"):
        with contextlib.suppress(Exception):
            getattr(sys, output).flush()


class LossyOutput(io.RawIOBase):
    """Writes to a descriptor; what the descriptor does not take is lost and counted.

    Args:
        descriptor: Stays the caller's: it is not closed.
        mask: Applied to what is written, which is whole lines unless they are very long.
    """

    def __init__(self, descriptor: int, mask: Callable[[bytes], bytes] = bytes) -> None:
        self._descriptor = descriptor
        self._mask = mask
        self._lost = 0
        self._why = ""

    @classmethod
    def text(cls, descriptor: int, mask: Callable[[bytes], bytes] = bytes) -> io.TextIOWrapper:
        """Lines of text into ``descriptor``, each written at its end."""
        buffer = io.BufferedWriter(cls(descriptor, mask), _LONGEST_LINE)
        return io.TextIOWrapper(
            buffer, encoding="utf-8", errors="backslashreplace", line_buffering=True
        )

    def fileno(self) -> int:
        """The descriptor."""
        return self._descriptor

    def isatty(self) -> bool:
        """Whether a person reads it."""
        return os.isatty(self._descriptor)

    def writable(self) -> bool:
        """Always."""
        return True

    def write(self, data: Any, /) -> int:  # noqa: ANN401 any buffer, as the base class has it
        """Take all of ``data``; never raises for what the descriptor does."""
        taken = len(memoryview(data).cast("B"))
        masked = self._mask(bytes(data))
        try:
            if self._lost:
                self._put(f"\n… {self._lost} bytes of this output are lost: {self._why}\n".encode())
                self._lost = 0
            self._put(masked)
        except OSError as error:
            self._lost += taken
            self._why = error.strerror or str(error)
        return taken

    def _put(self, data: bytes) -> None:
        while data:
            data = data[os.write(self._descriptor, data) :]
