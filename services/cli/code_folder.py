"""A folder as an archive of code: without what git ignores, and without what no job imports."""

import os
import stat
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final, NamedTuple

import humanize
from pathspec import GitIgnoreSpec

from services.cli.errors import CliError
from services.contract.jobs.code_archives import (
    MOST_FOLDERS,
    MOST_MEMBERS,
    MOST_UNPACKED_BYTES,
    CodeArchiveError,
    examine,
    pack,
)

LEFT_OUT: Final = frozenset({".git", "__pycache__", ".venv", ".meshloom"})
"""Never packed, whatever ``.gitignore`` says; nor any other virtual environment of Python's."""
_LARGEST_NAMED: Final = 5
_ADVICE: Final = "leave out what no job imports: list it in .gitignore"
_EXECUTABLE: Final = 0o100


class _Rules(NamedTuple):
    """A ``.gitignore``, and the folder to which its patterns are relative."""

    folder: Path
    spec: GitIgnoreSpec


class _File(NamedTuple):
    path: Path
    status: os.stat_result


def pack_folder(folder: Path, most_mib: int) -> bytes:
    """The archive of a folder: the same bytes for the same files.

    Args:
        folder: Whose modules are to be imported; its own name plays no part.
        most_mib: How large the archive may be.

    Raises:
        CliError: It is no folder, cannot be read, is too large, or holds what no archive may.
    """
    if not folder.is_dir():
        raise CliError(f"--code {folder}: there is no such folder")
    root = folder.resolve()
    try:
        above = list(_rules_above(root))
        if _is_ignored(root, above, is_folder=True):  # it was named all the same
            above = []
        files = _bounded(folder, root, _files(root, above))
        body = pack(
            (
                file.path.relative_to(root).as_posix(),
                file.path.read_bytes(),
                bool(file.status.st_mode & _EXECUTABLE),
            )
            for file in files
        )
        examine(body)
    except CodeArchiveError as error:
        raise CliError(f"--code {folder}: {error}, or list it in .gitignore") from error
    except OSError as error:
        raise CliError(
            f"--code {folder}: cannot read {error.filename}: {error.strerror}"
        ) from error
    if len(body) > most_mib << 20:
        raise CliError(
            f"--code {folder}: packed it has {_size(len(body))}, more than {most_mib} MiB "
            f"(MESHLOOM_MAX_CODE_MIB); {_ADVICE}; {_largest(root, files)}"
        )
    return body


def _bounded(folder: Path, root: Path, found: Iterable[_File]) -> list[_File]:
    """All files, if they are not too many nor too large to be read."""
    files: list[_File] = []
    for file in found:
        files.append(file)
        if len(files) > MOST_MEMBERS:
            tops = Counter(each.path.relative_to(root).parts[0] for each in files)
            top, count = tops.most_common(1)[0]
            raise CliError(
                f"--code {folder}: more than {MOST_MEMBERS} files, {count} of them in {top}; {_ADVICE}"
            )
    if not files:
        raise CliError(f"--code {folder}: nothing is left of it besides what .gitignore lists")
    size = sum(file.status.st_size for file in files)
    if size > MOST_UNPACKED_BYTES:
        raise CliError(
            f"--code {folder}: its files have {_size(size)}, more than "
            f"{_size(MOST_UNPACKED_BYTES)}; {_ADVICE}; {_largest(root, files)}"
        )
    return files


def _files(folder: Path, rules: list[_Rules], depth: int = 0) -> Iterator[_File]:
    """The files below a folder that git would not ignore.

    Raises:
        CliError: Something is no plain file nor folder, or lies ``MOST_FOLDERS`` deep.
    """
    if depth >= MOST_FOLDERS:
        raise CliError(
            f"--code: {folder} lies in more than {MOST_FOLDERS} folders, which no archive holds: list it in .gitignore"
        )
    rules = [*rules, *_rules_of(folder)]
    for path in sorted(folder.iterdir()):
        status = path.lstat()
        is_folder = stat.S_ISDIR(status.st_mode)
        if path.name in LEFT_OUT or _is_ignored(path, rules, is_folder=is_folder):
            continue
        if is_folder:
            if not (path / "pyvenv.cfg").exists():
                yield from _files(path, rules, depth + 1)
        elif stat.S_ISREG(status.st_mode):
            yield _File(path, status)
        else:
            kind = "a symbolic link" if stat.S_ISLNK(status.st_mode) else "no plain file"
            raise CliError(
                f"--code: {path} is {kind}, which no archive holds: put a plain file in its place, "
                "or list it in .gitignore"
            )


def _is_ignored(path: Path, rules: list[_Rules], *, is_folder: bool) -> bool:
    """As git judges: what the nearest ``.gitignore`` says last of it counts."""
    for folder, spec in reversed(rules):
        name = path.relative_to(folder).as_posix()
        said = spec.check_file(f"{name}/" if is_folder else name).include
        if said is not None:
            return said
    return False


def _rules_above(folder: Path) -> Iterator[_Rules]:
    """Those between a folder and the top of its repository, from the top on."""
    line = [folder, *folder.parents]
    tops = [place for place, each in enumerate(line) if (each / ".git").exists()]
    for each in reversed(line[1 : tops[0] + 1] if tops else []):
        yield from _rules_of(each)


def _rules_of(folder: Path) -> Iterator[_Rules]:
    path = folder / ".gitignore"
    if not path.is_file() or path.is_symlink():
        return
    try:
        yield _Rules(
            folder, GitIgnoreSpec.from_lines(path.read_text(errors="replace").splitlines())
        )
    except ValueError as error:
        raise CliError(f"{path} holds a pattern that git would not take: {error}") from error


def _largest(root: Path, files: Iterable[_File]) -> str:
    """The largest files, for people."""
    first = sorted(files, key=lambda file: -file.status.st_size)[:_LARGEST_NAMED]
    named = (f"{f.path.relative_to(root)} ({_size(f.status.st_size)})" for f in first)
    return f"the largest are {', '.join(named)}"


def _size(size: int) -> str:
    return humanize.naturalsize(size, binary=True)
