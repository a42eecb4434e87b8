"""``meshloom logs``: what a job's ranks wrote, narrowed down and followed."""

import re
import sys
from collections import deque
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime
from enum import StrEnum
from typing import Annotated, Final

import typer

from meshloom.client import RestClient as Client
from services.cli.connect import PATIENCE_S, WATCHING_PATIENCE_S, connect
from services.cli.errors import CliError
from services.cli.output import answers, as_data_line
from services.cli.references import Job, job_id_of
from services.cli.terminal import console, errors
from services.cli.times import Since, Until
from services.contract.api.views import LogView
from services.contract.words.control_characters import one_line

_MOST_OF_THE_CONTROLLER: Final = 1_000
_LONGEST_TEXT: Final = 200
_OF_PATTERNS: Final = frozenset(r".^$*+?{}[]\|()")


class Stream(StrEnum):
    """Where a rank wrote."""

    STDOUT = "stdout"
    STDERR = "stderr"


class Level(StrEnum):
    """How bad a line is."""

    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


@answers
def logs(  # noqa: PLR0913 (one parameter an option)
    job: Job,
    *,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on as lines come.")] = False,
    tail: Annotated[
        int | None, typer.Option(help="Only the last N lines so far.", min=0, metavar="N")
    ] = None,
    rank: Annotated[int | None, typer.Option(help="Only this rank.", min=0, metavar="N")] = None,
    stream: Annotated[
        Stream | None, typer.Option(help="Only stdout or stderr.", metavar="STREAM")
    ] = None,
    level: Annotated[
        Level | None,
        typer.Option(help="This and worse: debug, info, warning or error.", metavar="LEVEL"),
    ] = None,
    grep: Annotated[
        str | None,
        typer.Option(help="Only lines that this regular expression matches.", metavar="PATTERN"),
    ] = None,
    timestamps: Annotated[
        bool, typer.Option("--timestamps", help="With the time (UTC) of each line.")
    ] = False,
    since: Since = None,
    until: Until = None,
) -> None:
    """Print the output of a job's ranks.

    Each line begins with its rank in brackets. With -o json it is one JSON object.

    Examples:
      meshloom logs last -f

      meshloom logs my-model --rank 0 --tail 100 --timestamps

      meshloom logs last --since 15m --level warning --grep 'loss|nan'
    """
    pattern = _pattern(grep)
    filters: dict[str, str | int] = {
        name: value.isoformat() if isinstance(value, datetime) else value
        for name, value in {
            "since": since,
            "until": until,
            "rank": rank,
            "stream": stream,
            "level": level,
        }.items()
        if value is not None
    }
    if grep and len(grep) <= _LONGEST_TEXT and not _OF_PATTERNS & set(grep):
        # The controller finds plain text, upper case or lower; an expression could take it any time.
        filters["text"] = grep
    with connect() as client:
        job_id = job_id_of(client, job)
        if rank is not None:
            _check_rank(client, job_id, rank)
    # Patient: a controller that restarts does not end the following.
    with connect(WATCHING_PATIENCE_S if follow else PATIENCE_S) as client:
        for line in _lines(client, job_id, filters, tail, pattern, follow=follow):
            if not as_data_line(line):
                time = f"{_time(line)} " if timestamps else ""
                console.print(f"{time}[{line.rank}] {one_line(line.text)}")


def _lines(
    client: Client,
    job_id: str,
    filters: dict[str, str | int],
    tail: int | None,
    pattern: re.Pattern[str] | None,
    *,
    follow: bool,
) -> Iterator[LogView]:
    def wanted(lines: Iterable[LogView]) -> Iterator[LogView]:
        return (line for line in lines if pattern is None or pattern.search(line.text))

    read = client.follow_logs if follow else client.logs
    if tail is None:
        yield from wanted(read(job_id, **filters))
        return
    if pattern is None and tail <= _MOST_OF_THE_CONTROLLER:
        yield from read(job_id, tail=tail, **filters)
        return
    known: set[str] = set()

    def noted(lines: Iterable[LogView]) -> Iterator[LogView]:
        for line in lines:
            known.add(line.id)
            yield line

    yield from deque(wanted(noted(client.logs(job_id, **filters))), maxlen=min(tail, sys.maxsize))
    if follow:
        newer = (line for line in client.follow_logs(job_id, **filters) if line.id not in known)
        yield from wanted(newer)


def _pattern(text: str | None) -> re.Pattern[str] | None:
    try:
        return None if text is None else re.compile(text)
    # Of a number that is too large, and of one that is nested too deep.
    except (re.error, OverflowError, RecursionError) as error:
        raise CliError(f"--grep {text!r} is no regular expression: {error}") from None


def _check_rank(client: Client, job_id: str, rank: int) -> None:
    """Refuse a rank that no attempt of the job had.

    Raises:
        CliError: There is no such rank.
    """
    sizes = [attempt.world_size for attempt in client.attempts(job_id).items]
    if not sizes:
        errors.print(f"{job_id} has no ranks yet")
    elif rank >= max(sizes):
        raise CliError(f"{job_id} has no rank {rank}: its ranks are 0 to {max(sizes) - 1}")


def _time(line: LogView) -> str:
    moment = datetime.fromtimestamp(line.time_ms / 1000, tz=UTC)
    return f"{moment:%Y-%m-%dT%H:%M:%S}.{line.time_ms % 1000:03d}Z"
