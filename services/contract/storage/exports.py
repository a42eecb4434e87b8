"""What an export of a checkpoint consists of: the file beside it that says so, and the API's answer."""

from typing import Annotated, Final

from pydantic import BaseModel, ConfigDict, FailFast, Field, StringConstraints

EXPORT_MANIFEST: Final = "export.json"
"""Beside the files of an export; written after all of them, so it names whole files only."""

ExportedName = Annotated[
    str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=255)
]


class ExportedFile(BaseModel):
    """One file of an export."""

    model_config = ConfigDict(frozen=True, json_schema_serialization_defaults_required=True)

    name: ExportedName
    bytes: Annotated[int, Field(ge=0)]
    sha256: Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]


class ExportManifest(BaseModel):
    """All files of an export, each with its size and its SHA-256."""

    model_config = ConfigDict(frozen=True, json_schema_serialization_defaults_required=True)

    # A fault an item of what a rank wrote in its place would take more memory than there is.
    files: Annotated[tuple[ExportedFile, ...], Field(max_length=100_000), FailFast()]
