"""The commit chain under repeats, races, zombies and damage."""

import contextlib
import errno
import hashlib
import multiprocessing
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from services.contract.storage import commit_chain
from services.contract.storage.chain_heads import Head, Record
from services.contract.storage.commit_chain import (
    MOST_USELESS,
    ChainError,
    CommitChain,
    FencedError,
)
from services.contract.storage.manifests import (
    AttemptOpened,
    CheckpointDeleted,
    Manifest,
    ShardFile,
    record_bytes,
    record_of,
)
from services.contract.storage.record_files import FolderRecords
from services.contract.system.rank_user import RankUser
from services.contract.words.ids import checkpoint_id, new_job_id
from tests.disk import as_somebody_else

JOB = new_job_id(1_700_000_000_000, bytes(10))


def opened(fence: int) -> AttemptOpened:
    return AttemptOpened(job_id=JOB, fence=fence)


def manifest(step: int, fence: int = 1) -> Manifest:
    shard = ShardFile(rank=0, name="rank-0.bin", bytes=1, sha256="0" * 64)
    return Manifest(
        job_id=JOB,
        checkpoint_id=checkpoint_id(JOB, step, fence),
        fence=fence,
        step=step,
        world_size=1,
        loss=0.1 + 0.2,
        shards=(shard,),
    )


def deleted(step: int, fence: int = 1) -> CheckpointDeleted:
    return CheckpointDeleted(job_id=JOB, fence=fence, checkpoint_id=checkpoint_id(JOB, step, 1))


def test_records_are_numbered_in_order_and_read_back_exactly(tmp_path: Path) -> None:
    chain = CommitChain(tmp_path, JOB)
    records: list[Record] = [opened(1), manifest(10), manifest(20), deleted(10), opened(2)]
    assert [chain.append(record) for record in records] == [1, 2, 3, 4, 5]
    assert list(CommitChain(tmp_path, JOB).records()) == records
    assert chain.committed() == [manifest(20)]
    assert chain.find(manifest(20).checkpoint_id) == manifest(20)


def test_a_repeated_record_keeps_its_number(tmp_path: Path) -> None:
    chain = CommitChain(tmp_path, JOB)
    for _ in range(2):
        assert [chain.append(record) for record in (opened(1), manifest(10))] == [1, 2]


RANKS = RankUser("of ranks", os.getuid(), os.getgid() + 1, "/")


@pytest.mark.parametrize(
    ("group", "given", "left"),
    [
        (os.getgid(), 0o2770, 0o2775),
        (os.getgid(), 0o3777, 0o2775),
        (RANKS.gid, 0o2770, 0o2755),
    ],
)
def test_what_is_shared_with_ranks_keeps_the_rights_that_its_owner_gave_others(
    tmp_path: Path, group: int, given: int, left: int
) -> None:
    """A group's folder on a storage that other nodes, and people, write to, but no rank."""
    if group not in {os.getgid(), *os.getgroups()} and os.getuid() != 0:
        pytest.skip("only root gives a folder to a group that it is not in")
    root = tmp_path / "of a group"
    root.mkdir()
    os.chown(root, -1, group)
    root.chmod(given)
    chain = CommitChain(root, JOB)
    chain.append(opened(1))
    for folder in (root / JOB, root / JOB / "chain"):
        folder.chmod(0o2777)  # as an access list of the root has new folders made
    chain.share_with(RANKS)
    assert stat.S_IMODE(root.stat().st_mode) == left
    for folder in (root / JOB, root / JOB / "chain"):
        assert stat.S_IMODE(folder.stat().st_mode) == 0o2755


