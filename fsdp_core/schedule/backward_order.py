"""Which unit backward will need next: the one that finished forward just before."""

from __future__ import annotations

from collections import defaultdict


class BackwardOrder:
    """The order of post-forwards, with multiplicity, read in reverse by backward.

    A unit may run forward several times before its backward; each run is one entry, and each
    pre-backward takes the unit's latest entry.
    """

    def __init__(self) -> None:
        self._order: list[int] = []
        self._positions: defaultdict[int, list[int]] = defaultdict(list)

    def record(self, unit: int) -> None:
        """Notes that `unit` finished a forward."""
        self._positions[unit].append(len(self._order))
        self._order.append(unit)

    def take(self, unit: int) -> int | None:
        """Unit to prefetch now that `unit` starts backward; None at the front or if unknown.

        Unknown are units of a second backward through one graph, whose entries are spent.
        """
        positions = self._positions[unit]
        if not positions:
            return None
        position = positions.pop()
        return self._order[position - 1] if position > 0 else None

    def __len__(self) -> int:
        return len(self._order)

    def clear(self) -> None:
        """Forgets the iteration."""
        self._order.clear()
        self._positions.clear()
