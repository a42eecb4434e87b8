"""Tensors within the nested values that forward takes and returns."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Collection
from typing import TypeVar, cast

import torch

T = TypeVar("T")


def map_tensors(
    fn: Callable[[torch.Tensor], torch.Tensor], tree: T, copies: Copies | None = None
) -> T:
    """Applies `fn` to every tensor in `tree`; what does not change keeps its identity.

    Descends into dicts, lists, tuples, sets, named tuples and dataclasses, subclasses included.

    Args:
        fn: Gives the tensor to put in another's place.
        tree: Left as it is.
        copies: Takes note of what is copied.
    """
    return cast("T", _map(fn, tree, copies))


class Copies:
    """Lists, dicts and dataclasses of which a module was given copies, with other tensors in them.

    The module may write to them what its caller reads: losses, or what it wants to find again.
    """

    def __init__(self) -> None:
        self._made: list[tuple[object, object, dict[object, object]]] = []
        self._originals: dict[int, tuple[object, object]] = {}

    def note(self, old: object, new: object) -> None:
        """`new` stands in the place of `old`."""
        self._originals[id(new)] = (old, new)  # what lives keeps its number

    def note_container(self, old: object, new: object) -> None:
        """The same of a container, whose content may change."""
        self.note(old, new)
        self._made.append((old, new, _content(new)))

    def write_back(self) -> list[object]:
        """Makes the changes of each copy to its original; returns the values that are new there."""
        written: list[object] = []
        for old, new, before in reversed(self._made):
            now = _content(new)
            changed = {
                key: v for key, v in now.items() if key not in before or v is not before[key]
            }
            if not changed and len(now) == len(before):
                continue
            written += [value for value in changed.values() if id(value) not in self._originals]
            if isinstance(old, list):
                old[:] = [self._original(value) for value in now.values()]
                continue
            target = cast("dict[object, object]", old if isinstance(old, dict) else vars(old))
            for key in before.keys() - now.keys():
                del target[key]
            for key, value in changed.items():
                target[key] = self._original(value)
        return written

    def _original(self, value: object) -> object:
        while id(value) in self._originals:
            value, _ = self._originals[id(value)]
        return value


def _content(container: object) -> dict[object, object]:
    if isinstance(container, list):
        return dict(enumerate(container))
    return {**(container if isinstance(container, dict) else vars(container))}


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


def _map(fn: Callable[[torch.Tensor], torch.Tensor], tree: object, copies: Copies | None) -> object:
    if isinstance(tree, torch.Tensor):
        result = fn(tree)
        if copies is not None and result is not tree:
            copies.note(tree, result)
        return result
    if _is_dataclass(tree):
        return _map_dataclass(fn, tree, copies)
    if isinstance(tree, dict):
        return _map_dict(fn, tree, copies)
    if isinstance(tree, list | tuple | set | frozenset):
        return _map_items(fn, tree, copies)
    return tree


def _map_items(
    fn: Callable[[torch.Tensor], torch.Tensor], tree: Collection[object], copies: Copies | None
) -> Collection[object]:
    items = [_map(fn, item, copies) for item in tree]
    if all(new is old for new, old in zip(items, tree, strict=True)):
        return tree
    make = cast("Callable[..., Collection[object]]", type(tree))
    # A named tuple takes its items one by one.
    result = make(*items) if hasattr(tree, "_fields") else make(items)
    if copies is not None and isinstance(tree, list):
        copies.note_container(tree, result)
    return result


def _map_dict(
    fn: Callable[[torch.Tensor], torch.Tensor],
    tree: dict[object, object],
    copies: Copies | None,
) -> dict[object, object]:
    changed = {key: new for key, old in tree.items() if (new := _map(fn, old, copies)) is not old}
    if not changed:
        return tree
    result = copy.copy(tree)
    for key, value in changed.items():
        result[key] = value
    if copies is not None:
        copies.note_container(tree, result)
    return result


def _map_dataclass(
    fn: Callable[[torch.Tensor], torch.Tensor], tree: object, copies: Copies | None
) -> object:
    changed: dict[str, object] = {}
    for field in dataclasses.fields(tree):  # type: ignore[arg-type]  # checked by the caller
        old = getattr(tree, field.name)
        if (new := _map(fn, old, copies)) is not old:
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
    if copies is not None and hasattr(tree, "__dict__"):
        copies.note_container(tree, result)
    return result
