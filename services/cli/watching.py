"""What is shown of a job until it has ended, and then."""

from typing import Annotated, Final

import typer

from meshloom.client import RestClient as Client
from services.cli import tables
from services.cli.connect import WATCHING_PATIENCE_S, connect
from services.cli.follow import follow as follow_job
from services.cli.terminal import console
from services.contract.api.views import JobView
from services.contract.words.states import CheckpointState, JobState

Follow = Annotated[bool, typer.Option("--follow", "-f", help="Watch it until it has ended.")]
_EXIT_JOB_FAILED: Final = 1
_EXIT_INTERRUPTED: Final = 130


def watch(job_id: str) -> None:
    """Show how the job goes on until it has ended, then what came of it.

    Raises:
        Exit: With code 1 unless it SUCCEEDED; with 130 after Ctrl-C, which leaves the job alone.
    """
    # Patient: a controller that restarts does not end the watching.
    with connect(WATCHING_PATIENCE_S) as client:
        try:
            job = follow_job(client, job_id, console)
        except KeyboardInterrupt:
            console.print(f"\nno longer watching; the job goes on: meshloom status -f {job_id}")
            raise typer.Exit(_EXIT_INTERRUPTED) from None
        _print_summary(client, job)
    if job.state is not JobState.SUCCEEDED:
        raise typer.Exit(_EXIT_JOB_FAILED)


def _print_summary(client: Client, job: JobView) -> None:
    committed = [
        checkpoint
        for checkpoint in client.checkpoints(job.id).items
        if checkpoint.state is CheckpointState.COMMITTED
    ]
    console.print(tables.job_details(job))
    if committed:
        newest = max(committed, key=lambda checkpoint: checkpoint.step)
        console.print(
            f"committed checkpoint {newest.id}: step {newest.step}, {len(newest.shards)} shards, "
            f"{newest.bytes:,} bytes",
            soft_wrap=True,
        )
    console.print(f"dashboard {client.base_url}/#/jobs/{job.id}", soft_wrap=True)
    print_failure(job)


def print_failure(job: JobView) -> None:
    """Print which rank failed first, and how; nothing of a job that has not FAILED."""
    failure = job.failure
    if failure is None or job.state is not JobState.FAILED:
        return
    where = "" if failure.rank is None else f"rank {failure.rank} failed first"
    at = "" if failure.step is None else f" at step {failure.step}"
    console.print(f"{where}{at}: {failure.error or failure.signal or failure.exit_code}")
    if failure.traceback:
        console.print(failure.traceback)
