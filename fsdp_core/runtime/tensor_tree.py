"""Tensors within the nested values that forward takes and returns."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterable
from typing import Any, TypeAlias, TypeVar, cast

import torch
from torch.nn.utils.rnn import PackedSequence

from fsdp_core.errors import ArgumentError
from fsdp_core.runtime.copies import Copies, copy_of

T = TypeVar("T")

Tree: TypeAlias = Any  # of a kind that was looked at


def map_tensors(
    fn: Callable[[torch.Tensor], torch.Tensor], tree: T, copies: Copies | None = None
) -> T:
    """Applies `fn` to every tensor in `tree`; what does not change keeps its identity.

    Descends into dicts, lists, tuples, sets, named tuples and dataclasses, subclasses included. A
    container that is there twice is mapped once, so that both places keep the same one.

    Args:
        fn: Gives the tensor to put in another's place.
        tree: Left as it is.
        copies: Takes note of what is copied.

    Raises:
        ArgumentError: A container contains itself.
    """
    return cast("T", _Mapping(fn, copies).apply(tree))


def grad_tensors(tree: object) -> list[torch.Tensor]:
    """The tensors in `tree` that require a gradient, in the order of `map_tensors`."""
    return [tensor for tensor in _tensors(tree) if tensor.requires_grad]


def has_no_tensor(tree: object) -> bool:
    """Whether `map_tensors` finds nothing in `tree`."""
    return not _tensors(tree)


def containers_in(tree: object) -> Collection[object]:
    """All containers that `map_tensors` looks into, `tree` itself included, each once."""
    seen: dict[int, object] = {}
    _collect(tree, [], seen)
    return seen.values()


def _tensors(tree: object) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    _collect(tree, found, {})
    return found


def _collect(tree: object, found: list[torch.Tensor], seen: dict[int, object]) -> None:
    if isinstance(tree, torch.Tensor):
        found.append(tree)
        return
    values: Iterable[object]
    if _is_dataclass(tree):
        values = (getattr(tree, field.name) for field in dataclasses.fields(tree))  # type: ignore[arg-type]  # just checked
    elif isinstance(tree, dict):
        values = tree.values()
    elif isinstance(tree, list | tuple | set | frozenset):
        values = tree
    else:
        return
    if id(tree) in seen:
        return
    seen[id(tree)] = tree  # what lives keeps its number
    for value in values:
        _collect(value, found, seen)


def _is_dataclass(tree: object) -> bool:
    # The builtin kinds, of which nearly all trees are made, need no look at their attributes.
    kind = type(tree)
    if kind is tuple or kind is dict or kind is list:
        return False
    return dataclasses.is_dataclass(kind)


_UNFINISHED = object()


class _Mapping:
    """One call of `map_tensors`."""

    def __init__(self, fn: Callable[[torch.Tensor], torch.Tensor], copies: Copies | None) -> None:
        self._fn = fn
        self._copies = copies
        self._mapped: dict[int, tuple[object, object]] = {}

    def apply(self, tree: object) -> object:
        """The tree to put in the place of this one."""
        if isinstance(tree, torch.Tensor):
            result = self._fn(tree)
            if self._copies is not None and result is not tree:
                self._copies.note(tree, result)
            return result
        if _is_dataclass(tree):
            apply = self._apply_to_dataclass
        elif isinstance(tree, dict):
            apply = self._apply_to_dict
        elif isinstance(tree, list | tuple | set | frozenset):
            apply = self._apply_to_items
        else:
            return tree
        if id(tree) not in self._mapped:
            self._mapped[id(tree)] = (tree, _UNFINISHED)  # what lives keeps its number
            self._mapped[id(tree)] = (tree, apply(tree))
        if (known := self._mapped[id(tree)][1]) is _UNFINISHED:
            raise ArgumentError(
                f"A {type(tree).__name__} that a unit takes or returns contains itself, so that it "
                "cannot be copied with other tensors in it. Hand over its parts."
            )
        return known

    def _apply_to_items(self, tree: Tree) -> object:
        # Lengths of packed sequences are the host's, on whatever device the rest is.
        lengths = tree.batch_sizes if isinstance(tree, PackedSequence) else None
        items = [item if item is lengths else self.apply(item) for item in tree]
        if all(new is old for new, old in zip(items, tree, strict=True)):
            return tree
        result: object
        if isinstance(tree, list):
            result = copy_of(tree)
            result[:] = items
        elif hasattr(tree, "_fields"):  # a named tuple takes its items one by one
            result = type(tree)(*items)
        else:
            result = type(tree)(items)
        self._note(tree, result)
        return result

    def _apply_to_dict(self, tree: Tree) -> object:
        changed = {k: new for k, old in tree.items() if (new := self.apply(old)) is not old}
        if not changed:
            return tree
        result = copy_of(tree)
        for key, value in changed.items():
            result[key] = value
        self._note(tree, result)
        return result

    def _apply_to_dataclass(self, tree: Tree) -> object:
        changed: dict[str, object] = {}
        for field in dataclasses.fields(tree):
            old = getattr(tree, field.name)
            if (new := self.apply(old)) is not old:
                changed[field.name] = new
        if not changed:
            return tree
        result = copy_of(tree)
        for name, value in changed.items():
            try:
                setattr(result, name, value)
            except dataclasses.FrozenInstanceError:
                object.__setattr__(result, name, value)
        self._note(tree, result)
        return result

    def _note(self, old: object, new: object) -> None:
        if self._copies is not None:
            self._copies.note_container(old, new)
