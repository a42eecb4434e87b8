"""State over data-parallel and tensor-parallel axes, cut along the tensor-parallel one alone.

This is how tensor-parallel checkpoints are exchanged: each tensor-parallel rank has one whole
shard of every tensor, and how many data-parallel ranks there were does not show.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from fsdp_core import torch_private
from fsdp_core.checkpoint.local_shards import ShardEntry, dtype_word
from fsdp_core.errors import (
    CheckpointError,
    MissingShardError,
    ShardMismatchError,
    TensorKindError,
    UnsupportedError,
)
from fsdp_core.fsdp1 import (
    DTensorExtensions,
    FSDPExtensions,
    _ext_all_gather_dtensor,
    _ext_chunk_dtensor,
)
from fsdp_core.layout import Box

TP_AXIS = "tp"


@torch.no_grad()
def tp_shards(
    state: Mapping[str, torch.Tensor], *, extension: FSDPExtensions | None = None
) -> Iterator[ShardEntry]:
    """Gathers each tensor of `state` over its data-parallel axes, one when the next is asked for.

    All ranks iterate together over the same names. Nothing is gathered ahead: besides `state`, a
    rank holds one shard, if the caller drops each.

    Args:
        state: Name to tensor. The tensor-parallel axis of a DTensor's mesh is the last and
            named "tp"; a mesh without that name is all data-parallel.
        extension: What gathers over the data-parallel axes; default is `DTensorExtensions`.

    Yields:
        Entries in the order of `state`: this tensor-parallel rank's shard, the same on all
        data-parallel ranks; the whole tensor where nothing is tensor-parallel. A tensor that
        is not a DTensor is the live one.

    Raises:
        UnsupportedError: A tensor lies on its mesh in a way that has no whole shards.
    """
    for fqn, tensor in state.items():
        lay = _Lay.of(fqn, tensor)
        shard = lay.gather(_extension(extension, lay)) if lay else tensor.detach()
        offsets = _box(lay, tensor).offsets
        yield ShardEntry(fqn, tuple(tensor.shape), offsets, dtype_word(tensor.dtype), shard)


@torch.no_grad()
def fill_from_tp_shards(
    state: Mapping[str, torch.Tensor],
    shards: Iterable[ShardEntry],
    *,
    extension: FSDPExtensions | None = None,
) -> None:
    """Fills `state` from what `tp_shards` yielded, for any number of data-parallel ranks.

    All ranks call it with the same names in the same order. Shards are asked for one by one.

    Args:
        state: Name to tensor, as for `tp_shards`; written in place.
        shards: This tensor-parallel rank's, of all names in `state`, on any device.
        extension: What chunks over the data-parallel axes; default is `DTensorExtensions`.

    Raises:
        ShardMismatchError: A shard has another shape, place or dtype than this rank's.
        MissingShardError: A name of `state` had no shard. The others are filled.
        CheckpointError: `state` does not have the name of a shard.
        UnsupportedError: See `tp_shards`.
    """
    missing = dict.fromkeys(state)
    for shard in shards:
        if shard.fqn not in state:
            raise CheckpointError(
                f"There is a shard of {shard.fqn!r}, which this state does not have. Build the "
                "model with the configuration it was saved with."
            )
        target = state[shard.fqn]
        lay = _Lay.of(shard.fqn, target)
        _check(shard, target, lay)
        values = shard.tensor.to(target.device)
        if lay is None:
            target.copy_(values)
        else:
            local = torch_private.local_tensor(lay.tensor)
            local.copy_(lay.chunk(values, _extension(extension, lay)))
        missing.pop(shard.fqn, None)
    if missing:
        raise MissingShardError(f"There was no shard of {list(missing)}.")


@torch.no_grad()
def whole_tensors(
    state: Mapping[str, torch.Tensor], *, extension: FSDPExtensions | None = None
) -> Iterator[tuple[str, torch.Tensor]]:
    """Gathers each tensor of `state` over all axes, one when the next is asked for.

    All ranks iterate together, and each gets all; one of them writes the file.

    Args:
        state: As for `tp_shards`.
        extension: As for `tp_shards`.

    Yields:
        (name, whole tensor) in the order of `state`.

    Raises:
        UnsupportedError: See `tp_shards`.
    """
    for shard in tp_shards(state, extension=extension):
        lay = _Lay.of(shard.fqn, state[shard.fqn])
        yield shard.fqn, lay.dressed(shard.tensor).full_tensor() if lay else shard.tensor


@dataclass(frozen=True)
class _Lay:
    """How a DTensor lies, and its shard when the data-parallel axes are gathered.

    Attributes:
        fqn: Name in the state.
        tensor: The DTensor.
        has_tp: Whether the last axis of its mesh is tensor-parallel.
    """

    fqn: str
    tensor: DTensor
    has_tp: bool

    @classmethod
    def of(cls, fqn: str, tensor: torch.Tensor) -> _Lay | None:
        """None for a plain tensor."""
        if not isinstance(tensor, DTensor):
            return None
        mesh, placements = tensor.device_mesh, tensor.placements
        names = mesh.mesh_dim_names or ()
        if TP_AXIS in names[:-1] or (mesh.ndim > 1 and not names):
            raise UnsupportedError(
                f"{fqn!r} lies on {mesh}, which does not tell its tensor-parallel axis. Name the "
                f"axes; the tensor-parallel one is {TP_AXIS!r} and last."
            )
        if any(placement.is_partial() for placement in placements):
            raise UnsupportedError(
                f"{fqn!r} has placements {placements}: it is a sum still to be made. Redistribute "
                "it before saving."
            )
        has_tp = names[-1:] == (TP_AXIS,)
        if has_tp and type(placements[-1]) not in {Shard, Replicate}:
            raise UnsupportedError(
                f"{fqn!r} has placements {placements}: a tensor-parallel shard must be one slice "
                "of one dim. Redistribute the last axis to Shard or Replicate before saving."
            )
        return cls(fqn, tensor, has_tp)

    @property
    def gathered(self) -> list[Placement]:
        """Placements of the shard: the data-parallel axes replicated."""
        placements: list[Placement] = [Replicate() for _ in self.tensor.placements]
        if self.has_tp:
            placements[-1] = self.tensor.placements[-1]
        return placements

    def dressed(self, shard: torch.Tensor) -> DTensor:
        """The shard as a DTensor of the whole."""
        shape, stride = self.tensor.shape, self.tensor.stride()
        mesh = self.tensor.device_mesh
        return torch_private.new_dtensor(shard, mesh, self.gathered, shape=shape, stride=stride)

    def gather(self, extension: FSDPExtensions) -> torch.Tensor:
        """The shard; the extension gathers where there is a tensor-parallel axis to spare."""
        if not self.has_tp:
            return self.tensor.full_tensor()
        mesh = self.tensor.device_mesh
        return torch_private.waited(_ext_all_gather_dtensor(self.tensor, mesh, extension))

    def chunk(self, shard: torch.Tensor, extension: FSDPExtensions) -> torch.Tensor:
        """This rank's slice of the shard, placed as the DTensor is.

        The extension chunks what lies as it chunks. Any other shape of slice, such as the strided
        one of FSDP2 on a dim that tensor parallelism cuts too, is cut out of the shard.
        """
        mesh = self.tensor.device_mesh
        if self._is_extensions():
            whole = torch_private.new_dtensor(
                shard,
                mesh[TP_AXIS],
                self.gathered[-1:],
                shape=self.tensor.shape,
                stride=self.tensor.stride(),
            )
            chunk = _ext_chunk_dtensor(whole, mesh.get_local_rank(mesh.ndim - 2), mesh, extension)
            if not isinstance(chunk, DTensor):
                raise TensorKindError(
                    f"{extension} chunked {self.fqn!r} into a {type(chunk).__name__}, not a DTensor."
                )
        else:
            chunk = self.dressed(shard).redistribute(placements=self.tensor.placements)
        return torch_private.waited(torch_private.local_tensor(chunk))

    def _is_extensions(self) -> bool:
        mesh, placements = self.tensor.device_mesh, self.tensor.placements
        ours = (*self.gathered[:-2], Shard(0), self.gathered[-1])
        return self.has_tp and placements == ours and torch_private.root_mesh(mesh) == mesh


def _extension(given: FSDPExtensions | None, lay: _Lay) -> FSDPExtensions:
    if given is not None:
        return given
    return DTensorExtensions(torch.get_device_module(lay.tensor.device_mesh.device_type))


def _box(lay: _Lay | None, tensor: torch.Tensor) -> Box:
    if lay is None:
        return Box.whole(tensor.shape)
    return Box(*torch_private.box_of(tensor.shape, lay.tensor.device_mesh, lay.gathered))


def _check(shard: ShardEntry, target: torch.Tensor, lay: _Lay | None) -> None:
    wanted = (_box(lay, target), tuple(target.shape), target.dtype)
    found = (Box(shard.offsets, tuple(shard.tensor.shape)), shard.global_shape, shard.tensor.dtype)
    if found != wanted:
        raise ShardMismatchError(
            f"{shard.fqn!r}: this rank needs {wanted[0]} of {wanted[1]} in {wanted[2]}, but the "
            f"shard is {found[0]} of {found[1]} in {found[2]}. Save and load with equally many "
            "tensor-parallel ranks, and each its own shard."
        )
