"""Files and folders whose names and contents outlive a power cut: synced, and their folders too.

What refuses them is often the state of the node and not the request: ``node_condition`` tells.
And how a file is opened that somebody else may have put something else in place of.
"""

import contextlib
import errno
import fnmatch
import os
import re
import secrets
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Final

_NEW_FILE: Final = 0o666  # less the umask
_LONGEST_RECORD: Final = 16 << 20
_BLOCK: Final = 512
_HOLES_ALLOWED: Final = 1 << 30
_HOLES_A_BYTE: Final = 15
_NO_PLAIN_FILE: Final = (errno.ELOOP, errno.ENXIO, errno.ENODEV)
CHECKPOINT_DISK: Final = "the checkpoint disk"
_CONDITIONS: Final[Mapping[int, str]] = MappingProxyType(
    {
        errno.ENOSPC: "{disk} of {node} is full",
        errno.EDQUOT: "the quota on {disk} of {node} is used up",
        errno.EROFS: "{disk} of {node} is read-only",
        errno.EIO: "{disk} of {node} reports input/output errors",
        errno.ESTALE: "{disk} of {node} is no longer mounted as it was",
        errno.ENOTCONN: "what serves {disk} of {node} has ended",
        errno.ESHUTDOWN: "what serves {disk} of {node} is shut down",
        errno.EHOSTDOWN: "what serves {disk} of {node} is down",
        errno.EHOSTUNREACH: "what serves {disk} of {node} is not reached",
        errno.ENETUNREACH: "what serves {disk} of {node} is not reached",
        errno.ETIMEDOUT: "what serves {disk} of {node} does not answer",
        errno.EREMOTEIO: "what serves {disk} of {node} reports input/output errors",
        errno.EMFILE: "a process on {node} has no free file handle",
        errno.ENFILE: "{node} has no free file handle",
        errno.ETOOMANYREFS: "processes on {node} have sent too many file handles that nobody has received",
        errno.ENOMEM: "{node} has no memory left",
        errno.EAGAIN: "{node} can start no more processes",
        errno.EADDRINUSE: "{node} has no free port",
    }
)
_AWAY: Final = frozenset(
    {
        errno.ESTALE,
        errno.ENOTCONN,
        errno.ESHUTDOWN,
        errno.EHOSTDOWN,
        errno.EHOSTUNREACH,
        errno.ENETUNREACH,
        errno.ETIMEDOUT,
        errno.EMFILE,
        errno.ENFILE,
        errno.ENOMEM,
    }
)


class StorageAwayError(OSError):
    """A storage that is no disk of this node refuses for now, or does not answer; the text says which."""

    def __str__(self) -> str:
        return str(self.args[0])


def node_condition(error: BaseException, node_id: str, disk: str = CHECKPOINT_DISK) -> str | None:
    """What of the node made a system call fail and may pass, in words; None: something else did.

    Args:
        error: What the call raised.
        node_id: Where it was made.
        disk: What was written to, as people know it.
    """
    if isinstance(error, StorageAwayError):
        return f"{error} (seen from {node_id})"
    words = _CONDITIONS.get(error.errno or 0) if isinstance(error, OSError) else None
    return None if words is None else words.format(disk=disk, node=node_id)


def says_nothing_of_the_file(error: OSError) -> bool:
    """Whether a read failed for what its node, or the server of its disk, lacks: not so EIO, which a bad block gives."""
    return isinstance(error, StorageAwayError) or error.errno in _AWAY


