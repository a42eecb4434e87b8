"""What frees the shared memory that ranks left, where it cannot."""

import asyncio
import os
import signal
import sys
from asyncio.subprocess import Process, create_subprocess_exec
from pathlib import Path
from typing import Any

import pytest

from services.contract.system.rank_user import RankUser
from services.local.settings import child_environment
from services.worker.agent.host import left_memory
from services.worker.agent.host.left_memory import remove_as


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become a user")
def test_a_process_that_cannot_free_is_told() -> None:
    # As where that user may not read what it is to run.
    environment = child_environment(PYTHONHOME="/nonexistent")
    with pytest.raises(OSError, match="exited with code 1"):
        asyncio.run(remove_as(RankUser("root", 0, 0, "/"), environment))


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become a user")
def test_a_process_that_a_rank_has_stopped_is_not_waited_for_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "program"
    program.write_text("#!/bin/sh\nkill -STOP $$\n")
    program.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(program))
    monkeypatch.setattr(left_memory, "_WITHIN_S", 0.5, raising=False)

    started: list[Process] = []

    async def start(*command: str, **options: Any) -> Process:  # noqa: ANN401 as asyncio has it
        started.append(await create_subprocess_exec(*command, **options))
        return started[0]

    monkeypatch.setattr(asyncio, "create_subprocess_exec", start)

    async def remove() -> None:
        async with asyncio.timeout(30):
            with pytest.raises(TimeoutError, match="the process that frees it took"):
                await remove_as(RankUser("root", 0, 0, "/"), child_environment())
            assert await started[0].wait() == -signal.SIGKILL

    asyncio.run(remove())
