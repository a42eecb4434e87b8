"""How an exception is told to people who were not there."""

import errno
import traceback
from typing import Final

_TEXT_LIMIT: Final = 32_768
_NO_MEMORY: Final = (
    "annot allocate memory",
    "can't start new thread",
    "failed to map segment",
)


def one_line(error: BaseException) -> str:
    """Its class and the first line of what it says."""
    first, *_ = str(error).splitlines() or [""]
    return shortened(f"{type(error).__name__}: {first}" if first else type(error).__name__)


def traceback_of(error: BaseException) -> str:
    """Its traceback without the first frame, which is the catcher's own: readers start below it."""
    frames = error.__traceback__.tb_next if error.__traceback__ is not None else None
    return "".join(traceback.format_exception(error.with_traceback(frames)))


def shortened(text: str) -> str:
    """``text``, its middle cut where it is too long: the two ends say where and what."""
    if len(text) <= _TEXT_LIMIT:
        return text
    half = _TEXT_LIMIT // 2
    return f"{text[:half]}\n… {len(text) - 2 * half} characters cut …\n{text[-half:]}"


def lacks_host_memory(error: BaseException) -> bool:
    """Whether the system refused memory of the host."""
    if isinstance(error, OSError) and error.errno == errno.ENOMEM:
        return True
    # A library that finds no room for itself is an ImportError.
    refused = any(word in str(error) for word in _NO_MEMORY)
    return isinstance(error, MemoryError) or (
        refused and isinstance(error, RuntimeError | ImportError)
    )
