"""One optimizer or several, with the rates that a schedule multiplies."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch

from services.worker.rank.optim.own_values import Values, own_values

ONLY = "optimizer"
"""The name of one that was made alone."""


class OptimizerError(TypeError):
    """What should make optimizers made something else, or put a parameter into two of them."""


@dataclass(frozen=True)
class Optimizers:
    """Optimizers by name, over disjoint parameters.

    Attributes:
        by_name: They.
        base_rates: Learning rate of each of their groups before the schedule.
        first_values: Their own values as they were made.
    """

    by_name: Mapping[str, torch.optim.Optimizer]
    base_rates: Mapping[str, tuple[float, ...]]
    first_values: Mapping[str, Values]

    @classmethod
    def of(cls, made: object, maker: str) -> "Optimizers":
        """What was made.

        Args:
            made: An optimizer, or a dict of several.
            maker: Who made it, for errors.

        Raises:
            OptimizerError: It is something else, or two of them have a parameter in common.
        """
        given = dict(made) if isinstance(made, Mapping) else {ONLY: made}
        by_name: dict[str, torch.optim.Optimizer] = {}
        taken: dict[torch.Tensor, str] = {}
        for name, optimizer in given.items():
            if not isinstance(optimizer, torch.optim.Optimizer):
                raise OptimizerError(
                    f"{maker} made a {type(optimizer).__name__}, not a torch.optim.Optimizer or a "
                    "dict of them by name"
                )
            for parameter in parameters_of(optimizer):
                if parameter in taken:
                    raise OptimizerError(
                        f"{maker}: the optimizers {taken[parameter]!r} and {name!r} both have a "
                        f"parameter of shape {tuple(parameter.shape)}; give it to one of them"
                    )
                taken[parameter] = name
            by_name[str(name)] = optimizer
        if not by_name:
            raise OptimizerError(f"{maker} made no optimizer: no parameter would be trained")
        rates = {
            name: tuple(float(group["lr"]) for group in optimizer.param_groups)
            for name, optimizer in by_name.items()
        }
        return cls(by_name, rates, {name: own_values(each) for name, each in by_name.items()})

    @property
    def first_rate(self) -> float:
        """Of the first group of the first, before the schedule."""
        return next(iter(self.base_rates.values()))[0]

    def named(self, name: str | None) -> list[torch.optim.Optimizer]:
        """The optimizer of that name; None: all.

        Raises:
            OptimizerError: There is none of that name.
        """
        if name is None:
            return list(self.by_name.values())
        if name not in self.by_name:
            raise OptimizerError(
                f"there is no optimizer {name!r}; there are {', '.join(self.by_name)}"
            )
        return [self.by_name[name]]

    def set_rates(self, factor: float) -> None:
        """Each learning rate is what it was made with, times ``factor``."""
        for name, optimizer in self.by_name.items():
            for group, rate in zip(optimizer.param_groups, self.base_rates[name], strict=True):
                group["lr"] = rate * factor


def parameters_of(optimizer: torch.optim.Optimizer) -> Iterator[torch.nn.Parameter]:
    """All parameters of its groups."""
    for group in optimizer.param_groups:
        yield from group["params"]
