"""Which modules a plan's patterns mean in a model, by names alone. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fsdp_core.errors import PlanError
from fsdp_core.plan.model.sharding import ShardingPlan, UnitPlan, is_pattern, matches


@dataclass(frozen=True)
class ResolvedUnit:
    """One call of `fully_shard`: module names and the options given with them."""

    names: tuple[str, ...]
    plan: UnitPlan

    @property
    def is_root(self) -> bool:
        """Whether it is the unit of the model itself."""
        return self.names == ("",)


def resolve_units(plan: ShardingPlan, names: Sequence[str]) -> list[ResolvedUnit]:
    """The calls of `fully_shard` that `plan` means for a model, in order; the root last.

    Args:
        plan: The plan.
        names: Names of all modules of the model, "" included, in the model's order.

    Raises:
        PlanError: A pattern matches nothing, or two units claim one module.
    """
    units = [resolved for unit in plan.units for resolved in _resolve(unit, names)]
    if not any(unit.is_root for unit in units):
        units.append(ResolvedUnit(("",), UnitPlan(("",))))
    claimed: set[str] = set()
    for name in (name for unit in units for name in unit.names):
        if name in claimed:
            raise PlanError(f"Module {name!r} is claimed by two units of the plan.")
        claimed.add(name)
    return sorted(units, key=lambda unit: -max(_depth(name) for name in unit.names))


def matching(pattern: str, names: Sequence[str]) -> list[str]:
    """The `names` that `pattern` means.

    Raises:
        PlanError: There is none.
    """
    hits = [name for name in names if matches(pattern, name)]
    if not hits:
        raise PlanError(
            f"Pattern {pattern!r} of the plan matches no module. The model's top-level "
            f"modules are {sorted({name.split('.')[0] for name in names if name})}."
        )
    return hits


def _resolve(unit: UnitPlan, names: Sequence[str]) -> list[ResolvedUnit]:
    found = [name for pattern in unit.modules for name in matching(pattern, names)]
    if is_pattern(unit.modules[0]):
        return [ResolvedUnit((name,), unit) for name in found]
    return [ResolvedUnit(tuple(found), unit)]


def _depth(name: str) -> int:
    return name.count(".") + 1 if name else 0
