"""The storage as an agent uses it: the folder that all nodes mount, or a bucket and this node's copies."""

import contextlib
import os
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from services.contract.storage.commit_chain import CommitChain
from services.contract.storage.job_cards import jobs_in
from services.contract.storage.manifests import ShardFile
from services.contract.storage.record_files import FolderRecords, RecordFiles
from services.contract.storage.storage_address import BucketAddress
from services.contract.system.durable import StorageAwayError, open_plain, sync_folder
from services.worker.agent.host.removal import PURGED_WITHIN_S, remove_tree
from services.worker.agent.storage.identity import (
    make_identity,
    read_identity,
    storage_identity,
)
from services.worker.agent.storage.shard_check import fault_of


class SharedFiles(RecordFiles, Protocol):
    """Files below a storage root, of which some are shards. Blocking: run in threads.

    ``root``: where this node, and its ranks, have them as files. Every method may raise OSError: the storage
    refuses, or does not answer.
    """

    @property
    def root(self) -> Path: ...  # noqa: D102 the class says it

    def identity(self) -> str | None:
        """The name that the storage has for all nodes that share it; None where it cannot be read or written."""
        ...

    def require_known(self) -> None:
        """Return if this is the storage in which the agent first saw jobs.

        Raises:
            StorageAwayError: It is another one, as where nothing is mounted any more: what is committed there is lost.
        """
        ...

    def fault(self) -> str | None:
        """Why no job can use the storage, in words that follow its address; None where all is well."""
        ...

    def jobs(self) -> list[str]:
        """The ids of all jobs of which the storage holds anything, oldest first."""
        ...

    def pull_missing(self, folder: Path) -> None:
        """Have ``folder`` hold what all nodes see there beside what is only here, and longer here."""
        ...

    def publish(
        self,
        path: Path,
        go_on: Callable[[], None] = lambda: None,
        size: int | None = None,
        sha256: str | None = None,
    ) -> None:
        """Have all nodes see the file at ``path``, or that there is none; whole or not at all.

        Args:
            path: The file.
            go_on: Called now and then; what it raises ends it.
            size: How many bytes it had when it was checked: one of another length is not published.
            sha256: The same of its digest.
        """
        ...

    def place(self, path: Path) -> str:
        """Where people find a file that all nodes see."""
        ...

    def fetch(
        self,
        path: Path,
        shard: ShardFile,
        for_job: str,
        took: Callable[[int], None] = lambda _: None,
    ) -> None:
        """Have ``path`` be the shard file that all nodes see there, if there is one.

        ``took`` is called with the bytes of each piece; what it raises ends it. It stays here until ``for_job`` is released. One that is damaged is there as it is: whoever loads it finds that out.
        """
        ...

    def release(self, job_id: str) -> None:
        """Nothing loads here for the job any more."""
        ...

    def drop_copy(self, folder: Path) -> None:
        """Remove what this node has of a folder that others see, if that is a copy."""
        ...

    def size(self, path: Path) -> int:
        """Bytes of the file that all nodes see.

        Raises:
            FileNotFoundError: There is none.
        """
        ...

    def fault_of(self, path: Path, shard: ShardFile) -> str | None:
        """What of a shard file, as all nodes see it, is not as its rank voted; None where all is."""
        ...

    def remove(self, path: Path) -> None:
        """Remove a file or a folder, for all nodes.

        Raises:
            FileNotFoundError: There is none, here or for others.
        """
        ...

    def discard_job(self, job_id: str) -> None:
        """Remove all of a job, so that nothing of it is found from the beginning on."""
        ...

    def forget_copies(self) -> None:
        """Remove what earlier lives of the agent have left here that is no longer of use."""
        ...


