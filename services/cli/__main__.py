"""Entry point of the ``meshloom`` command: exit code 2, and what to do, for what cannot be done."""

import signal
import sys
from types import FrameType

from services.cli.app import app
from services.cli.errors import CliError
from services.contract.system.own_process import hide_process


def main() -> None:
    """Run the command line."""
    hide_process()
    # As an exception, so that a live view gives the terminal back its cursor.
    signal.signal(signal.SIGTERM, _end)
    try:
        app()
    except CliError as error:
        _refuse(str(error))
    except UnicodeEncodeError as error:
        _refuse(f"{error.object!r} has characters that no HTTP header can carry")
    except ValueError as error:
        from pydantic import ValidationError  # noqa: PLC0415 (help and completion do without it)

        if not isinstance(error, ValidationError):
            raise
        fault = error.errors(include_url=False)[0]
        place = ".".join(map(str, fault["loc"]))
        _refuse(f"{error.title}: {place}: {fault['msg']} (given: {fault['input']!r})")


def _end(number: int, _: FrameType | None) -> None:
    sys.exit(128 + number)


def _refuse(text: str) -> None:
    from services.cli.terminal import errors  # noqa: PLC0415 (as above)

    errors.print(f"meshloom: {text}", style="red")
    sys.exit(2)


if __name__ == "__main__":
    main()
