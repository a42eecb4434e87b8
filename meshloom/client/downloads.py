"""Files that are downloaded: resumed where they broke off, named only once their digest is right."""

import hashlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Final, Literal, Self

from meshloom.client.errors import DownloadError
from services.contract.storage.exports import ExportedFile, ExportManifest

ExportFormat = Literal["safetensors", "hf", "dcp"]
"""The model's safetensors files; these with ``config.json`` and whatever else the model brought; or a
checkpoint of ``torch.distributed.checkpoint``, which is made here and needs torch and safetensors."""

_WEIGHTS: Final = (".safetensors", ".safetensors.index.json")
_READ_BYTES: Final = 1 << 20


class PartialFile:
    """A file on its way: ``.<name>.part`` until all of it is there and has its digest.

    Args:
        folder: Where it is to be.
        file: Its name, size and digest.
    """

    def __init__(self, folder: Path, file: ExportedFile) -> None:
        self._path = folder / file.name
        self._part = folder / f".{file.name}.part"
        self._file = file

    @property
    def is_there(self) -> bool:
        """Whether the whole file is there already, with the right digest."""
        try:
            return self._path.stat().st_size == self._file.bytes and self._digest_is_right(
                self._path
            )
        except FileNotFoundError:
            return False

    @property
    def size(self) -> int:
        """Bytes that an earlier download left."""
        return self._part.stat().st_size if self._part.exists() else 0

    @property
    def is_complete(self) -> bool:
        """Whether no byte is missing."""
        return self.size == self._file.bytes

    def headers(self) -> dict[str, str]:
        """Ask for the missing bytes, of this very file."""
        size = self.size
        if not 0 < size < self._file.bytes:
            return {}
        return {"Range": f"bytes={size}-", "If-Range": f'"{self._file.sha256}"'}

    def begin(self, *, resumed: bool) -> Self:
        """Before bytes come: behind those that are there (``resumed``), or from the first one."""
        if not resumed:
            self._part.write_bytes(b"")
        return self

    def append(self, part: bytes) -> None:
        """Bytes came.

        Raises:
            DownloadError: They are more than were promised; what came is removed.
        """
        if self.size + len(part) > self._file.bytes:
            raise self._not_the_promised(f"is longer than the {self._file.bytes} bytes")
        with self._part.open("ab", buffering=0) as file:
            file.write(part)

    def refuse_standstill(self, before: int) -> None:
        """After a whole answer: asked again, whatever is there would answer the same, as often as it is asked.

        Args:
            before: Bytes that were there before it.

        Raises:
            DownloadError: It brought the file no further, and bytes are missing; what came is removed.
        """
        if not self.is_complete and self.size <= before:
            raise self._not_the_promised(f"is shorter than the {self._file.bytes} bytes")

    def finish(self) -> Path:
        """Give it its name.

        Raises:
            DownloadError: It is not the promised file; what came is removed.
        """
        if not self._part.exists() and self._file.bytes == 0:
            self._part.write_bytes(b"")
        if not self._digest_is_right(self._part):
            raise self._not_the_promised(f"does not have the SHA-256 {self._file.sha256}")
        with self._part.open("rb") as file:
            os.fsync(file.fileno())
        return self._part.replace(self._path)

    def _not_the_promised(self, what: str) -> DownloadError:
        self._part.unlink(missing_ok=True)
        return DownloadError(
            f"{self._path.name} {what} that the controller promised; it was removed: download it again"
        )

    def _digest_is_right(self, path: Path) -> bool:
        digest = hashlib.sha256()
        with path.open("rb") as file:
            while part := file.read(_READ_BYTES):
                digest.update(part)
        return digest.hexdigest() == self._file.sha256


def prepared_folder(folder: Path | str) -> Path:
    """The folder, made if it is not there."""
    path = Path(folder)
    path.mkdir(parents=True, exist_ok=True)
    return path


def files_of(manifest: ExportManifest, wanted: ExportFormat) -> Sequence[ExportedFile]:
    """The files of an export that a format takes.

    Raises:
        DownloadError: The model brought no ``config.json``, so that no ``from_pretrained`` loads it.
    """
    if wanted == "hf":
        if not any(file.name == "config.json" for file in manifest.files):
            raise DownloadError(
                "this export has no config.json: only models of transformers bring one; "
                "download it as safetensors"
            )
        return manifest.files
    return [file for file in manifest.files if file.name.endswith(_WEIGHTS)]
