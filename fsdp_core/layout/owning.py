"""How tensors that ranks own whole lie in a communication buffer, and who owns which."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from fsdp_core.errors import ArgumentError


@dataclass(frozen=True)
class OwnedPacking:
    """Row r of the buffer holds what part r owns, end to end; rows are as long as the longest.

    Attributes:
        sizes: Elements of each tensor.
        owners: The part that owns each.
        parts: Rows.
    """

    sizes: tuple[int, ...]
    owners: tuple[int, ...]
    parts: int

    @cached_property
    def offsets(self) -> tuple[int, ...]:
        """Start of each tensor within its owner's row."""
        filled = [0] * self.parts
        starts = []
        for size, owner in zip(self.sizes, self.owners, strict=True):
            starts.append(filled[owner])
            filled[owner] += size
        return tuple(starts)

    @cached_property
    def row(self) -> int:
        """Elements of a row."""
        ends = (start + size for start, size in zip(self.offsets, self.sizes, strict=True))
        return max(ends, default=0)

    @property
    def total(self) -> int:
        """Elements of the buffer."""
        return self.row * self.parts


def balanced_owners(
    sizes: Sequence[int], wanted: Sequence[int | None], parts: int
) -> tuple[int, ...]:
    """An owner for each tensor, such that the longest row is short.

    What is wanted is kept. The others go, the largest first, to the part that owns least so far,
    the lowest of equals: at most 4/3 of the best possible where nothing is wanted (Graham,
    "Bounds on Multiprocessing Timing Anomalies", 1969). Equal input gives equal output.

    Args:
        sizes: Of the tensors.
        wanted: The owner of each; None leaves it open.
        parts: How many owners there may be.

    Raises:
        ArgumentError: A wanted owner does not exist.
    """
    loads = [0] * parts
    owners: dict[int, int] = {}
    for index, (size, owner) in enumerate(zip(sizes, wanted, strict=True)):
        if owner is None:
            continue
        if not 0 <= owner < parts:
            raise ArgumentError(f"Rank {owner} cannot own a parameter among {parts} ranks.")
        owners[index] = owner
        loads[owner] += size
    still_open = [index for index in range(len(sizes)) if index not in owners]
    for index in sorted(still_open, key=lambda index: -sizes[index]):
        owners[index] = min(range(parts), key=lambda part: loads[part])
        loads[owners[index]] += sizes[index]
    return tuple(owners[index] for index in range(len(sizes)))
