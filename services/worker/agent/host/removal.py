"""Removes folders in which ranks wrote, however deep these are and whatever is done to them meanwhile.

``shutil.rmtree`` calls itself for each level and holds a descriptor for each: a thousand levels end
it with an error that is no OSError, and take all descriptors of the agent.
"""

import contextlib
import errno
import itertools
import os
import secrets
import time
from pathlib import Path
from typing import Final

_MOST_LEVELS: Final = 10_000
_MOST_NAMES: Final = 1 << 16
_MOST_UNDONE: Final = 100
_BY_ANOTHER: Final = (errno.ENOENT, errno.ENOTEMPTY)
_WITHIN_S: Final = 60.0
PURGED_WITHIN_S: Final = 600.0
"""For so long all of a job may take: people ask for its removal, and would have to ask again."""
_ONLY_A_FOLDER: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def remove_tree(folder: Path, within_s: float = _WITHIN_S) -> None:
    """Remove a folder and all that is in it, or what is in its place. Links are not followed.

    Blocking.

    Args:
        folder: It.
        within_s: For so many seconds at most: who goes on to write there must not keep a thread for ever.

    Raises:
        OSError: Something cannot be removed; or it has more than ten thousand levels, takes too long, or somebody
            goes on to write there. Another call removes more.
    """
    deadline = time.monotonic() + within_s
    try:
        _open_up(None, str(folder))
        root = os.open(folder, _ONLY_A_FOLDER)
    except OSError as error:
        if error.errno not in (errno.ELOOP, errno.ENOTDIR):
            raise
        folder.unlink()
        return
    try:
        undone = 0
        for _ in range(_MOST_LEVELS):
            names = _names(root)
            for name in names:
                _require_time(deadline, folder)
                if not _is_unlinked(root, name):
                    try:
                        _empty(root, name, deadline)
                    except OSError as error:
                        # Another thread may remove it, too, and puts folders in it beside others.
                        undone += 1
                        if undone > _MOST_UNDONE or error.errno not in _BY_ANOTHER:
                            raise
            if not names:
                folder.rmdir()
                return
    finally:
        os.close(root)
    raise OSError(errno.ENOTEMPTY, "it has too many levels, or is still written to", str(folder))


def remove_what_can_be(folder: Path) -> None:
    """The same, for as long as a purge may take; what cannot be removed stays, without an error. Blocking."""
    with contextlib.suppress(OSError):
        remove_tree(folder, PURGED_WITHIN_S)


def _require_time(deadline: float, folder: Path) -> None:
    if time.monotonic() > deadline:
        # Not ETIMEDOUT, by which a storage says that it does not answer.
        raise OSError(
            errno.EBUSY, "there is too much in it, or it is still written to", str(folder)
        )


def _empty(root: int, name: str, deadline: float) -> None:
    """Remove the folder ``name``; the folders in it, one level less deep, are put beside it."""
    _open_up(root, name)
    inner = os.open(name, _ONLY_A_FOLDER, dir_fd=root)
    try:
        is_looked_at = False
        while not is_looked_at:
            _require_time(deadline, Path(name))
            names = _names(inner)
            is_looked_at = len(names) < _MOST_NAMES
            for each in names:
                if not _is_unlinked(inner, each):
                    try:
                        os.rmdir(each, dir_fd=inner)
                    except OSError:  # it is not empty
                        _open_up(inner, each)
                        os.rename(each, secrets.token_hex(16), src_dir_fd=inner, dst_dir_fd=root)
    finally:
        os.close(inner)
    os.rmdir(name, dir_fd=root)


def _names(folder: int) -> list[str]:
    """Names in a folder, and no more than an agent has memory for: a rank may have put ten million there."""
    with os.scandir(folder) as entries:
        return [entry.name for entry in itertools.islice(entries, _MOST_NAMES)]


def _open_up(folder: int | None, name: str) -> None:
    """Have a folder's owner, if that is this user, list it and write in it."""
    descriptor = os.open(name, os.O_PATH | _ONLY_A_FOLDER, dir_fd=folder)
    try:
        Path(f"/proc/self/fd/{descriptor}").chmod(0o700)
    finally:
        os.close(descriptor)


def _is_unlinked(folder: int, name: str) -> bool:
    """Remove what is no folder; False where it is one."""
    try:
        os.unlink(name, dir_fd=folder)
    except (IsADirectoryError, PermissionError) as error:
        if isinstance(error, PermissionError) and not _is_folder(folder, name):
            raise
        return False
    except FileNotFoundError:
        return True
    return True


def _is_folder(folder: int, name: str) -> bool:
    try:
        os.close(os.open(name, _ONLY_A_FOLDER, dir_fd=folder))
    except OSError:
        return False
    return True
