"""In which order the dims of a tensor lie in memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Self

import torch


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
