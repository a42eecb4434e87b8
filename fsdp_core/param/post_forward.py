"""A parameter's slice for a smaller mesh, kept between forward and backward."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.distributed.tensor import DTensor, Replicate, Shard

from fsdp_core import torch_private
from fsdp_core.errors import StateError, UnsupportedError
from fsdp_core.layout import Slicing
from fsdp_core.param import slices

if TYPE_CHECKING:
    from fsdp_core.comm import FSDPMeshInfo
    from fsdp_core.param.slices import MemoryOrder
    from fsdp_core.param.unsharded import UnshardedParam


class PostForwardSlice:
    """Cuts one parameter for a smaller mesh, along its outermost dim in memory, and gathers it there.

    Its group's `ShardedState` says whether the slice is what modules have now.

    Attributes:
        slicing: How it is cut.
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
        self._kept: tuple[torch.Tensor, UnshardedParam] | None = None

    def keep(self, whole: UnshardedParam, order: MemoryOrder, like: DTensor) -> DTensor:
        """Copies this rank's slice out of the whole.

        Args:
            whole: The parameter, filled.
            order: Of its dims.
            like: Of the same global shape and strides.

        Returns:
            The slice as modules show it.
        """
        rank, slicing = self._info.shard.rank, self.slicing
        padded = slices.cut(whole.flat[: slicing.total].view(slicing.shape), slicing, rank)
        self._kept = (padded.view(-1), whole)
        cut = Replicate() if slicing.dim is None else Shard(order.dims[slicing.dim])
        return torch_private.new_dtensor(
            order.seen(slices.own(padded, slicing, rank)),
            self._info.mesh,
            (Replicate(), cut),
            shape=like.shape,
            stride=like.stride(),
        )

    def drop(self) -> None:
        """Forgets the slice."""
        self._kept = None

    # -- What a gather over the smaller mesh sends and fills

    def all_gather_inputs(self) -> list[tuple[torch.Tensor, torch.dtype]]:
        """The slice, which has the dtype of computation already."""
        padded, _ = self._now
        return [(padded, padded.dtype)]

    def all_gather_outputs(self, dtypes: list[torch.dtype]) -> list[torch.Tensor]:
        """Memory for all slices, (parts, row)."""
        del dtypes
        return [self._now[1].destination(self.slicing)]

    def finish_gather(self, arrived: list[torch.Tensor]) -> None:
        """Makes the parameter whole again."""
        self._now[1].fill(arrived[0], self.slicing)

    @property
    def _now(self) -> tuple[torch.Tensor, UnshardedParam]:
        if self._kept is None:
            raise StateError("No slice for a smaller mesh is kept: forward has not ended.")
        return self._kept


def cannot_keep_part(kind: str, fqn: str) -> UnsupportedError:
    """The refusal to keep slices of a parameter of this `kind` for a smaller mesh."""
    return UnsupportedError(
        f"Resharding to smaller mesh is not supported for {kind} parameters yet, and {fqn!r} is "
        "one. Pass reshard_after_forward=True."
    )
