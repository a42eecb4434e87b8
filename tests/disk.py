"""A file system of a test's own, so small that the test can fill it."""

import errno
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest


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
    mount = ["mount", "-t", "tmpfs", "-o", f"size={mebibytes}m", "tmpfs", str(folder)]
    mounted = subprocess.run(mount, capture_output=True, text=True, check=False)
    if mounted.returncode:
        pytest.skip(f"a file system of its own takes the right to mount: {mounted.stderr.strip()}")
    try:
        yield Disk(folder, mebibytes << 20)
    finally:
        # Whoever has it open yet, a process on its way out, does not keep it mounted here.
        subprocess.run(["umount", "--lazy", str(folder)], check=True)