class FolderFiles(FolderRecords):
    """``SharedFiles`` in a folder that all nodes mount."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._first: tuple[str, tuple[int, int]] | None = None

    @property
    def root(self) -> Path:
        """See ``SharedFiles.root``."""
        return self._root

    def identity(self) -> str | None:
        """See ``SharedFiles.identity``: once it is known, an empty folder in its place is given none."""
        with contextlib.suppress(OSError):
            if self._first is not None:
                return self._found(*self._first)
            return storage_identity(self._root)
        return None

    def require_known(self) -> None:
        """See ``SharedFiles.require_known``."""
        if self._first is None:
            # Not before: an agent may have started before its storage was mounted.
            # Ranks may have written shards, and nothing else, to the folder below one that was unmounted.
            has_chains = any(map(self._has_chain, jobs_in(self._root)))
            if has_chains and (name := read_identity(self._root)) is not None:
                self._first = name, _place(self._root)
        elif self._found(*self._first) != self._first[0]:
            raise StorageAwayError(
                f"{self._root} is not the storage that was there before: is it mounted? Where it was replaced on "
                "purpose, restart the agent"
            )

    def _has_chain(self, job_id: str) -> bool:
        try:
            return CommitChain(self._root, job_id).exists
        except PermissionError:  # that of an agent of another user, which stops no other job
            return False

    def _found(self, name: str, place: tuple[int, int]) -> str | None:
        found = read_identity(self._root)
        if found is None and self._root.exists() and _place(self._root) == place:
            return make_identity(self._root, name)  # somebody has removed the file alone
        return found

    def fault(self) -> str | None:
        """See ``SharedFiles.fault``: what a disk lacks is told when it is written to."""
        return None

    def jobs(self) -> list[str]:
        """See ``SharedFiles.jobs``."""
        return jobs_in(self._root)

    def pull_missing(self, folder: Path) -> None:
        """See ``SharedFiles.pull_missing``."""

    def publish(
        self,
        path: Path,
        go_on: Callable[[], None] = lambda: None,
        size: int | None = None,
        sha256: str | None = None,
    ) -> None:
        """See ``SharedFiles.publish``."""

    def fetch(
        self,
        path: Path,
        shard: ShardFile,
        for_job: str,
        took: Callable[[int], None] = lambda _: None,
    ) -> None:
        """See ``SharedFiles.fetch``."""

    def place(self, path: Path) -> str:
        """See ``SharedFiles.place``."""
        return str(path)

    def release(self, job_id: str) -> None:
        """See ``SharedFiles.release``."""

    def drop_copy(self, folder: Path) -> None:
        """See ``SharedFiles.drop_copy``."""

    def size(self, path: Path) -> int:
        """See ``SharedFiles.size``: not that of what a rank's link leads to."""
        with open(open_plain(path), "rb") as file:  # noqa: PTH123 a descriptor, not a path
            return os.fstat(file.fileno()).st_size

    def fault_of(self, path: Path, shard: ShardFile) -> str | None:
        """See ``SharedFiles.fault_of``."""
        return fault_of(path, shard)

    def remove(self, path: Path) -> None:
        """See ``SharedFiles.remove``."""
        remove_tree(path)

    def discard_job(self, job_id: str) -> None:
        """See ``SharedFiles.discard_job``: renamed first, however long its files take to be removed."""
        folder = self._root / job_id
        # Not if it is found there: a look that fails would say that nothing is left.
        with contextlib.suppress(FileNotFoundError):
            folder.rename(self._root / f".purged-{job_id}-{secrets.token_hex(8)}")
            sync_folder(self._root)
        for left in self._root.glob(f".purged-{job_id}-*"):
            remove_tree(left, PURGED_WITHIN_S)

    def forget_copies(self) -> None:
        """See ``SharedFiles.forget_copies``."""


def _place(folder: Path) -> tuple[int, int]:
    about = folder.stat()
    return about.st_dev, about.st_ino


def shared_files(
    address: Path | BucketAddress, folder: Path, most_copies_bytes: int
) -> SharedFiles:
    """The storage at ``address``; of a bucket with this node's copies in ``folder``.

    Raises:
        ImportError: It is a bucket, and boto3 is not installed.
    """
    if isinstance(address, Path):
        return FolderFiles(address)
    # Only here, for a node without a bucket need not have boto3.
    from services.contract.storage.bucket import Bucket  # noqa: PLC0415
    from services.worker.agent.storage.bucket_files import BucketFiles  # noqa: PLC0415

    return BucketFiles(Bucket(address), folder, most_copies_bytes)


def as_shared(files: SharedFiles | Path) -> SharedFiles:
    """``files``, or those of the folder that all nodes mount."""
    return FolderFiles(files) if isinstance(files, Path) else files
