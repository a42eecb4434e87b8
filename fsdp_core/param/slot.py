"""Where a parameter hangs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from fsdp_core import torch_private
from fsdp_core.errors import ArgumentError


@dataclass(frozen=True)
class ParamSlot:
    """All (module, name) places of one parameter; more than one if it is tied.

    Attributes:
        places: The first is where changes by the user are read from.
        fqn: Name below the unit's first module, for messages.
    """

    places: tuple[tuple[nn.Module, str], ...]
    fqn: str

    @property
    def modules(self) -> tuple[nn.Module, ...]:
        """The modules concerned, each once."""
        return tuple(dict.fromkeys(module for module, _ in self.places))

    def joined(self, other: ParamSlot) -> ParamSlot:
        """With the places of `other` behind this one's."""
        return ParamSlot((*self.places, *other.places), self.fqn)

    def registered(self) -> nn.Parameter:
        """What hangs at the first place now."""
        module, name = self.places[0]
        return module.get_parameter(name)

    def register(self, parameter: nn.Parameter) -> None:
        """Hangs `parameter` at every place."""
        for module, name in self.places:
            torch_private.set_parameter(module, name, parameter)


def find_slots(parameters: Sequence[nn.Parameter], modules: Sequence[nn.Module]) -> list[ParamSlot]:
    """The slot of each parameter within the trees of `modules`, in the order given.

    Raises:
        ArgumentError: A parameter hangs nowhere in the trees.
    """
    places: dict[nn.Parameter, dict[tuple[nn.Module, str], str]] = {p: {} for p in parameters}
    for root in modules:
        for prefix, module in root.named_modules(remove_duplicate=False):
            for name, parameter in torch_private.own_parameters(module):
                if parameter in places:
                    fqn = f"{prefix}.{name}" if prefix else name
                    places[parameter].setdefault((module, name), fqn)
    if any(not found for found in places.values()):
        raise ArgumentError(f"Some parameters are not in the module trees of {tuple(modules)}.")
    return [ParamSlot(tuple(found), next(iter(found.values()))) for found in places.values()]
