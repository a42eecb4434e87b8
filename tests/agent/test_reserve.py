"""An agent whose system has no thread and no process left still does what its threads are for."""

import socket
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest

from services.contract.messages.facts import LaunchRefused
from services.contract.system.durable import node_condition
from services.local.settings import child_environment
from tests.agent.conftest import NODE, Controller, StartAgent, launch

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


def test_a_launch_for_which_no_process_is_left_is_refused_for_what_its_node_lacks(
    controller: Controller, start_agent: StartAgent
) -> None:
    controller.open_job()
    start_agent(MESHLOOM_TRAINER="crowded_program:train")
    controller.send(launch())
    refused = controller.fact(LaunchRefused)
    assert refused.condition == f"{NODE} can start no more processes"
    assert refused.reason.startswith("fork failed: ")


def test_that_no_port_is_free_is_what_a_node_lacks() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(OSError) as refused:  # noqa: PT011 its number
        socket.create_server(taken.getsockname())
    assert node_condition(refused.value, NODE) == f"{NODE} has no free port"
