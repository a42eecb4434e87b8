"""Which modules a plan's patterns mean in a model, by names alone. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from fsdp_core.errors import PlanError
from fsdp_core.plan.model.sharding import ANY, ShardingPlan, UnitPlan, is_pattern, matches

_NAMES_TOLD = 32


@dataclass(frozen=True)
class ResolvedUnit:
    """One call of `fully_shard`: module names and the options given with them."""

    names: tuple[str, ...]
    plan: UnitPlan

    @property
    def is_root(self) -> bool:
        """Whether it is the unit of the model itself."""
        return self.names == ("",)


class ModuleNames:
    """The names of all modules of a model; what most plans name is found without a look at each.

    Args:
        names: "" included, in the model's order.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self._names = names

    def matching(self, pattern: str) -> list[str]:
        """The names that `pattern` means.

        Raises:
            PlanError: There is none.
        """
        parent, _, last = pattern.rpartition(".")
        if not is_pattern(pattern):
            hits = [pattern] if pattern in self._known else []
        elif last == ANY and parent and not is_pattern(parent):
            hits = self._children.get(parent, [])
        else:
            hits = [name for name in self._names if matches(pattern, name)]
        if not hits:
            top = sorted({name.split(".")[0] for name in self._names if name})
            more = f" and {len(top) - _NAMES_TOLD} more" if len(top) > _NAMES_TOLD else ""
            raise PlanError(
                f"Pattern {pattern!r} of the plan matches no module. The model's top-level "
                f"modules are {top[:_NAMES_TOLD]}{more}."
            )
        return list(hits)

    @cached_property
    def _known(self) -> frozenset[str]:
        return frozenset(self._names)

    @cached_property
    def _children(self) -> dict[str, list[str]]:
        found: dict[str, list[str]] = {}
        for name in self._names:
            found.setdefault(name.rpartition(".")[0], []).append(name)
        return found


def resolve_units(plan: ShardingPlan, names: Sequence[str]) -> list[ResolvedUnit]:
    """The calls of `fully_shard` that `plan` means for a model, in order; the root last.

    Args:
        plan: The plan.
        names: Names of all modules of the model, "" included, in the model's order.

    Raises:
        PlanError: A pattern matches nothing, or two units claim one module.
    """
    modules = ModuleNames(names)
    units = [resolved for unit in plan.units for resolved in _resolve(unit, modules)]
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
    return ModuleNames(names).matching(pattern)


def _resolve(unit: UnitPlan, modules: ModuleNames) -> list[ResolvedUnit]:
    found = [name for pattern in unit.modules for name in modules.matching(pattern)]
    if is_pattern(unit.modules[0]):
        return [ResolvedUnit((name,), unit) for name in found]
    return [ResolvedUnit(tuple(found), unit)]


def _depth(name: str) -> int:
    return name.count(".") + 1 if name else 0
