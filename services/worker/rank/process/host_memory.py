"""How much memory of the host a process may take, and how to tell that it was refused some."""

import contextlib
import errno
import resource
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

from services.worker.rank.process.failures import chain_of, text_of

_KIB: Final = 1 << 10
# A library that finds no room for itself is an ImportError.
_REFUSED: Final = (
    "annot allocate memory",
    "can't start new thread",
    "failed to map segment",
    "std::bad_alloc",
)


def limit_memory(allowance: int) -> None:
    """Have the kernel refuse this process more than ``allowance`` bytes beyond what it has.

    What is limited is private memory that can be written (RLIMIT_DATA). Address space as a whole
    would count files that a data source maps and what CUDA reserves, which take no memory; and
    what is resident is limited by no kernel, only watched, so that an allocation that is far too
    large would be made first and noticed later, if at all.
    """
    limit = _limit(allowance)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))


def count_shared_memory() -> None:
    """Lowers the limit, if there is one, by what this process has of memory that it shares.

    RLIMIT_DATA leaves that out. It is counted as far as it is written to by now.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    if hard != resource.RLIM_INFINITY:
        limit = max(hard - shared_bytes(), 0)
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))


def shared_bytes() -> int:
    """This process's part of the resident memory that it shares: each page by how many map it.

    0 where the kernel does not tell.
    """
    with contextlib.suppress(OSError):
        lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
        found = (line.split()[1] for line in lines if line.startswith("Pss_Shmem:"))
        return int(next(found, "0")) * _KIB
    return 0


@contextlib.contextmanager
def limited_memory(allowance: int) -> Iterator[None]:
    """Within, no more than ``allowance`` bytes beyond what there is, if that is less."""
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    limit = _limit(allowance)
    narrower = limit if soft == resource.RLIM_INFINITY else min(limit, soft)
    resource.setrlimit(resource.RLIMIT_DATA, (narrower, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))


def lacks_host_memory(error: BaseException) -> bool:
    """Whether the system refused memory of the host."""
    if isinstance(error, OSError) and error.errno == errno.ENOMEM:
        return True
    is_refused = any(words in text_of(error) for words in _REFUSED)
    return isinstance(error, MemoryError) or (
        isinstance(error, RuntimeError | ImportError) and is_refused
    )


def refusal_behind(error: BaseException) -> BaseException | None:
    """What of this error, and of those that led to it, says that memory was refused; None: nothing."""
    return next(filter(lacks_host_memory, chain_of(error)), None)


class ThreadRefusals:
    """Threads of this process that ended because memory was refused, which Python tells on stderr alone.

    Args:
        step: Answers the step that the process is at.
    """

    def __init__(self, step: Callable[[], int]) -> None:
        self._step = step
        self._last: tuple[int, BaseException] | None = None

    def watch(self) -> None:
        """Begin to."""
        tell = threading.excepthook

        def note(ended: threading.ExceptHookArgs) -> None:
            error = ended.exc_value
            refused = None if error is None else refusal_behind(error)
            if refused is not None:
                self._last = self._step(), refused
            tell(ended)

        threading.excepthook = note

    def before(self, step: int) -> BaseException | None:
        """Why a thread ended in this step or the one before; None where none did for that."""
        if self._last is None or step > self._last[0] + 1:
            return None
        return self._last[1]


def _limit(allowance: int) -> int:
    limit = _private_bytes() + allowance
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    return limit if hard == resource.RLIM_INFINITY else min(limit, hard)


def _private_bytes() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    (kibibytes,) = (line.split()[1] for line in lines if line.startswith("VmData:"))
    return int(kibibytes) * _KIB
