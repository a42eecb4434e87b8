"""What storage that hosts share has to do, tried on mounts of one folder with caches of their own."""

import multiprocessing
from collections.abc import Iterator
from pathlib import Path

import pytest

from services.contract.storage.commit_chain import CommitChain, FencedError
from services.contract.storage.manifests import AttemptOpened, Manifest, ShardFile
from services.contract.system.durable import read_plain, write_new
from services.contract.words.ids import checkpoint_id, new_job_id
from services.worker.agent.storage.identity import storage_identity
from tests.hosts.shared_storage import mounted, why_not_here

JOB = new_job_id(1_700_000_000_000, bytes(10))
STEPS = 40


@pytest.fixture(params=[False, True], ids=["finds at once", "goes on to miss"])
def hosts(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[Path, Path]]:
    """One storage as two hosts have it."""
    why_not = why_not_here()
    if why_not is not None:
        pytest.skip(why_not)
    real = tmp_path / "real"
    with (
        mounted(real, tmp_path / "one", keeps_missing=request.param) as one,
        mounted(real, tmp_path / "other", keeps_missing=request.param) as other,
    ):
        yield one, other


def manifest(step: int, fence: int = 1) -> Manifest:
    shard = ShardFile(rank=0, name="rank-0.safetensors", bytes=1, sha256="0" * 64)
    return Manifest(
        job_id=JOB,
        checkpoint_id=checkpoint_id(JOB, step, fence),
        fence=fence,
        step=step,
        world_size=1,
        shards=(shard,),
    )


def append_all(root: Path, steps: range) -> None:
    for step in steps:
        CommitChain(root, JOB).append(manifest(step))


def test_records_of_two_hosts_that_write_at_once_take_a_number_each(
    hosts: tuple[Path, Path],
) -> None:
    for root in hosts:  # each has looked where nothing was yet
        assert CommitChain(root, JOB).read().heads == {}
    CommitChain(hosts[0], JOB).append(AttemptOpened(job_id=JOB, fence=1))
    spawn = multiprocessing.get_context("spawn")
    steps = (range(0, STEPS, 2), range(1, STEPS, 2))
    writers = [
        spawn.Process(target=append_all, args=each) for each in zip(hosts, steps, strict=True)
    ]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    assert [writer.exitcode for writer in writers] == [0, 0]
    reading = CommitChain(hosts[0].parent / "real", JOB).read()
    assert not reading.damaged
    assert list(reading.heads) == list(range(1, len(reading.heads) + 1))
    assert {each.step for each in reading.committed.values()} == set(range(STEPS))


def test_an_attempt_that_another_host_has_overtaken_commits_nothing_whatever_its_host_believes(
    hosts: tuple[Path, Path],
) -> None:
    one, other = (CommitChain(root, JOB) for root in hosts)
    one.append(AttemptOpened(job_id=JOB, fence=1))
    assert not (hosts[0] / JOB / "chain" / "00000002.json").exists()
    other.append(AttemptOpened(job_id=JOB, fence=2))
    with pytest.raises(FencedError, match="attempt 2 is open"):
        one.append(manifest(4))


def test_both_hosts_name_the_storage_alike_and_read_what_the_other_has_finished(
    hosts: tuple[Path, Path],
) -> None:
    one, other = hosts
    name = storage_identity(one)
    assert name is not None
    assert storage_identity(other) == name
    draft = one / "draft"
    write_new(draft, b"whole")
    draft.replace(one / "shard")
    assert read_plain(other / "shard") == b"whole"
