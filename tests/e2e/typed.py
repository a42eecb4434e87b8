"""The `meshloom` command as a person types it, in a process born with most imports done.

A person waits for them once; these tests type it some fifty times.
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from services.local.settings import child_environment
from tests.forking import forking

_PATIENCE_S = 120.0


def typed(url: str, *words: object) -> subprocess.CompletedProcess[str]:
    """What came of typing ``meshloom`` and these words, for the controller at ``url``."""
    line = ["meshloom", *map(str, words)]
    with tempfile.TemporaryDirectory(prefix="meshloom-typed-") as folder:
        outputs = [Path(folder) / name for name in ("stdout", "stderr")]
        environment = child_environment(MESHLOOM_URL=url, COLUMNS="200")
        process = forking().Process(target=_run, args=(line, environment, *outputs))
        process.start()
        process.join(_PATIENCE_S)
        if process.exitcode is None:
            process.kill()
            raise subprocess.TimeoutExpired(line, _PATIENCE_S)
        stdout, stderr = (output.read_text() for output in outputs)
    return subprocess.CompletedProcess(line, process.exitcode, stdout, stderr)


def _run(line: list[str], environment: dict[str, str], *outputs: Path) -> None:
    for number, output in enumerate(outputs, start=1):
        os.dup2(os.open(output, os.O_WRONLY | os.O_CREAT), number)
    os.environ.clear()  # noqa: TID251 as if it had been started with it
    os.environ.update(environment)  # noqa: TID251 as above
    sys.argv = line
    from services.cli.__main__ import main  # noqa: PLC0415 it looks at its environment

    main()
