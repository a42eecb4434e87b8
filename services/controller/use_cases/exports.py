"""Downloads of exported checkpoints."""

from collections.abc import AsyncIterator

from services.contract.storage.exports import ExportedFile, ExportManifest
from services.contract.words.ids import job_of_checkpoint
from services.controller.domain.errors import NotFoundError, StateConflictError
from services.controller.ports.coordination import Ports
from services.controller.ports.exports import ExportStore
from services.controller.use_cases.checkpoints import get_checkpoint


async def exported(ports: Ports, exports: ExportStore, checkpoint_id: str) -> ExportManifest:
    """The files of a checkpoint's export.

    Raises:
        NotFoundError: There is no such checkpoint.
        StateConflictError: It is not exported, or the controller cannot read the storage.
    """
    view = await get_checkpoint(ports, checkpoint_id)
    if view.export is None or view.export.state != "DONE":
        state = "not exported" if view.export is None else f"{view.export.state.lower()} to export"
        raise StateConflictError(
            f"{checkpoint_id} is {state}: POST /v1/checkpoints/{checkpoint_id}/export, and ask "
            "again when its export is DONE"
        )
    return await exports.manifest(view.job_id, checkpoint_id)


async def exported_file(
    ports: Ports, exports: ExportStore, checkpoint_id: str, name: str
) -> ExportedFile:
    """One file of a checkpoint's export.

    Raises:
        NotFoundError: There is no such checkpoint, or its export has no such file.
        StateConflictError: As ``exported``.
    """
    manifest = await exported(ports, exports, checkpoint_id)
    for file in manifest.files:
        if file.name == name:
            return file
    names = ", ".join(file.name for file in manifest.files[:20])
    raise NotFoundError(f"the export of {checkpoint_id} has no file {name!r}; it has {names}")


async def content(
    exports: ExportStore, checkpoint_id: str, name: str, start: int, end: int
) -> AsyncIterator[bytes]:
    """Bytes ``start`` to ``end`` (not included) of a file that ``exported_file`` answered."""
    return await exports.content(job_of_checkpoint(checkpoint_id), checkpoint_id, name, start, end)