@pytest.mark.skipif(os.getuid() != 0, reason="only root gives files to others")
@pytest.mark.parametrize("place", ["", "chain", "shards"])
def test_sharing_with_ranks_changes_nothing_behind_the_link_of_another_user(
    tmp_path: Path, place: str
) -> None:
    """Ranks of a node without a user of their own may have put it there, where nodes share the storage."""
    nobody = RankUser.named("nobody")
    outside = tmp_path / "outside"
    (outside / "folder").mkdir(parents=True)
    (outside / "secret").write_text("root's")
    for path in (outside, outside / "secret"):
        path.chmod(0o700)
    root = tmp_path / "root"
    chain = CommitChain(root, JOB)
    chain.append(opened(1))
    chain.share_with(nobody)
    link = root / JOB / place
    link.rename(tmp_path / "put aside")
    link.symlink_to(outside)
    os.chown(link, nobody.uid, nobody.gid, follow_symlinks=False)
    with pytest.raises(OSError, match="a link of another user"):
        chain.share_with(nobody)
    for path in (outside, outside / "secret"):
        assert (path.stat().st_uid, stat.S_IMODE(path.stat().st_mode)) == (0, 0o700)
    os.chown(link, 0, 0, follow_symlinks=False)
    chain.append(opened(2))
    chain.share_with(nobody)  # people may keep a job's files elsewhere


@pytest.mark.skipif(os.getuid() != 0, reason="only root gives files to others")
def test_a_link_in_a_records_place_keeps_what_it_leads_to_from_being_opened_to_ranks(
    tmp_path: Path,
) -> None:
    secret = tmp_path / "secret"
    secret.touch(0o600)
    chain = CommitChain(tmp_path / "root", JOB)
    chain.append(opened(1))
    (tmp_path / "root" / JOB / "chain" / "00000002.json").symlink_to(secret)
    chain.share_with(RankUser.named("nobody"))
    assert stat.S_IMODE(secret.stat().st_mode) == 0o600
    record = tmp_path / "root" / JOB / "chain" / "00000001.json"
    assert stat.S_IMODE(record.stat().st_mode) == 0o644
    shards = tmp_path / "root" / JOB / "shards"
    assert shards.stat().st_uid == RankUser.named("nobody").uid


def test_a_record_is_not_said_to_stand_before_its_name_is_durable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chain = CommitChain(tmp_path, JOB)

    def refused(folder: Path) -> None:
        raise OSError(errno.EIO, "the disk refuses", str(folder))

    with monkeypatch.context() as disk:
        disk.setattr(commit_chain, "sync_folder", refused)
        for _ in range(2):
            with pytest.raises(OSError, match="the disk refuses"):
                chain.append(opened(1))
    assert chain.append(opened(1)) == 1


@contextlib.contextmanager
def chain_that_others_reach() -> Iterator[tuple[Path, CommitChain]]:
    """A storage and its chain of two records; pytest's own folders are closed to other users."""
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        root.chmod(0o755)
        chain = CommitChain(root, JOB)
        for record in (opened(1), manifest(10)):
            chain.append(record)
        yield root, chain


def test_a_chain_that_may_not_be_listed_is_no_empty_one() -> None:
    """Otherwise its checkpoints are corrupt, and their shards of no use to anybody."""
    with chain_that_others_reach() as (root, chain):
        chain.shard_folder(manifest(10).checkpoint_id).mkdir(parents=True)
        for path in (root / JOB, root / JOB / "shards"):
            path.chmod(0o755)
        (root / JOB / "chain").chmod(0o300)
        with as_somebody_else():
            for ask in (chain.read, chain.committed, chain.abandoned, chain.uncommitted):
                with pytest.raises(PermissionError):
                    ask()
        (root / JOB / "chain").chmod(0o700)
        assert chain.committed() == [manifest(10)]


def test_a_record_that_may_not_be_read_is_no_damaged_one() -> None:
    """Files are their user's alone: an agent of another user would call whole checkpoints corrupt."""
    with chain_that_others_reach() as (root, chain):
        for path in (root / JOB, root / JOB / "chain", root / JOB / "chain" / "00000001.json"):
            path.chmod(0o755)
        (root / JOB / "chain" / "00000002.json").chmod(0o600 if os.geteuid() == 0 else 0)
        with as_somebody_else():
            for ask in (
                chain.read,
                chain.committed,
                lambda: chain.find(manifest(10).checkpoint_id),
            ):
                with pytest.raises(PermissionError):
                    ask()


