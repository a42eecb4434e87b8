"""The page of the command line, made from the tree of commands."""

import inspect
from collections.abc import Iterator
from typing import Any, Final

from services.cli.waiting import EXIT_CODES, EXIT_TIMED_OUT
from tests.cli.tree import Leaf, leaves

_MADE: Final = (
    "<!-- Made by `python -m tests.docs.generated_pages` from the tree of commands. -->\n"
)
_WITH_ALL: Final = frozenset({"--help", "-o", "--json"})
_INTRODUCTION: Final = """\
`meshloom COMMAND --help` shows the same. The controller is at `MESHLOOM_URL`, else at 127.0.0.1 and
`MESHLOOM_PORT` (8400). `MESHLOOM_TOKEN` is sent if it is set ([configuration](../configuration.md)).

Help imports no client: `meshloom --help` takes 0.16 CPU seconds, where `python -c pass` takes 0.01. A command takes
0.6 before its first request (`python -m benchmarks.command_line`, 2 cores).

## Names

| word | it may be |
| --- | --- |
| JOB | a job's id or the beginning of one; its name, of which the newest job is meant; `last`, the newest job |
| CHECKPOINT | a checkpoint's id or the beginning of one; or a JOB: its newest committed checkpoint |
| PLAN | a plan's id or the beginning of one; its name; `last` |

If several ids begin so, the command lists them and does nothing.

## Output

Every command takes `-o FORMAT`:

| format | what is printed |
| --- | --- |
| `table` | what fits the terminal: less important columns are left out, ids and paths are never cut |
| `wide` | all columns, nothing cut or wrapped |
| `json` | what the API answers; `--json` is the same. `logs` prints one object a line |
| `yaml` | the same as YAML |

With `json` or `yaml`, `-f` waits in silence and prints the job at its end.

## Exit codes

| code | meaning |
| --- | --- |
| 0 | done; with `-f`, the job SUCCEEDED |
| 1 | with `-f`, the job is FAILED, CANCELLED or PAUSED; a checkpoint is corrupt, an export, trace or plan failed, or `doctor` found a fault |
| 2 | the command could not be carried out; the error says why, and what to do |
| 3 | `plan`: the job does not fit |
| 130 | Ctrl-C |

`wait` ends with"""


def command_line_page() -> str:
    """Every command by group, with its options and examples."""
    codes = ", ".join(f"{code} for {state}" for state, code in EXIT_CODES.items())
    lines = [
        "# Command line",
        "",
        _MADE,
        f"{_INTRODUCTION} {codes}, and {EXIT_TIMED_OUT} if the job has not ended within `--timeout`.",
    ]
    panel = ""
    for leaf in leaves():
        if leaf.panel != panel:
            panel = leaf.panel
            lines += ["", f"## {panel}"]
        lines += ["", *_of(leaf)]
    return "\n".join(lines) + "\n"


def _of(leaf: Leaf) -> Iterator[str]:
    name = " ".join(leaf.words)
    about, _, examples = inspect.cleandoc(leaf.command.help).partition("\nExample")
    yield f"### {name}"
    yield ""
    yield " ".join([f"`meshloom {name}", *_usage(leaf.command)]) + "`"
    yield ""
    yield about.replace("\f", "").strip()
    yield ""
    yield "```"
    yield from (line.strip() for line in examples.splitlines()[1:] if line.strip())
    yield "```"
    rows = list(_rows(leaf.command))
    if rows:
        yield ""
        yield "| option | meaning |"
        yield "| --- | --- |"
        yield from rows


def _usage(command: Any) -> Iterator[str]:  # noqa: ANN401 typer's commands have no public type
    for param in command.params:
        if param.param_type_name == "argument":
            name = param.metavar + ("..." if param.nargs != 1 else "")
            yield name if param.required else f"[{name}]"
    yield "[OPTIONS]"


def _rows(command: Any) -> Iterator[str]:  # noqa: ANN401 as above
    for param in command.params:
        if param.param_type_name == "argument" or _WITH_ALL & set(param.opts):
            continue
        names = ", ".join(f"`{option}`" for option in [*param.opts, *param.secondary_opts])
        value = f" {param.metavar}" if param.metavar else ""
        meaning = param.help.replace("|", "\\|")
        yield f"| {names}{value} | {meaning} |"
