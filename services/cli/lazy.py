"""Commands that are imported when they are run: help and completion need their names alone."""

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import typer
from typer.core import TyperArgument, TyperCommand, TyperGroup, TyperOption


@dataclass(frozen=True)
class Listed:
    """A command as it stands in the list.

    Attributes:
        name: What a person types.
        panel: Under which heading help lists it.
        place: ``module:attribute`` of the function, or of a ``Typer`` that has commands of its own.
        summary: The first line of its help.
    """

    name: str
    panel: str
    place: str
    summary: str


class Command(TyperCommand):
    """A command whose help shows arguments and flags as a person types them."""

    def get_params(self, ctx: Any) -> Any:  # noqa: ANN401 typer's contexts have no public type here
        """Flags and arguments without types."""
        return _plainly(super().get_params(ctx))

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:  # noqa: ANN401 as above
        """Errors of options without pydantic's words."""
        try:
            return super().parse_args(ctx, args)
        except typer.BadParameter as error:
            said = error.message.removeprefix("Value error, ")
            error.message = said.replace("Input should be", "it must be")
            raise

    def collect_usage_pieces(self, ctx: Any) -> list[str]:  # noqa: ANN401 as above
        """``JOB`` for what typer calls ``{JOB}``."""
        pieces = super().collect_usage_pieces(ctx)
        return [piece.replace("{", "").replace("}", "") for piece in pieces]


class Group(TyperGroup):
    """A group with such help."""

    def get_params(self, ctx: Any) -> Any:  # noqa: ANN401 as of Command
        """Flags and arguments without types."""
        return _plainly(super().get_params(ctx))


class LazyGroup(Group):
    """A group of ``listed`` commands; a subclass names them.

    All of ``before_loading`` are called before a command is imported.
    """

    listed: tuple[Listed, ...] = ()
    before_loading: ClassVar[list[Callable[[], None]]] = []

    def __init__(self, **given: Any) -> None:  # noqa: ANN401 passed through to typer
        super().__init__(**given)
        for each in self.listed:
            self.commands[each.name] = TyperCommand(
                each.name, help=each.summary, rich_help_panel=each.panel
            )

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:  # noqa: ANN401 as typer's own
        """The command itself, in the place of what only lists it."""
        name, command, rest = super().resolve_command(ctx, args)
        place = next((each for each in self.listed if each.name == name), None)
        if place is None:
            return name, command, rest
        for prepare in self.before_loading:
            prepare()
        return name, load(place), rest


def _plainly(params: Any) -> Any:  # noqa: ANN401 typer's parameters have no public type
    """Without the types that typer shows: of a flag, and of an argument whose name says what it is."""
    for param in params:
        if isinstance(param, TyperOption) and param.metavar is None and param.is_flag:
            param.metavar = ""
        elif isinstance(param, TyperArgument):
            param.display_type_rich = _no_type  # type: ignore[method-assign]  # it has no other way
    return params


def _no_type(ctx: Any) -> None:  # noqa: ANN401, ARG001 in the place of a method of typer's
    return None


def load(listed: Listed) -> Any:  # noqa: ANN401 typer's commands have no common public type
    """The command behind an entry of the list."""
    module, _, attribute = listed.place.partition(":")
    found = getattr(importlib.import_module(module), attribute)
    command: Any
    if isinstance(found, typer.Typer):
        command = typer.main.get_group(found)
    else:
        alone = typer.Typer(rich_markup_mode="rich", add_completion=False)
        alone.command(listed.name, cls=Command)(found)
        command = typer.main.get_command(alone)
    command.name = listed.name
    return command
