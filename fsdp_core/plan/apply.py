"""Shards a model as a plan says."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import nn

from fsdp_core.errors import PlanError, UnsupportedError
from fsdp_core.plan.model import Precision, ShardingPlan, UnitPlan, is_pattern, matches
from fsdp_core.policy import MixedPrecisionPolicy
from fsdp_core.runtime import fully_shard

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

M = TypeVar("M", bound=nn.Module)

DTYPES: dict[Precision, torch.dtype] = {
    "fp64": torch.float64,
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}


@dataclass(frozen=True)
class ResolvedUnit:
    """One call of `fully_shard`: module names and the option given with them."""

    names: tuple[str, ...]
    reshard_after_forward: bool | None


def apply_plan(model: M, plan: ShardingPlan, mesh: DeviceMesh) -> M:
    """Applies `fully_shard` to the units of `plan`, innermost first, and to the root last.

    Args:
        model: Not yet sharded; on any device, meta included.
        plan: See `fsdp_core.plan.model`.
        mesh: Of one axis with `plan.mesh.dp_shard` ranks.

    Returns:
        `model` itself.

    Raises:
        PlanError: A pattern matches nothing, two units claim one module, or the mesh has
            another size than the plan.
        UnsupportedError: The plan replicates or uses tensor parallelism.
    """
    _check_mesh(plan, mesh)
    modules = dict(model.named_modules())
    policy = MixedPrecisionPolicy(
        param_dtype=_dtype(plan.param_dtype), reduce_dtype=_dtype(plan.reduce_dtype)
    )
    for unit in resolve_units(plan, list(modules)):
        targets = [modules[name] for name in unit.names]
        is_root = unit.names == ("",)
        fully_shard(
            targets[0] if len(targets) == 1 else targets,
            mesh=mesh,
            reshard_after_forward=unit.reshard_after_forward,
            mp_policy=replace(policy, output_dtype=_dtype(plan.output_dtype))
            if is_root
            else policy,
        )
    return model


def resolve_units(plan: ShardingPlan, names: Sequence[str]) -> list[ResolvedUnit]:
    """The calls of `fully_shard` that `plan` means for a model, in order; the root last.

    Args:
        plan: The plan.
        names: Names of all modules of the model, "" included, in the model's order.

    Raises:
        PlanError: A pattern matches nothing, or two units claim one module.
    """
    units = [resolved for unit in plan.units for resolved in _resolve(unit, names)]
    if not any(unit.names == ("",) for unit in units):
        units.append(ResolvedUnit(("",), None))
    claimed: set[str] = set()
    for name in (name for unit in units for name in unit.names):
        if name in claimed:
            raise PlanError(f"Module {name!r} is claimed by two units of the plan.")
        claimed.add(name)
    return sorted(units, key=lambda unit: -max(_depth(name) for name in unit.names))


def _resolve(unit: UnitPlan, names: Sequence[str]) -> list[ResolvedUnit]:
    found: list[str] = []
    for pattern in unit.modules:
        hits = [name for name in names if matches(pattern, name)]
        if not hits:
            raise PlanError(
                f"Pattern {pattern!r} of the plan matches no module. The model's top-level "
                f"modules are {sorted({name.split('.')[0] for name in names if name})}."
            )
        found += hits
    if is_pattern(unit.modules[0]):
        return [ResolvedUnit((name,), unit.reshard_after_forward) for name in found]
    return [ResolvedUnit(tuple(found), unit.reshard_after_forward)]


def _depth(name: str) -> int:
    return name.count(".") + 1 if name else 0


def _check_mesh(plan: ShardingPlan, mesh: DeviceMesh) -> None:
    if plan.mesh.dp_replicate > 1 or plan.mesh.tp > 1:
        raise UnsupportedError(
            f"{plan.mesh} replicates or splits tensors, which is not supported yet. "
            "Use dp_shard alone."
        )
    if mesh.size() != plan.mesh.ranks:
        raise PlanError(
            f"The plan is for {plan.mesh.ranks} ranks, and the mesh has {mesh.size()}: {mesh}."
        )


def _dtype(word: Precision | None) -> torch.dtype | None:
    return None if word is None else DTYPES[word]
