"""How the padded slices of a group lie in one communication buffer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TypeAlias

View: TypeAlias = tuple[tuple[int, ...], tuple[int, ...], int]
"""Shape, strides and start of a tensor within a row, as `torch.Tensor.as_strided` takes them."""


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

    def views(self, shapes: Sequence[tuple[int, ...]]) -> tuple[View, ...]:
        """Where within a row the first elements of each slice, of `shapes`, lie."""
        return tuple(
            (shape, _contiguous(shape), offset)
            for shape, offset in zip(shapes, self.offsets, strict=True)
        )


def _contiguous(shape: tuple[int, ...]) -> tuple[int, ...]:
    strides = accumulate(reversed(shape[1:]), lambda stride, size: stride * max(size, 1), initial=1)
    return tuple(strides)[::-1] if shape else ()
