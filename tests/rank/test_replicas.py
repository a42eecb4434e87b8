"""A job that continues without a lost replica has the losses of the undisturbed run."""

from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from services.contract.jobs.specs import JobSpec
from services.contract.messages.rank_pipe import (
    RankCheckpointBegan,
    RankEpochBroken,
    RankFailed,
    RankFinished,
    RankVote,
)
from services.worker.rank.loop.share_gradients import parts_taken_over
from services.worker.rank.process.seat import DEFAULT_TRAINER
from tests.rank import late_vote_trainer, parting_trainer
from tests.rank.gang import Trained, spec_of
from tests.rank.replicas import ReplicaJob

pytestmark = [pytest.mark.ranks, pytest.mark.system]

STEPS = 40


USER = "tests.rank.user_trainables"


def lasting(
    library: Path, replicas: int, shards: int = 1, tp: int = 1, **parts: dict[str, Any]
) -> JobSpec:
    """Two samples of a share on each rank, in two passes."""
    given: dict[str, dict[str, Any]] = {
        "train": {"steps": STEPS, "global_batch": 12, "seed": 7, "micro_batch": 1},
        "mesh": {"dp_replicate": replicas, "dp_shard": shards, "tp": tp},
        "resources": {"ranks": replicas * shards * tp},
        "faults": {"on_replica_loss": "continue"},
        "checkpoint": {"every_steps": 0},
    }
    return spec_of(library, **given | parts)


def undisturbed(trained: Trained, spec: JobSpec) -> dict[int, float]:
    """Losses of the engine's own all-reduce over replicas; the same whatever is saved."""
    changes = {"faults": {}, "checkpoint": {"every_steps": 0}}
    plain = JobSpec.model_validate(spec.model_dump(mode="json") | changes)
    return trained.of(plain, spec.resources.ranks).losses()


@pytest.fixture
def started(tmp_path: Path) -> Iterator[Callable[..., ReplicaJob]]:
    jobs: list[ReplicaJob] = []

    def start(spec: JobSpec, trainer: str = DEFAULT_TRAINER) -> ReplicaJob:
        root = tmp_path / str(len(jobs))
        root.mkdir()
        jobs.append(ReplicaJob(root, spec, trainer))
        jobs[-1].start()
        return jobs[-1]

    yield start
    for job in jobs:
        job.close()


def test_a_lost_replica_costs_no_step_and_comes_back_from_memory(
    started: Callable[..., ReplicaJob], trained: Trained, library: Path
) -> None:
    spec = lasting(library, 3)
    expected = undisturbed(trained, spec)
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


def test_whoever_computes_a_share_draws_the_same_random_numbers(
    started: Callable[..., ReplicaJob], library: Path
) -> None:
    """Of torch, Python and NumPy."""
    spec = lasting(library, 2, model={"factory": "tests.rank.user_models:Noisy", "args": {}})
    whole = started(spec)
    whole.succeeded()
    job = started(spec)
    job.until_step(4, 1)
    job.lose(0)
    job.succeeded()
    assert job.losses(1) == pytest.approx(whole.losses(1), abs=1e-5)


