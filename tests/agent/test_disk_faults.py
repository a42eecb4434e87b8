"""What a disk that refuses to be written or read changes for an agent: as little as possible."""

import os
from pathlib import Path

import pytest

from services.contract.messages.commands import StopGang
from services.contract.messages.facts import GangEnded, LaunchRefused, NodeJoined
from services.worker.agent.telemetry.log_tail import LogTail
from tests.agent.conftest import (
    JOB,
    NODE,
    AgentProcess,
    Controller,
    StartAgent,
    ended,
    launch,
    running,
)
from tests.disk import dead_disk, small_disk
from tests.waiting import until


def forbid_records_of_the_end(agent: AgentProcess) -> None:
    # A folder in the draft's place refuses the write whoever runs this, root included.
    (agent.folder.attempt(JOB, 1).path / "ended.json.draft").mkdir()


def assert_well(agent: AgentProcess) -> None:
    assert agent.process.poll() is None
    assert "redis_unreachable" not in agent.log.read_text()


def test_an_end_that_cannot_be_recorded_is_told_and_told_again_on_demand(
    agent: AgentProcess, controller: Controller
) -> None:
    running(controller)
    forbid_records_of_the_end(agent)
    stop = StopGang(job_id=JOB, fence=1, mode="kill")
    controller.send(stop)
    end = ended(controller)
    controller.send(stop, launch())
    until(lambda: len(controller.all_of(GangEnded)) == 3)
    assert controller.all_of(GangEnded) == [end] * 3
    assert "end_not_recorded" in agent.log.read_text()
    assert_well(agent)
    controller.open_job(fence=2)
    controller.send(launch(fence=2))
    assert all(e.finished for e in ended(controller, fence=2).exits)


def test_the_end_of_a_fenced_gang_that_cannot_be_recorded_is_told_and_the_agent_lives(
    agent: AgentProcess, controller: Controller
) -> None:
    running(controller)
    forbid_records_of_the_end(agent)
    controller.open_job(fence=2)
    ended(controller)
    assert_well(agent)


def test_an_agent_joins_though_it_cannot_record_the_end_of_what_it_found(
    agent: AgentProcess, controller: Controller, start_agent: StartAgent
) -> None:
    running(controller)
    forbid_records_of_the_end(agent)
    agent.kill()
    again = start_agent()
    until(lambda: len(controller.all_of(NodeJoined)) == 2)
    ended(controller)
    assert_well(again)


def test_an_attempt_that_meets_a_full_disk_is_refused_for_that_and_opened_when_there_is_room(
    controller: Controller, start_agent: StartAgent, tmp_path: Path
) -> None:
    home = tmp_path / "home"
    home.mkdir()
    with small_disk(home / "checkpoints") as disk:
        disk.fill()
        controller.open_job()
        agent = start_agent()
        controller.fact(NodeJoined)
        controller.send(launch())
        refused = controller.fact(LaunchRefused)
        assert refused.condition == f"the checkpoint disk of {NODE} is full"
        assert "No space left on device" in refused.reason
        assert list(disk.path.glob("*/chain/.draft-*")) == []
        assert_well(agent)

        disk.free()
        controller.open_job(fence=2)
        controller.send(launch(fence=2))
        assert all(e.finished for e in ended(controller, fence=2).exits)


def test_an_attempt_that_meets_a_disk_whose_server_has_died_is_refused_for_that(
    controller: Controller, start_agent: StartAgent, tmp_path: Path
) -> None:
    home = tmp_path / "home"
    home.mkdir()
    with dead_disk(home / "checkpoints"):
        controller.open_job()
        agent = start_agent()
        controller.fact(NodeJoined)
        controller.send(launch())
        refused = controller.fact(LaunchRefused)
        assert refused.condition == f"what serves the checkpoint disk of {NODE} has ended"
        assert_well(agent)
    controller.open_job(fence=2)
    controller.send(launch(fence=2))
    assert all(e.finished for e in ended(controller, fence=2).exits)


def test_output_that_cannot_be_read_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "rank-0.stdout.log"
    path.write_text("a line\n")
    tail = LogTail(path)

    def refuse(*_: object, **__: object) -> None:
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as broken:
        broken.setattr(os, "open", refuse)
        assert tail.read(10, last=True) == []
        assert tail.at_end()
    assert [line.text for line in tail.read(10)] == ["a line"]
