"""How an exception is told to people who were not there."""

import traceback
from collections.abc import Iterator
from types import TracebackType
from typing import Final

from services.contract.system.mask import NOTHING_MASKED, Mask
from services.contract.words.bounds import ERROR_CHARACTERS, shortened
from services.worker.rank.process.user_path import why_not_imported

_RUNPY: Final = "<frozen runpy>"
_MOST_LINKS: Final = 100


def one_line(error: BaseException, mask: Mask = NOTHING_MASKED) -> str:
    """Its class and the first line of what it says, and what its user may not know of it.

    Args:
        error: What was raised.
        mask: Takes secrets out before the line is cut: half of one is none that an agent would know.
    """
    first, *_ = mask.text(text_of(error)).splitlines() or [""]
    said = f"{type(error).__name__}: {first}" if first else type(error).__name__
    return shortened(f"{said}{why_not_imported(error)}", ERROR_CHARACTERS)


def text_of(error: BaseException) -> str:
    """What it says. Classes of users may fail to say it, often where an error came from another process."""
    try:
        return str(error)
    except Exception as failure:  # noqa: BLE001 the error itself is what is told
        return f"its text cannot be had ({type(failure).__name__})"


def chain_of(error: BaseException) -> Iterator[BaseException]:
    """An exception, the one that led to it, and so on: those that a traceback shows, the last first."""
    seen: set[int] = set()
    at: BaseException | None = error
    while at is not None and id(at) not in seen:
        seen.add(id(at))
        yield at
        at = at.__cause__ or (None if at.__suppress_context__ else at.__context__)


def traceback_of(error: BaseException) -> str:
    """Its traceback without the first frame, which is the catcher's own: readers start below it.

    That of a script starts with its own first line, below how it was run.
    """
    frames = error.__traceback__.tb_next if error.__traceback__ is not None else None
    shown = error.with_traceback(_of_script(frames) or frames)
    links = sum(1 for _ in chain_of(shown))
    if links <= _MOST_LINKS:
        return "".join(traceback.format_exception(shown))
    # All of them take seconds, and most of that text is cut.
    last = "".join(traceback.format_exception(shown, chain=False))
    return f"… {links - 1} exceptions that led to this one are left out\n\n{last}"


def _of_script(frames: TracebackType | None) -> TracebackType | None:
    """What is below the frames of runpy; None without any of these."""
    found = False
    while frames is not None:
        is_runpy = frames.tb_frame.f_code.co_filename == _RUNPY
        if found and not is_runpy:
            return frames
        found = found or is_runpy
        frames = frames.tb_next
    return None
