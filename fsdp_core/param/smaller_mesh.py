"""A parameter's slices for a smaller mesh, kept between forward and backward."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.distributed.tensor import DTensor, Replicate, Shard

from fsdp_core import torch_private
from fsdp_core.errors import UnsupportedError
from fsdp_core.layout import Slicing
from fsdp_core.param import slices

if TYPE_CHECKING:
    from fsdp_core.comm import FSDPMeshInfo
    from fsdp_core.param.slices import MemoryOrder


class SmallerMesh:
    """Cuts one parameter for a smaller mesh, along its outermost dim in memory.

    Attributes:
        slicing: How it is cut.
        kept: This rank's padded slice, 1D; None outside of the time between forward and backward.
    """

    def __init__(self, info: FSDPMeshInfo, slicing: Slicing) -> None:
        """Plans the cut.

        Args:
            info: The smaller mesh.
            slicing: How the parameter is cut otherwise.
        """
        self._info = info
        dim = None if slicing.dim is None else 0
        self.slicing = Slicing.of(slicing.shape, dim, info.shard.size)
        self.kept: torch.Tensor | None = None

    def keep(self, flat: torch.Tensor, order: MemoryOrder, like: DTensor) -> DTensor:
        """Copies this rank's slice out of the whole.

        Args:
            flat: Begins with the whole parameter, 1D.
            order: Of its dims.
            like: Of the same global shape and strides.

        Returns:
            The slice as modules show it.
        """
        rank, slicing = self._info.shard.rank, self.slicing
        padded = slices.cut(flat[: slicing.total].view(slicing.shape), slicing, rank)
        self.kept = padded.view(-1)
        cut = Replicate() if slicing.dim is None else Shard(order.dims[slicing.dim])
        return torch_private.new_dtensor(
            order.seen(slices.own(padded, slicing, rank)),
            self._info.mesh,
            (Replicate(), cut),
            shape=like.shape,
            stride=like.stride(),
        )


def cannot_keep_part(kind: str, fqn: str) -> UnsupportedError:
    """The refusal to keep slices of a parameter of this `kind` for a smaller mesh."""
    return UnsupportedError(
        f"Resharding to smaller mesh is not supported for {kind} parameters yet, and {fqn!r} is "
        "one. Pass reshard_after_forward=True."
    )
