"""Points at which a test has a process die: once for each file that it lays into a folder."""

import contextlib
import os
import signal
from pathlib import Path

FOLDER = Path(os.environ.get("LOOM_FAULTS", "/nonexistent"))  # noqa: TID251 a test's own switch
STEP = int(os.environ.get("LOOM_FAULTS_STEP", "40"))  # noqa: TID251 as above
"""Whose save is disturbed."""


def is_armed(point: str) -> bool:
    """Whether this point was armed; of all that ask, one hears yes, and once."""
    with contextlib.suppress(FileNotFoundError):
        (FOLDER / point).unlink()
        return True
    return False


def strike(point: str) -> None:
    """End this process here, as a power cut would, if the point is armed."""
    if is_armed(point):
        os.kill(os.getpid(), signal.SIGKILL)
