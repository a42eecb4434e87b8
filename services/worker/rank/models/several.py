"""One model or several by name, and what a plan says of each."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Final

from torch import nn

from fsdp_core import FSDPModule, fully_shard
from fsdp_core.errors import PlanError
from fsdp_core.plan.model import ShardingPlan, TensorParallelPlan, UnitPlan
from fsdp_core.plan.model.sharding import ANY, matches

ALONE: Final = "model"
"""The name of one that was built alone; nothing else has it in front."""


@dataclass(frozen=True)
class Models:
    """Models by name.

    Attributes:
        by_name: They; at least one.
        is_one: Whether it was built alone: then names of its modules are without its own.
    """

    by_name: Mapping[str, nn.Module]
    is_one: bool

    @classmethod
    def of(cls, built: object) -> "Models":
        """What a factory built.

        Raises:
            TypeError: That is neither a module nor a mapping of some by names without dots.
        """
        if not isinstance(built, Mapping):
            return cls({ALONE: checked_module(built, "build_model")}, is_one=True)
        for name, model in built.items():
            if not isinstance(name, str) or not name.isidentifier():
                raise TypeError(
                    f"build_model: {name!r} is not a valid name of a model; use a plain word"
                )
            if not isinstance(model, nn.Module):
                raise TypeError(
                    f"build_model: {name!r} is a {type(model).__name__}, not an nn.Module"
                )
        if not built:
            raise TypeError("build_model made no model")
        return cls(dict(built), is_one=False)

    @cached_property
    def whole(self) -> nn.Module:
        """The one, or a container of all, which is never called: for names, states and norms."""
        if self.is_one:
            return self.by_name[ALONE]
        return nn.ModuleDict(self.by_name)

    @cached_property
    def _sharded(self) -> Sequence[FSDPModule]:
        return [each for each in self.whole.modules() if isinstance(each, FSDPModule)]

    def reshard(self) -> None:
        """Has every unit give back what it gathered: those whose last pass had no backward keep it.

        They would otherwise compute on with values of before an update or an exchange.
        """
        for module in self._sharded:
            module.reshard()

    def prefix(self, name: str) -> str:
        """What names of modules of this model have in front."""
        return "" if self.is_one else f"{name}."

    def units(self, name: str) -> tuple[str, ...]:
        """Names of the engine's units of a model in the order of their indices; its root is first."""
        prefix = self.prefix(name)
        names: dict[object, list[str]] = {}
        for inner, module in self.by_name[name].named_modules():
            state = fully_shard.state(module)
            if state is not None:
                whole = f"{prefix}{inner}".removesuffix(".") or "root"
                names.setdefault(state, []).append(whole)
        return tuple(", ".join(fqns) for fqns in names.values())

    def plans(self, plan: ShardingPlan) -> Mapping[str, ShardingPlan]:
        """The plan of each model: of several, the patterns that begin with its name or with ``*``.

        Raises:
            PlanError: A unit has modules of two models, or a pattern begins with no model's name.
        """
        if self.is_one:
            return dict.fromkeys(self.by_name, plan)
        of_units = [pattern for unit in plan.units for pattern in unit.modules]
        of_splits = [pattern for split in plan.tensor_parallel for pattern in split.modules]
        for pattern in (*of_units, *of_splits):
            if not any(self._rest(name, pattern) for name in self.by_name):
                raise PlanError(
                    f"Pattern {pattern!r} of the plan matches nothing in the models "
                    f"{', '.join(self.by_name)}; it begins with the name of one of them."
                )
        return {
            name: replace(
                plan,
                units=tuple(each for unit in plan.units for each in self._unit(name, unit)),
                tensor_parallel=tuple(
                    each for split in plan.tensor_parallel for each in self._split(name, split)
                ),
            )
            for name in self.by_name
        }

    def _unit(self, name: str, unit: UnitPlan) -> Sequence[UnitPlan]:
        rests = [self._rest(name, pattern) for pattern in unit.modules]
        found = tuple(rest[0] for rest in rests if rest)
        if not found:
            return ()
        if len(found) < len(rests):
            raise PlanError(f"One unit cannot have modules of two models: {list(unit.modules)}.")
        return (replace(unit, modules=found),)

    def _split(self, name: str, split: TensorParallelPlan) -> Sequence[TensorParallelPlan]:
        rests = [self._rest(name, pattern) for pattern in split.modules]
        found = tuple(rest[0] for rest in rests if rest)
        return (replace(split, modules=found),) if found else ()

    def _rest(self, name: str, pattern: str) -> tuple[str, ...]:
        """The pattern within the model, in a tuple, which is empty if it means nothing there."""
        if pattern == "":
            return ("",)
        head, _, rest = pattern.partition(".")
        if head not in (ANY, name):
            return ()
        names = (inner for inner, _ in self.by_name[name].named_modules())
        return (rest,) if any(matches(rest, inner) for inner in names) else ()


def checked_module(model: object, maker: str = "model.factory") -> nn.Module:
    """What a model factory made.

    Raises:
        TypeError: That is something else than a module.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"{maker} made a {type(model).__name__}, not an nn.Module")
    return model
