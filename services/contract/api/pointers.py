"""Pydantic's errors as faults with JSON pointers (RFC 6901) into the body."""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, get_args

from pydantic import BaseModel

from services.contract.api.fault_words import in_words, no_such_field
from services.contract.words.problems import MOST_FAULTS, Fault, first_faults

_ERRORS_A_FAULT: Final = 4
_LONGEST_DETAIL: Final = 1_000  # faults of one place are joined up to about here
_SAID_PATH: Final = re.compile(r"^([a-z_]+(?:\.[a-z_0-9]+)*): ")
_NOT_THERE: Final = frozenset({"missing", "value_error"})
UNION_TAGS: Final = frozenset({"(spec)", "(plan)"})
"""Of bodies that may be one thing or another: never names of fields."""
_OUTSIDE_THE_BODY: Final = frozenset({"query", "path", "header", "cookie"})


def faults_of(
    errors: Sequence[Mapping[str, Any]], body: object, model: type[BaseModel] | None = None
) -> list[Fault]:
    """One fault a place, with all that is wrong there, as far as ``first_faults`` lists them.

    A union reports what each of its members misses: the literal ones are passed over where a
    fault lies deeper, and several complaints about one place are joined.

    Args:
        errors: As ``ValidationError.errors()`` or FastAPI gives them.
        body: The parsed body, by which a union's tags are told from its fields.
        model: What the body should be, by which a field that is not known is told what was meant.
    """
    # A union has an error for each of its members, so more of them are looked at than are listed.
    looked_at = errors[: MOST_FAULTS * _ERRORS_A_FAULT]
    found = [_fault(error, body, model) for error in looked_at]
    deeper = {fault.pointer for fault in found}
    merged: dict[str, Fault] = {}
    for fault in found:
        if fault.code == "literal_error" and _has_deeper(fault.pointer, deeper):
            continue
        known = merged.get(fault.pointer)
        if known is None:
            merged[fault.pointer] = fault
        elif len(known.detail) < _LONGEST_DETAIL and fault.detail not in known.detail:
            detail = f"{known.detail}; or: {fault.detail}"
            merged[fault.pointer] = known.model_copy(update={"detail": detail})
    return first_faults(merged.values(), len(errors) - len(looked_at))


def pointer_of(parts: Iterable[object]) -> str:
    """The JSON pointer through these keys and indices."""
    return "".join("/" + str(part).replace("~", "~0").replace("/", "~1") for part in parts)


def _fault(error: Mapping[str, Any], body: object, model: type[BaseModel] | None) -> Fault:
    loc: Sequence[str | int] = error["loc"]
    code = str(error["type"])
    text = in_words(error)
    if loc and loc[0] in _OUTSIDE_THE_BODY:
        return Fault(pointer="", detail=f"{loc[0]} parameter {loc[-1]}: {text}", code=code)
    parts = _real_parts(loc[1:] if loc and loc[0] == "body" else loc, body, code)
    if code == "extra_forbidden":
        known = fields_at(model, parts[:-1]) if model is not None else ()
        text = no_such_field(str(loc[-1]), known)
    said = _SAID_PATH.match(text)
    if code == "value_error" and said is not None:
        parts = [*parts, *said.group(1).split(".")]
    return Fault(pointer=pointer_of(parts), detail=text, code=code)


def fields_at(model: type[BaseModel], parts: Iterable[object]) -> set[str]:
    """The fields that may stand at a place of a body; none where any name may."""
    here = {model}
    for part in parts:
        if isinstance(part, int):
            continue  # an item of a list: the list's type was followed already
        fields = (each.model_fields.get(str(part)) for each in here)
        here = {inner for field in fields if field for inner in _models_in(field.annotation)}
    return {name for each in here for name in each.model_fields}


def _models_in(annotation: object) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for part in get_args(annotation):
        yield from _models_in(part)


def _real_parts(loc: Sequence[str | int], body: object, code: str) -> list[str | int]:
    """The parts of a location that are in the body; a union's tags are not."""
    parts: list[str | int] = []
    here: Any = body
    for index, part in enumerate(loc):
        is_last = index == len(loc) - 1
        is_item = isinstance(here, list) and isinstance(part, int) and part < len(here)
        if is_item or (isinstance(here, dict) and part in here):
            here = here[part]
        elif not (is_last and code in _NOT_THERE) or part in UNION_TAGS:
            continue
        parts.append(part)
    return parts


def _has_deeper(pointer: str, all_pointers: set[str]) -> bool:
    return any(other.startswith(f"{pointer}/") for other in all_pointers)
