"""What a module writes into copies of its caller's containers, brought back to these."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterator, MutableMapping
from typing import TypeVar, cast

Container = TypeVar("Container")


class Copies:
    """Lists, sets, dicts and dataclasses of which a module was given copies, with other tensors in them.

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
        for theirs, ours in zip(_parts(old), _parts(new), strict=True):
            self._made.append((theirs, ours, _content(ours)))

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
            if isinstance(old, set):
                old.clear()
                old.update(self._original(value) for value in now.values())
                continue
            target = cast("MutableMapping[object, object]", old)
            for key in before.keys() - now.keys():
                del target[key]
            for key, value in changed.items():
                target[key] = self._original(value)
        return written

    def _original(self, value: object) -> object:
        while id(value) in self._originals:
            value, _ = self._originals[id(value)]
        return value


def copy_of(container: Container) -> Container:
    """A shallow copy, made without `__init__`, which may have effects."""
    result = copy.copy(container)
    if _has_dict(container) and vars(container) is container:
        result.__dict__ = result  # type: ignore[assignment]  # a dict whose keys are its attributes
    return result


def _parts(container: object) -> list[object]:
    """What of a container can change: its items, its attributes, and its slots."""
    parts: list[object] = [container] if isinstance(container, list | set | dict) else []
    if _has_dict(container) and vars(container) is not container:
        parts.append(vars(container))
    if dataclasses.is_dataclass(container):
        parts.append(_Slots(container))
    return parts


def _has_dict(container: object) -> bool:
    # To look the attribute up may run a `__getattr__` that knows keys only.
    return type(container).__dictoffset__ != 0


def _content(part: object) -> dict[object, object]:
    if isinstance(part, list):
        return dict(enumerate(part))
    if isinstance(part, set):
        return {id(item): item for item in part}
    return {**cast("MutableMapping[object, object]", part)}


class _Slots(MutableMapping[str, object]):
    """The fields of a dataclass that are not in its `__dict__`."""

    def __init__(self, container: object) -> None:
        names = [field.name for field in dataclasses.fields(container)]  # type: ignore[arg-type]  # checked by the caller
        held = vars(container) if _has_dict(container) else {}
        self._container = container
        self._names = [name for name in names if name not in held]

    def __iter__(self) -> Iterator[str]:
        return (name for name in self._names if hasattr(self._container, name))

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __getitem__(self, name: str) -> object:
        return getattr(self._container, name)

    def __setitem__(self, name: str, value: object) -> None:
        object.__setattr__(self._container, name, value)

    def __delitem__(self, name: str) -> None:
        object.__delattr__(self._container, name)
