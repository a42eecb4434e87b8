"""How the padded slices of a group lie in one communication buffer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Final, TypeAlias

from fsdp_core.layout.slicing import Slicing

_ALIGNMENT: Final = 64
_SMALL_BYTES: Final = 1 << 18
"""Of whole gradients: so many are copied in about the time that cutting them takes."""

View: TypeAlias = tuple[tuple[int, ...], tuple[int, ...], int]
"""Shape, strides and start of a tensor within a row, as `torch.Tensor.as_strided` takes them."""


@dataclass(frozen=True)
class Packing:
    """Slices laid end to end, the same on every rank; a whole buffer is one row per rank.

    The order equals the reference's (parameters in the order of the group), which makes the
    sums of a reduce-scatter equal to its, bit for bit.

    Attributes:
        sizes: Elements of each padded slice.
        parts: Ranks, and so rows.
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


def aligned(nbytes: int) -> int:
    """`nbytes` up to where the next tensor in shared memory begins: whole cache lines."""
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


def are_left_in_rows(slicings: Sequence[Slicing], itemsize: int) -> bool:
    """Whether a reduction in shared memory leaves tensors as one row for each rank, its own too.

    So it does with small ones that are cut evenly; of others each has a place of its own.

    Args:
        slicings: How each is cut over the ranks.
        itemsize: Bytes of an element on its way.
    """
    is_small = sum(each.total for each in slicings) * itemsize <= _SMALL_BYTES
    return is_small and all(map(_is_even, slicings))


def _is_even(slicing: Slicing) -> bool:
    """Whether the slices of all ranks, end to end, are the tensor; or each has the whole, 1D."""
    if slicing.dim is None:
        return len(slicing.shape) == 1
    return slicing.dim == 0 and slicing.row * slicing.parts == slicing.total
