"""Exports in a storage that the controller may read: the folder of the nodes, a mount of it, or their bucket."""

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypeVar

import structlog
from pydantic import ValidationError

from services.contract.storage.exports import EXPORT_MANIFEST, ExportManifest
from services.contract.storage.storage_address import BucketAddress
from services.contract.system.durable import open_plain
from services.controller.domain.errors import StateConflictError

if TYPE_CHECKING:
    from services.contract.storage.bucket import Bucket

# A slow client reads each within the time in which an answer must be read.
_PART_BYTES: Final = 1 << 18
# Ranks may write where exports lie. To parse 16 MiB takes more than a second, in which no other thread runs,
# and the loop renews no lead; so much is enough for ten thousand files.
_LONGEST_MANIFEST: Final = 2 << 20
_AGAIN: Final = "export the checkpoint again"
# Of their own: a storage that does not answer holds each for a minute and more. In those of the loop plans are made,
# archives read, and hosts looked up: that of Redis, too.
_THREADS: Final = ThreadPoolExecutor(max_workers=16, thread_name_prefix="storage")
_log = structlog.get_logger()
_Answer = TypeVar("_Answer")


class FolderExports:
    """The port ``ExportStore``.

    Args:
        root: The storage root; None: this controller was given none.
    """

    def __init__(self, root: Path | None) -> None:
        self._root = root
        self._parsing = asyncio.Semaphore()

    async def manifest(self, job_id: str, checkpoint_id: str) -> ExportManifest:
        """See ``ExportStore.manifest``."""
        path = self._folder(job_id, checkpoint_id) / EXPORT_MANIFEST
        text = await _reading(_read_manifest, path)
        async with self._parsing:
            return await asyncio.to_thread(_parsed, text)

    async def content(
        self, job_id: str, checkpoint_id: str, name: str, start: int, end: int
    ) -> AsyncIterator[bytes]:
        """See ``ExportStore.content``."""
        path = self._folder(job_id, checkpoint_id) / name
        parts = _parts(await _reading(_open, path), start, end)
        await anext(parts)  # a generator that never began closes no file when it is closed
        return parts

    def _folder(self, job_id: str, checkpoint_id: str) -> Path:
        if self._root is None:
            raise StateConflictError(
                "this controller cannot read the storage: set MESHLOOM_CHECKPOINT_ROOT of the "
                "controller to the folder of checkpoints that the nodes share, or to their bucket"
            )
        return self._root / job_id / "exports" / checkpoint_id


class BucketExports:
    """The port ``ExportStore`` in a bucket.

    Args:
        bucket: With the exports; this controller may read it.
    """

    def __init__(self, bucket: "Bucket") -> None:
        self._bucket = bucket
        self._parsing = asyncio.Semaphore()

    async def manifest(self, job_id: str, checkpoint_id: str) -> ExportManifest:
        """See ``ExportStore.manifest``."""
        name = _object(job_id, checkpoint_id, EXPORT_MANIFEST)
        with _refusals(EXPORT_MANIFEST):
            text, _ = await _reading(self._bucket.read, name)
        async with self._parsing:
            return await asyncio.to_thread(_parsed, text)

    async def content(
        self, job_id: str, checkpoint_id: str, name: str, start: int, end: int
    ) -> AsyncIterator[bytes]:
        """See ``ExportStore.content``."""
        if start >= end:
            return _from_bucket(iter(()))
        whole = _object(job_id, checkpoint_id, name)
        with _refusals(name):
            parts = await _reading(self._bucket.parts, whole, start, end)
        return _from_bucket(parts)


def export_store(address: Path | BucketAddress | None) -> FolderExports | BucketExports:
    """The exports at ``address``.

    Raises:
        ImportError: It is a bucket, and boto3 is not installed.
    """
    if not isinstance(address, BucketAddress):
        return FolderExports(address)
    # Only here, for a controller without a bucket need not have boto3.
    from services.contract.storage.bucket import Bucket  # noqa: PLC0415

    return BucketExports(Bucket(address))


async def _reading(read: Callable[..., _Answer], *about: object) -> _Answer:
    return await asyncio.get_running_loop().run_in_executor(_THREADS, read, *about)


def _object(job_id: str, checkpoint_id: str, name: str) -> str:
    return f"{job_id}/exports/{checkpoint_id}/{name}"


async def _from_bucket(parts: Iterator[bytes]) -> AsyncIterator[bytes]:
    while True:
        try:
            part = await _reading(next, parts, b"")
        except OSError as error:
            # Cut short: the client sees that bytes are missing, and asks for the rest.
            _log.warning("download_cut_short", why=str(error))
            return
        if not part:
            return
        yield part


@contextlib.contextmanager
def _refusals(name: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise StateConflictError(
            f"the controller cannot read {name} of this export ({error.strerror or error}); {_AGAIN}"
        ) from error


def _open(path: Path) -> int:
    with _refusals(path.name):
        return open_plain(path)


def _read_manifest(path: Path) -> bytes:
    with os.fdopen(_open(path), "rb") as file:
        return file.read(_LONGEST_MANIFEST + 1)


def _parsed(text: bytes) -> ExportManifest:
    if len(text) > _LONGEST_MANIFEST:
        raise StateConflictError(
            f"{EXPORT_MANIFEST} of this export is longer than {_LONGEST_MANIFEST >> 20} MiB; {_AGAIN}"
        )
    try:
        return ExportManifest.model_validate_json(text)
    except ValidationError as error:
        raise StateConflictError(
            f"{EXPORT_MANIFEST} of this export is damaged; {_AGAIN}"
        ) from error


async def _parts(descriptor: int, start: int, end: int) -> AsyncIterator[bytes]:
    try:
        yield b""  # it has begun
        while start < end:
            # In a thread: the storage may be on another host.
            part = await _reading(os.pread, descriptor, min(_PART_BYTES, end - start), start)
            if not part:
                return  # cut short by whoever writes there; the client sees that bytes are missing
            start += len(part)
            yield part
    finally:
        os.close(descriptor)
