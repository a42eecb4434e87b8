"""What is shown of a job until it has ended, and then; ``meshloom watch``."""

from textwrap import indent
from typing import Annotated, Final

import typer

from meshloom.client import RestClient as Client
from services.cli import tables
from services.cli.connect import WATCHING_PATIENCE_S, connect
from services.cli.figures import plural
from services.cli.follow import follow as follow_job
from services.cli.follow import rested
from services.cli.output import answers, as_data, for_programs
from services.cli.references import Job, job_id_of
from services.cli.terminal import console, errors
from services.cli.tracebacks import own_frames
from services.contract.api.views import JobView
from services.contract.words.states import CheckpointState, JobState

Follow = Annotated[bool, typer.Option("--follow", "-f", help="Watch it until it has ended.")]
EXIT_JOB_FAILED: Final = 1
EXIT_INTERRUPTED: Final = 130


@answers
def watch(job: Job) -> None:
    """Watch a job and its ranks live, until it ends.

    Ctrl-C leaves the job alone. The exit code is 0 if the job SUCCEEDED, else 1.

    Example:
      meshloom watch last
    """
    with connect() as client:
        job_id = job_id_of(client, job)
    follow_to_its_end(job_id, every_rank=True)


def submitted(client: Client, job: JobView, *, verb: str = "submitted", follow: bool) -> None:
    """Say which job that is, and follow it if that is wanted; programs get the job itself."""
    if not for_programs():
        url = f"{client.base_url}/#/jobs/{job.id}"
        console.print(f"{verb} {job.id}  {url}")
    elif not follow:
        as_data(job)
    if follow:
        follow_to_its_end(job.id)


def follow_to_its_end(job_id: str, *, every_rank: bool = False) -> None:
    """Show how the job goes on until it has ended, then what came of it.

    Args:
        job_id: The job.
        every_rank: With a table of the ranks.

    Raises:
        Exit: With code 1 unless it SUCCEEDED; with 130 after Ctrl-C, which leaves the job alone.
    """
    # Patient: a controller that restarts does not end the watching.
    with connect(WATCHING_PATIENCE_S) as client:
        try:
            if for_programs():
                job = rested(client, job_id)
            else:
                job = follow_job(client, job_id, console, every_rank=every_rank)
        except KeyboardInterrupt:
            errors.print(f"\nno longer watching; the job goes on: meshloom status -f {job_id}")
            raise typer.Exit(EXIT_INTERRUPTED) from None
        if not as_data(job):
            _print_summary(client, job)
    if job.state is not JobState.SUCCEEDED:
        raise typer.Exit(EXIT_JOB_FAILED)


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
            f"committed checkpoint {newest.id}: step {newest.step}, {plural(len(newest.shards), 'shard')}, "
            f"{newest.bytes:,} bytes"
        )
    console.print(f"dashboard {client.base_url}/#/jobs/{job.id}")
    print_failure(job)


def print_failure(job: JobView) -> None:
    """Print which rank failed first, and how; nothing of a job that has not FAILED."""
    failure = job.failure
    if failure is None or job.state is not JobState.FAILED:
        return
    if failure.rank is not None:  # else the job's reason has said all of it
        at = "" if failure.step is None else f" at step {failure.step}"
        told = failure.error or failure.signal or f"exit code {failure.exit_code}"
        console.print(f"rank {failure.rank} failed first{at}: {told}")
    if failure.traceback:
        console.print(indent(own_frames(failure.traceback), "  "))
