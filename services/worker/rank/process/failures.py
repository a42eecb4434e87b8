"""How an exception is told to people who were not there."""

import traceback

from services.contract.bounds import ERROR_CHARACTERS, shortened


def one_line(error: BaseException) -> str:
    """Its class and the first line of what it says."""
    first, *_ = str(error).splitlines() or [""]
    said = f"{type(error).__name__}: {first}" if first else type(error).__name__
    return shortened(said, ERROR_CHARACTERS)


def traceback_of(error: BaseException) -> str:
    """Its traceback without the first frame, which is the catcher's own: readers start below it."""
    frames = error.__traceback__.tb_next if error.__traceback__ is not None else None
    return "".join(traceback.format_exception(error.with_traceback(frames)))
