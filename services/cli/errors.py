"""What can go wrong on the way to the controller, each as one line that says what to do.

::

    CliError
     +- UnreachableError   nobody answers at the URL
     +- RefusedError       the controller answered with a problem (RFC 9457)
     |   +- SpecRefusedError   about a spec in a file: with lines and columns
     +- UnknownNameError   no job, checkpoint or plan is called so
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
        mark: Line and column, from 1, of what a JSON pointer names; None: the file does not say it.
    """

    def __init__(
        self, problem: "Problem", where: str, mark: "Callable[[str], tuple[int, int] | None]"
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
