"""Process ids are given out again: whose end it is that the warm process tells of."""

import asyncio
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import cast

import pytest

from services.contract.messages.commands import LaunchGang
from services.contract.messages.facts import Fact
from services.contract.messages.rank_pipe import RankSeat
from services.contract.messages.warm_channel import RankForked, RankReaped
from services.contract.system.pipe_end import PipeEnd
from services.worker.agent.host.folders import AttemptFolder, NodeFolder
from services.worker.agent.node_commands import NodeCommands
from services.worker.agent.ranks.launch import Crew, Launcher, LaunchError
from services.worker.agent.storage.job_storage import Storage
from services.worker.agent.supervisor import Supervisor
from tests.agent.conftest import NODE, launch


class NoNodeCommands:
    def give_way(self) -> None:
        """Nothing is measured here."""

    async def put_together(self, job_id: str, fence: int) -> None:
        """Nothing is recorded here."""


class OnePid:
    """Forks one rank, always under the same process id; where it fails, the rank was for nothing."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.fails = False
        self.dies_early = False
        self.supervisor: Supervisor | None = None
        self.pipes: tuple[PipeEnd, ...] = ()

    def close(self) -> None:
        for pipe in self.pipes:
            asyncio.get_running_loop().remove_reader(pipe.reading)
            pipe.close()

    async def launch(self, command: LaunchGang, _: AttemptFolder) -> Crew:
        assert self.supervisor is not None
        self.supervisor.rank_told(RankForked(rank=0, pid=self.pid))
        if self.fails:
            raise LaunchError("the fork of rank 1 failed")
        if self.dies_early:
            self.supervisor.rank_told(RankReaped(pid=self.pid, exit_code=7))
        self.pipes = PipeEnd.pair()
        seat = RankSeat(
            job_id=command.job_id,
            fence=command.fence,
            rank=0,
            local_rank=0,
            device="cpu",
            spec=command.spec,
            plan=command.plan,
            storage_root="/nowhere",
            board_path="/nowhere/board",
            log_folder="/nowhere",
            store_host="127.0.0.1",
            store_port=1,
            threads=1,
        )
        return Crew(
            seats={0: seat},
            store=None,
            pids={0: self.pid},
            pipes={0: self.pipes[0]},
            boards={},
        )


@pytest.fixture
def process() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
    yield process
    process.kill()
    process.wait()


@pytest.mark.parametrize("dies_early", [False, True])
def test_a_rank_is_not_dead_because_one_that_was_forked_for_nothing_had_its_number(
    tmp_path: Path,
    process: "subprocess.Popen[bytes]",
    dies_early: bool,  # noqa: FBT001 a parameter of the test
) -> None:
    async def run() -> tuple[list[Fact], bool]:
        told: list[Fact] = []
        launcher = OnePid(process.pid)
        supervisor = Supervisor(
            NODE,
            NodeFolder(tmp_path, NODE, tmp_path),
            Storage(tmp_path / "checkpoints", NODE),
            cast("NodeCommands", NoNodeCommands()),
            cast("Launcher", launcher),
            told.append,
        )
        launcher.supervisor = supervisor
        launcher.fails = True
        await supervisor.handle(launch(1, ranks=1))
        supervisor.rank_told(RankReaped(pid=process.pid, signal=9))
        launcher.fails, launcher.dies_early = False, dies_early
        await supervisor.handle(launch(2, ranks=1))
        lives = bool(supervisor.running())
        launcher.close()
        return told, lives

    told, lives = asyncio.run(run())
    assert [fact.kind for fact in told] == ["launch_refused", "gang_launched"]
    assert lives is not dies_early
