"""What an agent reports of the storage when the storage fails halfway."""

import errno
import hashlib
import itertools
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from services.contract.messages.commands import (
    CommitCheckpoint,
    KeepStanding,
    PurgeJob,
    RetireCheckpoint,
    VerifyCheckpoint,
)
from services.contract.messages.facts import (
    ChainDamaged,
    CheckpointCorrupt,
    CheckpointLinked,
    CheckpointLost,
    CheckpointRetired,
    CheckpointUnread,
    CheckpointVerified,
    JobFound,
)
from services.contract.redis import redis_keys
from services.contract.storage import commit_chain
from services.contract.storage.commit_chain import CommitChain
from services.contract.storage.job_cards import put_card_away
from services.contract.storage.manifests import Manifest, ShardFile
from services.contract.system.durable import StorageAwayError
from services.contract.words.ids import checkpoint_id, new_job_id
from services.contract.words.states import JobState
from services.worker.agent.storage import shard_check
from services.worker.agent.storage.job_storage import Storage, purge
from services.worker.agent.storage.shard_check import fault_of
from tests.agent.conftest import JOB, NODE, launch
from tests.disk import as_somebody_else, small_disk


@pytest.fixture
def storage(tmp_path: Path) -> Storage:
    """Where the first attempt of a job is open."""
    storage = Storage(tmp_path, NODE)
    storage.open_attempt(launch())
    return storage


@pytest.fixture
def commit(storage: Storage) -> CommitCheckpoint:
    """For a checkpoint whose one shard lies there."""
    return _commit_of(storage.root)


def _about(commit: CommitCheckpoint) -> dict[str, Any]:
    return {"job_id": JOB, "fence": 1, "checkpoint_id": commit.manifest.checkpoint_id}


def _commit_of(root: Path) -> CommitCheckpoint:
    shard = ShardFile(rank=0, name="rank-0.bin", bytes=1, sha256=hashlib.sha256(b"x").hexdigest())
    manifest = Manifest(
        job_id=JOB,
        checkpoint_id=checkpoint_id(JOB, 3, 1),
        fence=1,
        step=3,
        world_size=1,
        shards=(shard,),
    )
    folder = CommitChain(root, JOB).shard_folder(manifest.checkpoint_id)
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