def test_a_replica_that_is_cut_off_holds_up_no_other(
    started: Callable[..., ReplicaJob], trained: Trained, library: Path
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
    assert job.losses(0) == pytest.approx(undisturbed(trained, spec), abs=1e-5)


def test_a_step_that_one_replica_made_is_made_by_all(
    started: Callable[..., ReplicaJob], trained: Trained, library: Path
) -> None:
    spec = lasting(library, 2, shards=2)
    expected = undisturbed(trained, spec)
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


def test_a_lost_replica_that_lives_writes_nothing_and_does_not_return_by_itself(
    started: Callable[..., ReplicaJob], trained: Trained, library: Path
) -> None:
    """Its node lost the way to Redis, and not the one to the others; it wrote the checkpoints until then."""
    spec = lasting(library, 3, checkpoint={"every_steps": 4})
    job = started(spec, f"{parting_trainer.__name__}:late")
    job.until_step(parting_trainer.LATE_AT - 1, 0)
    told = job.decide((1, 2))
    job.until(lambda: all(job.of_kind(rank, RankFinished) for rank in (1, 2)))
    (job.root / parting_trainer.GO).touch()
    job.until(lambda: bool(job.of_kind(0, RankEpochBroken)))
    assert job.last_step(0) == parting_trainer.LATE_AT - 1
    assert [each.step for each in job.of_kind(0, RankCheckpointBegan)] == [4]
    assert [each.step for each in job.of_kind(0, RankVote)] == [4]
    assert [each.step for each in job.of_kind(1, RankVote)] == list(range(8, STEPS + 1, 4))
    assert not job.of_kind(0, RankFinished)
    job.order(0, told)
    job.until(lambda: bool(job.of_kind(0, RankFailed)))
    assert "it was given up for lost" in job.of_kind(0, RankFailed)[0].error
    job.succeeded()
    assert job.losses(1) == pytest.approx(undisturbed(trained, spec), abs=1e-5)


def test_connections_that_break_without_a_death_cost_no_step(
    started: Callable[..., ReplicaJob], trained: Trained, library: Path
) -> None:
    spec = lasting(library, 3)
    job = started(spec, f"{parting_trainer.__name__}:breaking")
    job.until(lambda: all(job.of_kind(rank, RankEpochBroken) for rank in range(3)))
    assert [each.epoch for each in job.of_kind(2, RankEpochBroken)] == [1]
    assert job.last_step(0) == parting_trainer.BREAKS_AT - 1
    job.decide((0, 1, 2))
    job.succeeded()
    assert job.losses(1) == pytest.approx(undisturbed(trained, spec), abs=1e-5)


def test_a_replica_that_returns_as_the_others_end_ends_with_them(
    started: Callable[..., ReplicaJob], trained: Trained, library: Path
) -> None:
    spec = lasting(library, 3)
    job = started(spec, f"{parting_trainer.__name__}:held")
    job.until_step(4, 1)
    job.lose(2)
    job.until_step(STEPS, 0)
    job.until_step(STEPS, 1)
    job.bring_back(2)
    (job.root / parting_trainer.GO).touch()
    job.succeeded()
    assert job.of_kind(2, RankFinished)[0].step == STEPS
    assert job.losses(1) == pytest.approx(undisturbed(trained, spec), abs=1e-5)


def test_replicas_of_tensor_parallel_ranks_are_lost_and_return(
    started: Callable[..., ReplicaJob], trained: Trained, library: Path
) -> None:
    few = {"steps": 20, "global_batch": 12, "seed": 7}
    spec = lasting(library, 2, tp=2, train=few)
    job = started(spec, f"{parting_trainer.__name__}:held")
    job.until_step(4, 2)
    job.lose(0)
    job.until_step(few["steps"] // 2, 2)
    job.bring_back(0)
    (job.root / parting_trainer.GO).touch()
    job.succeeded()
    assert job.losses(3) == pytest.approx(undisturbed(trained, spec), abs=1e-5)
    assert job.losses(0).items() <= job.losses(2).items()
    assert [job.of_kind(rank, RankFinished)[0].step for rank in range(4)] == [few["steps"]] * 4


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        (
            {"model": f"{USER}:TokenLoss", "data": f"{USER}:Masked"},
            "not possible with labels that mask tokens",
        ),
        (
            {
                "model": "tests.rank.user_vision:Classifier",
                "data": "tests.rank.user_sets:Flow",
                "loss": "cross_entropy",
            },
            "needs data that is read by its place",
        ),
        ({"trainable": f"{USER}:Gan"}, "not possible with a trainable that steps itself"),
    ],
)
def test_what_cannot_go_on_without_a_replica_is_refused_as_it_starts(
    tmp_path: Path, library: Path, changes: dict[str, str], why: str
) -> None:
    named = {part: {"factory": factory} for part, factory in changes.items()}
    plain = lasting(library, 2).model_dump(mode="json") | {"model": None, "data": None}
    with closing(ReplicaJob(tmp_path, JobSpec.model_validate(plain | named))) as job:
        job.launch(0)
        job.until(lambda: bool(job.of_kind(0, RankFailed)))
        assert why in job.of_kind(0, RankFailed)[0].error


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
