"""Commit and retire, at the commit chain that a real agent writes."""

import pytest

from services.contract.messages.commands import CommitCheckpoint, PurgeJob, RetireCheckpoint
from services.contract.messages.facts import (
    CheckpointLinked,
    CheckpointLost,
    CheckpointRetired,
    CheckpointVoted,
    GangEnded,
    JobPurged,
    LaunchRefused,
)
from services.contract.storage.commit_chain import CommitChain
from services.contract.storage.manifests import AttemptOpened, Manifest
from services.contract.words.ids import checkpoint_id
from tests.agent.conftest import JOB, AgentProcess, Controller, ended, launch
from tests.waiting import until


@pytest.fixture
def voted(agent: AgentProcess, controller: Controller) -> Manifest:
    """The manifest of a checkpoint for which all ranks of an ended gang have voted."""
    assert agent.process.poll() is None
    controller.send(launch(steps=2))
    ended(controller)
    votes = controller.all_of(CheckpointVoted)
    return Manifest(
        job_id=JOB,
        checkpoint_id=votes[0].checkpoint_id,
        fence=1,
        step=2,
        world_size=2,
        shards=tuple(sorted((vote.shard for vote in votes), key=lambda shard: shard.rank)),
    )


def commit(manifest: Manifest) -> CommitCheckpoint:
    return CommitCheckpoint(job_id=JOB, fence=1, manifest=manifest)


def test_a_manifest_is_linked_once_behind_its_attempt(
    agent: AgentProcess, controller: Controller, voted: Manifest
) -> None:
    controller.send(commit(voted), commit(voted))
    until(lambda: len(controller.all_of(CheckpointLinked)) == 2)
    assert [fact.number for fact in controller.all_of(CheckpointLinked)] == [2, 2]
    chain = CommitChain(agent.checkpoint_root, JOB)
    assert list(chain.records()) == [AttemptOpened(job_id=JOB, fence=1), voted]


def test_a_manifest_with_a_missing_or_short_shard_is_not_linked(
    agent: AgentProcess, controller: Controller, voted: Manifest
) -> None:
    chain = CommitChain(agent.checkpoint_root, JOB)
    shard = chain.shard_folder(voted.checkpoint_id) / voted.shards[1].name
    shard.write_bytes(b"short")
    controller.send(commit(voted))
    assert "has 5 bytes" in controller.fact(CheckpointLost).reason
    shard.unlink()
    controller.send(commit(voted))
    until(lambda: len(controller.all_of(CheckpointLost)) == 2)
    assert "No such file" in controller.all_of(CheckpointLost)[1].reason
    assert chain.committed() == []


def test_an_attempt_that_was_overtaken_can_neither_start_nor_commit(
    agent: AgentProcess, controller: Controller, voted: Manifest
) -> None:
    chain = CommitChain(agent.checkpoint_root, JOB)
    chain.append(AttemptOpened(job_id=JOB, fence=3))
    controller.send(commit(voted), launch(fence=2))
    assert "attempt 3 is open" in controller.fact(CheckpointLost).reason
    assert "attempt 3 is open" in controller.fact(LaunchRefused).reason
    assert len(controller.all_of(GangEnded)) == 1


def test_a_retired_checkpoint_is_unlinked_and_its_files_are_gone(
    agent: AgentProcess, controller: Controller, voted: Manifest
) -> None:
    retire = RetireCheckpoint(job_id=JOB, fence=1, checkpoint_id=voted.checkpoint_id)
    controller.send(commit(voted))
    controller.fact(CheckpointLinked)
    # What is removed may take minutes: commits do not wait for it.
    controller.send(retire, retire, commit(voted))
    until(lambda: len(controller.all_of(CheckpointLinked)) == 2)
    until(lambda: len(controller.all_of(CheckpointRetired)) == 2)
    chain = CommitChain(agent.checkpoint_root, JOB)
    assert chain.committed() == []
    assert not chain.shard_folder(voted.checkpoint_id).exists()


def test_a_new_attempt_removes_what_older_ones_wrote_and_did_not_commit(
    agent: AgentProcess, controller: Controller, voted: Manifest
) -> None:
    chain = CommitChain(agent.checkpoint_root, JOB)
    controller.send(commit(voted))
    controller.fact(CheckpointLinked)
    crashed, unvoted = (chain.shard_folder(checkpoint_id(JOB, step, 1)) for step in (7, 8))
    for folder, name in ((crashed, ".rank-00000.safetensors.partial"), (unvoted, "rank-1.bin")):
        folder.mkdir()
        (folder / name).write_bytes(b"of no use")
    controller.send(launch(fence=1))
    until(lambda: len(controller.all_of(GangEnded)) == 2)
    assert crashed.exists(), "its own attempt may still commit it"
    controller.open_job(fence=2)
    controller.send(launch(fence=2, steps=3))
    ended(controller, fence=2)
    assert [path.name for path in sorted((agent.checkpoint_root / JOB / "shards").iterdir())] == [
        voted.checkpoint_id,
        checkpoint_id(JOB, 3, 2),
    ]
    assert all((chain.shard_folder(voted.checkpoint_id) / s.name).exists() for s in voted.shards)


@pytest.mark.usefixtures("voted")
def test_a_new_attempt_removes_a_link_among_older_shards_and_nothing_behind_it(
    agent: AgentProcess, controller: Controller
) -> None:
    chain = CommitChain(agent.checkpoint_root, JOB)
    link = chain.shard_folder(checkpoint_id(JOB, 7, 1))
    behind = agent.checkpoint_root.parent / "behind"
    behind.mkdir()
    (behind / "kept").touch()
    link.symlink_to(behind)
    controller.open_job(fence=2)
    controller.send(launch(fence=2, steps=3))
    assert all(e.finished for e in ended(controller, fence=2).exits)
    assert not link.is_symlink()
    assert (behind / "kept").exists()


def test_a_purged_job_leaves_no_file_and_purging_it_again_is_no_fault(
    agent: AgentProcess, controller: Controller, voted: Manifest
) -> None:
    purge = PurgeJob(job_id=JOB, fence=1)
    controller.send(commit(voted), purge, purge)
    until(lambda: len(controller.all_of(JobPurged)) == 2)
    assert [fact.error for fact in controller.all_of(JobPurged)] == [None, None]
    assert [path.name for path in agent.checkpoint_root.iterdir()] == [".storage-id"]
