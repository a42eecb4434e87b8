"""A job that continues without a lost replica has the losses of the undisturbed run."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from services.contract.jobs.specs import JobSpec
from tests.rank.gang import Ranks, spec_of
from tests.rank.replicas import ReplicaJob

pytestmark = pytest.mark.ranks

STEPS = 60


def lasting(library: Path, replicas: int, shards: int = 1, **parts: dict[str, Any]) -> JobSpec:
    base: dict[str, dict[str, Any]] = {
        "train": {"steps": STEPS, "global_batch": 12, "seed": 7, "micro_batch": 1},
        "mesh": {"dp_replicate": replicas, "dp_shard": shards},
        "resources": {"ranks": replicas * shards},
        "faults": {"on_replica_loss": "continue"},
        "checkpoint": {"every_steps": 0},
    }
    return spec_of(library, **(base | parts))


@pytest.fixture
def started(tmp_path: Path) -> Iterator[Callable[[JobSpec], ReplicaJob]]:
    jobs: list[ReplicaJob] = []

    def start(spec: JobSpec) -> ReplicaJob:
        root = tmp_path / str(len(jobs))
        root.mkdir()
        jobs.append(ReplicaJob(root, spec))
        jobs[-1].start()
        return jobs[-1]

    yield start
    for job in jobs:
        job.close()


def test_replicas_train_as_the_engine_does_over_dp_replicate(
    started: Callable[[JobSpec], ReplicaJob], ranks: Ranks, library: Path
) -> None:
    spec = lasting(library, 2)
    plain = spec.model_copy(
        update={"faults": spec.faults.model_copy(update={"on_replica_loss": None})}
    )
    fixed = ranks.start(plain).succeeded().losses()
    job = started(spec)
    job.succeeded()
    assert sorted(job.losses(0)) == sorted(fixed)
    assert job.losses(0) == job.losses(1)
    assert job.losses(0) == pytest.approx(fixed, abs=1e-5)


def test_a_lost_replica_costs_no_step_and_comes_back_from_memory(
    started: Callable[[JobSpec], ReplicaJob], library: Path
) -> None:
    undisturbed = started(lasting(library, 3))
    undisturbed.succeeded()
    expected = undisturbed.losses(1)
    job = started(lasting(library, 3))
    job.until_step(8, 1)
    job.lose(0)
    job.until_step(job.last_step(1) + 5, 1)
    job.bring_back(0)
    job.until_step(job.last_step(1) + 8, 0)
    job.lose(2)
    job.succeeded()
    found = job.losses(1)
    assert sorted(found) == list(range(1, STEPS + 1))
    assert found == pytest.approx(expected, abs=1e-5)
    returned = job.losses(0)
    assert returned
    assert all(found[step] == loss for step, loss in returned.items())
