"""Tensors within the nested values that forward takes and returns."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Collection
from typing import TypeVar, cast

import torch

T = TypeVar("T")


def map_tensors(fn: Callable[[torch.Tensor], torch.Tensor], tree: T) -> T:
    """Applies `fn` to every tensor in `tree`; what does not change keeps its identity.

    Descends into dicts, lists, tuples, sets, named tuples and dataclasses, subclasses included.
    """
    return cast("T", _map(fn, tree))


def grad_tensors(tree: object) -> list[torch.Tensor]:
    """The tensors in `tree` that require a gradient, in the order of `map_tensors`."""
    return [tensor for tensor in _tensors(tree) if tensor.requires_grad]


def has_no_tensor(tree: object) -> bool:
    """Whether `map_tensors` finds nothing in `tree`."""
    return not _tensors(tree)


def _tensors(tree: object) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    _collect(tree, found)
    return found


def _collect(tree: object, found: list[torch.Tensor]) -> None:
    if isinstance(tree, torch.Tensor):
        found.append(tree)
    elif _is_dataclass(tree):
        for field in dataclasses.fields(tree):  # type: ignore[arg-type]  # just checked
            _collect(getattr(tree, field.name), found)
    elif isinstance(tree, dict):
        for value in tree.values():
            _collect(value, found)
    elif isinstance(tree, list | tuple | set | frozenset):
        for item in tree:
            _collect(item, found)


def _is_dataclass(tree: object) -> bool:
    # The builtin kinds, of which nearly all trees are made, need no look at their attributes.
    kind = type(tree)
    if kind is tuple or kind is dict or kind is list:
        return False
    return dataclasses.is_dataclass(kind)


def _map(fn: Callable[[torch.Tensor], torch.Tensor], tree: object) -> object:
    if isinstance(tree, torch.Tensor):
        return fn(tree)
    if _is_dataclass(tree):
        return _map_dataclass(fn, tree)
    if isinstance(tree, dict):
        return _map_dict(fn, tree)
    if isinstance(tree, list | tuple | set | frozenset):
        return _map_items(fn, tree)
    return tree


def _map_items(
    fn: Callable[[torch.Tensor], torch.Tensor], tree: Collection[object]
) -> Collection[object]:
    items = [_map(fn, item) for item in tree]
    if all(new is old for new, old in zip(items, tree, strict=True)):
        return tree
    make = cast("Callable[..., Collection[object]]", type(tree))
    # A named tuple takes its items one by one.
    return make(*items) if hasattr(tree, "_fields") else make(items)


def _map_dict(
    fn: Callable[[torch.Tensor], torch.Tensor], tree: dict[object, object]
) -> dict[object, object]:
    changed = {key: new for key, old in tree.items() if (new := _map(fn, old)) is not old}
    if not changed:
        return tree
    result = copy.copy(tree)
    for key, value in changed.items():
        result[key] = value
    return result


def _map_dataclass(fn: Callable[[torch.Tensor], torch.Tensor], tree: object) -> object:
    changed: dict[str, object] = {}
    for field in dataclasses.fields(tree):  # type: ignore[arg-type]  # checked by the caller
        old = getattr(tree, field.name)
        if (new := _map(fn, old)) is not old:
            changed[field.name] = new
    if not changed:
        return tree
    # A copy instead of a new construction: __init__ and __post_init__ may have effects.
    result = copy.copy(tree)
    for name, value in changed.items():
        try:
            setattr(result, name, value)
        except dataclasses.FrozenInstanceError:
            object.__setattr__(result, name, value)
    return result
