"""Which parameters of a unit communicate together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from torch import nn
from torch.distributed.tensor import DTensor, Shard

from fsdp_core.comm import (
    DataParallelMeshInfo,
    FSDPMeshInfo,
    ShardPlacementResult,
    post_forward_mesh_info,
    resolve_placement,
)
from fsdp_core.errors import (
    ArgumentError,
    PlacementError,
    SharedParameterError,
    UnsupportedError,
)
from fsdp_core.param import (
    Charge,
    FSDPParam,
    FSDPParamGroup,
    ParamOptions,
    ParamSlot,
    charge_of,
    claim,
    find_slots,
)

if TYPE_CHECKING:
    from collections.abc import Hashable


@dataclass(frozen=True)
class UnitGroups:
    """The groups that a unit computes with.

    Attributes:
        own: Those it has charge of.
        borrowed: Those of other units that have charge of a parameter which it shares.
    """

    own: tuple[FSDPParamGroup, ...]
    borrowed: tuple[FSDPParamGroup, ...]


PlacementFn = Callable[[nn.Parameter], Shard | ShardPlacementResult | None]


def group_params(
    originals: Sequence[nn.Parameter],
    modules: Sequence[nn.Module],
    info: DataParallelMeshInfo,
    options: ParamOptions,
    *,
    reshard_to: int | None,
    placement_of: PlacementFn | None,
) -> UnitGroups:
    """Shards parameters; those over the same ranks become one group, in the order given.

    A parameter that an earlier unit has taken stays with that: it has one owner.

    Args:
        originals: Not yet sharded.
        modules: In whose trees they hang.
        info: Mesh for those that `placement_of` names none for.
        options: Precision and offload.
        reshard_to: Ranks of the smaller mesh that forward reshards to, if any.
        placement_of: See `fully_shard`.

    Raises:
        ArgumentError: `placement_of` returned something else, or two mesh infos for the same
            ranks, or the unit's mesh only replicates.
        SharedParameterError: A shared parameter was sharded over other ranks.
        PlacementError: A parameter does not have the dim to shard.
        UnsupportedError: A DTensor or extended parameter is to be resharded to a smaller mesh.
    """
    if placement_of is not None and not isinstance(info, FSDPMeshInfo):
        raise ArgumentError(
            "Per-param mesh via shard_placement_fn is not supported with "
            f"{type(info).__name__}; it requires FSDPMeshInfo (or subclass)"
        )
    infos: dict[Hashable, DataParallelMeshInfo] = {}
    members: dict[DataParallelMeshInfo, list[tuple[nn.Parameter, FSDPParam]]] = {}
    borrowed: dict[FSDPParamGroup, None] = {}
    for original, slot in zip(originals, find_slots(originals, modules), strict=True):
        if (charge := charge_of(original)) is not None:
            borrowed[_borrow(charge, slot, info)] = None
            continue
        chosen = resolve_placement(None if placement_of is None else placement_of(original), info)
        mine = chosen.mesh_info
        known = infos.setdefault((mine.shard.group, mine.replicate.group), mine)
        if known is not mine:
            raise ArgumentError(
                "Params sharing the same process group must use the same FSDPMeshInfo object, "
                f"but got different objects: {known} vs {mine} for parameter {slot.fqn!r}. Make "
                "the mesh info once and return it for all of them."
            )
        post_forward = _post_forward(mine, reshard_to)
        if post_forward is not None and isinstance(original, DTensor):
            raise UnsupportedError(
                "Resharding to smaller mesh is not supported for DTensor parameters yet, and "
                f"{slot.fqn!r} is one. Pass reshard_after_forward=True."
            )
        dim = _dim_of(original, chosen.placement, slot.fqn)
        param = FSDPParam(original, slot, mine, dim, replace(options, post_forward=post_forward))
        members.setdefault(mine, []).append((original, param))
    own = []
    for mine, pairs in members.items():
        group = FSDPParamGroup([param for _, param in pairs], mine, _post_forward(mine, reshard_to))
        for original, param in pairs:
            claim(original, Charge(param, group))
        own.append(group)
    return UnitGroups(tuple(own), tuple(borrowed))


def _borrow(charge: Charge, slot: ParamSlot, info: DataParallelMeshInfo) -> FSDPParamGroup:
    if charge.group.info.shard.group is not info.shard.group:
        raise SharedParameterError(
            f"Parameter {slot.fqn!r} is shared with a parameter already managed by another FSDP "
            f"group, {charge.param.fqn!r}, which is sharded over other ranks. Pass the same mesh "
            "to both calls."
        )
    charge.param.hang_also_at(slot)
    charge.group.is_lent = True
    return charge.group


def _post_forward(info: DataParallelMeshInfo, ranks: int | None) -> FSDPMeshInfo | None:
    if ranks is None or not isinstance(info, FSDPMeshInfo) or info.shard.size == ranks:
        return None
    return post_forward_mesh_info(info, ranks)


def _dim_of(param: nn.Parameter, placement: Shard | None, fqn: str) -> int | None:
    if param.ndim == 0:
        # Nothing to cut: every rank holds it, and its gradient is averaged over all.
        return None
    dim = 0 if placement is None else placement.dim
    if not -param.ndim <= dim < param.ndim:
        raise PlacementError(
            f"Shard dim {dim} is invalid for {param.ndim}D tensor: parameter {fqn!r} has shape "
            f"{tuple(param.shape)}."
        )
    return dim % param.ndim
