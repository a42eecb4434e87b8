"""A job spec as people write it: a YAML 1.2 file."""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.error import MarkedYAMLError, YAMLError

from services.cli.errors import SpecFileError


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