@pytest.mark.skipif(os.getuid() != 0, reason="only root gives files to others")
def test_ranks_find_their_checkpoint_while_records_are_linked_that_are_not_theirs_to_read() -> None:
    """A clone starts, or an older checkpoint is removed as a job goes on: agents' files are their user's alone."""
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        chain = CommitChain(root, JOB)
        for record in (opened(1), manifest(10)):
            chain.append(record)
        chain.share_with(RankUser.named("nobody"))
        chain.append(manifest(20))
        (root / JOB / "chain" / "00000003.json").chmod(0o600)
        with as_somebody_else():
            assert chain.find(manifest(10).checkpoint_id) == manifest(10)
            with pytest.raises(PermissionError):
                chain.find(manifest(20).checkpoint_id)


def test_a_job_without_a_chain_has_no_records(tmp_path: Path) -> None:
    assert list(CommitChain(tmp_path, JOB).records()) == []


def test_an_overtaken_attempt_can_link_nothing_more(tmp_path: Path) -> None:
    chain = CommitChain(tmp_path, JOB)
    chain.append(opened(1))
    chain.append(opened(2))
    for record in (manifest(10), deleted(10), opened(1)):
        with pytest.raises(FencedError, match="attempt 2 is open"):
            chain.append(record)
    assert len(list(chain.records())) == chain.append(opened(2)) == 2


def test_a_zombie_that_wakes_between_its_check_and_its_link_finds_its_number_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chain = CommitChain(tmp_path, JOB)
    chain.append(opened(1))
    link = os.link

    def overtaken(source: Path, target: Path) -> None:
        monkeypatch.setattr(os, "link", link)
        CommitChain(tmp_path, JOB).append(opened(2))
        link(source, target)

    monkeypatch.setattr(os, "link", overtaken)
    with pytest.raises(FencedError):
        chain.append(manifest(10))
    assert list(chain.records()) == [opened(1), opened(2)]


def test_a_link_that_reports_its_own_success_as_taken_counts_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    link = os.link

    def repeated(source: Path, target: Path) -> None:
        link(source, target)
        link(source, target)

    monkeypatch.setattr(os, "link", repeated)
    chain = CommitChain(tmp_path, JOB)
    assert chain.append(opened(1)) == 1
    assert list(chain.records()) == [opened(1)]


def test_writers_that_race_lose_no_record(tmp_path: Path) -> None:
    CommitChain(tmp_path, JOB).append(opened(1))
    context = multiprocessing.get_context("spawn")
    with context.Pool(3) as pool:
        steps = range(1, 31)
        numbers = pool.starmap(_append, [(str(tmp_path), step) for step in steps], chunksize=1)
    assert sorted(numbers) == list(range(2, 32))
    found = {m.step for m in CommitChain(tmp_path, JOB).committed()}
    assert found == set(steps)


def _append(root: str, step: int) -> int:
    return CommitChain(Path(root), JOB).append(manifest(step))


def test_drafts_are_removed(tmp_path: Path) -> None:
    CommitChain(tmp_path, JOB).append(opened(1))
    names = sorted(path.name for path in (tmp_path / JOB / "chain").iterdir())
    assert names == ["00000001.json", "opened-0001"]


def damage(root: Path, number: int, content: bytes | None = b'{"kind": "attem') -> None:
    path = root / JOB / "chain" / f"{number:08d}.json"
    path.unlink()
    if content is not None:
        path.write_bytes(content)


@pytest.mark.parametrize("content", [b"", b"{}", b'{"kind": "attempt_opened"', None])
def test_a_damaged_or_missing_record_is_named_and_the_others_hold(
    tmp_path: Path, content: bytes | None
) -> None:
    chain = CommitChain(tmp_path, JOB)
    for record in (opened(1), manifest(10), manifest(20)):
        chain.append(record)
    damage(tmp_path, 2, content)
    reading = chain.read()
    assert [(record.number, record.name) for record in reading.damaged] == [(2, "00000002.json")]
    assert reading.committed == {3: manifest(20)}
    with pytest.raises(ChainError, match=r"damaged there: 00000002\.json"):
        chain.find(manifest(10).checkpoint_id)


