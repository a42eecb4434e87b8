"""What can go wrong on the way to the controller, each as one line that says what to do.

::

    CliError
     +- UnreachableError   nobody answers at the URL
     +- RefusedError       the controller answered with a problem (RFC 9457)
     |   +- SpecRefusedError   about a spec in a file: with lines and columns
     +- SpecFileError      the file is not a job spec that could be sent
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:  # every command imports this module, and the contract takes a tenth of a second
    from collections.abc import Callable, Sequence

    from services.contract.words.problems import Fault, Problem


class CliError(Exception):
    """The command ends with exit code 2 and this text."""


class UnreachableError(CliError):
    """Nobody answers at the controller's URL."""


class SpecFileError(CliError):
    """The file cannot be read as a job spec."""


class RefusedError(CliError):
    """The controller refused; ``problem`` is its answer."""

    def __init__(self, problem: "Problem") -> None:
        super().__init__(listed(problem.errors) or problem.detail or problem.title)
        self.problem = problem


class SpecRefusedError(RefusedError):
    """The controller refused what stands in a file; each fault is told with its place there.

    Args:
        problem: Its answer.
        where: What the file is called.
        place: Line and column of what a JSON pointer names, as words.
    """

    def __init__(self, problem: "Problem", where: str, place: "Callable[[str], str]") -> None:
        super().__init__(problem)
        count = f"{len(problem.errors)} error{'s' * (len(problem.errors) != 1)}"
        told = (f"\n  {place(each.pointer)}{in_a_line(each)}" for each in problem.errors)
        self.args = (f"{where} is not a valid spec: {count}{''.join(told)}",)


def listed(faults: "Sequence[Fault]") -> str:
    """Faults as text: one as it is, several a line each."""
    lines = [in_a_line(fault) for fault in faults]
    return lines[0] if len(lines) == 1 else "".join(f"\n  {line}" for line in lines)


def in_a_line(fault: "Fault") -> str:
    """Where, and what is wrong; the place only once."""
    if not fault.pointer:
        return fault.detail
    dotted = fault.pointer.removeprefix("/").replace("/", ".")
    return f"{fault.pointer}: {fault.detail.removeprefix(f'{dotted}: ')}"
