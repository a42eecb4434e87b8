"""The owned parameters of a group, which travel as one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import nn

from fsdp_core import torch_private
from fsdp_core.errors import StateError
from fsdp_core.layout import OwnedPacking, Slicing
from fsdp_core.param.grads import Contribution
from fsdp_core.param.unsharded_param import allocate_as_saved, free_for_autograd

if TYPE_CHECKING:
    from fsdp_core.comm import CommLink, DataParallelMeshInfo, Lane
    from fsdp_core.param.owned_param import OwnedParam


class OwnedSection:
    """Towards gathers and reductions it plays the part of one parameter.

    The row of a rank holds what that rank owns, padded to the longest row. What arrives is the
    memory of the whole parameters itself.

    Args:
        members: At least one, of one dtype, in packing order.
        info: Over whose shard axis they are owned.
    """

    def __init__(self, members: Sequence[OwnedParam], info: DataParallelMeshInfo) -> None:
        self._members = tuple(members)
        self._info = info
        self._packing = _pack(members, info.shard.size)
        self._flat: torch.Tensor | None = None

    def all_gather_inputs(self) -> list[tuple[torch.Tensor, torch.dtype]]:
        """This rank's row, packed and cast."""
        dtype, packing = self._dtype(), self._packing
        row = torch.empty(packing.row, dtype=dtype, device=self._info.device)
        mine = [
            (row.narrow(0, start, size), member.held())
            for member, start, size in zip(
                self._members, packing.offsets, packing.sizes, strict=True
            )
            if member.is_mine
        ]
        if mine:
            torch_private.foreach_copy([to for to, _ in mine], [held for _, held in mine])
        return [(row, dtype)]

    def all_gather_outputs(self, dtypes: list[torch.dtype]) -> list[torch.Tensor]:
        """The memory of the whole parameters, (ranks, row)."""
        (dtype,) = dtypes
        if self._flat is None or self._flat.dtype != dtype:
            self._flat = self._make(dtype)
        allocate_as_saved(self._flat)
        return [self._flat.view(self._packing.parts, self._packing.row)]

    def finish_gather(self, arrived: list[torch.Tensor]) -> None:
        """Nothing is left to do."""

    def take_contribution(self, *, covers_unused: bool) -> Contribution | None:
        """Removes the gradients of this backward and packs each into its owner's row.

        Args:
            covers_unused: Whether members without a gradient take part with zeros.
        """
        taken = [(m, m.take_grad()) for m in self._members if m.may_have_grad]
        taken = [(m, grad) for m, grad in taken if covers_unused or grad is not None]
        dtypes = {m.reduce_dtype or grad.dtype for m, grad in taken if grad is not None}
        if not taken:
            return None
        dtype = dtypes.pop() if dtypes else taken[0][0].zero_grad().dtype
        target = OwnedGrads(tuple(m for m, _ in taken), self._info.shard.size)
        packing = target.packing
        whole = torch.zeros(packing.total, dtype=dtype, device=self._info.device)
        rows = whole.view(packing.parts, packing.row)
        for (member, grad), start, size in zip(taken, packing.offsets, packing.sizes, strict=True):
            if grad is not None:
                rows[member.owner].narrow(0, start, size).copy_(grad.reshape(-1))
        return Contribution(target, whole, [grad is not None for _, grad in taken], dtype)

    def _make(self, dtype: torch.dtype) -> torch.Tensor:
        packing = self._packing
        with torch_private.outside_inference_mode(), torch.no_grad():
            flat = torch.empty(packing.total, dtype=dtype, device=self._info.device)
            rows = flat.view(packing.parts, packing.row)
            for member, start, size in zip(
                self._members, packing.offsets, packing.sizes, strict=True
            ):
                own = member.whole_from_flat(rows[member.owner].narrow(0, start, size))
                member.compute_with(_SharedWhole(nn.Parameter(own, requires_grad=False), flat))
        return flat

    def _dtype(self) -> torch.dtype:
        dtypes = {member.compute_dtype for member in self._members}
        if len(dtypes) > 1:
            raise StateError(
                f"The owned parameters {[member.fqn for member in self._members]} had one dtype "
                f"when they were sharded and now have {dtypes}. Convert all of them, or none."
            )
        return dtypes.pop()


@dataclass(frozen=True)
class OwnedGrads:
    """Which gradients lie where in the rows of one reduction, and where they go.

    Attributes:
        members: In packing order.
        ranks: Rows.
    """

    members: tuple[OwnedParam, ...]
    ranks: int

    @property
    def packing(self) -> OwnedPacking:
        """How they lie."""
        return _pack(self.members, self.ranks)

    @property
    def slicing(self) -> Slicing:
        """The rows end to end, one to each rank."""
        return Slicing.of((self.packing.total,), 0, self.ranks)

    @property
    def fqn(self) -> str:
        """Names of all, for messages."""
        return ", ".join(member.fqn for member in self.members)

    @property
    def orig_dtype(self) -> torch.dtype:
        """Of the gradients."""
        return self.members[0].orig_dtype

    def add_sharded_grads(
        self, row: torch.Tensor, present: Sequence[bool], link: CommLink, lane: Lane
    ) -> None:
        """Gives each member that has a gradient its own: whole on the owner, empty elsewhere."""
        packing = self.packing
        for member, has_grad, start, size in zip(
            self.members, present, packing.offsets, packing.sizes, strict=True
        ):
            if has_grad:
                own = row.narrow(0, start, size) if member.is_mine else row.new_empty(0)
                member.add_own_grad(own, link, lane)


class _SharedWhole:
    """A whole parameter within the memory of its section."""

    def __init__(self, parameter: nn.Parameter, flat: torch.Tensor) -> None:
        self._parameter = parameter
        self._flat = flat

    @property
    def parameter(self) -> nn.Parameter:
        """A view of the section's memory."""
        return self._parameter

    @property
    def held_bytes(self) -> int:
        """Its own elements, if the section has memory."""
        is_held = self._flat.untyped_storage().size() > 0
        return self._parameter.numel() * self._parameter.itemsize if is_held else 0

    def free(self) -> None:
        """Gives the section's memory back: its parameters are resharded together."""
        free_for_autograd(self._flat)


def _pack(members: Sequence[OwnedParam], ranks: int) -> OwnedPacking:
    return OwnedPacking(
        tuple(member.slicing.total for member in members),
        tuple(member.owner for member in members),
        ranks,
    )


def sections_of(params: Sequence[OwnedParam], info: DataParallelMeshInfo) -> list[OwnedSection]:
    """One section for each dtype."""
    by_dtype: dict[torch.dtype, list[OwnedParam]] = {}
    for param in params:
        by_dtype.setdefault(param.orig_dtype, []).append(param)
    return [OwnedSection(members, info) for members in by_dtype.values()]
