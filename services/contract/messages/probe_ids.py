"""The name of a probe, the same for all questions to which the answer is the same; and which answers can be used."""

import hashlib
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

from pydantic import BaseModel

from fsdp_core.plan.model import PROFILE_VERSION
from services.contract.messages.probing import ModelProbed, ProbeModel
from services.contract.words.bounds import shortened

_MOST: Final = 1 << 62
_MOST_OF: Final = {
    "modules": 65_536,
    "stops": 65_536,
    "parameters": 65_536,
    "buffers": 65_536,
    "units": 1_024,
    "traces": 16,
}
# Of each list of that name, wherever it is: a probe measures ten sizes, and a search goes through all of
# these for each layout.
_MOST_OF_EACH: Final = {
    "lines": 256,
    "table": 64,
    "seen": 64,
    "seconds": 64,
    "shape": 64,
    "also": 1_024,
}
_MOST_NAMES: Final = 1 << 19
# A plan says the name of a module in many places, and each list of plans says its reason.
_NAME_CHARACTERS: Final = 2_048
_GRADS_OF_EACH: Final = 4
# A line on which no whole numbers lie is told by its two ends.
_ROWS_OF_A_LINE: Final = 2
_OF_THE_SPEC: Final = ("model", "data", "optimizer")
_OF_THE_SPEC_IF_SET: Final = ("trainable", "loss", "code")
_OF_THE_TRAINING: Final = ("precision",)
_OF_THE_TRAINING_IF_SET: Final = ("ema",)


def probe_id(question: ProbeModel, versions: Mapping[str, str]) -> str:
    """The id that ``question`` should carry; the one that it carries plays no part.

    Args:
        question: What is asked.
        versions: Of what decides how a model is built, by name, on the node that is asked.
    """
    text = json.dumps(
        {
            "profile": PROFILE_VERSION,
            "versions": dict(sorted(versions.items())),
            "spec": _chosen(question.spec, _OF_THE_SPEC, _OF_THE_SPEC_IF_SET),
            "train": _chosen(question.spec.train, _OF_THE_TRAINING, _OF_THE_TRAINING_IF_SET),
            "question": question.model_dump(
                mode="json", exclude={"probe_id", "spec", "timeout_s", "memory_bytes", "owner"}
            ),
        },
        sort_keys=True,
    )
    return f"probe_{hashlib.sha256(text.encode()).hexdigest()[:32]}"


class UnfitProfileError(ValueError):
    """A profile holds what no model has, or more than a search can go through."""


def refuse_unfit(answer: ModelProbed) -> None:
    """Refuse an answer that says what no measurement can find. It may be of megabytes: not for an event loop.

    Raises:
        UnfitProfileError: With what it says, and where.
    """
    document = answer.model_dump(include={"profile", "optimizer", "sequence_tokens"})
    profile = document["profile"] or {}
    for name, most in _MOST_OF.items():
        if len(profile.get(name, ())) > most:
            raise UnfitProfileError(
                f"the profile has {len(profile[name])} {name}, more than the {most} that a plan is "
                "searched for; use plan: default, which needs no profile"
            )
    for place, value in _numbers(document):
        if abs(value) > _MOST or not math.isfinite(value):
            raise UnfitProfileError(
                f"the profile says {shortened(str(value), 80)} at {place}: that is not a "
                "measurement of a model"
            )
    _refuse_heavy(profile)


def _refuse_heavy(profile: Mapping[str, Any]) -> None:
    """Refuse what a search would spend minutes with."""
    parameters = profile.get("parameters", ())
    names = (name for each in parameters for name in (each["name"], *each["also"]))
    depth = sum(name.count(".") + 1 for name in names)
    if depth > _MOST_NAMES:
        raise UnfitProfileError(
            f"names of the profile's parameters have {depth} parts, more than the {_MOST_NAMES} that a "
            "plan is searched for; use plan: default, which needs no profile"
        )
    for number, trace in enumerate(profile.get("traces", ())):
        grads = sum(len(each["grads"]) for each in trace["segments"])
        if grads > _GRADS_OF_EACH * len(parameters):
            raise UnfitProfileError(
                f"the profile says at /profile/traces/{number} that {grads} gradients are made of "
                f"{len(parameters)} parameters: that is not a measurement of a model"
            )


def _numbers(root: object) -> Iterator[tuple[str, float]]:
    """All numbers, and where they are; refuses lists and names on its way that are too long."""
    todo: list[tuple[str, object]] = [("", root)]
    while todo:
        place, value = todo.pop()
        if isinstance(value, dict):
            todo += [(f"{place}/{name}", item) for name, item in value.items()]
        elif isinstance(value, list | tuple):
            most = _MOST_OF_EACH.get(place.rpartition("/")[2])
            if most is not None and len(value) > most:
                raise UnfitProfileError(
                    f"the profile has {len(value)} numbers or names at {place}, more than the {most} "
                    "that a measurement finds"
                )
            if place.endswith("/lines"):
                _refuse_curves(place, value)
            todo += [(f"{place}/{number}", item) for number, item in enumerate(value)]
        elif isinstance(value, str) and len(value) > _NAME_CHARACTERS:
            raise UnfitProfileError(
                f"the profile has a name of {len(value)} characters at {place}, more than the "
                f"{_NAME_CHARACTERS} that a plan can tell; use plan: default, which needs no profile"
            )
        elif isinstance(value, int | float) and not isinstance(value, bool):
            yield place, value


def _refuse_curves(place: str, lines: Sequence[Any]) -> None:
    """Refuse several curves of which the highest counts: each takes a search as long as a dozen lines."""
    if len(lines) > 1 and any(
        each["curved"] or len(each["table"]) > _ROWS_OF_A_LINE for each in lines
    ):
        raise UnfitProfileError(
            f"the profile has curves among the {len(lines)} lines at {place}: a measurement finds one curve, or lines"
        )


def _chosen(part: BaseModel, always: Iterable[str], if_set: Iterable[str]) -> dict[str, Any]:
    """Fields of a spec; those that came later only if they say something, so that names stay."""
    fields = part.model_dump(mode="json", include={*always, *if_set})
    chosen = {name: fields[name] for name in always}
    if (optimizer := chosen.get("optimizer")) is not None and not optimizer["groups"]:
        del optimizer["groups"]
    return chosen | {name: fields[name] for name in if_set if fields[name] is not None}
