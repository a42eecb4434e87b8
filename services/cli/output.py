"""How a command answers: as a table for people, or as JSON or YAML for programs.

``answers`` gives a command the options ``-o`` and ``--json``; the command hands what it has to ``as_data``
first, and prints tables only if that says that people read them.
"""

import contextlib
import functools
import inspect
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from enum import StrEnum
from typing import Annotated, Any, Final, TypeAlias

import typer
from pydantic import BaseModel


class Format(StrEnum):
    """How an answer is written."""

    TABLE = "table"
    """What fits the terminal."""
    WIDE = "wide"
    """All columns, nothing cut or wrapped."""
    JSON = "json"
    """As the API answers it."""
    YAML = "yaml"
    """The same as YAML."""


Data: TypeAlias = BaseModel | Mapping[str, Any] | Sequence[Any]

_CHOSEN: ContextVar[Format] = ContextVar("format", default=Format.TABLE)
_FORMAT: Final = inspect.Parameter(
    "answer_format",
    inspect.Parameter.KEYWORD_ONLY,
    default=Format.TABLE,
    annotation=Annotated[
        Format,
        typer.Option(
            "-o",
            metavar="FORMAT",
            help="table, wide (all columns, nothing cut), json or yaml.",
            show_default=False,
        ),
    ],
)
_JSON: Final = inspect.Parameter(
    "as_json",
    inspect.Parameter.KEYWORD_ONLY,
    default=False,
    annotation=Annotated[bool, typer.Option("--json", help="The same as -o json.")],
)


def answers(command: Callable[..., None]) -> Callable[..., None]:
    """The command with the options ``-o`` and ``--json``."""

    @functools.wraps(command)
    def with_format(*args: Any, answer_format: Format, as_json: bool, **given: Any) -> None:  # noqa: ANN401 (the command's own parameters)
        with chosen(Format.JSON if as_json else answer_format):
            command(*args, **given)

    signature = inspect.signature(command)
    added = (_FORMAT, _JSON)
    with_format.__signature__ = signature.replace(  # type: ignore[attr-defined]  # functions may have one
        parameters=[*signature.parameters.values(), *added]
    )
    with_format.__annotations__ = {
        **command.__annotations__,
        **{each.name: each.annotation for each in added},
    }
    return with_format


@contextlib.contextmanager
def chosen(how: Format) -> Iterator[None]:
    """Answers within the block are written so."""
    token = _CHOSEN.set(how)
    try:
        yield
    finally:
        _CHOSEN.reset(token)


def is_wide() -> bool:
    """Whether all columns are wanted."""
    return _CHOSEN.get() is Format.WIDE


def for_programs() -> bool:
    """Whether JSON or YAML was asked for."""
    return _CHOSEN.get() in {Format.JSON, Format.YAML}


def as_data(answer: Data) -> bool:
    """Write the answer as JSON or YAML, if that was asked for; False: people read it, as a table."""
    if _CHOSEN.get() is Format.JSON:
        print_json(answer)
    elif _CHOSEN.get() is Format.YAML:
        _print_yaml(answer)
    else:
        return False
    return True


def as_data_line(answer: Data) -> bool:
    """As ``as_data`` for one of many answers: JSON in a line, or a document of YAML."""
    if _CHOSEN.get() is Format.JSON:
        sys.stdout.write(json.dumps(_plain(answer)) + "\n")
        sys.stdout.flush()
        return True
    if _CHOSEN.get() is Format.YAML:
        sys.stdout.write("---\n")
    return as_data(answer)


def print_json(answer: Data) -> None:
    """The answer as JSON in ASCII: terminals obey control characters of other ranges, too."""
    sys.stdout.write(json.dumps(_plain(answer), indent=2) + "\n")


def _print_yaml(answer: Data) -> None:
    from ruamel.yaml import YAML  # noqa: PLC0415 (few ask for it, and it takes 30 ms)

    yaml = YAML(typ="safe", pure=True)
    yaml.default_flow_style = False
    yaml.allow_unicode = False  # as of JSON
    yaml.sort_base_mapping_type_on_output = False  # type: ignore[assignment]  # an option that is declared None
    yaml.width = 1 << 30
    yaml.dump(_plain(answer), sys.stdout)


def _plain(answer: object) -> Any:  # noqa: ANN401 whatever JSON holds
    if isinstance(answer, BaseModel):
        return json.loads(answer.model_dump_json())
    if isinstance(answer, Mapping):
        return {name: _plain(value) for name, value in answer.items()}
    if isinstance(answer, list | tuple):
        return [_plain(each) for each in answer]
    return answer
