"""How a tensor is cut into one slice per rank."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from fsdp_core.errors import ArgumentError
from fsdp_core.layout.chunking import Chunking


@dataclass(frozen=True)
class Slicing:
    """A tensor of `shape` over `parts` ranks, cut along `dim`; or held whole by each of them.

    Slices travel padded: all have `padded_shape`, so that a collective sees equal rows. Only
    along the first dim do padded slices, laid end to end, form the tensor by themselves.

    Attributes:
        shape: Of the whole tensor, in the order in which it lies in memory.
        dim: The dim that is cut; None: every rank holds the whole.
        parts: Ranks, at least 1.
    """

    shape: tuple[int, ...]
    dim: int | None
    parts: int

    def __post_init__(self) -> None:
        if self.dim is not None and not 0 <= self.dim < len(self.shape):
            raise ArgumentError(f"Dim {self.dim} does not exist in shape {self.shape}.")
        if self.parts < 1:
            raise ArgumentError(f"{self.shape} cannot be cut for {self.parts} ranks.")

    @classmethod
    def of(cls, shape: Sequence[int], dim: int | None, parts: int) -> Slicing:
        """Cuts `shape` along `dim`."""
        return cls(tuple(shape), dim, parts)

    @property
    def padded_shape(self) -> tuple[int, ...]:
        """Of every slice as it travels."""
        if self.dim is None:
            return self.shape
        return self._with_rows(self._chunking.width)

    @cached_property
    def row(self) -> int:
        """Elements of a padded slice."""
        return math.prod(self.padded_shape)

    @cached_property
    def total(self) -> int:
        """Elements of the whole tensor."""
        return math.prod(self.shape)

    @property
    def leads(self) -> bool:
        """Whether the padded slices end to end are the tensor followed by padding only."""
        return self.dim == 0 or self.parts == 1

    def shape_of(self, part: int) -> tuple[int, ...]:
        """Of the slice of `part`, without padding; empty along `dim` past the end."""
        if self.dim is None:
            return self.shape
        return self._with_rows(self._chunking.size(part))

    def bounds(self, part: int) -> tuple[int, int]:
        """(start, length) of the slice of `part` along `dim`.

        Raises:
            ArgumentError: Nothing is cut.
        """
        return self._chunking.start(part), self._chunking.size(part)

    @cached_property
    def _chunking(self) -> Chunking:
        if self.dim is None:
            raise ArgumentError(f"{self.shape} is held whole by every rank and has no chunks.")
        return Chunking(self.shape[self.dim], self.parts)

    def _with_rows(self, rows: int) -> tuple[int, ...]:
        dim = 0 if self.dim is None else self.dim
        return (*self.shape[:dim], rows, *self.shape[dim + 1 :])
