"""Every fault of a job spec at once: those of its fields, and those that they hide.

Pydantic stops at the fields: what several of them come to together (a mesh and a number of ranks, a batch and its
ranks) and what the names of built-ins mean is only looked at once they are right. A person wants to know all of it.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, Final

from pydantic import ValidationError

from services.contract.api.pointers import faults_of, pointer_of
from services.contract.jobs.built_ins import BUILT_IN_NAMES, misuse
from services.contract.jobs.specs import JobSpec
from services.contract.words.problems import Fault, first_faults

_ROUNDS: Final = 3
_PLACEHOLDERS: Final[Mapping[str, Any]] = {
    "model": {"factory": "decoder"},
    "data": {"factory": "stdlib_bytes"},
    "train": {"steps": 1},
}
_OF_ONE_ANOTHER: Final = ("/resources", "/train/global_batch", "/train/micro_batch", "/entrypoint")
"""Fields of rules across fields: with one of them wrong, what such a rule says would be wrong too."""
_MESH: Final = "/mesh"


def hidden_faults(body: object, found: Sequence[Fault]) -> list[Fault]:
    """What is wrong with a spec beside the faults that were found in it.

    Args:
        body: The spec, as it came.
        found: What validating it says.
    """
    if not isinstance(body, dict):
        return []
    every = list(found)
    for _ in range(_ROUNDS):
        new = [fault for fault in _found_without(body, every) if not _is_known(fault, every)]
        if not new:
            break
        every += new
    misused = (fault for fault in _misused(body) if not _is_known(fault, every))
    return first_faults(chain(every, misused))[len(found) :]


def _found_without(body: dict[str, Any], faults: Sequence[Fault]) -> list[Fault]:
    """The faults of the spec that is left once what is known to be wrong is taken out."""
    # Not copied deeply: Python gives up on a copy of what its parser of JSON still takes.
    rest = dict(body)
    # Once: it may have as many wrong fields as a body has room for.
    if isinstance(rest.get("train"), dict):
        rest["train"] = dict(rest["train"])
    for fault in faults:
        _take_out(rest, fault.pointer)
    try:
        JobSpec.model_validate(rest)
    except ValidationError as error:
        new = faults_of(error.errors(include_url=False), rest, JobSpec)
    else:
        return []
    untold = any(fault.pointer.startswith(_OF_ONE_ANOTHER) for fault in faults)
    across = (_MESH, *_OF_ONE_ANOTHER)
    return [each for each in new if not (untold and each.pointer.startswith(across))]


def _take_out(spec: dict[str, Any], pointer: str) -> None:
    """Remove what a fault is about; where that is required, put in what is right."""
    parts = [part.replace("~1", "/").replace("~0", "~") for part in pointer.split("/")[1:]]
    if not parts:
        return
    top = parts[0]
    if top == "train":
        train = spec.get("train")
        if len(parts) > 1 and isinstance(train, dict):
            train.pop(parts[1], None)
            train.setdefault("steps", 1)
        else:
            spec["train"] = dict(_PLACEHOLDERS["train"])
    elif top in _PLACEHOLDERS:
        spec[top] = dict(_PLACEHOLDERS[top])
    else:
        spec.pop(top, None)


def _misused(body: Mapping[str, Any]) -> Iterator[Fault]:
    """Built-ins that there are not, or that do not take these arguments."""
    if body.get("entrypoint") is not None:
        return
    for field in BUILT_IN_NAMES:
        here: Any = body
        parts = field.split(".")
        for part in parts:
            here = here.get(part) if isinstance(here, Mapping) else None
        if not isinstance(here, Mapping) or not isinstance(here.get("factory"), str):
            continue
        args = here.get("args")
        for place, text in misuse(field, here["factory"], args if isinstance(args, dict) else {}):
            yield Fault(pointer=pointer_of([*parts, *place]), detail=text, code="not_supported_yet")


def _is_known(fault: Fault, known: Sequence[Fault]) -> bool:
    """Whether the place of a fault, or one around or in it, has a fault already."""
    here = fault.pointer
    places = (each.pointer for each in known)
    return any(
        here == place or here.startswith(f"{place}/") or place.startswith(f"{here}/")
        for place in places
    )
