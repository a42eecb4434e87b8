"""How the padded slices of a group lie in one communication buffer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate


@dataclass(frozen=True)
class Packing:
    """Slices laid end to end, the same on every rank; a whole buffer is one row per rank.

    The order equals the reference's (parameters in the order of the group), which makes the
    sums of a reduce-scatter equal to its, bit for bit.

    Attributes:
        sizes: Elements of each padded slice.
        parts: Ranks, hence rows.
    """

    sizes: tuple[int, ...]
    parts: int

    @classmethod
    def of(cls, sizes: Sequence[int], parts: int) -> Packing:
        """Packs slices of `sizes` elements over `parts` ranks."""
        return cls(tuple(sizes), parts)

    @property
    def row(self) -> int:
        """Elements that one rank contributes to a gather or receives from a reduction."""
        return sum(self.sizes)

    @property
    def total(self) -> int:
        """Elements of the whole buffer."""
        return self.row * self.parts

    @property
    def offsets(self) -> tuple[int, ...]:
        """Start of each slice within a row."""
        return tuple(accumulate(self.sizes, initial=0))[:-1]
