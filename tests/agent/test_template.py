"""The process that has imported the trainer outlives an agent that is killed, and nothing else does."""

import signal
import socket
import subprocess
import sys
from pathlib import Path

import psutil

from services.contract.messages.facts import NodeJoined
from services.local.settings import child_environment
from tests.agent.conftest import (
    PROGRAMS,
    AgentProcess,
    Controller,
    StartAgent,
    ended,
    is_gone,
    launch,
    running,
)
from tests.waiting import until


def joined(controller: Controller, times: int) -> None:
    until(lambda: len(controller.all_of(NodeJoined)) == times)


def found(agent: AgentProcess) -> psutil.Process:
    """The agent's template, once it has forked a warm process."""

    def look() -> psutil.Process | None:
        try:
            return agent.template()
        except (ValueError, psutil.Error):
            return None

    return until(look)


def test_the_next_agent_takes_over_the_template_of_one_that_was_killed(
    agent: AgentProcess, controller: Controller, start_agent: StartAgent
) -> None:
    ranks = running(controller).pids.values()
    template = found(agent)
    agent.kill()
    until(lambda: all(is_gone(pid) for pid in ranks))
    again = start_agent()
    joined(controller, 2)
    assert found(again) == template
    assert psutil.Process(again.process.pid).pid != template.ppid()
    controller.open_job(fence=2)
    controller.send(launch(fence=2))
    assert all(e.exit_code == 0 for e in ended(controller, fence=2).exits)
    assert again.stop() == 0
    until(lambda: is_gone(template.pid))


def test_a_template_with_other_settings_is_ended_and_not_taken_over(
    agent: AgentProcess, controller: Controller, start_agent: StartAgent, tmp_path: Path
) -> None:
    template = found(agent)
    agent.kill()
    again = start_agent(MESHLOOM_USER_PATH=f"{PROGRAMS}:{tmp_path}")
    joined(controller, 2)
    assert found(again) != template
    until(lambda: is_gone(template.pid))


def test_a_frozen_warm_process_ends_with_its_agent_though_no_sentinel_works(
    agent: AgentProcess, controller: Controller
) -> None:
    pids = [*running(controller).pids.values(), agent.warm().pid]
    agent.sentinel().suspend()
    sentinel = agent.sentinel()
    agent.warm().suspend()
    agent.process.kill()
    agent.process.wait(60)
    until(lambda: all(is_gone(pid) for pid in pids))
    sentinel.resume()


def test_a_rank_has_no_pipe_of_the_process_that_forked_it(
    agent: AgentProcess, controller: Controller
) -> None:
    rank = running(controller).pids[1]
    assert pipes(agent.warm().pid)
    assert not pipes(agent.warm().pid) & pipes(rank)


def pipes(pid: int) -> set[str]:
    files = (str(entry.readlink()) for entry in Path(f"/proc/{pid}/fd").iterdir())
    return {file for file in files if file.startswith("pipe:")}


def test_a_template_to_which_no_agent_comes_ends_by_itself(tmp_path: Path) -> None:
    ours, theirs = socket.socketpair()
    with theirs:
        template = subprocess.Popen(
            [
                *(sys.executable, "-m", "services.worker.rank.process.template"),
                *("--channel", str(theirs.fileno()), "--listen", tmp_path / "template.sock"),
                *("--linger-s", "0.01", "--key", "any", "--trainer", "rank_program:train"),
                f"--user-path={PROGRAMS}",
            ],
            env=child_environment(),
            pass_fds=(theirs.fileno(),),
        )
    assert ours.recv(1)
    assert (tmp_path / "template.sock").stat().st_mode & 0o077 == 0
    assert template.poll() is None
    ours.close()
    assert template.wait(60) == 0


def test_a_warm_process_that_dies_is_replaced_by_a_fork_of_the_same_template(
    agent: AgentProcess,
) -> None:
    template, warm = found(agent), agent.warm()
    warm.send_signal(signal.SIGKILL)
    until(lambda: is_gone(warm.pid))
    assert found(agent) == template
