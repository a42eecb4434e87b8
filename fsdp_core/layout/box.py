"""Axis-parallel boxes of elements: intersection, and whether boxes tile a tensor."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from fsdp_core.errors import ArgumentError, MissingShardError, OverlappingShardsError


@dataclass(frozen=True)
class Box:
    """A box of a tensor: `offsets[d] <= index[d] < offsets[d] + shape[d]` for each dim d.

    A zero-dimensional box holds exactly one element.
    """

    offsets: tuple[int, ...]
    shape: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.offsets) != len(self.shape):
            raise ArgumentError(f"Offsets {self.offsets} and shape {self.shape} differ in rank.")
        if any(value < 0 for value in (*self.offsets, *self.shape)):
            raise ArgumentError(f"Negative offset or size: {self.offsets}, {self.shape}.")

    @classmethod
    def whole(cls, shape: Sequence[int]) -> Box:
        """The box of a whole tensor of `shape`."""
        return cls((0,) * len(shape), tuple(shape))

    @property
    def volume(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def ends(self) -> tuple[int, ...]:
        """Exclusive upper corner."""
        return tuple(o + s for o, s in zip(self.offsets, self.shape, strict=True))

    def intersect(self, other: Box) -> Box | None:
        """The common box, or None where the two share no element."""
        if len(self.shape) != len(other.shape):
            raise ArgumentError(f"{self} and {other} differ in rank.")
        starts = tuple(max(a, b) for a, b in zip(self.offsets, other.offsets, strict=True))
        ends = tuple(min(a, b) for a, b in zip(self.ends, other.ends, strict=True))
        if any(end <= start for start, end in zip(starts, ends, strict=True)):
            return None
        return Box(starts, tuple(e - s for s, e in zip(starts, ends, strict=True)))

    def slices_within(self, outer: Box) -> tuple[slice, ...]:
        """This box as slices of a tensor that holds `outer` alone."""
        if any(s < o for s, o in zip(self.offsets, outer.offsets, strict=True)) or any(
            s > o for s, o in zip(self.ends, outer.ends, strict=True)
        ):
            raise ArgumentError(f"{self} does not lie within {outer}.")
        return tuple(
            slice(s - o, s - o + n)
            for s, o, n in zip(self.offsets, outer.offsets, self.shape, strict=True)
        )


def check_tiling(name: str, shape: Sequence[int], boxes: Sequence[Box]) -> None:
    """Checks that `boxes` hold every element of a tensor of `shape` exactly once.

    Empty boxes are ignored, and a tensor without elements needs none.

    Args:
        name: Tensor's name, for the error.
        shape: Global shape.
        boxes: In any order.

    Raises:
        OverlappingShardsError: Two boxes share an element.
        MissingShardError: Some element is in no box, or a box reaches outside the tensor.
    """
    whole = Box.whole(shape)
    held = sorted((box for box in boxes if box.volume), key=lambda box: (box.offsets, box.shape))
    # Sweep along the first dim: only boxes that reach past the present start can still overlap.
    active: list[Box] = []
    for box in held:
        if box.intersect(whole) != box:
            raise MissingShardError(f"{name!r}: saved box {box} reaches outside {tuple(shape)}.")
        active = [other for other in active if other.ends[:1] > box.offsets[:1] or not shape]
        for other in active:
            if (common := box.intersect(other)) is not None:
                raise OverlappingShardsError(
                    f"{name!r}: elements {common.offsets}..{common.ends} are saved twice. "
                    "Load the shards of one checkpoint only."
                )
        active.append(box)
    covered = sum(box.volume for box in held)
    if covered != whole.volume:
        raise MissingShardError(
            f"{name!r}: saved shards hold {covered} of {whole.volume} elements of shape "
            f"{tuple(shape)}. Give the shards of every rank that saved the checkpoint."
        )
