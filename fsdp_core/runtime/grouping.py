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
from fsdp_core.param import (
    Charge,
    FSDPParam,
    FSDPParamGroup,
    OwnedParam,
    ParamOptions,
    ParamSlot,
    charge_of,
    claim,
    find_slots,
)
from fsdp_core.param.fsdp_param import cannot_keep_part
from fsdp_core.param.owned_param import check_ownable
from fsdp_core.param.placing import place
from fsdp_core.param.tensor_extension import is_extended

if TYPE_CHECKING:
    from collections.abc import Hashable

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
    """

    params: ParamOptions
    reshard_to: int | None = None
    placement_of: PlacementFn | None = None


@dataclass(frozen=True)
class _Choice:
    """Where and how one parameter is to be sharded."""

    original: nn.Parameter
    slot: ParamSlot
    info: DataParallelMeshInfo
    dim: int | None
    options: ParamOptions
    owned: Owned | None


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

    members: dict[DataParallelMeshInfo, list[tuple[nn.Parameter, FSDPParam]]] = {}
    owners = _owners_of(choices)
    for choice in choices:
        param = _shard(choice, owners.get(choice.original))
        members.setdefault(choice.info, []).append((choice.original, param))
    own = []
    for mine, pairs in members.items():
        smaller = _post_forward(mine, options.reshard_to)
        group = FSDPParamGroup([param for _, param in pairs], mine, smaller)
        for original, param in pairs:
            claim(original, Charge(param, group))
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
    owned = placement if isinstance(placement, Owned) else None
    dim = None if isinstance(placement, Owned) else _dim_of(original, placement, slot.fqn)
    smaller = _post_forward(mine, options.reshard_to)
    extended = is_extended(original, slot.fqn)
    if smaller is not None and (extended or isinstance(original, DTensor)):
        raise cannot_keep_part("extended" if extended else "DTensor", slot.fqn)
    if isinstance(original, DTensor) or mine.is_spmd:
        place(original, slot.fqn, mine, dim)  # for what it refuses
    chosen = replace(options.params, post_forward=smaller)
    if owned is not None:
        check_ownable(original, slot.fqn, chosen)
    return _Choice(original, slot, mine, dim, chosen, owned)


def _owners_of(choices: Sequence[_Choice]) -> dict[nn.Parameter, int]:
    # Owners are balanced over a group, so all of it must be known.
    by_info: dict[DataParallelMeshInfo, list[tuple[nn.Parameter, Owned]]] = {}
    for choice in choices:
        if choice.owned is not None:
            by_info.setdefault(choice.info, []).append((choice.original, choice.owned))
    found: dict[nn.Parameter, int] = {}
    for info, members in by_info.items():
        sizes = [original.numel() * original.itemsize for original, _ in members]
        owners = balanced_owners(sizes, [owned.rank for _, owned in members], info.shard.size)
        found.update(zip((original for original, _ in members), owners, strict=True))
    return found


def _shard(choice: _Choice, owner: int | None) -> FSDPParam:
    if owner is not None:
        return OwnedParam(choice.original, choice.slot, choice.info, owner, choice.options)
    return FSDPParam(choice.original, choice.slot, choice.info, choice.dim, choice.options)


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
