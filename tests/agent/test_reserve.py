"""An agent whose system has no thread and no process left still does what its threads are for."""

import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest

from services.local.settings import child_environment

PROGRAM: Final = """
import asyncio, os, resource, sys, threading
from services.worker.agent.host.reserve import take_reserve

async def run():
    if sys.argv[1] == "reserve":
        take_reserve()
    await asyncio.create_subprocess_exec("true")
    if os.getuid() == 0:
        os.setresuid(*[65534] * 3)  # whom the limit binds
    resource.setrlimit(resource.RLIMIT_NPROC, (1, 1))
    try:
        await asyncio.create_subprocess_exec("true")
    except OSError as error:
        print("no process:", error)
    print(await asyncio.gather(*[asyncio.to_thread(sum, (i, 1)) for i in range(20)]), flush=True)
    os._exit(0)

asyncio.run(run())
"""


@pytest.mark.parametrize("taken", ["reserve", "nothing"])
def test_threads_are_taken_before_ranks_can_take_them(taken: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, taken],
        capture_output=True,
        text=True,
        check=False,
        env=child_environment(PYTHONPATH=str(Path(__file__).parents[2])),
    )
    assert ("can't start new thread" in done.stderr) is (taken == "nothing"), done.stderr
    if taken == "reserve":
        assert "no process: [Errno 11]" in done.stdout
        assert str(list(range(1, 21))) in done.stdout
