"""Numbers that an optimizer keeps of itself, in its groups or under names of its state, and changes as it trains."""

import copy
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, cast

import torch

from fsdp_core.errors import CheckpointError

Values = Sequence[Mapping[str, Any]]
"""Of each group, and last what belongs to no group: text, numbers, None, lists of these, and small tensors, by name."""
# The schedule sets the rate before each step, and a clone may be given another.
_LEFT_OUT: Final = frozenset({"params", "param_names", "lr"})
_LARGEST: Final = 1024  # elements of a tensor that is told as text


def own_values(optimizer: torch.optim.Optimizer) -> Values:
    """All of them, as they are now.

    Raises:
        CheckpointError: Its state has something else than such values that is no parameter's.
    """
    groups = [
        {
            key: _told(each)
            for key, each in group.items()
            if key not in _LEFT_OUT and (_is_plain(each) or _is_small(each))
        }
        for group in optimizer.param_groups
    ]
    state: Mapping[Any, Any] = optimizer.state
    beside = {key: _told(each) for key, each in state.items() if isinstance(key, str)}
    for key, each in beside.items():
        if not _is_plain(each) and not _is_small(state[key]):
            raise CheckpointError(
                f"the optimizer's state has a {type(each).__name__} under {key!r}, which is no parameter; only text, "
                f"numbers, lists of them and tensors of up to {_LARGEST} elements can be saved there. Keep it with one "
                "of the parameters"
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
    device = optimizer.param_groups[0]["params"][0].device
    if any(saved) and len(own) != len(saved):
        raise CheckpointError(
            f"the optimizer has {len(own) - 1} groups of parameters, and was saved with {len(saved) - 1}, whose values "
            "changed as it trained. Build it with the groups it was saved with"
        )
    for values, kept in zip(own, saved, strict=False):
        for key, each in kept.items():
            if isinstance(each, Mapping):
                where = "cpu" if each["on_cpu"] else device
                dtype = getattr(torch, each["dtype"])
                values[key] = torch.tensor(each["values"], dtype=dtype, device=where)
            else:
                values[key] = tuple(each) if isinstance(values.get(key), tuple) else each


def refuse_hidden_state(optimizers: Sequence[torch.optim.Optimizer]) -> None:
    """Refuses one that wraps another, whose state it does not have as its own.

    Args:
        optimizers: All whose state is saved.

    Raises:
        CheckpointError: A resumed run would begin that state from nothing.
    """
    for optimizer in optimizers:
        for name, inner in _within(optimizer, {id(each) for each in optimizers}):
            state: Mapping[Any, Any] = inner.state
            for owner, kept in state.items():
                if optimizer.state.get(owner) is not kept and _has_any(kept):
                    whole, part = type(optimizer).__name__, type(inner).__name__
                    raise CheckpointError(
                        f"the optimizer {whole} has another one within, {name!r} ({part}), which has a state of its own "
                        "that no checkpoint would have: a resumed run would begin it from nothing. Let both have one state, as "
                        f"by self.state = self.{name}.state in {whole}.__init__"
                    )


def _within(
    optimizer: torch.optim.Optimizer, seen: set[int]
) -> Iterator[tuple[str, torch.optim.Optimizer]]:
    for name, value in vars(optimizer).items():
        held = value.values() if isinstance(value, Mapping) else value
        for each in held if isinstance(value, Mapping | list | tuple) else (value,):
            if isinstance(each, torch.optim.Optimizer) and id(each) not in seen:
                seen.add(id(each))
                yield name, each
                yield from ((f"{name}.{within}", inner) for within, inner in _within(each, seen))


def _has_any(kept: object) -> bool:
    return any(each is not None for each in kept.values()) if isinstance(kept, Mapping) else True


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


def _is_small(value: object) -> bool:
    # Of a tensor on several ranks none has all.
    return type(value) is torch.Tensor and value.numel() <= _LARGEST and not value.is_complex()


def _told(value: object) -> object:
    if not _is_small(value):
        return value
    tensor = cast("torch.Tensor", value)
    dtype = str(tensor.dtype).removeprefix("torch.")
    return {"dtype": dtype, "values": tensor.tolist(), "on_cpu": tensor.device.type == "cpu"}


def _text(value: object) -> str:
    return json.dumps(value)  # NaN is not equal to itself
