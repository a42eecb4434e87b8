"""Values and guesses in errors that people read."""

import difflib
from collections.abc import Iterable
from typing import Final

from pydantic import ValidationError

_SHOWN: Final = 60
_CLOSE_ENOUGH: Final = 0.6


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """``; did you mean 'x'?`` where one of the known words is like it, else nothing."""
    near = difflib.get_close_matches(word, sorted(known), n=1, cutoff=_CLOSE_ENOUGH)
    return f"; did you mean {near[0]!r}?" if near else ""


def setting_faults(error: ValidationError) -> list[str]:
    """What is wrong with settings of the environment, each by the name of its variable, and without its value."""
    faults = []
    for fault in error.errors(include_url=False, include_input=False):
        name = "_".join(["MESHLOOM", *map(str, fault["loc"])]).upper()
        text = str(fault["msg"]).removeprefix("Value error, ")
        faults.append(f"{name}: {text}" if fault["loc"] else text)
    return faults


def shown(value: object) -> str:
    """A value of JSON as an error shows it: as people write it, and short."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, dict):
        return "a mapping"
    if isinstance(value, list | tuple):
        return "a list"
    text = repr(value[: _SHOWN + 1] if isinstance(value, str) else value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"
