"""A job that continues without a lost replica has the losses of the undisturbed run."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from services.contract.jobs.specs import JobSpec
from services.worker.rank.loop.share_gradients import parts_taken_over
from services.worker.rank.process.seat import DEFAULT_TRAINER
from tests.rank import late_vote_trainer
from tests.rank.gang import Ranks, spec_of
from tests.rank.replicas import ReplicaJob

pytestmark = pytest.mark.ranks

STEPS = 40


def lasting(library: Path, replicas: int, shards: int = 1) -> JobSpec:
    """Two samples of a share on each rank, in two passes."""
    return spec_of(
        library,
        train={"steps": STEPS, "global_batch": 12, "seed": 7, "micro_batch": 1},
        mesh={"dp_replicate": replicas, "dp_shard": shards},
        resources={"ranks": replicas * shards},
        faults={"on_replica_loss": "continue"},
        checkpoint={"every_steps": 0},
    )


def undisturbed(ranks: Ranks, spec: JobSpec) -> dict[int, float]:
    """Losses of the engine's own all-reduce over replicas."""
    faults = spec.faults.model_copy(update={"on_replica_loss": None})
    return ranks.start(spec.model_copy(update={"faults": faults})).succeeded().losses()


@pytest.fixture
def started(tmp_path: Path) -> Iterator[Callable[..., ReplicaJob]]:
    jobs: list[ReplicaJob] = []

    def start(spec: JobSpec, trainer: str = DEFAULT_TRAINER) -> ReplicaJob:
        jobs.append(ReplicaJob(tmp_path, spec, trainer))
        jobs[-1].start()
        return jobs[-1]

    yield start
    for job in jobs:
        job.close()


def test_a_lost_replica_costs_no_step_and_comes_back_from_memory(
    started: Callable[..., ReplicaJob], ranks: Ranks, library: Path
) -> None:
    spec = lasting(library, 3)
    expected = undisturbed(ranks, spec)
    job = started(spec)
    job.until_step(4, 1)
    job.lose(0)
    job.until_step(job.last_step(1) + 3, 1)
    job.bring_back(0)
    job.until_step(job.last_step(1) + 3, 0)
    job.lose(2)
    job.succeeded()
    found = job.losses(1)
    assert sorted(found) == list(range(1, STEPS + 1))
    assert found == pytest.approx(expected, abs=1e-5)
    returned = job.losses(0)
    assert returned.items() <= found.items()
    assert max(returned) == STEPS


def test_a_replica_that_is_cut_off_holds_up_no_other(
    started: Callable[..., ReplicaJob], ranks: Ranks, library: Path
) -> None:
    """Its connections stay open, as those of a node without power do."""
    spec = lasting(library, 3)
    job = started(spec)
    job.until_step(4, 1)
    job.cut_off(2)
    job.until_step(STEPS, 1)
    job.until_step(STEPS, 0)
    job.end(2)
    job.succeeded()
    assert job.losses(0) == pytest.approx(undisturbed(ranks, spec), abs=1e-5)


def test_a_step_that_one_replica_made_is_made_by_all(
    started: Callable[..., ReplicaJob], ranks: Ranks, library: Path
) -> None:
    spec = lasting(library, 2, shards=2)
    expected = undisturbed(ranks, spec)
    job = started(spec, f"{late_vote_trainer.__name__}:train")
    late = job.ranks_of(late_vote_trainer.LATE_REPLICA)
    job.until_step(late_vote_trainer.LATE_VOTE, 0)
    # It has the sums of that step, and does not know that the vote has passed.
    assert {job.last_step(rank) for rank in late} == {late_vote_trainer.LATE_VOTE - 1}
    job.decide((0, 1))
    job.until_step(late_vote_trainer.LATE_VOTE + 3, 0)
    job.lose(0)
    job.until_step(job.last_step(late[0]) + 2, late[0])
    job.bring_back(0)
    job.succeeded()
    for rank in late:
        found = job.losses(rank)
        assert sorted(found) == list(range(1, STEPS + 1))
        assert found == pytest.approx(expected, abs=1e-5)
    assert job.losses(0).items() <= job.losses(late[0]).items()


@pytest.mark.parametrize("present", [(0,), (1, 3), (0, 1, 2), (0, 1, 2, 3)])
@pytest.mark.parametrize("per_rank", [1, 2, 7])
def test_each_sample_of_absent_replicas_is_taken_over_once(
    present: tuple[int, ...], per_rank: int
) -> None:
    taken = [
        (part.share, sample)
        for replica in present
        for part in parts_taken_over(present, replica, 4, per_rank)
        for sample in range(part.first, part.last)
    ]
    absent = sorted(set(range(4)).difference(present))
    assert sorted(taken) == [(share, sample) for share in absent for sample in range(per_rank)]
