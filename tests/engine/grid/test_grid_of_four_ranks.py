"""Four ranks train as the reference and as one process do, in every cell of the grid."""

from __future__ import annotations

import pytest

from tests.engine.gang import Gangs
from tests.engine.grid.cell import Cell
from tests.engine.grid.compare import check_cell

pytestmark = [pytest.mark.ranks, pytest.mark.system]

WORLDS = (4,)


def test_trains_as_the_reference_and_as_one_process(gangs: Gangs, cell: Cell, steps: int) -> None:
    gangs(cell.world).run(check_cell, cell, steps)
