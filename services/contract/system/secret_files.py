"""Secrets in files: ``MESHLOOM_<NAME>_FILE`` names a file that has what ``MESHLOOM_<NAME>`` would be."""

from pathlib import Path
from typing import Any, Final

_LONGEST_BYTES: Final = 64 * 1024


def with_secret_files(values: object, *names: str) -> object:
    """``values`` of a settings class, with those of ``names`` read from their files, without white space at the ends.

    The class has a field ``<name>_file`` for each of ``names``.

    Args:
        values: What the settings were given; returned as it is if it is no mapping.
        names: Fields that may come from a file.

    Raises:
        ValueError: A file cannot be read or is empty, or both the value and its file are given.
    """
    if not isinstance(values, dict):
        return values
    read: dict[str, Any] = {}
    for name in names:
        path = values.get(f"{name}_file")
        if path is None or not str(path):
            continue
        if values.get(name) is not None:
            variable = f"MESHLOOM_{name.upper()}"
            raise ValueError(f"{variable} and {variable}_FILE are both set: set one of them")
        read[name] = _secret(name, Path(path))
    return {**values, **read}


def _secret(name: str, path: Path) -> str:
    variable = f"MESHLOOM_{name.upper()}_FILE"
    try:
        with path.open("rb") as file:
            text = file.read(_LONGEST_BYTES).decode().strip()
    except OSError as error:
        raise ValueError(f"{variable}: cannot read {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ValueError(f"{variable}: {path} is no text") from None
    if not text:
        raise ValueError(f"{variable}: {path} is empty")
    return text
