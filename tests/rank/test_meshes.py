"""Jobs on meshes of several axes train as on one rank, and resume on any other mesh."""

from pathlib import Path

import pytest

from services.contract.specs import JobSpec
from tests.rank.gang import Ranks, spec_of

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
def test_losses_are_those_of_one_process(ranks: Ranks, library: Path, mesh: str) -> None:
    alone = ranks.start(spec_of(library), 1).succeeded().losses()
    together = ranks.start(on_mesh(library, **MESHES[mesh]), fence=2).succeeded()
    for rank in range(4):
        assert together.losses(rank) == pytest.approx(alone, abs=1e-5)


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("world", [1, 2])
def test_a_checkpoint_of_a_mesh_is_resumed_on_fewer_ranks(
    ranks: Ranks, library: Path, mesh: str, world: int
) -> None:
    whole = ranks.start(on_mesh(library, **MESHES[mesh])).succeeded()
    source = whole.committed(3).checkpoint_id
    rest = ranks.start(spec_of(library), world, fence=2, resume_from=source).succeeded()
    expected = {step: loss for step, loss in whole.losses().items() if step > 3}
    assert rest.losses() == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("mesh", MESHES)
def test_a_checkpoint_is_resumed_on_its_own_mesh_bit_for_bit(
    ranks: Ranks, library: Path, mesh: str
) -> None:
    whole = ranks.start(on_mesh(library, **MESHES[mesh])).succeeded()
    source = whole.committed(3).checkpoint_id
    again = ranks.start(on_mesh(library, **MESHES[mesh]), fence=2, resume_from=source).succeeded()
    assert again.losses() == {step: loss for step, loss in whole.losses().items() if step > 3}


def test_one_rank_can_hand_over_to_a_mesh(ranks: Ranks, library: Path) -> None:
    alone = ranks.start(spec_of(library), 1).succeeded()
    source = alone.committed(3).checkpoint_id
    rest = ranks.start(on_mesh(library, **MESHES["tp"]), fence=2, resume_from=source).succeeded()
    expected = {step: loss for step, loss in alone.losses().items() if step > 3}
    assert rest.losses() == pytest.approx(expected, abs=1e-5)


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
