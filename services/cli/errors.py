"""What ends a command with one text that says what to do, and exit code 2.

``CliError`` is what the client raises, too: nobody answers, or the controller refused.

::

    CliError  (meshloom.client.ClientError)
     +- UnreachableError   nobody answers at the URL
     +- RefusedError       the controller answered with a problem (RFC 9457)
     |   +- SpecRefusedError   about a spec in a file: with lines and columns
     +- UnknownNameError   no job, checkpoint or plan is called so
     +- SpecFileError      the file is not a job spec that could be sent
"""

from collections.abc import Callable, Sequence
from typing import TypeAlias

from meshloom.client.errors import ClientError as CliError
from meshloom.client.errors import RefusedError, UnreachableError
from services.contract.words.problems import Fault, Problem, in_a_line

Mark: TypeAlias = Callable[[str], tuple[int, int] | None]

__all__ = [
    "CliError",
    "RefusedError",
    "SpecFileError",
    "SpecRefusedError",
    "UnknownNameError",
    "UnreachableError",
    "in_their_places",
]


class SpecFileError(CliError):
    """The file cannot be read as a job spec."""


class UnknownNameError(CliError):
    """No job, checkpoint or plan is called so."""


class SpecRefusedError(RefusedError):
    """The controller refused what stands in a file; each fault is told with its place there.

    Args:
        problem: Its answer.
        told: Its faults with their places, as ``in_their_places`` writes them.
    """

    def __init__(self, problem: Problem, told: str) -> None:
        super().__init__(problem)
        self.args = (told,)


def in_their_places(faults: Sequence[Fault], where: str, mark: Mark, kind: str = "spec") -> str:
    """Faults of a file, each on its line, in the order of the file.

    Args:
        faults: What is wrong.
        where: What the file is called.
        mark: Line and column, from 1, of what a JSON pointer names; None: the file does not say it.
        kind: What the file should be.
    """
    found = [(mark(fault.pointer), fault) for fault in faults]
    lines = [
        f"\n  line {at[0]}, column {at[1]}, {in_a_line(fault)}"
        for at, fault in sorted(found, key=lambda each: each[0] or ())
        if at is not None
    ]
    lines += [f"\n  {in_a_line(fault)}" for at, fault in found if at is None]
    count = f"{len(lines)} error{'s' * (len(lines) != 1)}"
    return f"{where} is not a valid {kind}: {count}{''.join(lines)}"
