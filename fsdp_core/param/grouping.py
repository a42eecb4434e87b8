"""Which parameters of a unit communicate together, and which group has charge of a shared one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch.distributed.tensor import DTensor

from fsdp_core.comm import FSDPMeshInfo, post_forward_mesh_info, resolve_placement
from fsdp_core.errors import (
    ArgumentError,
    PlacementError,
    SharedParameterError,
    UnsupportedError,
)
from fsdp_core.layout import balanced_owners
from fsdp_core.param.extension import is_extended
from fsdp_core.param.fsdp_param import FSDPParam
from fsdp_core.param.owned import OwnedParam
from fsdp_core.param.param_group import FSDPParamGroup
from fsdp_core.param.post_forward import cannot_keep_part
from fsdp_core.param.registration import Attachment, ParamSlot, attach, attached, find_slots
from fsdp_core.param.sharding_spec import ShardingChoice, place
from fsdp_core.policy import Owned

if TYPE_CHECKING:
    from collections.abc import Hashable

    from torch import nn
    from torch.distributed.tensor import Shard

    from fsdp_core.comm import DataParallelMeshInfo
    from fsdp_core.options import ShardingOptions


@dataclass(frozen=True)
class Charge(Attachment):
    """Who has charge of a parameter.

    Attributes:
        param: The parameter, sharded.
        group: With which it communicates.
    """

    param: FSDPParam
    group: FSDPParamGroup


def claim(original: nn.Parameter, charge: Charge) -> None:
    """Notes who has charge of what was `original`.

    Both parameters say so: modules that no unit has taken yet still register the original, and
    users may tie the sharded parameter to further places.
    """
    for known in (original, charge.param.sharded_param):
        attach(known, charge)


def charge_of(parameter: nn.Parameter) -> Charge | None:
    """Who has charge of a parameter found on a module, if a unit has taken it before."""
    return attached(parameter, Charge)


@dataclass(frozen=True)
class UnitGroups:
    """The groups that a unit computes with.

    Attributes:
        own: Those it has charge of.
        borrowed: Those of other units that have charge of a parameter which it shares.
    """

    own: tuple[FSDPParamGroup, ...]
    borrowed: tuple[FSDPParamGroup, ...]


def group_params(
    originals: Sequence[nn.Parameter],
    modules: Sequence[nn.Module],
    info: DataParallelMeshInfo,
    options: ShardingOptions,
) -> UnitGroups:
    """Shards parameters; those over the same ranks become one group, in the order given.

    A parameter that an earlier unit has taken stays with that: it has one owner.

    Args:
        originals: Not yet sharded by this unit.
        modules: In whose trees they are registered.
        info: Mesh for those that no other is named for.
        options: Of the call.

    Raises:
        ArgumentError: `placement_of` returned something else, or two mesh infos for the same
            ranks, or the unit's mesh only replicates.
        SharedParameterError: A shared parameter was sharded over other ranks.
        PlacementError: A parameter does not have the dim to shard.
        UnsupportedError: A DTensor or extended parameter is to be resharded to a smaller mesh, or
            owned by one rank.
    """
    if options.placement_of is not None and not isinstance(info, FSDPMeshInfo):
        raise ArgumentError(
            "Per-param mesh via shard_placement_fn is not supported with "
            f"{type(info).__name__}; it requires FSDPMeshInfo (or subclass)"
        )
    # Nothing is sharded before everything is known to be right: a refusal leaves all as it was.
    choices: list[ShardingChoice] = []
    shared: list[tuple[Charge, ParamSlot]] = []
    for original, slot in zip(originals, find_slots(originals, modules), strict=True):
        if (charge := charge_of(original)) is not None:
            _check_shared(charge, slot, info)
            shared.append((charge, slot))
        else:
            choices.append(_choose(original, slot, info, options))
    _check_infos(choices)

    members: dict[DataParallelMeshInfo, list[ShardingChoice]] = {}
    for choice in choices:
        members.setdefault(choice.info, []).append(choice)
    own = []
    for mine, chosen in members.items():
        params = _shard(chosen, mine)
        group = FSDPParamGroup(params, mine, chosen[0].post_forward, options.shared_memory)
        for choice, param in zip(chosen, params, strict=True):
            claim(choice.original, Charge(param, group))
        own.append(group)
    for charge, slot in shared:
        charge.param.register_also_at(slot)
        charge.group.is_borrowed = True
    return UnitGroups(tuple(own), tuple(dict.fromkeys(charge.group for charge, _ in shared)))


def _choose(
    original: nn.Parameter, slot: ParamSlot, info: DataParallelMeshInfo, options: ShardingOptions
) -> ShardingChoice:
    wanted = None if options.placement_of is None else options.placement_of(original)
    result = resolve_placement(wanted, info)
    mine, placement = result.mesh_info, result.placement
    smaller = _post_forward(mine, options.reshard_to)
    kind = _kind_beyond_plain(original, slot.fqn)
    if smaller is not None and kind is not None:
        raise cannot_keep_part(kind, slot.fqn)
    owned = placement if isinstance(placement, Owned) else None
    dim = None if isinstance(placement, Owned) else _dim_of(original, placement, slot.fqn)
    spec = place(original, slot.fqn, mine, dim)
    if owned is not None:
        _check_ownable(original, slot.fqn, smaller)
    return ShardingChoice(original, slot, mine, owned, dim, spec, smaller, options)


def _kind_beyond_plain(original: nn.Parameter, fqn: str) -> str | None:
    if is_extended(original, fqn):
        return "extended"
    return "DTensor" if isinstance(original, DTensor) else None


def _shard(chosen: Sequence[ShardingChoice], info: DataParallelMeshInfo) -> list[FSDPParam]:
    # Owners are balanced over the group, so all of it must be known.
    owned = {each: each.owned for each in chosen if each.owned is not None}
    owners = balanced_owners(
        [each.original.numel() * each.original.itemsize for each in owned],
        [placement.rank for placement in owned.values()],
        info.shard.size,
    )
    owner_of = dict(zip(owned, owners, strict=True))
    return [
        OwnedParam(each, owner_of[each]) if each in owner_of else FSDPParam(each) for each in chosen
    ]


def _check_infos(choices: Sequence[ShardingChoice]) -> None:
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


def _check_ownable(param: nn.Parameter, fqn: str, smaller: FSDPMeshInfo | None) -> None:
    reason = None
    if isinstance(param, DTensor):
        reason = "is a DTensor"
    elif is_extended(param, fqn):
        reason = f"is a {type(param).__name__}, which decides itself what is gathered"
    elif smaller is not None:
        reason = "would be resharded to a smaller mesh"
    if reason is not None:
        raise UnsupportedError(
            f"Parameter {fqn!r} {reason}, so it cannot be owned by one rank. Return a Shard from "
            "shard_placement_fn, or pass reshard_after_forward=True."
        )
