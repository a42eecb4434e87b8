"""File systems of a test's own: one that it can fill, one that can go, one that nobody serves any more."""

import contextlib
import ctypes
import errno
import os
import stat
import struct
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from services.contract.system.rank_user import RankUser


@dataclass(frozen=True)
class Disk:
    """Where it is mounted, and what it holds at most."""

    path: Path
    nbytes: int

    def fill(self) -> None:
        """Leave room for no block."""
        with pytest.raises(OSError, match=os.strerror(errno.ENOSPC)):
            self._filler.write_bytes(bytes(self.nbytes + 1))

    def free(self) -> None:
        """Make the room again that ``fill`` took."""
        self._filler.unlink()

    @property
    def _filler(self) -> Path:
        return self.path / "filler"


@contextmanager
def small_disk(folder: Path, mebibytes: int = 8) -> Iterator[Disk]:
    """A disk mounted on ``folder``; skips the test where nothing may be mounted."""
    folder.mkdir()
    _mount("-t", "tmpfs", "-o", f"size={mebibytes}m", "tmpfs", str(folder))
    try:
        yield Disk(folder, mebibytes << 20)
    finally:
        # Whoever has it open yet, a process on its way out, does not keep it mounted here.
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


@contextmanager
def as_somebody_else() -> Iterator[None]:
    """Within, this process may do no more than its rights say: not as root, who may read everything."""
    is_root = os.geteuid() == 0
    if is_root:
        os.seteuid(RankUser.named("nobody").uid)
    try:
        yield
    finally:
        if is_root:
            os.seteuid(0)


@dataclass(frozen=True)
class LooseDisk:
    """A disk that is mounted at ``path`` and holds what lies in ``content``."""

    path: Path
    content: Path

    def mount(self) -> None:
        """Have it there."""
        _mount("--bind", str(self.content), str(self.path))

    def unmount(self) -> None:
        """Have an empty folder of the disk below in its place, at once and for everybody."""
        subprocess.run(["umount", "--lazy", str(self.path)], check=True)


@contextmanager
def loose_disk(folder: Path) -> Iterator[LooseDisk]:
    """A disk mounted within ``folder``; skips the test where nothing may be mounted."""
    disk = LooseDisk(folder / "mounted", folder / "content")
    for each in (disk.path, disk.content):
        each.mkdir(parents=True)
    disk.mount()
    try:
        yield disk
    finally:
        # As often as it is there: a mount of a folder of the same disk looks like none.
        unmount = ["umount", "--lazy", str(disk.path)]
        while not subprocess.run(unmount, check=False, stderr=subprocess.DEVNULL).returncode:
            continue


@contextmanager
def dead_disk(folder: Path) -> Iterator[None]:
    """A disk mounted on ``folder`` whose program in user space has died; skips the test as ``small_disk`` does."""
    folder.mkdir(exist_ok=True)
    with _served(folder, stat.S_IFDIR) as device:
        os.close(device)
        yield


# linux/fuse.h
_HEAD = struct.Struct("<IIQ24x")  # of a request: bytes, what is asked, its number
_ANSWER = struct.Struct("<IiQ")
_GETATTR, _OPEN, _READ, _INIT = 3, 14, 15, 26
_ATTRIBUTES = (1, 1 << 20, *[0] * 7, stat.S_IFREG | 0o444, 1, 0, 0, 0, 4096, 0)
_ANSWERS = {
    _GETATTR: struct.pack("<QII6Q10I", 3600, 0, 0, *_ATTRIBUTES),
    _OPEN: bytes(16),
    _INIT: struct.pack("<IIIIHHII36x", 7, 31, 0, 0, 1, 1, 1 << 17, 1),
}


@contextmanager
def file_that_does_not_answer(path: Path) -> Iterator[threading.Event]:
    """A file at ``path`` of which no read is answered; skips the test as ``small_disk`` does.

    Yields what is set once somebody reads. Who waits for it is released at the end.
    """
    path.touch()
    asked = threading.Event()
    with _served(path, stat.S_IFREG) as device:
        serving = threading.Thread(target=_serve, args=(device, asked), daemon=True)
        serving.start()
        yield asked
    serving.join()
    os.close(device)


@contextmanager
def _served(path: Path, kind: int) -> Iterator[int]:
    """A file system in user space on ``path``, of which the root is of a ``kind``; by the descriptor of who serves it."""
    try:
        device = os.open("/dev/fuse", os.O_RDWR)
    except OSError as error:
        pytest.skip(f"there is no FUSE: {error}")
    options = f"fd={device},rootmode={kind:o},user_id=0,group_id=0".encode()
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mount(b"tests", os.fsencode(path), b"fuse", 0, options):
        os.close(device)
        pytest.skip(f"nothing may be mounted: {os.strerror(ctypes.get_errno())}")
    try:
        yield device
    finally:
        subprocess.run(["umount", "--force", "--lazy", str(path)], check=True)


def _serve(device: int, asked: threading.Event) -> None:
    """Answers all but reads, until it is unmounted."""
    with contextlib.suppress(OSError):
        while True:
            _, what, number = _HEAD.unpack_from(os.read(device, 2 << 20))
            if what == _READ:
                asked.set()
                continue
            answer = _ANSWERS.get(what, b"")
            refused = 0 if answer else -errno.ENOSYS
            os.write(device, _ANSWER.pack(_ANSWER.size + len(answer), refused, number) + answer)


def _mount(*words: str) -> None:
    done = subprocess.run(["mount", *words], capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"a file system of its own takes the right to mount: {done.stderr.strip()}")
