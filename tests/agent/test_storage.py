"""What an agent reports of the storage when the storage fails halfway."""

import errno
import os
from pathlib import Path

import pytest

from services.contract import commit_chain
from services.contract.commit_chain import CommitChain
from services.contract.ids import checkpoint_id
from services.contract.manifests import Manifest, ShardFile
from services.contract.messages.commands import CommitCheckpoint, PurgeJob
from services.contract.messages.facts import CheckpointLinked, CheckpointLost
from services.worker.agent.storage import Storage, purge
from tests.agent.conftest import JOB, NODE


@pytest.fixture
def storage(tmp_path: Path) -> Storage:
    """Where the first attempt of a job is open."""
    storage = Storage(tmp_path, NODE)
    storage.open_attempt(JOB, 1)
    return storage


@pytest.fixture
def commit(storage: Storage) -> CommitCheckpoint:
    """For a checkpoint whose one shard lies there."""
    shard = ShardFile(rank=0, name="rank-0.bin", bytes=1, sha256="0" * 64)
    manifest = Manifest(
        job_id=JOB,
        checkpoint_id=checkpoint_id(JOB, 3, 1),
        fence=1,
        step=3,
        world_size=1,
        shards=(shard,),
    )
    folder = CommitChain(storage.root, JOB).shard_folder(manifest.checkpoint_id)
    folder.mkdir(parents=True)
    (folder / shard.name).write_bytes(b"x")
    return CommitCheckpoint(job_id=JOB, fence=1, manifest=manifest)


def refuse(*_: object) -> None:
    raise OSError(errno.EIO, "Input/output error")


def test_a_failure_behind_the_link_leaves_the_checkpoint_committed_and_reported_so(
    storage: Storage, commit: CommitCheckpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    def linked_only(folder: Path) -> None:
        if (folder / "00000002.json").exists():
            refuse()

    monkeypatch.setattr(commit_chain, "sync_folder", linked_only)
    fact = storage.commit(commit)
    assert isinstance(fact, CheckpointLinked)
    assert (fact.number, fact.manifest) == (2, commit.manifest)
    assert CommitChain(storage.root, JOB).committed() == [commit.manifest]


def test_a_failure_before_the_link_loses_the_checkpoint(
    storage: Storage, commit: CommitCheckpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "link", refuse)
    fact = storage.commit(commit)
    assert isinstance(fact, CheckpointLost)
    assert "Input/output error" in fact.reason
    assert CommitChain(storage.root, JOB).committed() == []


def test_a_chain_that_cannot_be_read_loses_the_checkpoint(
    storage: Storage, commit: CommitCheckpoint
) -> None:
    (storage.root / JOB / "chain" / "00000001.json").write_bytes(b"")
    fact = storage.commit(commit)
    assert isinstance(fact, CheckpointLost)
    assert "00000001.json cannot be read" in fact.reason


def test_a_purged_job_leaves_nothing_and_its_zombies_commit_nothing(
    storage: Storage, commit: CommitCheckpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert isinstance(storage.commit(commit), CheckpointLinked)
    command = PurgeJob(job_id=JOB, fence=1)
    with monkeypatch.context() as broken:
        broken.setattr("services.worker.agent.storage.shutil.rmtree", refuse)
        told = purge(storage, command, NODE)
    assert told.error == "[Errno 5] Input/output error"
    # Its name is gone at once; what could not be removed is removed when it is asked for again.
    assert not (storage.root / JOB).exists()
    assert purge(storage, command, NODE).error is None
    assert list(storage.root.iterdir()) == []
    zombie = storage.commit(commit)
    assert isinstance(zombie, CheckpointLost)
    assert CommitChain(storage.root, JOB).committed() == []


def test_a_purge_of_an_overtaken_attempt_removes_nothing(
    storage: Storage, commit: CommitCheckpoint
) -> None:
    storage.commit(commit)
    storage.open_attempt(JOB, 3)
    told = purge(storage, PurgeJob(job_id=JOB, fence=1), NODE)
    assert "attempt 3 is open" in str(told.error)
    assert len(CommitChain(storage.root, JOB).committed()) == 1
