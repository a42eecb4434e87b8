"""The default run leaves out no pair of features, the full run no feature."""

from __future__ import annotations

from tests.engine.grid.cell import FACTORS, single_feature_cells
from tests.engine.grid.cover import (
    WAYS_TO_SHARE,
    memory_of,
    pairs_of,
    pairwise_cells,
    possible_cells,
)


def test_every_two_values_that_can_meet_do_meet() -> None:
    wanted = {pair for cell in possible_cells() for pair in pairs_of(cell)}
    covered = {pair for cell in pairwise_cells() for pair in pairs_of(cell)}
    assert covered == wanted
    assert len(pairwise_cells()) < 40


def test_each_way_to_share_memory_meets_every_value() -> None:
    for way in WAYS_TO_SHARE:
        cells = [cell for cell in pairwise_cells() if way in memory_of(cell)]
        for name, values in FACTORS.items():
            assert {str(getattr(cell, name)) for cell in cells} == set(map(str, values)), name


def test_no_cell_of_the_cover_is_superfluous() -> None:
    cells = pairwise_cells()
    seen: set[object] = set()
    for cell in cells:
        new = set(pairs_of(cell)) - seen
        assert new, cell
        seen |= new


def test_every_value_stands_alone_in_some_cell_of_the_full_run() -> None:
    cells = single_feature_cells()
    for name, values in FACTORS.items():
        for value in values:
            alone = [c for c in cells if str(getattr(c, name)) == str(value)]
            assert any(len(c.features) <= 1 for c in alone), (name, value)
    assert all(len(cell.features) <= 1 for cell in cells)


def test_no_two_cells_have_one_name() -> None:
    cells = {*single_feature_cells(), *pairwise_cells()}
    assert len({str(cell) for cell in cells}) == len(cells)
