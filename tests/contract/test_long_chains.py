"""A chain of any length is read once; what becomes of its files is seen all the same."""

from contextlib import AbstractContextManager
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.contract.storage import chain_heads, commit_chain
from services.contract.storage.commit_chain import (
    ChainError,
    ChainReading,
    CommitChain,
    FencedError,
)
from services.contract.storage.manifests import Manifest, record_of
from tests.contract.test_commit_chain import JOB, deleted, manifest, opened

DEEDS = st.lists(
    st.tuples(
        st.sampled_from(["commit", "delete", "open", "damage", "repair", "remove"]),
        st.integers(1, 6),
    ),
    max_size=12,
)


def settled() -> AbstractContextManager[object]:
    """Within, files count as old from the moment at which they were written."""
    return mock.patch.object(chain_heads, "_SETTLED_AFTER_S", -3600.0)


def test_of_a_long_chain_a_commit_reads_nothing_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chain = CommitChain(tmp_path, JOB)
    chain.append(opened(1))
    for step in range(1, 20):
        chain.append(manifest(step))
        chain.append(deleted(step))
    read = []

    def counted(content: bytes) -> object:
        read.append(content)
        return record_of(content)

    monkeypatch.setattr(commit_chain, "record_of", counted)
    with settled():
        chain.read()
        assert len(read) == 39
        read.clear()
        assert CommitChain(tmp_path, JOB).append(manifest(20)) == 40
        assert not read
        assert CommitChain(tmp_path, JOB).append(manifest(20)) == 40
        assert CommitChain(tmp_path, JOB).append(manifest(7)) == 14  # its deletion stands behind it
        assert len(read) == 3
        assert CommitChain(tmp_path, JOB).committed() == [manifest(20)]
        assert CommitChain(tmp_path, JOB).committed_ids() == {manifest(20).checkpoint_id}
        read.clear()
        with mock.patch.object(chain_heads, "_KNOWN", chain_heads._KnownHeads()):  # as a rank has
            assert CommitChain(tmp_path, JOB).find(manifest(20).checkpoint_id) == manifest(20)
            assert len(read) == 1
            with pytest.raises(ChainError, match="is not committed"):
                CommitChain(tmp_path, JOB).find(manifest(19).checkpoint_id)
            assert len(read) == 2


def test_a_file_that_changed_just_now_may_change_again(tmp_path: Path) -> None:
    chain = CommitChain(tmp_path, JOB)
    chain.append(opened(1))
    chain.read()
    path = tmp_path / JOB / "chain" / "00000001.json"
    path.write_bytes(path.read_bytes().replace(b"opened", b"closed"))
    assert [record.number for record in chain.read().damaged] == [1]


@given(DEEDS)
def test_what_becomes_of_the_files_is_seen_whatever_was_read_before(
    deeds: list[tuple[str, int]],
) -> None:
    with TemporaryDirectory() as root, settled():
        chain = CommitChain(Path(root), JOB)
        chain.append(opened(1))
        for deed, number in deeds:
            try:
                do(chain, Path(root) / JOB / "chain" / f"{number:08d}.json", deed, number)
            except FencedError:
                continue
            assert told(chain) == told_at_first_sight(Path(root))


def do(chain: CommitChain, path: Path, deed: str, number: int) -> None:
    fence = chain.read().fence
    if deed == "commit":
        chain.append(manifest(number, fence))
    elif deed == "delete":
        chain.append(deleted(number, fence))
    elif deed == "open":
        chain.append(opened(number))
    elif not path.exists():
        return
    elif deed == "damage":
        path.write_bytes(path.read_bytes() + b"}")
    elif deed == "repair":
        path.write_bytes(path.read_bytes().rstrip(b"}") + b"}")
    else:
        path.unlink()


def told(chain: CommitChain) -> tuple[ChainReading, set[str], list[Manifest]]:
    reading = chain.read()
    found = [chain.find(manifest.checkpoint_id) for manifest in reading.committed.values()]
    return reading, set(chain.committed_ids()), found


def told_at_first_sight(root: Path) -> tuple[ChainReading, set[str], list[Manifest]]:
    with mock.patch.object(chain_heads, "_KNOWN", chain_heads._KnownHeads()):
        return told(CommitChain(root, JOB))
