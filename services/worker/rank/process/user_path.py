"""Where modules of users are found: before everything else, except our own packages.

A user's folder may have the name of one of our packages. It must not take their place: neither in
this process nor in Python processes that user code starts, which import from the same folders.
"""

import os
import sys
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Final

OUR_PACKAGES: Final = ("services", "fsdp_core", "meshloom")
OUR_PLACE: Final = Path(__file__).resolve().parents[4]
_RESERVED: Final = (
    f"{', '.join(OUR_PACKAGES)} are Meshloom's own packages, so yours cannot have that name; "
    "rename it"
)
_folders: list[Path] = []


def user_folders() -> tuple[Path, ...]:
    """The folders that ``add_user_path`` was given in this process, or before it was forked."""
    return tuple(_folders)


def add_user_path(entries: Sequence[str]) -> None:
    """Have this process, and the Python processes that it starts, import from ``entries``.

    To be called once, before any user code is imported.
    """
    inherited = os.environ.get("PYTHONPATH", "").split(os.pathsep)  # noqa: TID251 extended
    before = [entry for entry in inherited if entry]
    os.environ["PYTHONPATH"] = os.pathsep.join([*before, *entries])  # noqa: TID251 written
    sys.path[len(before) : len(before)] = entries
    _folders.extend(map(Path, entries))
    if hidden_by_us(entries):
        # What else lies beside our packages comes first now, too: so only where it must be.
        sys.path.insert(0, str(OUR_PLACE))


def add_code(folder: str) -> None:
    """Have this process, and the Python processes that it starts, import from uploaded code first.

    To be called by what is of one job alone, once it has the rights of a rank. No archive holds a
    package with the name of one of ours. Nobody writes beside its modules, compiled ones neither.
    """
    inherited = os.environ.get("PYTHONPATH", "")  # noqa: TID251 extended
    entries = [folder, *(entry for entry in inherited.split(os.pathsep) if entry)]
    os.environ["PYTHONPATH"] = os.pathsep.join(entries)  # noqa: TID251 written
    os.environ["PYTHONDONTWRITEBYTECODE"] = "1"  # noqa: TID251 written
    sys.dont_write_bytecode = True
    sys.path.insert(0, folder)


def hidden_by_us(
    entries: Sequence[str], packages: Collection[str] = OUR_PACKAGES
) -> tuple[str, ...]:
    """A sentence for each folder or module there that has the name of one of our ``packages``."""
    places = [
        (name, there)
        for entry in map(Path, entries)
        for name in OUR_PACKAGES
        if name in packages
        for there in (entry / name, entry / f"{name}.py")
    ]
    return tuple(
        f"{there} is hidden by Meshloom's own package {name}; rename it"
        for name, there in places
        if there.exists() and there.resolve() != OUR_PLACE / name
    )


def why_not_imported(error: BaseException) -> str:
    """What to add to what ``error`` says: that it looked for a module of the user's in a package of ours."""
    package = (error.name or "").partition(".")[0] if isinstance(error, ImportError) else ""
    if package not in OUR_PACKAGES:
        return ""
    said = "; ".join(hidden_by_us(sys.path, (package,)))
    return f": {said or _RESERVED}"
