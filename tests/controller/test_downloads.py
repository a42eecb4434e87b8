"""Ranges of files, and what the controller reads of the storage."""

import hashlib
from pathlib import Path

import pytest

from services.contract.storage.exports import EXPORT_MANIFEST, ExportedFile, ExportManifest
from services.controller.adapters.storage.exports import FolderExports
from services.controller.api.downloads import wanted_range
from services.controller.domain.errors import RangeNotSatisfiableError, StateConflictError

JOB, CHECKPOINT = "job_a", "ckpt_a"


@pytest.mark.parametrize(
    ("asked", "found"),
    [
        ("bytes=0-", (0, 10)),
        ("bytes=3-", (3, 10)),
        ("bytes=3-5", (3, 6)),
        ("bytes=3-99", (3, 10)),
        ("bytes=-4", (6, 10)),
        ("bytes=-40", (0, 10)),
        # Not one range of bytes: as if none were asked for.
        ("bytes=-", None),
        ("bytes=5-3", None),
        ("bytes=0-1,4-5", None),
        ("lines=0-1", None),
        ("bytes=" + "9" * 30 + "-", None),
    ],
)
def test_a_range_is_read_as_http_has_it(asked: str, found: tuple[int, int] | None) -> None:
    assert wanted_range(asked, 10) == found


@pytest.mark.parametrize("asked", ["bytes=10-", "bytes=11-12", "bytes=-0"])
def test_a_range_behind_the_end_is_refused(asked: str) -> None:
    with pytest.raises(RangeNotSatisfiableError, match="10 bytes"):
        wanted_range(asked, 10)


def export_of(root: Path, content: bytes) -> Path:
    """An export with one file; answers that file."""
    folder = root / JOB / "exports" / CHECKPOINT
    folder.mkdir(parents=True)
    file = folder / "model.safetensors"
    file.write_bytes(content)
    digest = hashlib.sha256(content).hexdigest()
    named = ExportedFile(name=file.name, bytes=len(content), sha256=digest)
    (folder / EXPORT_MANIFEST).write_text(ExportManifest(files=(named,)).model_dump_json())
    return file


@pytest.mark.anyio
async def test_a_part_of_a_file_is_read(tmp_path: Path) -> None:
    content = bytes(range(256)) * 10_000
    export_of(tmp_path, content)
    exports = FolderExports(tmp_path)
    (file,) = (await exports.manifest(JOB, CHECKPOINT)).files
    parts = await exports.content(JOB, CHECKPOINT, file.name, 100, 2_000_000)
    assert b"".join([part async for part in parts]) == content[100:2_000_000]


@pytest.mark.anyio
async def test_a_link_in_the_storage_is_not_followed(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("of the controller")
    file = export_of(tmp_path, b"x")
    file.unlink()
    file.symlink_to(secret)
    with pytest.raises(StateConflictError, match="cannot read"):
        await FolderExports(tmp_path).content(JOB, CHECKPOINT, file.name, 0, 1)


@pytest.mark.anyio
async def test_an_export_of_an_older_version_and_a_missing_storage_say_what_to_do(
    tmp_path: Path,
) -> None:
    with pytest.raises(StateConflictError, match="export the checkpoint again"):
        await FolderExports(tmp_path).manifest(JOB, CHECKPOINT)
    with pytest.raises(StateConflictError, match="MESHLOOM_CHECKPOINT_ROOT"):
        await FolderExports(None).manifest(JOB, CHECKPOINT)
