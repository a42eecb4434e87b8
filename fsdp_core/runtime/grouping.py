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
from fsdp_core.errors import ArgumentError, PlacementError
from fsdp_core.param import FSDPParam, FSDPParamGroup, ParamOptions, ParamSlot, find_slots
from fsdp_core.param.fsdp_param import cannot_keep_part
from fsdp_core.param.placing import place
from fsdp_core.param.tensor_extension import is_extended

if TYPE_CHECKING:
    from collections.abc import Hashable

PlacementFn = Callable[[nn.Parameter], Shard | ShardPlacementResult | None]


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
    slots = find_slots(originals, modules)
    # Nothing is sharded before everything is known to be right: a refusal leaves all as it was.
    chosen = [
        _choose(original, slot, info, options, reshard_to, placement_of)
        for original, slot in zip(originals, slots, strict=True)
    ]
    infos: dict[Hashable, DataParallelMeshInfo] = {}
    for slot, choice in zip(slots, chosen, strict=True):
        mine = choice.info
        known = infos.setdefault((mine.shard.group, mine.replicate.group), mine)
        if known is not mine:
            raise ArgumentError(
                "Params sharing the same process group must use the same FSDPMeshInfo object, "
                f"but got different objects: {known} vs {mine} for parameter {slot.fqn!r}. Make "
                "the mesh info once and return it for all of them."
            )
    members: dict[DataParallelMeshInfo, list[FSDPParam]] = {}
    for original, slot, choice in zip(originals, slots, chosen, strict=True):
        param = FSDPParam(original, slot, choice.info, choice.dim, choice.options)
        members.setdefault(choice.info, []).append(param)
    return [
        FSDPParamGroup(params, mine, _post_forward(mine, reshard_to))
        for mine, params in members.items()
    ]


@dataclass(frozen=True)
class _Choice:
    """Where and how one parameter is to be sharded."""

    info: DataParallelMeshInfo
    dim: int | None
    options: ParamOptions


def _choose(
    original: nn.Parameter,
    slot: ParamSlot,
    info: DataParallelMeshInfo,
    options: ParamOptions,
    reshard_to: int | None,
    placement_of: PlacementFn | None,
) -> _Choice:
    result = resolve_placement(None if placement_of is None else placement_of(original), info)
    dim = _dim_of(original, result.placement, slot.fqn)
    post_forward = _post_forward(result.mesh_info, reshard_to)
    extended = is_extended(original, slot.fqn)
    if post_forward is not None and (extended or isinstance(original, DTensor)):
        raise cannot_keep_part("extended" if extended else "DTensor", slot.fqn)
    if isinstance(original, DTensor) or result.mesh_info.is_spmd:
        place(original, slot.fqn, result.mesh_info, dim)  # for what it refuses
    return _Choice(result.mesh_info, dim, replace(options, post_forward=post_forward))


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
