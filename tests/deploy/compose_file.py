"""docker-compose.yml as `docker compose` would run it: variables filled in, and each service's words split."""

import re
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from ruamel.yaml import YAML

ROOT: Final = Path(__file__).parents[2]
_VARIABLE: Final = re.compile(
    r"\$(?:(?P<dollar>\$)|\{(?P<name>\w+)(?:(?P<kind>:[-?])(?P<text>[^}]*))?\})"
)
_UNITS: Final = {"": 1, "b": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30}


def rendered(environment: Mapping[str, str]) -> dict[str, Any]:
    """The whole file with the variables of ``environment``.

    Raises:
        KeyError: A variable has no value, and no default; with what the file says about it.
    """
    loaded = YAML(typ="safe", pure=True).load(ROOT / "docker-compose.yml")
    filled: dict[str, Any] = _filled(loaded, environment)
    return filled


def words(command: str | list[str] | None) -> list[str]:
    """An ``entrypoint`` or ``command`` as arguments."""
    return shlex.split(command) if isinstance(command, str) else list(command or ())


def size(text: str) -> int:
    """Bytes of ``8gb``, ``512m`` and the like."""
    found = re.fullmatch(r"(\d+)([kmg]?)b?", text)
    assert found is not None, text
    return int(found[1]) * _UNITS[found[2]]


def seconds(text: str) -> float:
    """Of ``2s``."""
    return float(text.removesuffix("s"))


def _filled(value: Any, environment: Mapping[str, str]) -> Any:  # noqa: ANN401 any YAML
    if isinstance(value, dict):
        return {key: _filled(each, environment) for key, each in value.items()}
    if isinstance(value, list):
        return [_filled(each, environment) for each in value]
    if not isinstance(value, str):
        return value

    def fill(match: re.Match[str]) -> str:
        if match["dollar"]:
            return "$"
        given = environment.get(match["name"], "")
        if given or match["kind"] is None:
            return given
        if match["kind"] == ":?":
            raise KeyError(f"{match['name']}: {match['text']}")
        return match["text"]

    return _VARIABLE.sub(fill, value)
