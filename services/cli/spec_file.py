"""A job spec as people write it: a YAML 1.2 file, or single fields of one."""

import contextlib
import math
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from pydantic import ValidationError
from ruamel.yaml import YAML
from ruamel.yaml.error import MarkedYAMLError, StringMark
from ruamel.yaml.events import (
    AliasEvent,
    Event,
    MappingEndEvent,
    MappingStartEvent,
    ScalarEvent,
    SequenceEndEvent,
    SequenceStartEvent,
)

from services.cli.errors import (
    CliError,
    RefusedError,
    SpecFileError,
    SpecRefusedError,
    in_their_places,
)
from services.cli.spec_places import SpecText
from services.contract.api.pointers import faults_of
from services.contract.jobs.bounded_json import INT_END, MAX_DEPTH
from services.contract.words.bounds import shortened
from services.contract.words.problems import Fault

MAX_FILE_BYTES: Final = 1 << 18
"""As the controller takes at most; a spec as JSON is at most a quarter of it."""
STANDARD_INPUT: Final = "-"
_MAX_VALUES: Final = 65_536
_SHOWN_CHARACTERS: Final = 300


def read_spec(path: Path) -> dict[str, Any]:
    """The spec in ``path``, as ``read_text`` reads it.

    Raises:
        SpecFileError: The file cannot be read, is not YAML, holds no mapping, or values unknown to JSON.
    """
    return dict(read_text(path).spec)


def read_text(path: Path) -> SpecText:
    """The spec in ``path``, or of standard input for ``-``; the controller judges what it says.

    YAML 1.2, because in 1.1 a learning rate written ``1e-3`` is a string.

    Raises:
        SpecFileError: As ``read_spec``.
    """
    where = "standard input" if str(path) == STANDARD_INPUT else str(path)
    text = _read(path, where)
    return SpecText(spec_of(text, where), text, where)


@contextlib.contextmanager
def judged(source: SpecText | None, kind: str = "spec") -> Iterator[None]:
    """A refusal within the block is one of this spec (or patch): its faults are told with their lines.

    Raises:
        SpecRefusedError: The controller refused the spec.
    """
    try:
        yield
    except RefusedError as error:
        if source is None or not error.problem.errors:
            raise
        told = in_their_places(error.problem.errors, source.where, source.mark, kind)
        raise SpecRefusedError(error.problem, told) from None


def spec_of(text: str, where: str) -> dict[str, Any]:
    """As ``read_spec`` of a text that was read; ``where`` is what errors call it.

    Raises:
        SpecFileError: It is not YAML, holds no mapping, or values unknown to JSON.
    """
    loaded = _loaded(text, where)
    if not isinstance(loaded, dict):
        raise SpecFileError(
            f"{where} holds no job spec: it must be a mapping with model, data, train"
        )
    for place, value in _beyond_json(loaded, ""):
        named = f"{where}: {shortened(place, _SHOWN_CHARACTERS) or 'a key'}"
        if isinstance(value, int) and not _is_of_json(value):  # too long to be shown, perhaps
            raise SpecFileError(f"{named} is an integer beyond 64 bits; quote it if it is a text")
        raise SpecFileError(
            f"{named} is {shortened(repr(value), _SHOWN_CHARACTERS)}, a {type(value).__name__}, which JSON cannot "
            "carry; write it as a number or a quoted text"
        )
    return loaded


def faults_in(spec: Mapping[str, Any]) -> list[Fault]:
    """What is wrong with a spec, as far as it can be judged without the controller."""
    # Not at the top: a submission does not need them, and they take a tenth of a second.
    from services.contract.api.spec_faults import hidden_faults  # noqa: PLC0415
    from services.contract.jobs.specs import JobSpec  # noqa: PLC0415

    found: list[Fault] = []
    try:
        JobSpec.model_validate(spec)
    except ValidationError as error:
        found = faults_of(error.errors(include_url=False), spec, JobSpec)
    return found + hidden_faults(spec, found)


