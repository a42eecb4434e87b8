"""What must outlive a power cut is synced, and so is each folder whose names are new."""

import os
from pathlib import Path

import pytest

from services.contract.storage.commit_chain import CommitChain
from services.contract.storage.manifests import AttemptOpened
from services.contract.system.durable import make_folders
from services.contract.words.ids import new_job_id

JOB = new_job_id(1_700_000_000_000, bytes(10))


@pytest.fixture
def synced(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The folders that are synced, in order."""
    found: list[Path] = []
    fsync = os.fsync

    def record(descriptor: int) -> None:
        path = Path(f"/proc/self/fd/{descriptor}").resolve()
        if path.is_dir():
            found.append(path)
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", record)
    return found


def test_the_first_record_of_a_job_is_durable_with_every_folder_above_it(
    tmp_path: Path, synced: list[Path]
) -> None:
    root = tmp_path / "storage" / "of all jobs"
    CommitChain(root, JOB).append(AttemptOpened(job_id=JOB, fence=1))
    assert {root / JOB / "chain", root / JOB, root, root.parent, tmp_path} == set(synced)
    assert synced[-1] == root / JOB / "chain", "a name is durable after what it is put in"


def test_a_later_record_trusts_no_folder_that_another_made_and_asks_nothing_above_the_root(
    tmp_path: Path, synced: list[Path]
) -> None:
    (tmp_path / JOB / "chain").mkdir(parents=True)
    CommitChain(tmp_path, JOB).append(AttemptOpened(job_id=JOB, fence=1))
    assert synced == [tmp_path / JOB, tmp_path, tmp_path / JOB / "chain"]


def test_folders_are_made_once_and_again(tmp_path: Path) -> None:
    for _ in range(2):
        make_folders(tmp_path / "a" / "b", tmp_path)
    assert (tmp_path / "a" / "b").is_dir()
