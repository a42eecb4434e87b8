"""The tree of commands, as it is loaded when they run."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

from services.cli.app import COMMANDS
from services.cli.lazy import load

GROUPS: Final = frozenset({"tokens", "data", "webhooks"})


@dataclass(frozen=True)
class Leaf:
    """A command: the words that name it, under which heading it is listed, and typer's command."""

    words: tuple[str, ...]
    panel: str
    command: Any


def leaves() -> Iterator[Leaf]:
    """Every command that does something."""
    for listed in COMMANDS:
        command = load(listed)
        if hasattr(command, "commands"):
            for name, inner in command.commands.items():
                yield Leaf((listed.name, name), listed.panel, inner)
        else:
            yield Leaf((listed.name,), listed.panel, command)
