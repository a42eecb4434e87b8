"""Free-form JSON of a spec within bounds that every reader on its way bears."""

from collections.abc import Iterator, Mapping
from itertools import islice
from types import MappingProxyType
from typing import Any, Final

from pydantic import ValidationError, ValidationInfo
from pydantic_core import InitErrorDetails, PydanticCustomError

from services.contract.words.problems import MOST_FAULTS

MAX_DEPTH: Final = 32
_MAX_VALUES: Final = 65_536
INT_END: Final = 1 << 63
JUDGED: Final[Mapping[str, bool]] = MappingProxyType({"judged": True})
"""The context in which a spec is validated that was within its bounds when the controller wrote it.

To judge one of 64 KiB again takes four times as long as to read it, and a page of a list may have 200.
"""


def is_judged(info: ValidationInfo) -> bool:
    """Whether the bounds of what is validated were kept when it was written."""
    return info.context is JUDGED


def bounded(value: object, info: ValidationInfo) -> object:
    """``value`` if all readers can bear it: JSON parsers give up on deep nesting, each elsewhere.

    Raises:
        ValidationError: It is nested too deep, too long, or has a number beyond 64 bits; each
            fault at its own place.
    """
    if is_judged(info) or _is_sound(value):
        return value
    faults = list(islice(_faults(value), MOST_FAULTS + 1))
    if faults:
        raise ValidationError.from_exception_data("bounded", faults)
    return value


def _is_sound(root: object) -> bool:
    """Whether there is no fault, without the places of values: with them a large spec takes nearly half as long again to be read."""
    seen = 0
    level: list[object] = [root]
    for depth in range(MAX_DEPTH + 1):
        seen += len(level)
        below: list[object] = []
        for value in level:
            if isinstance(value, dict | list | tuple):
                if depth == MAX_DEPTH:
                    return False
                below += value.values() if isinstance(value, dict) else value
                if seen + len(below) > _MAX_VALUES:
                    return False
            elif isinstance(value, int) and not -INT_END <= value < INT_END:
                return False
        if not below:
            break
        level = below
    return True


def _faults(root: object) -> Iterator[InitErrorDetails]:
    # By hand, not by recursion, which is what this guards; YAML's aliases make few bytes many.
    seen = 0
    todo: list[tuple[tuple[str | int, ...], object]] = [((), root)]
    while todo:
        place, value = todo.pop()
        seen += 1
        if seen > _MAX_VALUES:
            yield _fault((), "too_many_values", f"more than {_MAX_VALUES} values")
            return
        if len(place) >= MAX_DEPTH and isinstance(value, dict | list | tuple):
            yield _fault(place[:1], "nested_too_deep", f"nested deeper than {MAX_DEPTH} levels")
            return
        if isinstance(value, dict):
            todo += [((*place, str(key)), item) for key, item in value.items()]
        elif isinstance(value, list | tuple):
            todo += [((*place, index), item) for index, item in enumerate(value)]
        elif isinstance(value, int) and not -INT_END <= value < INT_END:
            yield _fault(place, "int_beyond_64_bits", "an integer beyond 64 bits")


def _fault(place: tuple[str | int, ...], code: str, text: str) -> InitErrorDetails:
    # Without the input: it may be what nobody can print.
    error: Any = PydanticCustomError(code, text)
    return InitErrorDetails(type=error, loc=place, input=None)
