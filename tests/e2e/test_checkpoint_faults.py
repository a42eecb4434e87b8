"""A crash within the checkpoint protocol, and a full disk: what is committed loads."""

import hashlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from services.contract.api.views import JobView
from services.contract.storage.commit_chain import CommitChain
from services.contract.words.states import CheckpointState, JobState
from tests.e2e.conftest import Stack, running_stack
from tests.waiting import until

pytestmark = [pytest.mark.ranks, pytest.mark.redis]

FAULTS = Path(__file__).parent / "faults"
JOB = {
    "train": {"steps": 60, "global_batch": 4, "seed": 7},
    "checkpoint": {"every_steps": 20, "keep_last": 5},
}
# Of seven: tests/rank/test_death_while_saving.py has a rank die at each.
RANK_POINTS = ("within_write", "after_vote")
AGENT_POINTS = ("before_link", "after_link")


@pytest.fixture(scope="module")
def armed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder in which a file of that name arms a point."""
    return tmp_path_factory.mktemp("armed")


@pytest.fixture(scope="module")
def faulty(armed: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """A whole stack whose ranks and agent can be had to die."""
    root = Path(__file__).parents[2]
    with running_stack(
        tmp_path_factory.mktemp("faulty"),
        PYTHONPATH=f"{FAULTS}:{root}",
        LOOM_FAULTS=str(armed),
        MESHLOOM_RANK_ENV="LOOM_FAULTS",
        MESHLOOM_TRAINER="faulty_trainer:train",
    ) as stack:
        yield stack


@pytest.fixture(scope="module")
def undisturbed(faulty: Stack) -> dict[int, float | None]:
    job = faulty.rested(faulty.submit(**JOB).id)
    assert (job.state, job.attempt) == (JobState.SUCCEEDED, 1), (job.reason, job.failure)
    assert_all_that_is_committed_loads(faulty, job)
    return faulty.losses(job.id)


def assert_all_that_is_committed_loads(stack: Stack, job: JobView) -> None:
    """API and chain name the same checkpoints, and every byte of them is what was voted for."""
    chain = CommitChain(stack.home / "checkpoints", job.id)
    shown = stack.client.checkpoints(job.id).items
    committed = {c.id for c in shown if c.state is CheckpointState.COMMITTED}
    manifests = chain.committed()
    assert {manifest.checkpoint_id for manifest in manifests} == committed
    assert job.latest_checkpoint in committed
    for manifest in manifests:
        for shard in manifest.shards:
            content = (chain.shard_folder(manifest.checkpoint_id) / shard.name).read_bytes()
            assert hashlib.sha256(content).hexdigest() == shard.sha256


def trained(stack: Stack, armed: Path, point: str) -> JobView:
    (armed / point).touch()
    job = stack.rested(stack.submit(**JOB).id)
    assert not (armed / point).exists(), "the point was never reached"
    assert job.state is JobState.SUCCEEDED, (job.reason, job.failure)
    assert_all_that_is_committed_loads(stack, job)
    return job


@pytest.mark.parametrize("point", RANK_POINTS)
def test_a_rank_that_dies_while_it_saves_costs_no_commit_and_no_loss_differs(
    faulty: Stack, armed: Path, undisturbed: dict[int, float | None], point: str
) -> None:
    job = trained(faulty, armed, point)
    assert job.attempt == 2
    assert faulty.losses(job.id) == undisturbed
    first, second = faulty.client.attempts(job.id).items
    assert first.failure is not None
    assert (first.failure.rank, first.failure.signal) == (1, "SIGKILL")
    assert second.resumed_from is not None
    resumed = faulty.client.checkpoint(second.resumed_from)
    assert resumed.step in ({20, 40} if point == "after_vote" else {20})


@pytest.mark.parametrize("point", AGENT_POINTS)
def test_an_agent_that_dies_while_it_commits_leaves_the_commit_whole_or_undone(
    faulty: Stack, armed: Path, undisturbed: dict[int, float | None], point: str
) -> None:
    job = trained(faulty, armed, point)
    assert faulty.losses(job.id) == undisturbed
    if point == "after_link":
        chain = CommitChain(faulty.home / "checkpoints", job.id)
        (linked,) = [m for m in chain.committed() if (m.step, m.fence) == (40, 1)]
        assert faulty.client.checkpoint(linked.checkpoint_id).state is CheckpointState.COMMITTED


def test_a_full_disk_costs_that_checkpoint_is_told_and_training_goes_on(
    faulty: Stack, armed: Path, undisturbed: dict[int, float | None]
) -> None:
    job = trained(faulty, armed, "disk_full")
    assert job.attempt == 1
    assert faulty.losses(job.id) == undisturbed
    events = faulty.client.events(job.id).items
    (lost,) = (event for event in events if event.kind == "checkpoint.aborted")
    assert lost.data["step"] == 40
    assert "too large" in lost.message
    steps = {c.step: c.state for c in faulty.client.checkpoints(job.id).items}
    assert steps[40] is CheckpointState.ABORTED
    assert steps[60] is CheckpointState.COMMITTED
    chain = CommitChain(faulty.home / "checkpoints", job.id)
    folders = [path for path in chain.uncommitted() if "-s000000040-" in path.name]
    until(lambda: all(not list(path.glob(".*.partial")) for path in folders))
