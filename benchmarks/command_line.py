"""What a command costs before it asks anything: CPU seconds of a process, median of some, beside Python itself.

``python -m benchmarks.command_line [--runs N]`` prints a table. Nothing has to run: each line is a process of its own
that ends by itself, and one round goes through all lines, so that what else the machine does falls on all alike.
"""

import argparse
import os
import resource
import statistics
import subprocess
import sys
from typing import Final

_MEASURED: Final = {
    "python -c pass": ("-c", "pass"),
    "python -c 'import typer, rich.console'": ("-c", "import typer, rich.console"),
    "meshloom --help": ("-m", "services.cli", "--help"),
    "meshloom --version": ("-m", "services.cli", "--version"),
    "meshloom submit --help": ("-m", "services.cli", "submit", "--help"),
    "meshloom ls --help": ("-m", "services.cli", "ls", "--help"),
    "meshloom top --help": ("-m", "services.cli", "top", "--help"),
    "meshloom ls, nobody answers": ("-m", "services.cli", "ls"),
    "meshloom submit, nobody answers": ("-m", "services.cli", "submit", "examples/digits/job.yaml"),
}
_NOBODY: Final = "http://127.0.0.1:1"
"""Where nothing listens: what a command costs until its first request, and some more tries within a second."""


def cpu_seconds(arguments: tuple[str, ...]) -> float:
    """User and system time of ``python`` with these arguments, from its start to its end."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(  # noqa: S603 (our own words)
        [sys.executable, *arguments],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"MESHLOOM_URL": _NOBODY},  # noqa: TID251 (the rest as the shell has it)
        check=False,
    )
    if done.returncode and _NOBODY not in done.stderr:
        raise RuntimeError(f"{arguments} failed: {done.stderr}")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=15, help="processes of each line")
    runs = parser.parse_args().runs
    for arguments in _MEASURED.values():  # once, so that all sources are compiled
        cpu_seconds(arguments)
    rounds = [{name: cpu_seconds(words) for name, words in _MEASURED.items()} for _ in range(runs)]
    lines = [f"{'process':42} {'median':>8} {'least':>8} {'most':>8}  CPU seconds of {runs}"]
    for name in _MEASURED:
        took = [each[name] for each in rounds]
        lines.append(f"{name:42} {statistics.median(took):8.3f} {min(took):8.3f} {max(took):8.3f}")
    sys.stdout.write(
        "\n".join(lines) + f"\n{os.cpu_count()} cores, Python {sys.version.split()[0]}\n"
    )


if __name__ == "__main__":
    main()
