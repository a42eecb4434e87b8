"""Groups of parameters by patterns of their names, for which an optimizer has options of their own."""

import difflib
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, Final

import torch

from services.contract.jobs.spec_parts import ParameterGroup

Named = tuple[str, torch.nn.Parameter]
Parameters = Iterable[Named] | Iterable[Mapping[str, Any]]
"""What an optimizer is made over: (FQN, parameter), or groups as ``torch.optim`` has them.

The ``params`` of a group are such pairs; its other keys are options that hold for it.
"""

_PARAMS: Final = "params"
_MATRIX_DIMS: Final = 2
_NAMES_SHOWN: Final = 5


class GroupError(ValueError):
    """A group of ``optimizer.groups`` has no parameter, or an option that the optimizer lacks."""


def by_patterns(named: Sequence[Named], groups: Sequence[ParameterGroup]) -> list[dict[str, Any]]:
    """One group for each of ``groups``, with the parameters that no group before it matches.

    What none of them matches comes first, without options.

    Raises:
        GroupError: A pattern matches no name.
    """
    found: list[dict[str, Any]] = [{_PARAMS: [], **group.options} for group in groups]
    rest: list[Named] = []
    for name, parameter in named:
        home = next((i for i, g in enumerate(groups) if fnmatchcase(name, g.match)), None)
        (rest if home is None else found[home][_PARAMS]).append((name, parameter))
    for place, group in enumerate(groups):
        if not any(fnmatchcase(name, group.match) for name, _ in named):
            raise GroupError(
                f"optimizer.groups.{place}.match: {group.match!r} matches no parameter; "
                f"{_close(group.match, [name for name, _ in named])}"
            )
    return [group for group in ({_PARAMS: rest}, *found) if group[_PARAMS]]


def as_groups(parameters: Parameters) -> list[dict[str, Any]]:
    """``parameters`` as groups, of which frozen parameters are left out."""
    given: list[Any] = list(parameters)
    groups = given if given and isinstance(given[0], Mapping) else [{_PARAMS: given}]
    trained = [
        {**group, _PARAMS: [(name, each) for name, each in group[_PARAMS] if each.requires_grad]}
        for group in groups
    ]
    return [group for group in trained if group[_PARAMS]]


def by_decay(parameters: Parameters, weight_decay: float) -> list[dict[str, Any]]:
    """``parameters`` in groups of which those of matrices decay; a group that says its decay keeps it."""
    groups: list[dict[str, Any]] = []
    for group in as_groups(parameters):
        if "weight_decay" in group:
            groups.append(group)
            continue
        matrices = [pair for pair in group[_PARAMS] if pair[1].ndim >= _MATRIX_DIMS]
        others = [pair for pair in group[_PARAMS] if pair[1].ndim < _MATRIX_DIMS]
        groups.append({**group, _PARAMS: matrices, "weight_decay": weight_decay})
        groups.append({**group, _PARAMS: others, "weight_decay": 0.0})
    return [group for group in groups if group[_PARAMS]]


def check_options(
    groups: Sequence[ParameterGroup], optimizers: Iterable[torch.optim.Optimizer]
) -> None:
    """Sees that the optimizers know each option: PyTorch keeps any key and asks for none.

    Raises:
        GroupError: They do not know one.
    """
    known = sorted({name for optimizer in optimizers for name in optimizer.defaults})
    for place, group in enumerate(groups):
        for option in group.options:
            if option not in known:
                raise GroupError(
                    f"optimizer.groups.{place}.{option}: the optimizer has no such option; "
                    f"it has {', '.join(known)}"
                )


def _close(pattern: str, names: Sequence[str]) -> str:
    if not names:
        return "the model has none that is trained"
    close = difflib.get_close_matches(pattern.replace("*", ""), names, _NAMES_SHOWN, cutoff=0.0)
    return f"close to it are {', '.join(close)}"