def _read(path: Path, where: str) -> str:
    try:
        if str(path) == STANDARD_INPUT:
            read = sys.stdin.buffer.read(MAX_FILE_BYTES + 1)
        else:
            with path.open("rb") as file:
                read = file.read(MAX_FILE_BYTES + 1)
        text = read.decode()
    except OSError as error:
        raise SpecFileError(f"cannot read {where}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise SpecFileError(f"{where} is not UTF-8 text") from error
    if len(read) > MAX_FILE_BYTES:
        raise SpecFileError(f"{where} is larger than {MAX_FILE_BYTES} bytes: it is no job spec")
    return text


def read_overrides(texts: Iterable[str]) -> dict[str, Any]:
    """``train.steps=500`` and the like as one merge-patch; values are YAML, null removes.

    Raises:
        CliError: One is no ``FIELD=VALUE``, or its value no YAML.
    """
    patch: dict[str, Any] = {}
    for text in texts:
        path, equals, value = text.partition("=")
        named = f"--set {shortened(path, _SHOWN_CHARACTERS)}"
        if not (equals and all(path.split("."))):
            shown = repr(shortened(text, _SHOWN_CHARACTERS))
            raise CliError(f"--set is FIELD=VALUE, such as train.steps=500, not {shown}")
        loaded = _loaded(value, named)
        if next(_beyond_json(loaded, ""), None) is not None:
            shown = repr(shortened(value, _SHOWN_CHARACTERS))
            raise CliError(f"{named}: {shown} holds what JSON cannot carry; quote it")
        *folders, last = path.split(".")
        if len(folders) >= MAX_DEPTH:
            raise CliError(f"{named} is nested deeper than {MAX_DEPTH} levels")
        here = patch
        for name in folders:
            inner = here.setdefault(name, {})
            if not isinstance(inner, dict):
                shown = shortened(name, _SHOWN_CHARACTERS)
                raise CliError(f"{named}: {shown} was set as a whole before")
            here = inner
        here[last] = loaded
    return patch


def _loaded(text: str, where: str) -> Any:  # noqa: ANN401 whatever a document holds
    """The one document of a text.

    Raises:
        SpecFileError: It is no YAML, or one that grows beyond what a spec may hold.
    """
    try:
        bounds = _Bounds()
        for event in YAML(typ="safe", pure=True).parse(text):
            bounds.take(event)
        return YAML(typ="safe", pure=True).load(text)
    except MarkedYAMLError as error:
        mark = error.problem_mark
        place = f"line {mark.line + 1}, column {mark.column + 1}" if mark else "somewhere"
        problem = shortened(str(error.problem), _SHOWN_CHARACTERS)
        raise SpecFileError(f"{where} is not valid YAML: {place}: {problem}") from error
    except Exception as error:  # what a scalar is made by raises what it likes
        problem = shortened(str(error), _SHOWN_CHARACTERS)
        raise SpecFileError(f"{where} is not valid YAML: {problem}") from error


@dataclass
class _Open:
    """A collection that is being read: how many values it holds, and how deep, with its aliases."""

    anchor: str | None
    mark: StringMark
    values: int = 1
    depth: int = 1


class _Bounds:
    """What a document grows to once its aliases are followed, before anything is made of it."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[int, int]] = {}
        self._opened: list[_Open] = []

    def take(self, event: Event) -> None:
        """Count one event of the parser's.

        Raises:
            MarkedYAMLError: Nested too deep, too many values, or an alias inside what it stands for.
        """
        match event:
            case SequenceStartEvent() | MappingStartEvent():
                self._opened.append(_Open(event.anchor, event.start_mark))
                self._check()
            case SequenceEndEvent() | MappingEndEvent():
                done = self._opened.pop()
                self._add(done.anchor, done.values, done.depth)
            case ScalarEvent():
                self._add(event.anchor, 1, 0)
            case AliasEvent():
                if any(outer.anchor == event.anchor for outer in self._opened):
                    raise _unbounded(f"*{event.anchor} is inside itself", event.start_mark)
                self._add(None, *self._known.get(event.anchor, (1, 0)))

    def _add(self, anchor: str | None, values: int, depth: int) -> None:
        if anchor is not None:
            self._known[anchor] = values, depth
        if self._opened:
            self._opened[-1].values += values
            self._opened[-1].depth = max(self._opened[-1].depth, depth + 1)
            self._check()

    def _check(self) -> None:
        innermost = self._opened[-1]
        if innermost.values > _MAX_VALUES:
            raise _unbounded(f"more than {_MAX_VALUES} values, with aliases", innermost.mark)
        if len(self._opened) - 1 + innermost.depth > MAX_DEPTH:
            raise _unbounded(f"nested deeper than {MAX_DEPTH} levels", innermost.mark)


def _unbounded(problem: str, mark: StringMark) -> MarkedYAMLError:
    return MarkedYAMLError(problem=problem, problem_mark=mark)


def _beyond_json(value: object, place: str) -> Iterator[tuple[str, object]]:
    if isinstance(value, dict):
        for key, each in value.items():
            if isinstance(key, str):
                yield from _beyond_json(each, f"{place}.{key}".removeprefix("."))
            else:
                yield place, key
    elif isinstance(value, list):
        for index, each in enumerate(value):
            yield from _beyond_json(each, f"{place}[{index}]")
    elif not _is_of_json(value):
        yield place, value


def _is_of_json(value: object) -> bool:
    if isinstance(value, float):
        return math.isfinite(value)
    if isinstance(value, int):
        return -INT_END <= value < INT_END
    return isinstance(value, str | None)
