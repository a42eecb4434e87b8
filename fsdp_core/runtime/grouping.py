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
from fsdp_core.errors import (
    ArgumentError,
    PlacementError,
    SharedParameterError,
)
from fsdp_core.layout import balanced_owners
from fsdp_core.options import ParamOptions
from fsdp_core.param import (
    Charge,
    FSDPParam,
    FSDPParamGroup,
    OwnedParam,
    ParamSlot,
    charge_of,
    claim,
    find_slots,
)
from fsdp_core.param.owned_param import check_ownable
from fsdp_core.param.placing import place
from fsdp_core.param.smaller_mesh import cannot_keep_part
from fsdp_core.param.tensor_extension import is_extended

if TYPE_CHECKING:
    from collections.abc import Hashable

    from fsdp_core.policy import SharedMemoryPolicy

PlacementFn = Callable[[nn.Parameter], Shard | Owned | ShardPlacementResult | None]


@dataclass(frozen=True)
class UnitGroups:
    """The groups that a unit computes with.

    Attributes:
        own: Those it has charge of.
        borrowed: Those of other units that have charge of a parameter which it shares.
    """

    own: tuple[FSDPParamGroup, ...]
    borrowed: tuple[FSDPParamGroup, ...]


@dataclass(frozen=True)
class GroupingOptions:
    """What a call of `fully_shard` says about its parameters.

    Attributes:
        params: Precision and offload.
        reshard_to: Ranks of the smaller mesh that forward reshards to, if any.
        placement_of: See `fully_shard`.
        shared_memory: See `fully_shard`.
    """

    params: ParamOptions
    reshard_to: int | None = None
    placement_of: PlacementFn | None = None
    shared_memory: SharedMemoryPolicy | None = None


@dataclass(frozen=True, eq=False)
class _Choice:
    """Where and how one parameter is to be sharded."""

    original: nn.Parameter
    slot: ParamSlot
    info: DataParallelMeshInfo
    placement: Shard | Owned | None
    options: ParamOptions


def group_params(
    originals: Sequence[nn.Parameter],
    modules: Sequence[nn.Module],
    info: DataParallelMeshInfo,
    options: GroupingOptions,
) -> UnitGroups:
    """Shards parameters; those over the same ranks become one group, in the order given.

    A parameter that an earlier unit has taken stays with that: it has one owner.

    Args:
        originals: Not yet sharded by this unit.
        modules: In whose trees they hang.
        info: Mesh for those that no other is named for.
        options: Of the call.

    Raises:
        ArgumentError: `placement_of` returned something else, or two mesh infos for the same
            ranks, or the unit's mesh only replicates.
        SharedParameterError: A shared parameter was sharded over other ranks.
        PlacementError: A parameter does not have the dim to shard.
        UnsupportedError: A DTensor or extended parameter is to be resharded to a smaller mesh.
    """
    if options.placement_of is not None and not isinstance(info, FSDPMeshInfo):
        raise ArgumentError(
            "Per-param mesh via shard_placement_fn is not supported with "
            f"{type(info).__name__}; it requires FSDPMeshInfo (or subclass)"
        )
    # Nothing is sharded before everything is known to be right: a refusal leaves all as it was.
    choices: list[_Choice] = []
    shared: list[tuple[Charge, ParamSlot]] = []
    for original, slot in zip(originals, find_slots(originals, modules), strict=True):
        if (charge := charge_of(original)) is not None:
            _check_shared(charge, slot, info)
            shared.append((charge, slot))
        else:
            choices.append(_choose(original, slot, info, options))
    _check_infos(choices)

    members: dict[DataParallelMeshInfo, list[_Choice]] = {}
    for choice in choices:
        members.setdefault(choice.info, []).append(choice)
    own = []
    for mine, chosen in members.items():
        params = _shard(chosen, mine)
        smaller = _post_forward(mine, options.reshard_to)
        group = FSDPParamGroup(params, mine, smaller, options.shared_memory)
        for choice, param in zip(chosen, params, strict=True):
            claim(choice.original, Charge(param, group))
        own.append(group)
    for charge, slot in shared:
        charge.param.hang_also_at(slot)
        charge.group.is_lent = True
    return UnitGroups(tuple(own), tuple(dict.fromkeys(charge.group for charge, _ in shared)))


def _choose(
    original: nn.Parameter, slot: ParamSlot, info: DataParallelMeshInfo, options: GroupingOptions
) -> _Choice:
    wanted = None if options.placement_of is None else options.placement_of(original)
    result = resolve_placement(wanted, info)
    mine, placement = result.mesh_info, result.placement
    smaller = _post_forward(mine, options.reshard_to)
    extended = is_extended(original, slot.fqn)
    if smaller is not None and (extended or isinstance(original, DTensor)):
        raise cannot_keep_part("extended" if extended else "DTensor", slot.fqn)
    dim = None if isinstance(placement, Owned) else _dim_of(original, placement, slot.fqn)
    if isinstance(original, DTensor) or mine.is_spmd:
        place(original, slot.fqn, mine, dim)  # for what it refuses
    chosen = replace(options.params, post_forward=smaller)
    if isinstance(placement, Owned):
        check_ownable(original, slot.fqn, chosen)
    return _Choice(original, slot, mine, placement, chosen)


def _shard(chosen: Sequence[_Choice], info: DataParallelMeshInfo) -> list[FSDPParam]:
    # Owners are balanced over the group, so all of it must be known.
    owned = {each: each.placement for each in chosen if isinstance(each.placement, Owned)}
    owners = balanced_owners(
        [each.original.numel() * each.original.itemsize for each in owned],
        [placement.rank for placement in owned.values()],
        info.shard.size,
    )
    owner_of = dict(zip(owned, owners, strict=True))
    params: list[FSDPParam] = []
    for each in chosen:
        original, slot, placement = each.original, each.slot, each.placement
        if isinstance(placement, Owned):
            params.append(OwnedParam(original, slot, info, owner_of[each], each.options))
        else:
            dim = _dim_of(original, placement, slot.fqn)
            params.append(FSDPParam(original, slot, info, dim, each.options))
    return params


def _check_infos(choices: Sequence[_Choice]) -> None:
    infos: dict[Hashable, DataParallelMeshInfo] = {}
    for choice in choices:
        mine = choice.info
        known = infos.setdefault((mine.shard.group, mine.replicate.group), mine)
        if known is not mine:
            raise ArgumentError(
                "Params sharing the same process group must use the same FSDPMeshInfo object, "
                f"but got different objects: {known} vs {mine} for parameter "
                f"{choice.slot.fqn!r}. Make the mesh info once and return it for all of them."
            )


def _check_shared(charge: Charge, slot: ParamSlot, info: DataParallelMeshInfo) -> None:
    if charge.group.info.shard.group is not info.shard.group:
        raise SharedParameterError(
            f"Parameter {slot.fqn!r} is shared with a parameter already managed by another FSDP "
            f"group, {charge.param.fqn!r}, which is sharded over other ranks. Pass the same mesh "
            "to both calls."
        )


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
