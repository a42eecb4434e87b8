"""Entry point of the ``meshloom`` command: exit code 2, and what to do, for what cannot be done."""

import io
import os
import signal
import sys
import warnings
from types import FrameType

from services.cli.app import Meshloom, app
from services.contract.system.own_process import hide_process


def main() -> None:
    """Run the command line."""
    hide_process()
    # As an exception, so that a live view gives the terminal back its cursor.
    signal.signal(signal.SIGTERM, _end)
    Meshloom.before_loading.append(_declare_late)
    if not sys.warnoptions:
        # Those of libraries, which quote files of others as they are: YAML's of an anchor that is given again.
        warnings.simplefilter("ignore")
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # it was closed before: nobody reads it
            setattr(sys, name, open(os.devnull, "w"))  # noqa: PTH123, SIM115 it is open to the end
    if isinstance(sys.stdout, io.TextIOWrapper):
        # Others write what the terminal's encoding may lack: a path of a stranger would keep the trail from being shown.
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        try:
            app()
        finally:
            sys.stdout.flush()
    except BrokenPipeError:
        _drop_output()
        sys.exit(1)
    except Exception as error:
        text = _told(error)
        if text is None:
            raise
        from services.cli.terminal import errors  # noqa: PLC0415 (as in _told)

        if isinstance(error, OSError):
            _drop_output()
        errors.print(f"meshloom: {text}", style="red")
        sys.exit(2)


def _drop_output() -> None:
    """Have what could not be written not tried again, and told once more, when the interpreter ends."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)


def _declare_late() -> None:
    """Have pydantic make a model's validator when it is first used.

    Of some two hundred models of the contract a command reads two or three, and making all takes a tenth of a second.
    Only here: a service uses them in several threads.
    """
    from pydantic import BaseModel  # noqa: PLC0415 (as in _told)

    BaseModel.model_config["defer_build"] = True


def _told(error: Exception) -> str | None:
    """The message for the user; None: the error is a bug of Meshloom."""
    # Not at the top: help and completion do without the client.
    from pydantic import ValidationError  # noqa: PLC0415

    from services.cli.errors import CliError  # noqa: PLC0415
    from services.contract.api.fault_words import in_words  # noqa: PLC0415

    if isinstance(error, CliError):
        return str(error)
    if isinstance(error, OSError):
        return f"{error.filename or 'output'}: {error.strerror or error}"
    if isinstance(error, UnicodeEncodeError):
        return f"{error.object!r} has characters that no HTTP header can carry"
    if isinstance(error, ValidationError):
        fault = error.errors(include_url=False)[0]
        place = ".".join(map(str, fault["loc"]))
        # Of the environment; bodies of requests are judged where they are made.
        variable = (
            f"MESHLOOM_{place.upper()}"
            if error.title == "CliSettings"
            else f"{error.title}: {place}"
        )
        return f"{variable}: {in_words(fault)}"
    return None


def _end(number: int, _: FrameType | None) -> None:
    sys.exit(128 + number)


if __name__ == "__main__":
    main()
