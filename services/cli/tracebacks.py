"""A traceback for its author: the frames of their code, and of runs of others how many there were."""

import re
from collections.abc import Iterator
from itertools import groupby
from typing import Final

_FRAME: Final = re.compile(r'  File "(?P<file>.+)", line (?P<line>\d+)(?:, in (?P<name>.+))?')
# An unpacked archive of the user's code is on none of these paths; the dashboard folds the same ones.
_FOREIGN: Final = re.compile(
    r"^<frozen |/(site|dist)-packages/|/lib/python3[^/]*/|(^|/)fsdp_core/"
    r"|(^|/)services/(contract|controller|local|worker)/|(^|/)meshloom/(trainable|session)\.py$"
)


def own_frames(traceback: str) -> str:
    """The traceback with frames of Meshloom, Python and packages counted instead of shown.

    If none is left it is shown whole: then the fault may be in what is not the user's.
    """
    entries = list(_entries(traceback.splitlines()))
    if not any(_kind(entry) == "own" for entry in entries):
        return traceback
    lines: list[str] = []
    for kind, run in groupby(entries, key=_kind):
        some = list(run)
        if kind == "foreign":
            frames = f"{len(some)} frame{'s' * (len(some) != 1)}"
            lines.append(f"  ({frames} of Meshloom or packages; -o json has all)")
        else:
            lines.extend(line for entry in some for line in entry)
    return "\n".join(lines)


def own_place(traceback: str) -> str | None:
    """File, line and function of the innermost frame of the user's code; None: there is none."""
    own = (entry[0] for entry in _entries(traceback.splitlines()) if _kind(entry) == "own")
    frame = next((found for each in reversed(list(own)) if (found := _FRAME.match(each))), None)
    if frame is None:
        return None
    return f"{frame['file']}:{frame['line']}" + (f" in {frame['name']}" if frame["name"] else "")


def _entries(lines: list[str]) -> Iterator[list[str]]:
    """Each frame with the lines of source below it; every other line by itself."""
    entry: list[str] = []
    for line in lines:
        if entry and _FRAME.match(entry[0]) and line.startswith("    "):
            entry.append(line)
            continue
        if entry:
            yield entry
        entry = [line]
    if entry:
        yield entry


def _kind(entry: list[str]) -> str:
    frame = _FRAME.match(entry[0])
    if frame is None:
        return "text"
    return "foreign" if _FOREIGN.search(frame["file"].replace("\\", "/")) else "own"
