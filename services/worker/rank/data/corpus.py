"""The text at hand on every machine: the sources of the running interpreter's standard library."""

import hashlib
import os
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from services.worker.rank.data.roots import inside

# Third-party packages and test suites differ between installations of one Python.
_SKIPPED: Final = frozenset(
    {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"}
)


@dataclass(frozen=True)
class CorpusFile:
    """One source file: its path below the library, and its bytes."""

    name: str
    content: bytes


def stdlib_sources(
    library: Path | None = None, roots: Sequence[Path] | None = None
) -> list[CorpusFile]:
    """Reads all sources of the standard library (about 11 MB), sorted by name.

    Args:
        library: Another folder to read instead.
        roots: Where its files must really lie, links followed; None: anywhere.

    Raises:
        PathOutsideRootsError: A link in it leads elsewhere.
        FileNotFoundError: There is no source file (some distributions ship compiled code only).
    """
    root = Path(sysconfig.get_path("stdlib")) if library is None else library
    names = sorted(_names(root))
    if not names:
        raise FileNotFoundError(
            f"data: {root} holds no Python sources; install the interpreter's standard library "
            "with sources or name another data factory"
        )
    if library is not None and roots is not None:
        for name in names:
            inside(root / name, roots)
    return [CorpusFile(name, (root / name).read_bytes()) for name in names]


def _names(root: Path) -> Iterator[str]:
    # Folders that are skipped are not entered: site-packages holds more files than the library.
    for folder, inner, files in os.walk(root):
        inner[:] = set(inner) - _SKIPPED
        below = Path(folder).relative_to(root)
        yield from ((below / file).as_posix() for file in files if file.endswith(".py"))


def manifest(files: list[CorpusFile]) -> str:
    """A line a file, ``<sha256>  <name>``: what ``sha256sum --check`` reads in the library."""
    return "".join(f"{hashlib.sha256(file.content).hexdigest()}  {file.name}\n" for file in files)
