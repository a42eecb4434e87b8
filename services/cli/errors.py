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

from collections.abc import Callable

from meshloom.client.errors import ClientError as CliError
from meshloom.client.errors import RefusedError, UnreachableError
from services.contract.words.problems import Problem, in_a_line

__all__ = [
    "CliError",
    "RefusedError",
    "SpecFileError",
    "SpecRefusedError",
    "UnknownNameError",
    "UnreachableError",
]


class SpecFileError(CliError):
    """The file cannot be read as a job spec."""


class UnknownNameError(CliError):
    """No job, checkpoint or plan is called so."""


class SpecRefusedError(RefusedError):
    """The controller refused what stands in a file; each fault is told with its place there.

    Args:
        problem: Its answer.
        where: What the file is called.
        mark: Line and column, from 1, of what a JSON pointer names; None: the file does not say it.
    """

    def __init__(
        self, problem: Problem, where: str, mark: Callable[[str], tuple[int, int] | None]
    ) -> None:
        super().__init__(problem)
        found = [(mark(fault.pointer), fault) for fault in problem.errors]
        lines = [
            f"\n  line {at[0]}, column {at[1]}, {in_a_line(fault)}"
            for at, fault in sorted(found, key=lambda each: each[0] or ())
            if at is not None
        ]
        lines += [f"\n  {in_a_line(fault)}" for at, fault in found if at is None]
        count = f"{len(lines)} error{'s' * (len(lines) != 1)}"
        self.args = (f"{where} is not a valid spec: {count}{''.join(lines)}",)
