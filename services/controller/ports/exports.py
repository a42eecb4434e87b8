"""Exports of checkpoints as the storage has them."""

from collections.abc import AsyncIterator
from typing import Protocol

from services.contract.storage.exports import ExportManifest


class ExportStore(Protocol):
    """Reads exports; writes nothing."""

    async def manifest(self, job_id: str, checkpoint_id: str) -> ExportManifest:
        """The files of an export.

        Raises:
            StateConflictError: There is none here, or an older version wrote it.
        """
        ...

    async def content(
        self, job_id: str, checkpoint_id: str, name: str, start: int, end: int
    ) -> AsyncIterator[bytes]:
        """Bytes ``start`` to ``end`` (not included) of a file, opened before this returns.

        Raises:
            StateConflictError: The file is not there.
        """
        ...
