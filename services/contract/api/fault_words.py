"""What is wrong with a value, in words for people: pydantic's names of errors are for programs."""

import re
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any, Final, get_args

from pydantic import StringConstraints

from services.contract.api.access import Subject
from services.contract.jobs.code_archives import CodeDigest
from services.contract.jobs.scripts import ModuleName, ScriptPath
from services.contract.jobs.secret_references import SECRET_NAME, looks_secret
from services.contract.jobs.spec_parts import FactoryName, LabelKey
from services.contract.words.error_values import did_you_mean, shown
from services.contract.words.ids import CheckpointId, JobId, NodeId, PlanId, TokenId, TraceId


def _pattern(kind: Any) -> str:  # noqa: ANN401 an annotated type
    constraints = next(each for each in get_args(kind) if isinstance(each, StringConstraints))
    return str(constraints.pattern)


JOB_NAME: Final = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,62}$"
FORMS: Final[Mapping[str, str]] = MappingProxyType(
    {
        JOB_NAME: "1 to 63 letters, digits, '.', '_' or '-', and begins with a letter or a digit",
        _pattern(Subject): "1 to 63 letters, digits, '.', '_', '@' or '-', and begins with a letter or a digit",
        _pattern(LabelKey): "1 to 63 letters, digits, '.', '_', '/' or '-', and begins with a letter or a digit",
        _pattern(FactoryName): "the name of a built-in, or package.module:callable",
        _pattern(CodeDigest): "the digest of uploaded code, as `sha256:` and 64 hexadecimal digits",
        _pattern(ScriptPath): "a relative path to a .py file: folders and a name of letters, digits, '.', '_' and "
        "'-', without '..'",
        _pattern(ModuleName): "a dotted module name, as for `python -m`",
        f"^{SECRET_NAME.pattern}$": "1 to 64 letters, digits or '_', and begins with a letter",
        _pattern(JobId): "a job's id, such as job_01m80dqny75dcp2ta9620emyrc",
        _pattern(CheckpointId): "a checkpoint's id, such as ckpt_01m80dqny75dcp2ta9620emyrc-s000000400-a0001",
        _pattern(PlanId): "a plan's id, such as plan_01m80dqny75dcp2ta9620emyrc",
        _pattern(TokenId): "a token's id, such as tok_01m80dqny75dcp2ta9620emyrc",
        _pattern(TraceId): "a trace's id, such as trace_01m80dqny75dcp2ta9620emyrc",
        _pattern(NodeId): "a node's id: 1 to 63 small letters, digits, '.' or '-'",
        r"^[^\x00-\x1f]*$": "a text without control characters",
    }
)  # fmt: skip
"""What a text must be, by the pattern that it has to match: each is what follows "it must be"."""

_KINDS: Final = {
    "int": "a whole number",
    "float": "a number",
    "string": "a text",
    "bool": "true or false",
    "dict": "a mapping of names to values",
    "model": "a mapping of names to values",
    "model_attributes": "a mapping of names to values",
    "dataclass": "a mapping of names to values",
    "mapping": "a mapping of names to values",
    "list": "a list",
    "tuple": "a list",
    "set": "a list",
    "json_value": "a value that JSON has",
}
_BOUNDS: Final = {
    "greater_than_equal": ("at least", "ge"),
    "greater_than": ("more than", "gt"),
    "less_than_equal": ("at most", "le"),
    "less_than": ("less than", "lt"),
}
_LENGTHS: Final = {
    "string_too_short": ("at least", "min_length", "character"),
    "string_too_long": ("at most", "max_length", "character"),
    "too_short": ("at least", "min_length", "item"),
    "too_long": ("at most", "max_length", "item"),
}
_ABOUT_KINDS: Final = re.compile(
    r"([a-z_]+?)_(?:type|parsing|from_float|parsing_size|attributes_type)"
)
_OF_A_SCRIPT: Final = frozenset({"args", "cmd", "command", "run", "script"})
"""What launchers of scripts call what is named by ``entrypoint`` here."""
_QUOTED: Final = re.compile(r"'([^']*)'")


def in_words(error: Mapping[str, Any]) -> str:
    """What is wrong, of one of ``ValidationError.errors()``: what must be there, and what is there."""
    kind = str(error["type"])
    for words in (_of_a_kind, _of_a_size, _of_a_form):
        if (said := words(kind, error)) is not None:
            return said
    return str(error["msg"]).removeprefix("Value error, ")


def no_such_field(name: str, known: Iterable[str]) -> str:
    """That a mapping has a field which it cannot have."""
    there = frozenset(known)
    if name in _OF_A_SCRIPT and "entrypoint" in there:
        guess = "; a script of yours is `entrypoint: {script: train.py, args: []}`"
    else:
        guess = did_you_mean(name, there)
    return f"there is no field {shown(name)} here{guess}"


def _of_a_kind(kind: str, error: Mapping[str, Any]) -> str | None:
    if kind == "missing":
        return "this field is required"
    if kind == "finite_number":
        return f"must be a finite number{_not(error)}"
    found = _ABOUT_KINDS.fullmatch(kind)
    named = None if found is None else _KINDS.get(found[1])
    return None if named is None else f"must be {named}{_not(error)}"


def _of_a_size(kind: str, error: Mapping[str, Any]) -> str | None:
    context = error.get("ctx", {})
    if kind in _BOUNDS:
        words, name = _BOUNDS[kind]
        return f"must be {words} {context[name]:g}{_not(error)}"
    if kind in _LENGTHS:
        words, name, unit = _LENGTHS[kind]
        count = context[name]
        return f"must have {words} {count} {unit}{'s' * (count != 1)}"
    return None


def _of_a_form(kind: str, error: Mapping[str, Any]) -> str | None:
    context = error.get("ctx", {})
    if kind in {"literal_error", "enum"}:
        expected, given = str(context["expected"]), error.get("input")
        known = _QUOTED.findall(expected)
        guess = did_you_mean(given, known) if isinstance(given, str) else ""
        one_of = "one of " if len(known) > 1 else ""
        return f"must be {one_of}{expected}{_not(error)}{guess}"
    if kind == "string_pattern_mismatch":
        form = FORMS.get(str(context["pattern"]), "in another form")
        return f"must be {form}{_not(error)}"
    return None


def _not(error: Mapping[str, Any]) -> str:
    """What is there, unless it may be a credential."""
    if "input" not in error:
        return ""
    name = next((part for part in reversed(error["loc"]) if isinstance(part, str)), "")
    return "" if looks_secret(name, error["input"]) else f", not {shown(error['input'])}"
