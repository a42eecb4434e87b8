"""What can go wrong on the way to the controller, each as one line that says what to do.

::

    CliError
     +- UnreachableError   nobody answers at the URL
     +- RefusedError       the controller answered with a problem (RFC 9457)
     +- SpecFileError      the file is not a job spec that could be sent
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:  # every command imports this module, and the contract takes a tenth of a second
    from services.contract.words.problems import Problem


class CliError(Exception):
    """The command ends with exit code 2 and this text."""


class UnreachableError(CliError):
    """Nobody answers at the controller's URL."""


class SpecFileError(CliError):
    """The file cannot be read as a job spec."""


class RefusedError(CliError):
    """The controller refused; ``problem`` is its answer."""

    def __init__(self, problem: "Problem") -> None:
        faults = "".join(
            f"\n  {fault.pointer or '(whole spec)'}: {fault.detail}" for fault in problem.errors
        )
        super().__init__(f"{problem.detail or problem.title}{faults}")
        self.problem = problem