def test_a_commit_that_may_be_linked_is_a_condition_where_nothing_may_be_read(
    storage: Storage, commit: CommitCheckpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    chain = storage.root / JOB / "chain"
    listed = Path.iterdir

    def denied_once_linked(folder: Path) -> Iterator[Path]:
        if folder == chain and (chain / "00000002.json").exists():
            raise PermissionError(errno.EACCES, "Permission denied")
        return listed(folder)

    def denied(folder: Path) -> None:
        list(denied_once_linked(folder))

    with monkeypatch.context() as broken:
        broken.setattr(Path, "iterdir", denied_once_linked)
        broken.setattr(commit_chain, "sync_folder", denied)
        # What is asked again meets the fault in its first reading.
        told = [storage.commit(commit) for _ in range(2)]
    for fact in told:
        assert isinstance(fact, CheckpointLost)
        assert "whether it is committed cannot be read" in str(fact.condition)
    assert isinstance(storage.commit(commit), CheckpointLinked)
    (found,) = storage.found_since(JOB)
    assert (found.number, found.manifest) == (2, commit.manifest)
    assert storage.found_since(JOB) == ()


def test_a_job_that_could_not_be_looked_for_is_not_told_to_be_purged_while_it_is_there(
    storage: Storage, commit: CommitCheckpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert isinstance(storage.commit(commit), CheckpointLinked)
    with monkeypatch.context() as broken:
        broken.setattr(os, "lstat", refuse)
        fact = purge(storage, PurgeJob(job_id=JOB, fence=1), NODE)
    assert fact.error is None
    assert storage.files.jobs() == []
    assert list(storage.root.iterdir()) == []


def test_a_failure_before_the_link_loses_the_checkpoint(
    storage: Storage, commit: CommitCheckpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "link", refuse)
    fact = storage.commit(commit)
    assert isinstance(fact, CheckpointLost)
    assert "Input/output error" in fact.reason
    assert CommitChain(storage.root, JOB).committed() == []


def test_a_shard_that_its_rank_has_swapped_for_a_link_is_not_committed(
    storage: Storage, commit: CommitCheckpoint, tmp_path: Path
) -> None:
    secret = tmp_path / "of root"
    secret.write_bytes(b"y")
    (shard,) = commit.manifest.shards
    voted = CommitChain(storage.root, JOB).shard_folder(commit.manifest.checkpoint_id) / shard.name
    voted.unlink()
    voted.symlink_to(secret)
    fact = storage.commit(commit)
    assert isinstance(fact, CheckpointLost)
    assert "symbolic links" in fact.reason
    assert CommitChain(storage.root, JOB).committed() == []


def test_a_checkpoint_is_committed_behind_a_damaged_record_and_the_damage_is_told(
    storage: Storage, commit: CommitCheckpoint
) -> None:
    (storage.root / JOB / "chain" / "00000001.json").write_bytes(b"")
    fact = storage.commit(commit)
    assert isinstance(fact, CheckpointLinked)
    assert fact.number == 2
    (damage,) = storage.open_attempt(launch(2))
    assert isinstance(damage, ChainDamaged)
    assert [record.name for record in damage.records] == ["00000001.json"]


def test_what_is_committed_is_told_to_who_wants_to_go_on_from_what_has_been_deleted(
    storage: Storage, commit: CommitCheckpoint
) -> None:
    storage.commit(commit)
    known = commit.manifest.checkpoint_id
    assert storage.open_attempt(launch(2).model_copy(update={"resume_from": known})) == ()
    gone = checkpoint_id(JOB, 1, 1)
    (found,) = storage.open_attempt(launch(3).model_copy(update={"resume_from": gone}))
    assert isinstance(found, JobFound)
    assert (found.fence, list(found.manifests.values())) == (3, [commit.manifest])
    assert (found.is_running, found.is_all) == (False, True)
    # At other times an older attempt may be about to commit, and of damage nobody knows what it committed.
    assert [fact.is_all for fact in storage.find_job(JOB, None, 0)] == [False]
    (storage.root / JOB / "chain" / "00000001.json").write_bytes(b"")
    _, less = storage.open_attempt(launch(4).model_copy(update={"resume_from": gone}))
    assert isinstance(less, JobFound)
    assert not less.is_all


def verify(commit: CommitCheckpoint) -> VerifyCheckpoint:
    name = commit.manifest.checkpoint_id
    return VerifyCheckpoint(job_id=JOB, fence=1, checkpoint_id=name)


def shard_path(storage: Storage, commit: CommitCheckpoint) -> Path:
    folder = CommitChain(storage.root, JOB).shard_folder(commit.manifest.checkpoint_id)
    return folder / commit.manifest.shards[0].name


def test_every_file_of_a_verified_checkpoint_has_its_digest(
    storage: Storage, commit: CommitCheckpoint
) -> None:
    storage.commit(commit)
    (told,) = storage.verify(verify(commit))
    assert isinstance(told, CheckpointVerified)
    assert told.bytes == 1


@pytest.mark.parametrize("content", [b"y", b"", None])
def test_a_flipped_short_or_missing_file_makes_the_checkpoint_corrupt_by_name(
    storage: Storage, commit: CommitCheckpoint, content: bytes | None
) -> None:
    storage.commit(commit)
    path = shard_path(storage, commit)
    path.unlink()
    if content is not None:
        path.write_bytes(content)
    (told,) = storage.verify(verify(commit))
    assert isinstance(told, CheckpointCorrupt)
    assert told.file == f"shards/{commit.manifest.checkpoint_id}/{path.name}"


def test_a_truncated_manifest_makes_its_checkpoint_corrupt_and_is_told(
    storage: Storage, commit: CommitCheckpoint
) -> None:
    storage.commit(commit)
    record = storage.root / JOB / "chain" / "00000002.json"
    record.write_bytes(record.read_bytes()[:40])
    damage, told = storage.verify(verify(commit))
    assert isinstance(damage, ChainDamaged)
    assert isinstance(told, CheckpointCorrupt)
    assert "00000002.json" in told.reason


def test_a_storage_that_holds_nothing_of_the_job_proves_nothing(
    storage: Storage, commit: CommitCheckpoint, tmp_path: Path
) -> None:
    storage.commit(commit)
    elsewhere = Storage(tmp_path / "not mounted", NODE)
    (told,) = elsewhere.verify(verify(commit))
    assert isinstance(told, CheckpointUnread)
    source = launch(2).model_copy(update={"resume_from": commit.manifest.checkpoint_id})
    with pytest.raises(StorageAwayError, match="is the storage mounted"):
        elsewhere.open_attempt(source)
    assert storage.open_attempt(source) == ()


def test_an_agent_that_started_before_its_storage_was_mounted_uses_it_once_it_is(
    storage: Storage, commit: CommitCheckpoint, tmp_path: Path
) -> None:
    storage.files.identity()
    storage.commit(commit)
    root = tmp_path.with_name(f"{tmp_path.name} mounted")
    # Ranks that trained on while it was unmounted have written there.
    (root / JOB / "shards").mkdir(parents=True)
    early = Storage(root, NODE)
    assert early.files.identity() is not None
    source = launch(2).model_copy(update={"resume_from": commit.manifest.checkpoint_id})
    with pytest.raises(StorageAwayError, match="is the storage mounted"):
        early.open_attempt(source)
    root.rename(f"{root} below")
    root.symlink_to(tmp_path)
    assert early.open_attempt(source) == ()


def test_nothing_is_written_to_a_folder_that_has_taken_the_place_of_the_storage(
    tmp_path: Path,
) -> None:
    root = tmp_path / "mounted"
    storage = Storage(root, NODE)
    name = storage.files.identity()
    storage.open_attempt(launch())
    commit = _commit_of(storage.root)
    root.rename(tmp_path / "away")
    for is_there in (False, True):
        if is_there:
            root.mkdir()
        assert storage.files.identity() is None
        lost = storage.commit(commit)
        assert isinstance(lost, CheckpointLost)
        assert "is it mounted" in str(lost.condition)
        with pytest.raises(StorageAwayError, match="is it mounted"):
            storage.open_attempt(launch(2))
        with pytest.raises(StorageAwayError, match="is it mounted"):
            storage.retire(RetireCheckpoint(**_about(commit)))
        with pytest.raises(StorageAwayError, match="is it mounted"):
            storage.keep_standing(KeepStanding(job_id=JOB, fence=1, standing=JobState.PAUSED))
        assert "is it mounted" in str(purge(storage, PurgeJob(job_id=JOB, fence=1), NODE).error)
    assert list(root.iterdir()) == []
    root.rmdir()
    (tmp_path / "away").rename(root)
    (root / ".storage-id").unlink()
    assert isinstance(storage.commit(commit), CheckpointLinked)
    assert storage.files.identity() == name, "the folder is the same: its name was removed alone"
    (root / ".storage-id").write_text("0" * 32)
    with pytest.raises(StorageAwayError, match="restart the agent"):
        storage.open_attempt(launch(2))


def test_a_purged_job_leaves_nothing_and_its_zombies_commit_nothing(
    storage: Storage, commit: CommitCheckpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert isinstance(storage.commit(commit), CheckpointLinked)
    command = PurgeJob(job_id=JOB, fence=1)
    with monkeypatch.context() as broken:
        broken.setattr("services.worker.agent.storage.shared_files.remove_tree", refuse)
        told = purge(storage, command, NODE)
    assert told.error == "[Errno 5] Input/output error"
    # Its name is gone at once; what could not be removed is removed when it is asked for again.
    assert not (storage.root / JOB).exists()
    assert purge(storage, command, NODE).error is None
    assert list(storage.root.iterdir()) == []
    zombie = storage.commit(commit)
    assert isinstance(zombie, CheckpointLost)
    assert CommitChain(storage.root, JOB).committed() == []


def test_checkpoints_and_jobs_are_removed_from_a_full_disk_to_make_room(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk") as disk:
        storage = Storage(disk.path, NODE)
        storage.open_attempt(launch())
        commit = _commit_of(storage.root)
        assert isinstance(storage.commit(commit), CheckpointLinked)
        disk.fill()
        (retired,) = storage.retire(RetireCheckpoint(**_about(commit)))
        assert isinstance(retired, CheckpointRetired)
        assert storage.chain(JOB).committed() == []
        disk.free()
        disk.fill()
        assert purge(storage, PurgeJob(job_id=JOB, fence=1), NODE).error is None
        assert [path.name for path in disk.path.iterdir()] == ["filler"]


def test_a_full_disk_lets_no_overtaken_attempt_remove_a_checkpoint(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk") as disk:
        storage = Storage(disk.path, NODE)
        storage.open_attempt(launch())
        commit = _commit_of(storage.root)
        storage.commit(commit)
        storage.open_attempt(launch(2))
        disk.fill()
        with pytest.raises(OSError, match=os.strerror(errno.ENOSPC)):
            storage.retire(RetireCheckpoint(**_about(commit)))
        assert storage.chain(JOB).shard_folder(commit.manifest.checkpoint_id).exists()


def test_a_purge_of_an_overtaken_attempt_removes_nothing(
    storage: Storage, commit: CommitCheckpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage.commit(commit)
    storage.open_attempt(launch(3))
    told = purge(storage, PurgeJob(job_id=JOB, fence=1), NODE)
    assert "attempt 3 is open" in str(told.error)
    with monkeypatch.context() as full:
        full.setattr(commit_chain, "write_new", _has_no_room)
        told = purge(storage, PurgeJob(job_id=JOB, fence=1), NODE)
    assert "No space left" in str(told.error)
    assert len(CommitChain(storage.root, JOB).committed()) == 1


def _has_no_room(path: Path, _: bytes) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))


def test_a_card_says_that_its_job_is_to_run_until_it_is_told_otherwise(storage: Storage) -> None:
    def kept() -> tuple[JobState, str]:
        (found,) = storage.find_job(JOB, None, 0)
        return found.card.standing, found.card.reason

    pause = KeepStanding(job_id=JOB, fence=1, standing=JobState.PAUSED, reason="on request")
    assert kept() == (JobState.QUEUED, "")
    storage.keep_standing(pause)
    assert kept() == (JobState.PAUSED, "on request")
    storage.open_attempt(launch(fence=2))
    assert kept() == (JobState.QUEUED, "")
    storage.keep_standing(pause)  # comes late
    assert kept() == (JobState.QUEUED, "")
    put_card_away(storage.root, JOB)
    storage.keep_standing(pause.model_copy(update={"fence": 2}))
    assert storage.find_job(JOB, None, 0) == ()


def test_a_job_of_many_ranks_and_checkpoints_is_told_of_in_facts_that_are_taken(
    storage: Storage,
) -> None:
    ranks, count = 1_024, 80
    shards = tuple(
        ShardFile(rank=rank, name=f"rank-{rank:05d}.safetensors", bytes=1 << 30, sha256="a" * 64)
        for rank in range(ranks)
    )
    for step in range(1, count + 1):
        manifest = Manifest(
            job_id=JOB,
            checkpoint_id=checkpoint_id(JOB, step, 1),
            fence=1,
            step=step,
            world_size=ranks,
            shards=shards,
        )
        record = storage.root / JOB / "chain" / f"{step + 1:08d}.json"
        record.write_bytes(manifest.model_dump_json().encode())
    storage.open_attempt(
        launch(fence=2).model_copy(update={"resume_from": checkpoint_id(JOB, 3, 1)})
    )
    facts = storage.find_job(JOB, None, 0)
    assert max(len(fact.model_dump_json().encode()) for fact in facts) < redis_keys.LONGEST_FACT
    assert not any(fact.is_all for fact in facts)
    steps = [[each.step for each in fact.manifests.values()] for fact in facts]
    assert steps[0][0] == 3, "from which it goes on"
    assert steps[0][-1] == count
    assert sorted(itertools.chain(*steps)) == list(range(1, count + 1))


def test_a_shard_to_which_somebody_goes_on_to_write_is_read_to_its_voted_end_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, content = tmp_path / "shard", b"x" * 100
    path.write_bytes(content)
    shard = ShardFile(rank=0, name="shard", bytes=100, sha256=hashlib.sha256(content).hexdigest())
    monkeypatch.setattr(shard_check, "_READ_BYTES", 10)

    def write_on() -> bool:
        with path.open("ab") as file:
            file.write(content)
        assert path.stat().st_size < 100_000, "it reads on as long as somebody writes"
        return False

    assert fault_of(path, shard, write_on) is None


def test_a_shard_that_is_nearly_all_holes_is_refused_and_not_read(tmp_path: Path) -> None:
    path = tmp_path / "shard"
    path.write_bytes(b"x" * 4096)
    os.truncate(path, 8 << 40)
    shard = ShardFile(rank=0, name="shard", bytes=8 << 40, sha256="0" * 64)

    def read() -> bool:
        raise AssertionError("eight terabytes are read")

    fault = fault_of(path, shard, read)
    assert fault is not None
    assert "are holes" in fault


def test_a_shard_in_which_the_file_system_keeps_no_zeros_is_a_shard(tmp_path: Path) -> None:
    path, weights, moments = tmp_path / "shard", b"w" * (1 << 20), 3 << 20
    path.write_bytes(weights)
    os.truncate(path, len(weights) + moments)
    digest = hashlib.sha256(weights + bytes(moments)).hexdigest()
    assert fault_of(path, ShardFile(rank=0, name="shard", bytes=4 << 20, sha256=digest)) is None


def test_a_shard_on_a_storage_that_knows_no_holes_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seek = os.lseek

    def refuse_holes(descriptor: int, position: int, from_where: int) -> int:
        if from_where in {os.SEEK_HOLE, os.SEEK_DATA}:
            raise OSError(errno.EINVAL, "Invalid argument")
        return seek(descriptor, position, from_where)

    monkeypatch.setattr(os, "lseek", refuse_holes)
    path, content = tmp_path / "shard", b"x" * 100
    path.write_bytes(content)
    digest = hashlib.sha256(content).hexdigest()
    assert fault_of(path, ShardFile(rank=0, name="shard", bytes=100, sha256=digest)) is None


def test_a_checkpoint_stays_where_the_chain_lacks_one_for_which_it_is_given_up(
    storage: Storage, commit: CommitCheckpoint
) -> None:
    """Any agent can tell the controller of a link that there is not."""
    storage.commit(commit)
    name, missing = commit.manifest.checkpoint_id, checkpoint_id(JOB, 9_000, 1)
    about = {"job_id": JOB, "fence": 1, "checkpoint_id": name}
    (told,) = storage.retire(RetireCheckpoint.model_validate(about | {"kept": [name, missing]}))
    assert isinstance(told, CheckpointVerified)
    assert shard_path(storage, commit).exists()
    assert CommitChain(storage.root, JOB).committed() == [commit.manifest]
    (told,) = storage.retire(RetireCheckpoint.model_validate(about | {"kept": [name]}))
    assert isinstance(told, CheckpointRetired)
    assert not shard_path(storage, commit).exists()


def test_a_job_folder_of_another_user_keeps_no_other_job_from_being_opened() -> None:
    """Agents of several users may share a storage, and files are their user's alone."""
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        root.chmod(0o777)
        oldest = root / new_job_id(1, bytes(10))
        (oldest / "chain").mkdir(parents=True)
        oldest.chmod(0o700 if os.geteuid() == 0 else 0)
        with as_somebody_else():
            Storage(root, NODE).open_attempt(launch())
            assert CommitChain(root, JOB).read().fence == 1
        oldest.chmod(0o700)
