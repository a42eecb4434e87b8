"""``meshloom wait``: for scripts that go on once a job has ended."""

import time
from typing import Annotated, Final

import typer

from services.cli.connect import WATCHING_PATIENCE_S, connect
from services.cli.figures import steps_of
from services.cli.follow import POLL_S, RESTING_STATES
from services.cli.output import answers, as_data
from services.cli.references import Job, job_id_of
from services.cli.terminal import console
from services.contract.words.states import JobState

EXIT_CODES: Final = {
    JobState.SUCCEEDED: 0,
    JobState.FAILED: 1,
    JobState.CANCELLED: 4,
    JobState.PAUSED: 5,
}
"""What ``wait`` ends with, by the state in which the job rests; 2 is for errors of the command itself."""
EXIT_TIMED_OUT: Final = 124
"""As of ``timeout(1)``."""


@answers
def wait(
    job: Job,
    *,
    timeout: Annotated[
        float | None,
        typer.Option(help="Give up after so many seconds.", min=0, metavar="SECONDS"),
    ] = None,
) -> None:
    """Wait until a job ends; the exit code is its outcome.

    0: SUCCEEDED. 1: FAILED. 4: CANCELLED. 5: PAUSED. 124: not ended within --timeout.

    Example:
      meshloom wait my-model && meshloom export my-model
    """
    ends = None if timeout is None else time.monotonic() + timeout
    with connect(WATCHING_PATIENCE_S) as client:
        job_id = job_id_of(client, job)
        view = client.job(job_id)
        while view.state not in RESTING_STATES and (ends is None or time.monotonic() < ends):
            time.sleep(POLL_S)  # noqa: TID251 a poll over REST has nothing else to wait on
            view = client.job(job_id)
    if not as_data(view):
        why = f": {view.reason}" if view.reason else ""
        console.print(f"{view.id} is {view.state} at step {steps_of(view)}{why}")
    raise typer.Exit(EXIT_CODES.get(view.state, EXIT_TIMED_OUT))
