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
    Owned,
    ShardPlacementResult,
    post_forward_mesh_info,
    resolve_placement,
)
from fsdp_core.errors import ArgumentError, PlacementError, UnsupportedError
from fsdp_core.layout import balanced_owners
from fsdp_core.param import (
    FSDPParam,
    FSDPParamGroup,
    OwnedParam,
    ParamOptions,
    ParamSlot,
    find_slots,
)

if TYPE_CHECKING:
    from collections.abc import Hashable

PlacementFn = Callable[[nn.Parameter], Shard | Owned | ShardPlacementResult | None]


def group_params(
    originals: Sequence[nn.Parameter],
    modules: Sequence[nn.Module],
    info: DataParallelMeshInfo,
    options: ParamOptions,
    *,
    reshard_to: int | None,
    placement_of: PlacementFn | None,
) -> list[FSDPParamGroup]:
    """Shards parameters; those over the same ranks become one group, in the order given.

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
        PlacementError: A parameter does not have the dim to shard.
        UnsupportedError: A DTensor or extended parameter is to be resharded to a smaller mesh.
    """
    if placement_of is not None and not isinstance(info, FSDPMeshInfo):
        raise ArgumentError(
            "Per-param mesh via shard_placement_fn is not supported with "
            f"{type(info).__name__}; it requires FSDPMeshInfo (or subclass)"
        )
    infos: dict[Hashable, DataParallelMeshInfo] = {}
    members: dict[DataParallelMeshInfo, list[_Chosen]] = {}
    for original, slot in zip(originals, find_slots(originals, modules), strict=True):
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
        members.setdefault(mine, []).append(_Chosen(original, slot, chosen.placement))
    groups = []
    for mine, chosen_params in members.items():
        post_forward = _post_forward(mine, reshard_to)
        params = _shard(chosen_params, mine, replace(options, post_forward=post_forward))
        groups.append(FSDPParamGroup(params, mine, post_forward))
    return groups


@dataclass(frozen=True)
class _Chosen:
    """An original parameter and how it is to lie."""

    original: nn.Parameter
    slot: ParamSlot
    placement: Shard | Owned | None


def _shard(
    members: Sequence[_Chosen], info: DataParallelMeshInfo, options: ParamOptions
) -> list[FSDPParam]:
    # Owners are balanced over the group, so all of it must be known.
    owned = {each: each.placement for each in members if isinstance(each.placement, Owned)}
    owners = balanced_owners(
        [each.original.numel() * each.original.itemsize for each in owned],
        [placement.rank for placement in owned.values()],
        info.shard.size,
    )
    owner_of = dict(zip(owned, owners, strict=True))
    return [
        OwnedParam(each.original, each.slot, info, owner_of[each], options)
        if isinstance(each.placement, Owned)
        else FSDPParam(
            each.original,
            each.slot,
            info,
            _dim_of(each.original, each.placement, each.slot.fqn),
            options,
        )
        for each in members
    ]


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
