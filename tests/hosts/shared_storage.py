"""One folder mounted several times by FUSE, as hosts mount one server's: each mount has caches of its own.

A mount keeps names for half a minute after another one has replaced or removed them, and attributes for a second, as
clients of NFS do. With ``keeps_missing`` it also goes on to miss what it has missed once.
"""

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

from tests.waiting import until


def why_not_here() -> str | None:
    """Why nothing can be mounted here; None: it can."""
    missing = [name for name in ("bindfs", "setpriv") if shutil.which(name) is None]
    if missing:
        return f"not installed: {', '.join(missing)}"
    if not os.access("/dev/fuse", os.R_OK | os.W_OK) or os.geteuid() != 0:
        return "no file system can be mounted by FUSE: that needs root and /dev/fuse"
    return None


@contextlib.contextmanager
def mounted(folder: Path, at: Path, *, keeps_missing: bool = False) -> Iterator[Path]:
    """``folder`` at ``at``, too, until the block ends."""
    folder.mkdir(exist_ok=True)
    at.mkdir(parents=True)
    caches = f"entry_timeout=30,attr_timeout=1,negative_timeout={30 if keeps_missing else 0}"
    # By SIGTERM it unmounts by itself, also when the tests' process is killed.
    command = ["setpriv", "--pdeathsig", "TERM", "bindfs", "-f", "--multithreaded", "-o", caches]
    process = subprocess.Popen([*command, folder, at])
    try:
        until(lambda: at.is_mount() or process.poll() is not None)
        assert process.poll() is None, f"bindfs exited with code {process.returncode}"
        yield at
    finally:
        # Lazily: a process that was killed a moment ago may still have a file open.
        subprocess.run(["umount", "--lazy", at], check=False)
        process.terminate()
        process.wait()
