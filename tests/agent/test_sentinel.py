"""Nothing outlives an agent, whatever ends it, and whoever else ends with it."""

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from services.contract.messages.warm_channel import NODE_MARK
from services.local.settings import child_environment
from services.worker.agent.host.processes import marked
from tests.agent.conftest import (
    AgentProcess,
    Controller,
    StartAgent,
    is_gone,
    running,
)
from tests.waiting import until

FAMILY = 5  # the warm process, two ranks, and a child of each


def family(agent: AgentProcess, controller: Controller, child: str) -> list[int]:
    """All processes of a gang whose ranks have children, once all are there."""
    ranks = running(controller, child=child).pids.values()
    until(lambda: sum("child" in line.text for line in controller.logs()) == len(ranks))
    lines = [line.text for line in controller.logs() if "child" in line.text]
    children = {int(line.split()[1]) for line in lines}
    pids = agent.marked()
    assert len(pids) == FAMILY
    assert {*ranks, *children} < set(pids)
    return pids


def assert_nothing_survives(agent: AgentProcess, pids: list[int]) -> None:
    until(lambda: all(is_gone(pid) for pid in pids))
    until(lambda: not agent.marked())


@pytest.mark.parametrize("child", ["of the rank's session", "of its own session"])
def test_a_killed_agent_leaves_no_process_of_its_ranks_nor_any_that_they_started(
    agent: AgentProcess, controller: Controller, child: str
) -> None:
    sentinel = agent.sentinel()
    pids = family(agent, controller, child)
    agent.kill()
    assert_nothing_survives(agent, pids)
    until(lambda: is_gone(sentinel.pid))


def test_nothing_survives_an_agent_that_is_killed_together_with_its_parent(
    start_agent: StartAgent, controller: Controller
) -> None:
    controller.open_job()
    parent = start_agent(below_a_parent=True)
    running(controller)
    (found,) = psutil.Process(parent.process.pid).children()
    agent = AgentProcess(parent.process, parent.home, parent.log)
    sentinel = next(
        c for c in found.children() if "services.worker.agent.host.sentinel" in c.cmdline()
    )
    pids = [*agent.marked(), found.pid]
    os.killpg(parent.process.pid, signal.SIGKILL)
    parent.process.wait(60)
    assert_nothing_survives(agent, pids)
    until(lambda: is_gone(sentinel.pid))


def test_a_stopped_agent_leaves_no_sentinel(agent: AgentProcess, controller: Controller) -> None:
    sentinel = agent.sentinel()
    pids = family(agent, controller, "of its own session")
    assert agent.stop() == 0
    until(lambda: all(is_gone(pid) for pid in (sentinel.pid, *pids)))


def test_a_sentinel_that_is_killed_is_replaced_by_one_that_does_its_work(
    agent: AgentProcess, controller: Controller
) -> None:
    pids = family(agent, controller, "of its own session")
    first = agent.sentinel()
    first.kill()

    def another() -> bool:
        with contextlib.suppress(ValueError, psutil.Error):
            return agent.sentinel() != first
        return False

    until(another)
    agent.kill()
    assert_nothing_survives(agent, pids)


def test_a_sentinel_is_marked_as_nothing_and_knows_no_credential(agent: AgentProcess) -> None:
    sentinel = agent.sentinel()
    environment = sentinel.environ()
    assert not [name for name in environment if name.startswith("MESHLOOM_")]
    assert os.getsid(sentinel.pid) == sentinel.pid
    assert not any("torch" in mapped.path for mapped in sentinel.memory_maps())


@pytest.fixture
def sleepers() -> Iterator[dict[str, "subprocess.Popen[bytes]"]]:
    """Processes that wait forever, by their marks."""
    nobody = f"nobody-{os.getpid()}"
    pause = [sys.executable, "-c", "import signal; signal.pause()"]
    with contextlib.ExitStack() as stack:
        found = {}
        for life in ("/1", "/2", "0/1"):
            environment = child_environment(**{NODE_MARK: nobody + life})
            found[nobody + life] = stack.enter_context(subprocess.Popen(pause, env=environment))
            stack.callback(found[nobody + life].kill)
        yield found


def test_a_sentinel_outlives_the_terminal_and_ends_the_processes_of_one_life_only(
    sleepers: dict[str, "subprocess.Popen[bytes]"],
) -> None:
    first, *others = sleepers
    reading, writing = os.pipe()
    with subprocess.Popen(
        [
            *(sys.executable, "-m", "services.worker.agent.host.sentinel"),
            *("--pipe", str(reading), "--mark", first),
        ],
        pass_fds=(reading,),
        env=child_environment(PYTHONPATH=str(Path(__file__).parents[2])),
    ) as sentinel:
        os.close(reading)
        ignored = 1 << signal.SIGHUP - 1 | 1 << signal.SIGINT - 1 | 1 << signal.SIGTERM - 1
        status = Path(f"/proc/{sentinel.pid}/status")
        until(lambda: ignored_by(status.read_text()) & ignored == ignored)
        for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM):
            sentinel.send_signal(number)
        os.close(writing)
        assert sentinel.wait(60) == 0
    assert sleepers[first].wait(60) == -signal.SIGKILL
    assert all(sleepers[mark].poll() is None for mark in others)


def ignored_by(status: str) -> int:
    line = next(line for line in status.splitlines() if line.startswith("SigIgn:"))
    return int(line.split()[1], 16)


def test_a_nodes_mark_stands_for_all_lives_of_its_agent_and_for_no_other_node(
    sleepers: dict[str, "subprocess.Popen[bytes]"],
) -> None:
    first, second, other = (sleeper.pid for sleeper in sleepers.values())
    node = next(iter(sleepers)).partition("/")[0]
    assert {process.pid for process in marked(node)} == {first, second}
    assert other in {process.pid for process in marked(f"{node}0")}
