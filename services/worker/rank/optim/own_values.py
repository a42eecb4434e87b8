"""Numbers that an optimizer keeps of itself, in its groups or under names of its state, and changes as it trains."""

import copy
import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch

from fsdp_core.errors import CheckpointError

Values = Sequence[Mapping[str, Any]]
"""Of each group, and last what belongs to no group: text, numbers, None, and lists of these, by name."""
# The schedule sets the rate before each step, and a clone may be given another.
_LEFT_OUT: Final = frozenset({"params", "param_names", "lr"})


def own_values(optimizer: torch.optim.Optimizer) -> Values:
    """All of them, as they are now.

    Raises:
        CheckpointError: Its state has something else than such values that is no parameter's.
    """
    groups = [
        {key: each for key, each in group.items() if key not in _LEFT_OUT and _is_plain(each)}
        for group in optimizer.param_groups
    ]
    state: Mapping[Any, Any] = optimizer.state
    beside = {key: each for key, each in state.items() if isinstance(key, str)}
    for key, each in beside.items():
        if not _is_plain(each):
            raise CheckpointError(
                f"the optimizer's state has a {type(each).__name__} under {key!r}, which is no parameter; only text, "
                "numbers and lists of them can be saved there. Keep it with one of the parameters"
            )
    # An optimizer may change a list in place.
    return copy.deepcopy([*groups, beside])


def changed(optimizer: torch.optim.Optimizer, first: Values) -> Values:
    """Those that are not what they were when the optimizer was made.

    Args:
        optimizer: It.
        first: Its values then.

    Raises:
        CheckpointError: As ``own_values``.
    """
    return [
        {
            key: each
            for key, each in now.items()
            if key not in then or _text(each) != _text(then[key])
        }
        for now, then in zip(own_values(optimizer), first, strict=True)
    ]


def number_keys(optimizer: torch.optim.Optimizer) -> list[str]:
    """The keys under which its state has Python's numbers for parameters."""
    state: Mapping[Any, Any] = optimizer.state
    of_parameters = [each for owner, each in state.items() if isinstance(owner, torch.Tensor)]
    return sorted(
        {
            key
            for kept in of_parameters
            for key, each in kept.items()
            if isinstance(each, int | float)
        }
    )


def put_back(optimizer: torch.optim.Optimizer, saved: Values) -> None:
    """Sets what had changed when it was saved.

    Args:
        optimizer: Freshly made.
        saved: As ``changed`` told, through JSON.

    Raises:
        CheckpointError: It has another number of groups, so that nobody knows whose they are.
    """
    own: list[dict[Any, Any]] = [*optimizer.param_groups, optimizer.state]
    if any(saved) and len(own) != len(saved):
        raise CheckpointError(
            f"the optimizer has {len(own) - 1} groups of parameters, and was saved with {len(saved) - 1}, whose values "
            "changed as it trained. Build it with the groups it was saved with"
        )
    for values, kept in zip(own, saved, strict=False):
        for key, each in kept.items():
            values[key] = tuple(each) if isinstance(values.get(key), tuple) else each


def rates(optimizer: torch.optim.Optimizer, first: Sequence[float]) -> list[list[float]]:
    """What each group was made with, of ``first``, and what it has now; nothing where all are as they were."""
    now = [float(group["lr"]) for group in optimizer.param_groups]
    return [] if now == [*first] else [list(pair) for pair in zip(first, now, strict=True)]


def put_rates_back(optimizer: torch.optim.Optimizer, saved: Sequence[Sequence[float]]) -> None:
    """Sets the rates that ``rates`` told. What was made with another rate, as in a clone, keeps it."""
    if len(saved) == len(optimizer.param_groups):
        for group, (first, rate) in zip(optimizer.param_groups, saved, strict=True):
            if group["lr"] != first:
                continue
            if isinstance(group["lr"], torch.Tensor):  # whoever holds it sets it
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate


def _is_plain(value: object) -> bool:
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, bool | int | float | str)


def _text(value: object) -> str:
    return json.dumps(value)  # NaN is not equal to itself
