"""Shards are read before the votes for them go on, in threads of the gang's own."""

import asyncio
import hashlib
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from services.contract.messages.rank_pipe import RankVote
from services.contract.storage.commit_chain import CommitChain
from services.contract.storage.manifests import ShardFile
from services.contract.words.ids import checkpoint_id
from services.worker.agent.gangs.vote_check import VoteCheck
from services.worker.agent.storage import shard_check
from tests.agent.conftest import JOB

CONTENT = b"seven b"
NAME = checkpoint_id(JOB, 3, 1)
Course = Callable[[VoteCheck], None]


def vote(rank: int = 0, size: int = len(CONTENT)) -> RankVote:
    digest = hashlib.sha256(CONTENT).hexdigest()
    shard = ShardFile(rank=rank, name=f"rank-{rank}.bin", bytes=size, sha256=digest)
    return RankVote(checkpoint_id=NAME, step=3, shard=shard)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = CommitChain(tmp_path, JOB).shard_folder(NAME)
    folder.mkdir(parents=True)
    return folder


def checked(root: Path, *votes: RankVote) -> list[str | None]:
    """What is wrong with each vote, in the order in which that was found."""

    async def run() -> list[str | None]:
        found: list[str | None] = []
        idle = asyncio.Event()

        def on_checked(_rank: int, _vote: RankVote, fault: str | None) -> None:
            found.append(fault)
            if len(found) == len(votes):
                idle.set()

        check = VoteCheck(root, JOB, 2, on_checked)
        for one in votes:
            check.check(one.shard.rank, one)
        async with asyncio.timeout(60):
            await idle.wait()
        assert check.is_idle
        check.end()
        return found

    return asyncio.run(run())


def test_a_shard_that_is_there_as_voted_for_is_at_no_fault(tmp_path: Path, folder: Path) -> None:
    (folder / "rank-0.bin").write_bytes(CONTENT)
    assert checked(tmp_path, vote()) == [None]


@pytest.mark.parametrize(
    ("put", "words"),
    [
        (lambda _: None, "the file is missing"),
        (lambda path: path.write_bytes(b"garbage"), "its sha256 is"),
        (lambda path: path.write_bytes(b"short"), "it has 5 bytes, not the 7"),
        (os.mkfifo, "not a plain file"),
        (lambda path: path.symlink_to("/dev/zero"), "symbolic links"),
        (Path.mkdir, "not a plain file"),
    ],
)
def test_whatever_else_lies_there_is_a_fault_and_holds_nobody_up(
    tmp_path: Path, folder: Path, put: Callable[[Path], object], words: str
) -> None:
    put(folder / "rank-0.bin")
    (fault,) = checked(tmp_path, vote())
    assert fault is not None
    assert words in fault


def test_a_folder_that_is_a_link_is_not_followed(tmp_path: Path, folder: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "rank-0.bin").write_bytes(CONTENT)
    folder.rmdir()
    folder.symlink_to(elsewhere)
    (fault,) = checked(tmp_path, vote())
    assert fault is not None
    assert "Not a directory" in fault


def test_more_votes_than_can_wait_are_refused_and_none_is_forgotten(
    tmp_path: Path, folder: Path
) -> None:
    (folder / "rank-0.bin").write_bytes(CONTENT)
    found = checked(tmp_path, *[vote()] * 100)
    assert found.count(None) == 64
    refused = [fault for fault in found if fault is not None]
    assert refused == ["64 of the rank's votes wait for a check"] * 36


def test_of_large_shards_two_wait_and_further_ones_are_refused(
    tmp_path: Path, folder: Path
) -> None:
    (folder / "rank-0.bin").write_bytes(CONTENT)
    large = [vote(size=12 << 30)] * 5
    found = checked(tmp_path, *large, *[vote(1)] * 5)
    refused = [fault for fault in found if fault is not None and "wait for a check" in fault]
    assert refused == ["2 of the rank's votes wait for a check, 36 GiB"] * 3


def test_a_check_that_is_over_gives_up_a_shard_of_any_size(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shard_check, "is_hollow", lambda _: False)
    with (folder / "rank-0.bin").open("wb") as file:
        file.truncate(1 << 40)  # no disk has to hold it, and nobody could read it to its end

    async def run() -> None:
        told: list[object] = []
        check = VoteCheck(tmp_path, JOB, 1, lambda *fault: told.append(fault))
        check.check(0, vote(size=1 << 40))
        check.end()
        (thread,) = check._threads
        await asyncio.to_thread(thread.join)
        assert told == []

    asyncio.run(run())
