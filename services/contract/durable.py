"""Files and folders whose names and contents outlive a power cut: synced, and their folders too."""

import os
from pathlib import Path


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
