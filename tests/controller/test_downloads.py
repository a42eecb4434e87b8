"""Ranges of files, and what the controller reads of the storage."""

import asyncio
import contextlib
import functools
import hashlib
import json
import threading
from pathlib import Path
from typing import NoReturn

import pytest
from fastapi import Request
from starlette.types import Message

from services.contract.storage.bucket import Bucket
from services.contract.storage.exports import EXPORT_MANIFEST, ExportedFile, ExportManifest
from services.contract.storage.storage_address import BucketAddress
from services.contract.system.durable import StorageAwayError
from services.controller.adapters.storage import exports as module
from services.controller.adapters.storage.exports import FolderExports, export_store
from services.controller.api import downloads
from services.controller.api.downloads import wanted_range
from services.controller.api.sse import StreamSlots, Viewer
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
async def test_a_download_does_not_outlive_its_token(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(downloads, "_LOOK_EVERY_S", 0.0)
    export_of(tmp_path, bytes(20 << 20))
    exports, slots = FolderExports(tmp_path), StreamSlots(4)
    (file,) = (await exports.manifest(JOB, CHECKPOINT)).files
    sent = 0

    async def refused() -> str | None:
        return "this token was revoked" if sent > 5 << 20 else None

    async def receive() -> Message:
        await asyncio.Event().wait()  # the client stays
        raise AssertionError

    async def send(message: Message) -> None:
        nonlocal sent
        sent += len(message.get("body", b""))

    scope = {"type": "http", "method": "GET", "headers": [], "path": "/"}
    content = functools.partial(exports.content, JOB, CHECKPOINT, file.name)
    viewer = Viewer("sue", refused)
    answer = await downloads.download(Request(scope), file, content, slots, viewer)
    assert slots.free == 3
    await answer(scope, receive, send)
    assert 5 << 20 < sent < 6 << 20
    assert slots.free == 4


@pytest.mark.anyio
async def test_a_download_that_breaks_off_before_its_first_byte_leaves_no_file_open(
    tmp_path: Path,
) -> None:
    exported = export_of(tmp_path, bytes(1 << 20))
    exports, slots = FolderExports(tmp_path), StreamSlots(4)
    (file,) = (await exports.manifest(JOB, CHECKPOINT)).files

    async def refused() -> str | None:
        return None

    async def receive() -> Message:
        return {"type": "http.disconnect"}

    async def send(_: Message) -> None:
        await asyncio.Event().wait()  # an earlier answer is not read

    scope = {"type": "http", "method": "GET", "headers": [], "path": "/"}
    content = functools.partial(exports.content, JOB, CHECKPOINT, file.name)
    answer = await downloads.download(Request(scope), file, content, slots, Viewer("sue", refused))
    await answer(scope, receive, send)
    assert exported not in open_files()
    assert slots.free == 4


@pytest.mark.anyio
@pytest.mark.parametrize("store", ["folder", "bucket"])
async def test_a_storage_that_does_not_answer_takes_no_threads_of_the_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, store: str
) -> None:
    """Redis is looked up in those: six downloads of one owner took the lead from its controller."""
    again = threading.Event()

    def wait(*_: object) -> NoReturn:
        again.wait()
        raise StorageAwayError("it is back")

    monkeypatch.setattr(module, "_read_manifest", wait)
    monkeypatch.setattr(Bucket, "read", wait)
    address = tmp_path if store == "folder" else BucketAddress("checkpoints", "")
    reads = [
        asyncio.create_task(export_store(address).manifest(JOB, CHECKPOINT)) for _ in range(100)
    ]
    try:
        done, _ = await asyncio.wait(reads, timeout=0)
        async with asyncio.timeout(20):
            assert await asyncio.get_running_loop().getaddrinfo("localhost", 1)
        assert not done
    finally:
        again.set()
        await asyncio.gather(*reads, return_exceptions=True)


def open_files() -> set[Path]:
    """The files that this process has open."""
    found = set[Path]()
    for link in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # the one that lists the folder
            found.add(link.readlink())
    return found


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
async def test_a_list_of_files_that_is_too_long_to_parse_is_refused(tmp_path: Path) -> None:
    # A rank that runs as the agent's user can write it, and the owner ask for it again and again.
    manifest = export_of(tmp_path, b"x").with_name(EXPORT_MANIFEST)
    files = [{"name": f"m{number}", "bytes": 1, "sha256": "a" * 64} for number in range(100_000)]
    manifest.write_text(json.dumps({"files": files[:10_000]}))
    assert len((await FolderExports(tmp_path).manifest(JOB, CHECKPOINT)).files) == 10_000
    manifest.write_text(json.dumps({"files": files}))
    with pytest.raises(StateConflictError, match="longer than 2 MiB; export the checkpoint again"):
        await FolderExports(tmp_path).manifest(JOB, CHECKPOINT)


@pytest.mark.anyio
async def test_an_export_of_an_older_version_and_a_missing_storage_say_what_to_do(
    tmp_path: Path,
) -> None:
    with pytest.raises(StateConflictError, match="export the checkpoint again"):
        await FolderExports(tmp_path).manifest(JOB, CHECKPOINT)
    with pytest.raises(StateConflictError, match="MESHLOOM_CHECKPOINT_ROOT"):
        await FolderExports(None).manifest(JOB, CHECKPOINT)
