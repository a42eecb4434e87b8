"""Jobs on meshes of several axes train as on one rank, and resume on any other mesh."""

from pathlib import Path

import pytest

from services.contract.jobs.specs import JobSpec
from tests.rank.gang import Ranks, Trained, spec_of

pytestmark = pytest.mark.system

MESHES = {
    "hsdp": {"dp_replicate": 2, "dp_shard": 2},
    "tp": {"dp_shard": 2, "tp": 2},
    "replicas-tp": {"dp_replicate": 2, "tp": 2},
}


def on_mesh(library: Path, **sizes: int) -> JobSpec:
    ranks = 1
    for size in sizes.values():
        ranks *= size
    return spec_of(library, mesh=dict(sizes), resources={"ranks": ranks})


@pytest.mark.parametrize("mesh", MESHES)
def test_losses_are_those_of_one_process(trained: Trained, library: Path, mesh: str) -> None:
    alone = trained.of(spec_of(library), 1).losses()
    together = trained.of(on_mesh(library, **MESHES[mesh]))
    for rank in range(4):
        assert together.losses(rank) == pytest.approx(alone, abs=1e-5)


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("world", [1, 2])
def test_a_checkpoint_of_a_mesh_is_resumed_on_fewer_ranks(
    trained: Trained, ranks: Ranks, library: Path, mesh: str, world: int
) -> None:
    job = on_mesh(library, **MESHES[mesh])
    source = trained.committed(3, ranks, job).checkpoint_id
    rest = ranks.start(spec_of(library), world, fence=2, resume_from=source).succeeded()
    assert rest.losses() == pytest.approx(trained.of(job).losses_after(3), abs=1e-5)


@pytest.mark.parametrize("mesh", MESHES)
def test_a_checkpoint_is_resumed_on_its_own_mesh_bit_for_bit(
    trained: Trained, ranks: Ranks, library: Path, mesh: str
) -> None:
    job = on_mesh(library, **MESHES[mesh])
    source = trained.committed(3, ranks, job).checkpoint_id
    again = ranks.start(job, fence=2, resume_from=source).succeeded()
    assert again.losses() == trained.of(job).losses_after(3)


def test_one_rank_can_hand_over_to_a_mesh(trained: Trained, ranks: Ranks, library: Path) -> None:
    source = trained.committed(3, ranks, spec_of(library), 1).checkpoint_id
    job = on_mesh(library, **MESHES["tp"])
    rest = ranks.start(job, fence=2, resume_from=source).succeeded()
    alone = trained.of(spec_of(library), 1)
    assert rest.losses() == pytest.approx(alone.losses_after(3), abs=1e-5)


def test_a_split_that_cuts_through_a_head_is_named(ranks: Ranks, library: Path) -> None:
    spec = spec_of(
        library,
        model={"args": {"dim": 24, "layers": 1, "heads": 3, "hidden": 32}},
        mesh={"tp": 2},
        resources={"ranks": 2},
    )
    attempt = ranks.start(spec)
    assert 1 in attempt.ended()
    assert "choose a tp that divides heads" in attempt.account()
