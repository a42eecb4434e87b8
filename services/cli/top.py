"""``meshloom top``: the cluster at a glance, again and again."""

import time
from collections.abc import Iterator
from typing import Annotated, Any, Final

import typer
from rich.console import Group, RenderableType
from rich.live import Live
from rich.text import Text

from meshloom.client import RestClient as Client
from services.cli.cluster_tables import nodes_table, queue_table
from services.cli.connect import PATIENCE_S, WATCHING_PATIENCE_S, connect
from services.cli.figures import plural
from services.cli.output import answers, as_data, for_programs
from services.cli.tables import jobs_table
from services.cli.terminal import console
from services.cli.watching import EXIT_INTERRUPTED
from services.contract.api.queue import QueueView
from services.contract.api.views import JobPage, NodeList
from services.contract.words.states import JobState

_STATES: Final = (JobState.STARTING, JobState.RUNNING, JobState.PAUSING, JobState.CANCELLING)
_JOBS_SHOWN: Final = 50


@answers
def top(
    *,
    once: Annotated[bool, typer.Option("--once", help="Print it once, and end.")] = False,
    every: Annotated[
        float, typer.Option(help="Seconds between two looks.", min=0.5, metavar="SECONDS")
    ] = 2.0,
) -> None:
    """Watch nodes, running jobs and the queue live.

    Ctrl-C ends it. Where the output is no terminal, or for -o json, it prints once.

    Examples:
      meshloom top

      meshloom top --once -o json
    """
    lives = console.is_terminal and not once and not for_programs()
    with connect(WATCHING_PATIENCE_S if lives else PATIENCE_S) as client:
        if lives:
            _live(client, every)
            return
        seen = _look(client)
        if not as_data(seen):
            console.print(Group(*_parts(**seen)))


def _live(client: Client, every_s: float) -> None:
    try:
        with Live(console=console, auto_refresh=False, screen=True) as live:
            while True:
                live.update(Group(*_parts(**_look(client))), refresh=True)
                time.sleep(every_s)  # noqa: TID251 a poll over REST has nothing else to wait on
    except KeyboardInterrupt:
        raise typer.Exit(EXIT_INTERRUPTED) from None


def _look(client: Client) -> dict[str, Any]:
    jobs = [job for state in _STATES for job in client.jobs(limit=_JOBS_SHOWN, state=state).items]
    return {
        "nodes": client.nodes(),
        "jobs": JobPage(items=tuple(jobs)),
        "queue": client.queue(),
    }


def _parts(nodes: NodeList, jobs: JobPage, queue: QueueView) -> Iterator[RenderableType]:
    yield Text(plural(len(nodes.items), "node"), style="bold")
    # Which jobs a node has stands below.
    yield nodes_table(nodes, name_jobs=False)
    yield Text(f"\n{plural(len(jobs.items), 'job')} on nodes", style="bold")
    if jobs.items:
        yield jobs_table(jobs)
    yield Text(f"\n{plural(len(queue.items), 'job')} waiting", style="bold")
    if queue.items:
        yield queue_table(queue)
