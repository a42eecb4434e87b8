"""What ends a command with one text that says what to do, and exit code 2.

``CliError`` is what the client raises, too: nobody answers, or the controller refused.

::

    CliError  (meshloom.client.ClientError)
     +- UnreachableError   nobody answers at the URL
     +- RefusedError       the controller answered with a problem (RFC 9457)
     +- SpecFileError      the file is not a job spec that could be sent
"""

from meshloom.client.errors import ClientError as CliError
from meshloom.client.errors import RefusedError, UnreachableError

__all__ = ["CliError", "RefusedError", "SpecFileError", "UnreachableError"]


class SpecFileError(CliError):
    """The file cannot be read as a job spec."""
