"""What a module writes into copies of its caller's containers, brought back to these."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Collection, Iterable, Iterator, Mapping, MutableMapping
from typing import TypeVar, cast

Container = TypeVar("Container")


class Copies:
    """Lists, sets, dicts and dataclasses that a module is given, some of them copied with other tensors.

    The module may write to them what its caller reads: losses, or what it wants to find again.
    """

    def __init__(self) -> None:
        self._made: list[tuple[object, object, dict[object, object]]] = []
        self._originals: dict[int, tuple[object, object]] = {}

    def note(self, old: object, new: object) -> None:
        """`new` stands in the place of `old`."""
        self._originals[id(new)] = (old, new)  # what lives keeps its number

    def note_container(self, old: object, new: object) -> None:
        """The same of a container, whose content may change, unless it is a tuple."""
        self.note(old, new)
        for theirs, ours in zip(_parts(old), _parts(new), strict=True):
            self._made.append((theirs, ours, _content(ours)))

    def watch(self, containers: Iterable[object]) -> None:
        """Takes note of what is in those that were not copied: the module may put copies there."""
        for container in containers:
            if id(container) not in self._originals:
                self._made += [(part, part, _content(part)) for part in _parts(container)]

    def written(self) -> list[object]:
        """The values that the module has put into containers, copied or not."""
        found: list[object] = []
        for _, new, before in reversed(self._made):
            now = _content(new)
            found += [now[key] for key in _changed(before, now)]
        return [value for value in found if id(value) not in self._originals]

    def write_back(self, made: Iterable[object]) -> None:
        """Makes the changes of each copy to its original.

        Args:
            made: Containers among what was written, which may have copies in them.
        """
        for old, new, before in reversed(self._made):
            now = _content(new)
            changed = _changed(before, now)
            if changed or len(now) != len(before):
                self._fill(old, now, changed, before.keys() - now.keys())
        for part in [part for container in made for part in _parts(container)]:
            content = _content(part)
            self._fill(part, content, list(content), ())

    def _fill(
        self,
        part: object,
        copied: Mapping[object, object],
        changed: Collection[object],
        gone: Iterable[object],
    ) -> None:
        content = {key: self._original(value) for key, value in copied.items()}
        held = _content(part)
        if held.keys() == content.keys() and all(held[key] is content[key] for key in changed):
            return
        if isinstance(part, list):
            part[:] = content.values()
            return
        if isinstance(part, set):
            part.clear()
            part.update(content.values())
            return
        target = cast("MutableMapping[object, object]", part)
        for key in gone:
            if key in target:
                del target[key]
        for key in changed:
            target[key] = content[key]
        if list(target) != list(content):  # a key was taken out and put in again
            for key, value in content.items():
                del target[key]
                target[key] = value

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


def _changed(before: Mapping[object, object], now: Mapping[object, object]) -> list[object]:
    return [key for key, v in now.items() if key not in before or v is not before[key]]


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
