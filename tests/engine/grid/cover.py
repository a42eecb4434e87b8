"""Few cells in which every two values that can meet do meet.

Greedy over all possible cells: the libraries for pairwise testing stop early under constraints
such as ours (allpairspy 2.5 left 30 of 337 pairs uncovered), and the number of cells is small.
"""

from __future__ import annotations

from functools import cache
from itertools import combinations, product

from fsdp_core.policy import SharedMemoryPolicy
from tests.engine.grid.cell import FACTORS, Cell, cell_of

WAYS_TO_SHARE = (SharedMemoryPolicy(), SharedMemoryPolicy(share_storage=True))

Pair = tuple[tuple[str, str], tuple[str, str]]


@cache
def pairwise_cells() -> tuple[Cell, ...]:
    """The cover, the same in every process."""
    cells = possible_cells()
    numbers: dict[Pair, int] = {}
    masks = [
        sum(1 << numbers.setdefault(pair, len(numbers)) for pair in pairs_of(cell))
        for cell in cells
    ]
    missing = (1 << len(numbers)) - 1
    chosen = []
    while missing:
        best = max(range(len(cells)), key=lambda index: (masks[index] & missing).bit_count())
        chosen.append(cells[best])
        missing &= ~masks[best]
    return tuple(chosen)


@cache
def memory_of(cell: Cell) -> tuple[SharedMemoryPolicy, ...]:
    """By which ways of sharing memory the cell is trained, too.

    A cell of the cover has one of them, such that each meets every value; any other cell has both.
    """
    return _memories().get(cell, WAYS_TO_SHARE)


@cache
def _memories() -> dict[Cell, tuple[SharedMemoryPolicy, ...]]:
    met: set[object] = set()
    chosen: dict[Cell, tuple[SharedMemoryPolicy, ...]] = {}
    for cell in pairwise_cells():
        new = {
            way: {(way, name, str(getattr(cell, name))) for name in FACTORS} - met
            for way in WAYS_TO_SHARE
        }
        way = max(WAYS_TO_SHARE, key=lambda each: len(new[each]))
        met |= new[way]
        chosen[cell] = (way,)
    return chosen


def pairs_of(cell: Cell) -> list[Pair]:
    """The pairs of values that meet in a cell."""
    values = [(name, str(getattr(cell, name))) for name in FACTORS]
    return list(combinations(values, 2))


def possible_cells() -> list[Cell]:
    """Every combination of features that the numbers of ranks allow; thousands."""
    every = (dict(zip(FACTORS, values, strict=True)) for values in product(*FACTORS.values()))
    return [cell for cell in map(cell_of, every) if cell.is_possible]
