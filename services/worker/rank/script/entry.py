"""Finds what a job's entry point names, and runs it as ``__main__``."""

import atexit
import os
import runpy
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

from services.contract.jobs.scripts import EntryPoint
from services.worker.rank.process.user_path import OUR_PLACE, hidden_by_us


class ScriptNotFoundError(FileNotFoundError):
    """There is no such script below the folders in which scripts are looked for."""


def find_script(script: str, folders: Sequence[Path]) -> Path:
    """The file of a script, in the first of ``folders`` that has it.

    Raises:
        ScriptNotFoundError: None has it, or it leads out of that folder.
    """
    for folder in folders:
        path = (folder / script).resolve()
        if path.is_file():
            if not path.is_relative_to(folder.resolve()):
                raise ScriptNotFoundError(
                    f"entrypoint.script: {script} in {folder} is a link that leads out of it"
                )
            return path
    where = ", ".join(map(str, folders)) or "no folder: MESHLOOM_USER_PATH is not set on this node"
    raise ScriptNotFoundError(f"entrypoint.script: there is no {script} below {where}")


def run(entrypoint: EntryPoint, folders: Sequence[Path]) -> None:
    """Runs it to its end, with what Python does at the end of a process.

    That is: it waits for threads that are no daemons, then calls what was registered by ``atexit``.

    Args:
        entrypoint: The script or module, and its arguments.
        folders: Where scripts are looked for.

    Raises:
        ScriptNotFoundError: There is no such script.
        SystemExit: It ended by ``sys.exit`` with something else than success.
        Exception: Whatever it raises.
    """
    try:
        if entrypoint.script is not None:
            _run_script(find_script(entrypoint.script, folders), entrypoint.args)
        else:
            sys.argv = [entrypoint.what, *entrypoint.args]
            runpy.run_module(entrypoint.what, run_name="__main__", alter_sys=True)
    except SystemExit as end:
        if end.code not in (None, 0):
            raise
    threading._shutdown()  # type: ignore[attr-defined]  # noqa: SLF001 there is no other name for it
    atexit._run_exitfuncs()  # noqa: SLF001 as above


def _run_script(path: Path, args: Sequence[str]) -> None:
    folder = str(path.parent)
    sys.path.insert(0, folder)
    if hidden_by_us([folder]):
        sys.path.insert(0, str(OUR_PLACE))
    sys.argv = [str(path), *args]
    runpy.run_path(os.fspath(path), run_name="__main__")
