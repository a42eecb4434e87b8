"""Exports in a folder that the controller may read: the storage root of the nodes, or a mount of it."""

import asyncio
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Final

from pydantic import ValidationError

from services.contract.storage.exports import EXPORT_MANIFEST, ExportManifest
from services.contract.system.durable import open_plain
from services.controller.domain.errors import StateConflictError

# A slow client reads each within the time in which an answer must be read.
_PART_BYTES: Final = 1 << 18
_LONGEST_MANIFEST: Final = 16 << 20
_AGAIN: Final = "export the checkpoint again"


class FolderExports:
    """The port ``ExportStore``.

    Args:
        root: The storage root; None: this controller was given none.
    """

    def __init__(self, root: Path | None) -> None:
        self._root = root

    async def manifest(self, job_id: str, checkpoint_id: str) -> ExportManifest:
        """See ``ExportStore.manifest``."""
        path = self._folder(job_id, checkpoint_id) / EXPORT_MANIFEST
        return await asyncio.to_thread(_read_manifest, path)

    async def content(
        self, job_id: str, checkpoint_id: str, name: str, start: int, end: int
    ) -> AsyncIterator[bytes]:
        """See ``ExportStore.content``."""
        path = self._folder(job_id, checkpoint_id) / name
        return _parts(await asyncio.to_thread(_open, path), start, end)

    def _folder(self, job_id: str, checkpoint_id: str) -> Path:
        if self._root is None:
            raise StateConflictError(
                "this controller cannot read the storage: set MESHLOOM_CHECKPOINT_ROOT of the "
                "controller to the folder of checkpoints that the nodes share"
            )
        return self._root / job_id / "exports" / checkpoint_id


def _open(path: Path) -> int:
    try:
        return open_plain(path)
    except OSError as error:
        raise StateConflictError(
            f"the controller cannot read {path.name} of this export "
            f"({error.strerror or error}); {_AGAIN}"
        ) from error


def _read_manifest(path: Path) -> ExportManifest:
    with os.fdopen(_open(path), "rb") as file:
        text = file.read(_LONGEST_MANIFEST)
    try:
        return ExportManifest.model_validate_json(text)
    except ValidationError as error:
        raise StateConflictError(f"{path.name} of this export is damaged; {_AGAIN}") from error


async def _parts(descriptor: int, start: int, end: int) -> AsyncIterator[bytes]:
    try:
        while start < end:
            # In a thread: the storage may be on another host.
            part = await asyncio.to_thread(
                os.pread, descriptor, min(_PART_BYTES, end - start), start
            )
            if not part:
                return  # cut short by whoever writes there; the client sees that bytes are missing
            start += len(part)
            yield part
    finally:
        os.close(descriptor)