def make_folders(folder: Path, root: Path) -> None:
    """Makes ``folder``, which lies below ``root``, and whatever is missing above it.

    Raises:
        OSError: The storage refuses.
    """
    line = (folder, *folder.parents)
    missing = [path for path in line if not path.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    # One that was there already may have been made by another that has not synced it yet.
    for path in dict.fromkeys((*line[: line.index(root)], *missing)):
        sync_folder(path.parent)


def write_new(path: Path, content: bytes) -> None:
    """Writes a file that is not there yet; its name is durable once its folder is synced.

    Raises:
        OSError: The storage refuses, or the file is there.
    """
    with path.open("xb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Makes the names in a folder durable.

    Raises:
        OSError: The storage refuses.
    """
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def names_like(folder: Path, pattern: str) -> Iterator[str]:
    """The names in ``folder`` that are like ``pattern``, one by one: a rank may have put millions there.

    None where there is no folder, or one that may not be listed.

    Raises:
        OSError: The disk refuses.
    """
    is_like = re.compile(fnmatch.translate(pattern)).match
    if not folder.is_dir():
        return
    with contextlib.suppress(PermissionError), os.scandir(folder) as entries:
        yield from (entry.name for entry in entries if is_like(entry.name))


def open_plain(path: Path) -> int:
    """A descriptor to read the plain file at ``path``; a rank may have replaced it, or its folder.

    Opening a pipe or a device in its place would wait, or read forever; a link may lead to what
    the rank itself cannot read.

    Raises:
        OSError: There is none, or something other than a plain file.
    """
    folder = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        return open_plain_in(folder, path.name)
    except OSError as error:
        error.filename = str(path)
        raise
    finally:
        os.close(folder)


def open_plain_in(folder: int, name: str) -> int:
    """The same of the file ``name`` in a folder that is open.

    Raises:
        OSError: As `open_plain`.
    """
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    descriptor = os.open(name, flags, dir_fd=folder)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "not a plain file", name)
    return descriptor


@contextlib.contextmanager
def own_folder(path: Path) -> Iterator[int]:
    """A descriptor of the folder at ``path``, whose rights are to change: of links only this user's own are followed.

    Where agents of other users share a storage, or did, their ranks may have put a link there that leads
    to what they themselves may not change.

    Raises:
        OSError: There is none, or a link of another user.
    """
    about = path.lstat()
    if stat.S_ISLNK(about.st_mode):
        if about.st_uid != os.geteuid():
            raise OSError(errno.ELOOP, "a link of another user, which is not followed", str(path))
        path = path.resolve()
    folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        yield folder
    finally:
        os.close(folder)


def is_hollow(descriptor: int) -> bool:
    """Whether nearly all of a file is holes: a terabyte that was never written takes hours to read.

    Holes alone do not tell it: some file systems keep none of the zeros that were written. So it has
    more than a GiB of them, and more than fifteen times what it has of data.

    Args:
        descriptor: Of a plain file; it stands at the beginning afterwards.

    Raises:
        OSError: The storage does not answer.
    """
    size = os.fstat(descriptor).st_size
    data = holes = end = 0
    try:
        os.lseek(descriptor, 0, os.SEEK_HOLE)
    except OSError:  # an empty file, or a file system that does not report holes
        return False
    try:
        while end < size and holes <= _HOLES_ALLOWED + _HOLES_A_BYTE * data:
            start = _next_data(descriptor, end, size)
            holes += start - end
            end = size if start == size else os.lseek(descriptor, start, os.SEEK_HOLE)
            data += end - start
    finally:
        os.lseek(descriptor, 0, os.SEEK_SET)
    return holes > _HOLES_ALLOWED + _HOLES_A_BYTE * data


def _next_data(descriptor: int, start: int, size: int) -> int:
    try:
        return os.lseek(descriptor, start, os.SEEK_DATA)
    except OSError as error:
        if error.errno == errno.ENXIO:  # there is none up to the end
            return size
        raise


def append_plain(path: Path) -> int:
    """A descriptor to append to the plain file at ``path``, which is made where there is none.

    A link, a pipe or a device in its place is removed.

    Raises:
        OSError: The disk refuses, or a folder is in its place.
    """
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    try:
        descriptor = os.open(path, flags, _NEW_FILE)
        if stat.S_ISREG(os.fstat(descriptor).st_mode):
            return descriptor
        os.close(descriptor)
    except OSError as error:
        if error.errno not in _NO_PLAIN_FILE:
            raise
    path.unlink(missing_ok=True)
    return os.open(path, flags | os.O_EXCL, _NEW_FILE)


def replace_plain(path: Path, content: bytes) -> None:
    """Puts a file with ``content`` in the place of what is at ``path``; not synced.

    Raises:
        OSError: The disk refuses; what was there stays.
    """
    draft = path.with_name(f"{path.name}.draft")
    for place in (draft, path):
        _put_aside_what_is_long(place)
    # Made again: somebody may have put a pipe there, or a link that leads elsewhere.
    draft.unlink(missing_ok=True)
    with draft.open("xb") as file:
        file.write(content)
    draft.replace(path)


def _put_aside_what_is_long(path: Path) -> None:
    """Gives a file another name that no record of ours is as long as: to free a hundred thousand pieces takes long."""
    with contextlib.suppress(FileNotFoundError):
        about = path.lstat()
        if max(about.st_size, about.st_blocks * _BLOCK) > _LONGEST_RECORD:
            path.rename(path.with_name(f"{path.name}.{secrets.token_hex(8)}.long"))


def read_plain(path: Path) -> bytes:
    """What the plain file at ``path`` holds, opened by ``open_plain``.

    Raises:
        OSError: There is none, something other than a plain file, or one of more than 16 MiB: no
            record of ours is so long, and a file may hold nothing of the terabytes that it has.
    """
    with open(open_plain(path), "rb") as file:
        if os.fstat(file.fileno()).st_size > _LONGEST_RECORD:
            raise OSError(errno.EFBIG, "too long for a record", str(path))
        return file.read(_LONGEST_RECORD)
