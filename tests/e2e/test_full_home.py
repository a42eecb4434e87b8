"""A disk that is full under ``MESHLOOM_HOME`` stops Redis and no training."""

import contextlib
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from services.contract.messages.board import BoardReader
from services.contract.storage.commit_chain import CommitChain
from services.worker.agent.host.folders import NodeFolder
from tests.e2e.conftest import LONG, running_stack
from tests.waiting import until

EVERY_STEPS = 40
PAGE = 4096
pytestmark = pytest.mark.skipif(os.getuid() != 0, reason="only root can mount a small disk")


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    home = tmp_path / "home"
    home.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=48m", "none", home], check=True)
    yield home
    # Whoever has it open yet, a process on its way out, does not keep it mounted here.
    subprocess.run(["umount", "--lazy", home], check=True)


def test_ranks_train_on_while_the_disk_of_the_home_is_full_and_what_they_held_commits_after(
    small_disk: Path, tmp_path: Path
) -> None:
    storage = tmp_path / "checkpoints"
    terminal = tmp_path / "terminal"
    # Its own log would lie in the home.
    shown = ("sh", "-c", f'exec "$@" 2>>{terminal}', "sh")
    with running_stack(small_disk, *shown, MESHLOOM_CHECKPOINT_ROOT=str(storage)) as stack:
        job_id = stack.submit(
            model=LONG["model"],
            train={"steps": 10**6, "global_batch": 4, "seed": 7},
            checkpoint={"every_steps": EVERY_STEPS, "keep_last": 1000},
        ).id
        stack.at_step(job_id, EVERY_STEPS)
        agent, redis = stack.part("services.worker.agent"), stack.part("redis-server")
        node = next((small_disk / "nodes").iterdir()).name
        board = NodeFolder(small_disk, node).attempt(job_id, 1).board(0)
        with contextlib.closing(BoardReader.open(board)) as reader:

            def step() -> int:
                snapshot = reader.read()
                return 0 if snapshot is None else snapshot.step

            ballast = fill(small_disk)
            until(lambda: not psutil.pid_exists(redis.pid))
            why = f"is started again; the disk of {small_disk / 'logs'} is full"
            until(lambda: f"redis ended with code 1 and {why}" in terminal.read_text())
            full = step()
            # What ranks print has nowhere to go meanwhile, and neither have the agent's warnings.
            until(lambda: step() > full + 3 * EVERY_STEPS)
            trained = step()
        ballast.unlink()
        held = {s for s in range(full + 1, trained + 1) if s % EVERY_STEPS == 0}
        until(lambda: held <= committed(storage, job_id))
        job = stack.at_step(job_id, trained)
        assert (job.attempt, job.restarts) == (1, 0)
        assert stack.part("services.worker.agent") == agent
        until(
            lambda: (
                "bytes of this output are lost: No space"
                in (small_disk / "logs" / "agent.log").read_text()
            )
        )


def fill(disk: Path) -> Path:
    """Take all room that the disk has."""
    ballast = disk / "ballast"
    for log in disk.rglob("*.log"):  # whose last page has room left
        with log.open("ab") as file:
            file.write(b"\n" * (-log.stat().st_size % PAGE))
    with contextlib.suppress(OSError), ballast.open("ab", buffering=0) as file:
        while True:
            file.write(bytes(PAGE))
    return ballast


def committed(storage: Path, job_id: str) -> set[int]:
    return {manifest.step for manifest in CommitChain(storage, job_id).read().committed.values()}
