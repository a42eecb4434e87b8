"""Filling state from boxes that were saved at any world size."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from fsdp_core.checkpoint.local_shards import dtype_word, local_part
from fsdp_core.errors import MetaParameterError, ShardMismatchError
from fsdp_core.layout import Box, check_tiling


@dataclass(frozen=True)
class SavedShard:
    """A box that was saved, and how to read parts of it.

    Attributes:
        fqn: Name in the state.
        global_shape: Of the whole tensor.
        offsets: Of the box in the whole tensor.
        shape: Of the box.
        read: Takes one slice per dim, relative to the box, and returns those elements.
    """

    fqn: str
    global_shape: tuple[int, ...]
    offsets: tuple[int, ...]
    shape: tuple[int, ...]
    read: Callable[[tuple[slice, ...]], torch.Tensor]

    @property
    def box(self) -> Box:
        """The box."""
        return Box(self.offsets, self.shape)


@torch.no_grad()
def fill_from_shards(target: Mapping[str, torch.Tensor], saved: Iterable[SavedShard]) -> None:
    """Fills this rank's elements of `target`, reading only the boxes that hold some of them.

    Every name is checked before the first element is written, so an error leaves the values
    whole; a dtype can only be seen in what is read.

    Args:
        target: Name to tensor, DTensor or not; written in place.
        saved: Boxes of all ranks that saved; names that are not in `target` are ignored.

    Raises:
        MissingShardError: Some elements of a tensor were not saved.
        OverlappingShardsError: Some were saved twice.
        ShardMismatchError: A tensor was saved with another shape or dtype.
        MetaParameterError: A tensor has no memory to fill.
    """
    index: defaultdict[str, list[SavedShard]] = defaultdict(list)
    for shard in saved:
        if shard.fqn in target:
            index[shard.fqn].append(shard)
    for fqn, tensor in target.items():
        _check(fqn, tensor, index[fqn])
    for fqn, tensor in target.items():
        wanted, local = local_part(tensor)
        for shard in index[fqn]:
            if (common := wanted.intersect(shard.box)) is not None:
                _copy(shard, common, local[common.slices_within(wanted)])


def _check(fqn: str, tensor: torch.Tensor, shards: Sequence[SavedShard]) -> None:
    if tensor.is_meta:
        raise MetaParameterError(
            f"{fqn!r} is still on the meta device. Call model.to_empty(device=...) before loading."
        )
    shape = tuple(tensor.shape)
    for shard in shards:
        if tuple(shard.global_shape) != shape or len(shard.shape) != len(shape):
            raise ShardMismatchError(
                f"{fqn!r} has shape {shape}, but was saved with {tuple(shard.global_shape)}. "
                "Build the model with the configuration it was saved with."
            )
    check_tiling(fqn, shape, [shard.box for shard in shards])


def _copy(shard: SavedShard, common: Box, destination: torch.Tensor) -> None:
    values = shard.read(common.slices_within(shard.box))
    if values.dtype != destination.dtype or tuple(values.shape) != common.shape:
        raise ShardMismatchError(
            f"{shard.fqn!r}: {common} has dtype {dtype_word(destination.dtype)}, but the saved "
            f"shard gave {dtype_word(values.dtype)} of shape {tuple(values.shape)}."
        )
    destination.copy_(values)