@pytest.mark.parametrize("record", [opened(1), manifest(10), deleted(10)], ids=lambda r: r.kind)
def test_a_record_of_which_a_bit_is_flipped_is_damaged_or_says_what_it_said(record: Record) -> None:
    whole = record_bytes(record)
    assert record_of(whole) == record
    others = []
    for bit in range(8 * len(whole)):
        flipped = bytearray(whole)
        flipped[bit // 8] ^= 1 << bit % 8
        with contextlib.suppress(ValueError):
            others.append(record_of(bytes(flipped)))
    assert all(other == record for other in others)


def test_a_record_of_an_older_version_has_no_digest_and_one_of_a_newer_may_have_more_fields() -> (
    None
):
    fields = manifest(10).model_dump_json(indent=1)
    assert record_of(fields.encode()) == manifest(10)
    newer = fields.removesuffix("\n}") + ',\n "colour": "blue"\n}'
    digest = hashlib.sha256(newer.encode()).hexdigest()
    sealed = newer.removesuffix("\n}") + f',\n "sha256": "{digest}"\n}}'
    assert record_of(sealed.encode()) == manifest(10)
    with pytest.raises(ValueError, match="not those of its sha256"):
        record_of(sealed.replace("blue", "bluf").encode())


def test_a_storage_that_does_not_answer_makes_no_record_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chain = CommitChain(tmp_path, JOB)
    chain.append(manifest(10))

    def refuse(path: Path) -> bytes:
        raise OSError(number, os.strerror(number), str(path))

    monkeypatch.setattr(commit_chain, "read_plain", refuse)
    for number in (errno.ETIMEDOUT, errno.ENOTCONN, errno.EMFILE):
        with pytest.raises(OSError, match=os.strerror(number)):
            chain.read()
    number = errno.EIO  # as a bad block gives it
    assert [record.number for record in chain.read().damaged] == [1]


def test_a_record_of_another_job_is_none_of_the_chain(tmp_path: Path) -> None:
    other = JOB[:-1] + ("0" if JOB[-1] != "0" else "1")
    CommitChain(tmp_path, other).append(
        manifest(10).model_copy(
            update={"job_id": other, "checkpoint_id": checkpoint_id(other, 10, 1)}
        )
    )
    chain = CommitChain(tmp_path, JOB)
    chain.append(opened(1))
    shutil.copy(
        tmp_path / other / "chain" / "00000001.json", tmp_path / JOB / "chain/00000002.json"
    )
    foreign = manifest(20).model_copy(update={"checkpoint_id": checkpoint_id(other, 20, 1)})
    (tmp_path / JOB / "chain/00000003.json").write_bytes(record_bytes(foreign))
    assert [record.reason for record in chain.read().damaged] == [
        f"ValueError: it is a record of {other}"
    ] * 2
    assert chain.committed() == []


def test_other_names_are_passed_over_and_a_pipe_in_place_of_a_record_is_not_waited_for(
    tmp_path: Path,
) -> None:
    chain = CommitChain(tmp_path, JOB)
    for record in (opened(1), manifest(10)):
        chain.append(record)
    damage(tmp_path, 2, None)
    folder = tmp_path / JOB / "chain"
    os.mkfifo(folder / "00000002.json")
    for name in ("1x.json", "9" * 8 + ".json", "9" * 30 + ".json", "notes.json"):
        (folder / name).touch()
    reading = chain.read()
    assert reading.heads == {1: Head.of(opened(1))}
    assert [record.number for record in reading.damaged] == [2]


def test_nothing_is_committed_over_a_damaged_record(tmp_path: Path) -> None:
    chain = CommitChain(tmp_path, JOB)
    for record in (opened(1), manifest(10)):
        chain.append(record)
    damage(tmp_path, 2)
    assert chain.append(manifest(20)) == 3
    damage(tmp_path, 3)
    assert chain.append(opened(2)) == 4
    assert chain.committed() == []


def test_a_damaged_opening_still_fences_what_it_overtook(tmp_path: Path) -> None:
    chain = CommitChain(tmp_path, JOB)
    for record in (opened(1), opened(2)):
        chain.append(record)
    damage(tmp_path, 2)
    assert chain.read().fence == 2
    with pytest.raises(FencedError, match="attempt 2 is open"):
        chain.append(manifest(10, fence=1))
    assert chain.append(manifest(10, fence=2)) == 3


def test_a_commit_that_is_repeated_after_damage_is_linked_again(tmp_path: Path) -> None:
    chain = CommitChain(tmp_path, JOB)
    for record in (opened(1), manifest(10)):
        chain.append(record)
    damage(tmp_path, 2)
    assert chain.append(manifest(10)) == 3
    assert chain.find(manifest(10).checkpoint_id) == manifest(10)


def test_nothing_is_abandoned_while_a_record_is_damaged(tmp_path: Path) -> None:
    chain = CommitChain(tmp_path, JOB)
    shards_of(tmp_path, 10, 1)
    for record in (opened(1), manifest(10), opened(2)):
        chain.append(record)
    damage(tmp_path, 2)
    assert chain.abandoned() == []


def test_a_deleted_checkpoint_is_not_found(tmp_path: Path) -> None:
    chain = CommitChain(tmp_path, JOB)
    for record in (opened(1), manifest(10), deleted(10)):
        chain.append(record)
    with pytest.raises(ChainError, match="not committed"):
        chain.find(manifest(10).checkpoint_id)


def shards_of(root: Path, step: int, fence: int) -> Path:
    folder = CommitChain(root, JOB).shard_folder(checkpoint_id(JOB, step, fence))
    folder.mkdir(parents=True)
    (folder / ".rank-00000.safetensors.partial").write_bytes(b"half")
    return folder


def test_only_what_overtaken_attempts_did_not_commit_is_abandoned(tmp_path: Path) -> None:
    chain = CommitChain(tmp_path, JOB)
    chain.append(opened(1))
    lost = shards_of(tmp_path, 5, 1)
    for step, retired in ((10, False), (15, True)):
        shards_of(tmp_path, step, 1)
        chain.append(manifest(step))
        if retired:
            chain.append(deleted(step))
    (tmp_path / JOB / "shards" / "ckpt_of-a-person").mkdir()
    last = shards_of(tmp_path, 20, 1)
    assert chain.abandoned() == []
    assert chain.abandoned(passed_over=True) == [lost]
    chain.append(opened(10_000))
    late = shards_of(tmp_path, 20, 2)
    shards_of(tmp_path, 25, 10_000)
    shards_of(tmp_path, 30, 10_001)
    assert chain.abandoned() == chain.abandoned(passed_over=True) == [lost, last, late]


def test_of_millions_of_folders_that_ranks_made_some_are_looked_at(tmp_path: Path) -> None:
    chain = CommitChain(tmp_path, JOB)
    for record in (opened(1), opened(2)):
        chain.append(record)
    shards = tmp_path / JOB / "shards"
    shards.mkdir()
    for number in range(MOST_USELESS + 20):
        (shards / f"ckpt_{number}-s000000001-a0001").symlink_to(".")
    assert len(chain.abandoned()) == MOST_USELESS
    assert len(chain.uncommitted()) == MOST_USELESS


def test_committed_checkpoints_do_not_hide_what_is_of_no_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(commit_chain, "MOST_USELESS", 1)
    chain = CommitChain(tmp_path, JOB)
    chain.append(opened(1))
    for step in range(10, 60, 10):
        shards_of(tmp_path, step, 1)
        if step != 30:
            chain.append(manifest(step))
    chain.append(opened(2))
    lost = chain.shard_folder(checkpoint_id(JOB, 30, 1))
    assert chain.abandoned() == chain.uncommitted() == [lost]


def test_what_is_committed_while_folders_are_listed_is_of_use(tmp_path: Path) -> None:
    class Late(FolderRecords):
        def folders(self, parent: Path, pattern: str) -> Iterator[Path]:
            CommitChain(tmp_path, JOB).append(manifest(10))
            yield from super().folders(parent, pattern)

    chain = CommitChain(tmp_path, JOB, Late())
    chain.append(opened(1))
    shards_of(tmp_path, 10, 1)
    lost = shards_of(tmp_path, 20, 1)
    assert chain.uncommitted() == [lost]


def test_a_job_without_a_chain_has_abandoned_nothing(tmp_path: Path) -> None:
    assert CommitChain(tmp_path, JOB).abandoned() == []
    shards_of(tmp_path, 5, 1)
    assert CommitChain(tmp_path, JOB).abandoned() == []
