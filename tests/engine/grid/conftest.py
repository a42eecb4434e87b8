"""Each cell of the chosen grid becomes one test of the module for its number of ranks."""

from __future__ import annotations

import pytest

from tests.engine.grid.cell import single_feature_cells
from tests.engine.grid.cover import pairwise_cells


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "cell" in metafunc.fixturenames:
        cells = list(pairwise_cells())
        if metafunc.config.getoption("--grid") == "full":
            cells = list(dict.fromkeys([*single_feature_cells(), *cells]))
        mine = [cell for cell in cells if cell.world in metafunc.module.WORLDS]
        metafunc.parametrize("cell", mine, ids=str)


@pytest.fixture
def steps(request: pytest.FixtureRequest) -> int:
    """Of each training: the full run carries rounding further than the first steps can."""
    return 10 if request.config.getoption("--grid") == "full" else 5
