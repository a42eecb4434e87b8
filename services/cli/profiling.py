"""``meshloom profile``: have ranks record their next steps, and wait for the files."""

from typing import Annotated, Final, Literal

import typer
from tenacity import Retrying, retry_if_result, wait_fixed

from meshloom.client import RestClient as Client
from services.cli.connect import PATIENCE_S, WATCHING_PATIENCE_S, connect
from services.cli.errors import CliError
from services.cli.figures import size
from services.cli.output import answers, as_data
from services.cli.references import Job, job_id_of
from services.cli.request_bodies import read_model
from services.cli.terminal import console, errors
from services.contract.jobs.traces import MOST_STEPS, TraceRequest, TraceView
from services.contract.words.states import TraceState

_EXIT_FAILED: Final = 1
_EXIT_INTERRUPTED: Final = 130
_LOOK_EVERY_S: Final = 0.5
# No job has so many ranks, and Python reads no number of thousands of digits.
_MOST_DIGITS: Final = 9
_OPEN_STATES: Final = frozenset({TraceState.REQUESTED, TraceState.RECORDING})


@answers
def profile(
    job: Job,
    *,
    steps: Annotated[
        int,
        typer.Option(help="How many whole steps to record.", min=1, max=MOST_STEPS, metavar="N"),
    ] = 3,
    ranks: Annotated[
        str,
        typer.Option(
            help="Which ranks record: numbers by commas, such as 0,1, or all.", metavar="RANKS"
        ),
    ] = "0",
    wait: Annotated[
        bool, typer.Option(help="Wait until it is done; else print the trace's id alone.")
    ] = True,
) -> None:
    """Record the next steps of a running job as a trace for Perfetto.

    Training goes on, with the same numbers. The exit code is 1 if the trace failed.

    Example:
      meshloom profile last --steps 3 --ranks 0,1
    """
    wanted = read_model(TraceRequest, {"steps": steps, "ranks": _ranks(ranks)})
    with connect(WATCHING_PATIENCE_S if wait else PATIENCE_S) as client:
        job_id = job_id_of(client, job)
        trace = client.record_trace(job_id, wanted)
        if wait:
            trace = _awaited(client, trace)
    if not as_data(trace):
        if wait:
            _show(trace)
        else:
            console.print(trace.id)
    if trace.state is TraceState.FAILED:
        raise typer.Exit(_EXIT_FAILED)


def _awaited(client: Client, trace: TraceView) -> TraceView:
    """The trace once it is done or has failed; a line tells meanwhile how it stands."""
    look: Retrying = Retrying(
        retry=retry_if_result(lambda now: now.state in _OPEN_STATES), wait=wait_fixed(_LOOK_EVERY_S)
    )
    said: list[str] = []

    with errors.status(_line(client, trace)) as line:

        def seen() -> TraceView:
            now = client.trace(trace.job_id, trace.id)
            words = _line(client, now)
            line.update(words)
            if not errors.is_terminal and now.state not in said:
                said.append(now.state)
                errors.print(words)
            return now

        try:
            return look(seen)
        except KeyboardInterrupt:
            errors.print(f"no longer waiting; the ranks go on to record {trace.id}")
            raise typer.Exit(_EXIT_INTERRUPTED) from None


def _line(client: Client, trace: TraceView) -> str:
    job = client.job(trace.job_id)
    written = f", {len(trace.files)} of {len(trace.ranks)} files" if len(trace.ranks) > 1 else ""
    return f"{trace.id} is {trace.state}: step {job.progress.step} of the job{written}"


def _show(trace: TraceView) -> None:
    for file in trace.files:
        steps = f"steps {file.first_step} to {file.last_step}"
        console.print(
            f"rank {file.rank}: {steps}, {size(file.bytes)}, on {file.node_id}: {file.path}",
            soft_wrap=True,
        )
    if trace.state is TraceState.FAILED:
        console.print(f"{trace.id} failed: {trace.reason}", soft_wrap=True)
    else:
        console.print("open it at https://ui.perfetto.dev")


def _ranks(text: str) -> tuple[int, ...] | Literal["all"]:
    if text == "all":
        return "all"
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and len(part) <= _MOST_DIGITS for part in parts):
        raise CliError(f"--ranks is numbers by commas, such as 0,1, or all, not {text!r}")
    return tuple(map(int, parts))
