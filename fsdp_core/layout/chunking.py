"""How one dim of a tensor is split over the ranks of a mesh axis."""

from __future__ import annotations

from dataclasses import dataclass

from fsdp_core.errors import ArgumentError


@dataclass(frozen=True)
class Chunking:
    """`length` rows over `parts` ranks, in the manner of ``torch.chunk``.

    Every part but the last non-empty one has `width` rows; parts past the end are empty. So
    the parts, padded to `width` each and laid end to end, are the tensor followed by padding
    only: a gather needs no gaps closed.

    Attributes:
        length: Rows of the whole dim, at least 0.
        parts: Ranks that share it, at least 1.
    """

    length: int
    parts: int

    def __post_init__(self) -> None:
        if self.length < 0 or self.parts < 1:
            raise ArgumentError(
                f"A dim of {self.length} rows cannot be split over {self.parts} ranks."
            )

    @property
    def width(self) -> int:
        """Rows each part is padded to: ceil(length / parts)."""
        return -(-self.length // self.parts)

    @property
    def padded_length(self) -> int:
        """Rows of all padded parts together."""
        return self.width * self.parts

    def start(self, part: int) -> int:
        """First row of `part` in the whole dim; `length` for parts past the end."""
        return min(self.width * self._checked(part), self.length)

    def size(self, part: int) -> int:
        """Rows of `part` without padding, from 0 to `width`."""
        return min(self.width * (self._checked(part) + 1), self.length) - self.start(part)

    def _checked(self, part: int) -> int:
        if not 0 <= part < self.parts:
            raise ArgumentError(f"Part {part} does not exist among {self.parts}.")
        return part
