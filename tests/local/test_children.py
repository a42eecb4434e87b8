"""The processes that an owner keeps alive, and what they leave on its disk."""

import asyncio
import contextlib
from pathlib import Path

import psutil
import pytest

from services.local import children
from services.local.children import Child, Program
from tests.waiting import until

WRITER = "i=0; while :; do i=$((i + 1)); echo line $i; done"


def test_a_log_that_has_grown_too_long_is_started_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(children, "MOST_LOG_BYTES", 20_000)
    monkeypatch.setattr(children, "LOOK_EVERY_S", 0.01)
    log = tmp_path / "writer.log"
    older = tmp_path / "writer.log.1"

    def last_lines() -> tuple[str, str] | None:
        """Of the older file and of the newer one, once the child writes on there."""
        if not older.exists() or not log.stat().st_size:
            return None
        texts = [path.read_text().splitlines() for path in (older, log)]
        if len(texts[0]) < 2 or len(texts[1]) < 2:
            return None
        return texts[0][-2], texts[1][-2]

    async def write() -> None:
        child = asyncio.create_task(Child(Program("writer", ["sh", "-c", WRITER], log, {})).run())
        before, after = await asyncio.to_thread(until, last_lines)
        (process,) = [p for p in psutil.Process().children() if WRITER in p.cmdline()]
        child.cancel()
        await asyncio.gather(child, return_exceptions=True)
        assert not process.is_running()
        assert int(after.split()[1]) > int(before.split()[1]), "it went on, in the same process"

    asyncio.run(write())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["writer.log", "writer.log.1"]


def test_a_child_whose_folder_is_gone_is_tried_again(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    child = Child(Program("redis", ["true"], tmp_path / "gone" / "redis.log", {}))

    async def run_for_a_while() -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(0.2):
                await child.run()

    asyncio.run(run_for_a_while())
    assert "redis cannot be started" in capfd.readouterr().err
