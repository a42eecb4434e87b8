"""How records of the commit chain become what all nodes see: the seam between a folder and a bucket.

Below the storage root everything has the same name wherever it lies; the chain, cards and manifests know
that format, and nothing else does. What differs is when a file is seen by all nodes.
"""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

from services.contract.system.durable import names_like


class RecordFiles(Protocol):
    """Files below a storage root, as all nodes see them.

    Every method may raise OSError: the storage refuses, or does not answer.
    """

    def pull(self, folder: Path) -> None:
        """Have ``folder`` hold the files that all nodes see there, and no others but drafts."""
        ...

    def pull_file(self, path: Path) -> None:
        """Have ``path`` be the record that all nodes see there, or nothing."""
        ...

    def holds(self, folder: Path) -> bool:
        """Whether all nodes see something in ``folder``."""
        ...

    def link(self, draft: Path, path: Path) -> None:
        """Give a finished file its name, for all nodes and once: this is the commit.

        Raises:
            FileExistsError: The name is taken. It may be by this very call, whose answer was lost: compare.
        """
        ...

    def touch(self, path: Path) -> None:
        """Have all nodes see an empty file of this name."""
        ...

    def folders(self, parent: Path, pattern: str) -> Iterator[Path]:
        """Paths of what all nodes see in ``parent`` by a name like ``pattern``, one by one, in any order."""
        ...


class FolderRecords:
    """``RecordFiles`` where all nodes mount the folder: what lies there is what they see."""

    def pull(self, folder: Path) -> None:
        """See ``RecordFiles.pull``."""

    def pull_file(self, path: Path) -> None:
        """See ``RecordFiles.pull_file``."""

    def holds(self, folder: Path) -> bool:
        """See ``RecordFiles.holds``."""
        return folder.is_dir()

    def link(self, draft: Path, path: Path) -> None:
        """See ``RecordFiles.link``."""
        os.link(draft, path)

    def touch(self, path: Path) -> None:
        """See ``RecordFiles.touch``. It is durable once its folder is synced."""
        path.touch()

    def folders(self, parent: Path, pattern: str) -> Iterator[Path]:
        """See ``RecordFiles.folders``."""
        return (parent / name for name in names_like(parent, pattern))
