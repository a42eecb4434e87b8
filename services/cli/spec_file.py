"""A job spec as people write it: a YAML 1.2 file, or single fields of one."""

import math
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from ruamel.yaml import YAML
from ruamel.yaml.error import MarkedYAMLError, YAMLError

from services.cli.errors import CliError, SpecFileError

_M = TypeVar("_M", bound=BaseModel)


def read_spec(path: Path) -> dict[str, Any]:
    """The spec in ``path`` as it goes on the wire; the controller judges its content.

    YAML 1.2, because in 1.1 a learning rate written ``1e-3`` is a string.

    Raises:
        SpecFileError: The file cannot be read, is not YAML, holds no mapping, or values unknown to JSON.
    """
    try:
        loaded = YAML(typ="safe", pure=True).load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise SpecFileError(f"cannot read {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise SpecFileError(f"{path} is not UTF-8 text") from error
    except MarkedYAMLError as error:
        mark = error.problem_mark
        where = f"line {mark.line + 1}, column {mark.column + 1}" if mark else "somewhere"
        raise SpecFileError(f"{path} is not valid YAML: {where}: {error.problem}") from error
    except YAMLError as error:
        raise SpecFileError(f"{path} is not valid YAML: {error}") from error
    if not isinstance(loaded, dict):
        raise SpecFileError(
            f"{path} holds no job spec: it must be a mapping with model, data, train"
        )
    for place, value in _beyond_json(loaded, ""):
        raise SpecFileError(
            f"{path}: {place or 'a key'} is {value!r}, a {type(value).__name__}, which JSON cannot "
            "carry; write it as a number or a quoted text"
        )
    return loaded


def read_overrides(texts: Iterable[str]) -> dict[str, Any]:
    """``train.steps=500`` and the like as one merge-patch; values are YAML, null removes.

    Raises:
        CliError: One is no ``FIELD=VALUE``, or its value no YAML.
    """
    patch: dict[str, Any] = {}
    for text in texts:
        path, equals, value = text.partition("=")
        if not (equals and all(path.split("."))):
            raise CliError(f"--set is FIELD=VALUE, such as train.steps=500, not {text!r}")
        try:
            loaded = YAML(typ="safe", pure=True).load(value)
        except YAMLError as error:
            raise CliError(f"--set {path}: {value!r} is not YAML") from error
        if next(_beyond_json(loaded, ""), None) is not None:
            raise CliError(f"--set {path}: {value!r} holds what JSON cannot carry; quote it")
        *folders, last = path.split(".")
        here = patch
        for name in folders:
            inner = here.setdefault(name, {})
            if not isinstance(inner, dict):
                raise CliError(f"--set {path}: {name} was set as a whole before")
            here = inner
        here[last] = loaded
    return patch


def read_model(model: type[_M], value: Mapping[str, Any]) -> _M:
    """The body of a request from options.

    Raises:
        CliError: It is none; every fault on its line.
    """
    try:
        return model.model_validate(value)
    except ValidationError as error:
        faults = (f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors())
        raise CliError("\n".join(faults)) from error


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
    elif isinstance(value, float):
        if not math.isfinite(value):
            yield place, value
    elif not isinstance(value, str | int | None):
        yield place, value
