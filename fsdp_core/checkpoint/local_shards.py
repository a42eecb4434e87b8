"""What this rank has to save."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from fsdp_core import torch_private
from fsdp_core.layout import Box
from fsdp_core.low_precision import full_precision

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


@dataclass(frozen=True)
class ShardEntry:
    """A box of a tensor that this rank saves; over all ranks the boxes tile the tensor.

    Attributes:
        fqn: Name in the state.
        global_shape: Of the whole tensor.
        offsets: Of the box, per dim.
        dtype: In PyTorch's words without the prefix, for example "float32".
        tensor: The box's elements, contiguous; shares memory with the live state.
    """

    fqn: str
    global_shape: tuple[int, ...]
    offsets: tuple[int, ...]
    dtype: str
    tensor: torch.Tensor


def local_shards(
    state: Mapping[str, torch.Tensor], mesh: DeviceMesh | None = None, *, all_save: bool = False
) -> list[ShardEntry]:
    """Lists what this rank has to save so that all ranks together save `state` once.

    Of a DTensor it is this rank's elements, without padding, if there are any and no rank
    earlier on a replicated axis has the same. Of any other tensor, which every rank has, it is
    the whole on rank 0 and nothing elsewhere.

    Args:
        state: Name to tensor, the same names on all ranks.
        mesh: All ranks, with names for its axes. A DTensor that lies on some of these axes only
            is the same along the others. Without it every DTensor lies on all ranks.
        all_save: Every rank lists all that it has, also what others have, too.

    Returns:
        Entries in the order of `state`. Their tensors are live: copy or write them before the
        next update.
    """
    entries = []
    # Training may stand still meanwhile, and many tensors lie alike: an optimizer's state as its
    # parameters, one layer as the next.
    alike: dict[tuple[object, ...], tuple[Box, bool]] = {}
    for fqn, tensor in state.items():
        box, saves = _share(tensor, mesh, alike)
        local = _local(tensor)
        if box.volume and (saves or all_save):
            entries.append(
                ShardEntry(
                    fqn,
                    tuple(tensor.shape),
                    box.offsets,
                    dtype_word(tensor.dtype),
                    local.detach().contiguous(),
                )
            )
    return entries


def local_part(tensor: torch.Tensor) -> tuple[Box, torch.Tensor]:
    """This rank's box of `tensor` and the live local tensor that holds just that box."""
    return _box(tensor), _local(tensor)


def dtype_word(dtype: torch.dtype) -> str:
    """The dtype's name without the "torch." prefix."""
    return str(dtype).removeprefix("torch.")


def _share(
    tensor: torch.Tensor,
    mesh: DeviceMesh | None,
    alike: dict[tuple[object, ...], tuple[Box, bool]],
) -> tuple[Box, bool]:
    """This rank's box and whether it saves it, which tensors that lie alike share."""
    if not isinstance(tensor, DTensor):
        return _box(tensor), _saves(tensor, mesh)
    key = (tensor.shape, tensor.device_mesh, tensor.placements)
    if key not in alike:
        alike[key] = _box(tensor), _saves(tensor, mesh)
    return alike[key]


def _box(tensor: torch.Tensor) -> Box:
    if not isinstance(tensor, DTensor):
        return Box.whole(tensor.shape)
    offsets, shape = torch_private.local_box(tensor)
    return Box(offsets, shape)


def _local(tensor: torch.Tensor) -> torch.Tensor:
    if not isinstance(tensor, DTensor):
        return tensor
    return full_precision(torch_private.local_tensor(tensor))


def _saves(tensor: torch.Tensor, mesh: DeviceMesh | None) -> bool:
    if not isinstance(tensor, DTensor):
        return not dist.is_initialized() or dist.get_rank() == 0
    coordinate = tensor.device_mesh.get_coordinate()
    if coordinate is None:
        return False
    return _is_first_elsewhere(tensor, mesh) and all(
        place == 0
        for place, placement in zip(coordinate, tensor.placements, strict=True)
        if placement.is_replicate()
    )


def _is_first_elsewhere(tensor: DTensor, mesh: DeviceMesh | None) -> bool:
    """Whether this rank is the first along the axes of `mesh` on which `tensor` does not lie."""
    if mesh is None or mesh.mesh_dim_names is None or mesh.ndim == 1:
        return True
    own = tensor.device_mesh.mesh_dim_names
    if own is None:  # the mesh of an owned parameter: all that hold it are in it
        return True
    coordinate = mesh.get_coordinate() or ()
    places = zip(mesh.mesh_dim_names, coordinate, strict=False)
    return all(place == 0 for name, place in places if name not in own)
