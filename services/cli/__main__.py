"""Entry point of the ``meshloom`` command: one line and exit code 2 for what cannot be done."""

import signal
import sys
from types import FrameType

from pydantic import ValidationError

from services.cli.app import app
from services.cli.errors import CliError
from services.cli.terminal import errors
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
    except ValidationError as error:
        fault = error.errors(include_url=False)[0]
        place = ".".join(map(str, fault["loc"]))
        _refuse(f"{error.title}: {place}: {fault['msg']} (given: {fault['input']!r})")
    except UnicodeEncodeError as error:
        _refuse(f"{error.object!r} has characters that no HTTP header can carry")


def _end(number: int, _: FrameType | None) -> None:
    sys.exit(128 + number)


def _refuse(text: str) -> None:
    errors.print(f"meshloom: {text}", style="red")
    sys.exit(2)


if __name__ == "__main__":
    main()
