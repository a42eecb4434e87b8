"""Tensors as they lie in memory, cut into slices and put together again as a `Slicing` says.

A padded slice begins with the slice's own elements without a gap, whichever dim is cut: what
users hold is dense. Fused optimizers would silently go wrong on anything else.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import TYPE_CHECKING, Self

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator

    from fsdp_core.layout import Slicing


@dataclass(frozen=True)
class MemoryOrder:
    """Between a tensor as users see it and the contiguous tensor that lies in memory.

    Attributes:
        dims: The tensor's dims, the outermost in memory first. (0, 1, ...) for a contiguous
            tensor; channels-last and transposed ones have another.
    """

    dims: tuple[int, ...]

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Self:
        """That of `tensor`; if it has gaps in memory, that of a contiguous one."""
        natural = tuple(range(tensor.ndim))
        if tensor.is_contiguous():
            return cls(natural)
        strides = tensor.stride()
        dims = tuple(sorted(natural, key=lambda dim: -strides[dim]))
        return cls(dims if tensor.permute(dims).is_contiguous() else natural)

    def physical(self, seen: torch.Tensor) -> torch.Tensor:
        """The tensor as it lies in memory; no copy."""
        # A tensor subclass need not know how to be permuted into what it is.
        return seen if self._is_natural else seen.permute(self.dims)

    def seen(self, physical: torch.Tensor) -> torch.Tensor:
        """Undoes `physical`."""
        return physical if self._is_natural else physical.permute(self._inverse)

    def seen_shape(self, physical: Sequence[int]) -> tuple[int, ...]:
        """The shape that `seen` gives to a tensor of this shape."""
        return tuple(physical[dim] for dim in self._inverse)

    @cached_property
    def _is_natural(self) -> bool:
        return self.dims == tuple(range(len(self.dims)))

    @cached_property
    def _inverse(self) -> tuple[int, ...]:
        return tuple(self.dims.index(dim) for dim in range(len(self.dims)))


def cut(whole: torch.Tensor, slicing: Slicing, part: int) -> torch.Tensor:
    """The slice of `part`, padded with zeros, in memory of its own."""
    padded = whole.new_zeros(slicing.padded_shape)
    if slicing.dim is None:
        return padded.copy_(whole)
    start, length = slicing.bounds(part)
    if length:
        own(padded, slicing, part).copy_(whole.narrow(slicing.dim, start, length))
    return padded


def pad(local: torch.Tensor, slicing: Slicing) -> torch.Tensor:
    """A slice without padding, padded with zeros, in memory of its own."""
    padded = local.new_zeros(slicing.padded_shape)
    _lead(padded, slicing, local.shape).copy_(local)
    return padded


def own(padded: torch.Tensor, slicing: Slicing, part: int) -> torch.Tensor:
    """The view of a padded slice without its padding; contiguous."""
    return _lead(padded, slicing, slicing.shape_of(part))


def join(rows: torch.Tensor, slicing: Slicing, whole: torch.Tensor) -> None:
    """Copies the padded slices of all ranks into the tensor they were cut from.

    Args:
        rows: (parts, row) elements.
        slicing: How they were cut.
        whole: Written; of `slicing.shape`.
    """
    if slicing.dim is None:
        # Every rank sent the same; the first is as good as any.
        whole.copy_(rows[0].view(slicing.shape))
        return
    padded = rows.view(slicing.parts, *slicing.padded_shape)
    for of_whole, of_padded in _pairs(whole, padded, slicing, slicing.dim):
        of_whole.copy_(of_padded)


def stack(whole: torch.Tensor, slicing: Slicing) -> torch.Tensor:
    """`whole` such that cutting it along its first dim gives the padded slices in rank order.

    A tensor that is cut along its first dim anyway is returned as it is, unpadded.
    """
    if slicing.dim == 0:
        return whole
    if slicing.dim is None:
        return whole.expand(slicing.parts, *slicing.shape)
    stacked = whole.new_zeros((slicing.parts, *slicing.padded_shape))
    for of_whole, of_padded in _pairs(whole, stacked, slicing, slicing.dim):
        of_padded.copy_(of_whole)
    return stacked


def _pairs(
    whole: torch.Tensor, padded: torch.Tensor, slicing: Slicing, dim: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Views of a whole and of its padded slices that are equal: of all full slices, of the rest.

    However many ranks there are, these are two at most, so two kernels.
    """
    width, size = slicing.padded_shape[dim], slicing.shape[dim]
    full = size // width if width else 0
    if full:
        # (..., full * width, ...) as (full, ..., width, ...)
        shape = (*slicing.shape[:dim], full, width, *slicing.shape[dim + 1 :])
        parts = whole.narrow(dim, 0, full * width).view(shape)
        yield parts.movedim(dim, 0), padded[:full]
    if rest := size - full * width:
        yield whole.narrow(dim, full * width, rest), own(padded[full], slicing, full)


def _lead(padded: torch.Tensor, slicing: Slicing, shape: Sequence[int]) -> torch.Tensor:
    if slicing.dim is None or tuple(shape) == slicing.padded_shape:
        return padded
    if slicing.dim == 0:
        # As rows of it: a tensor subclass need not know more.
        return padded.narrow(0, 0, shape[0])
    return padded.view(-1)[: prod(shape)].view(shape)
