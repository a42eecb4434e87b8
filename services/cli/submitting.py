"""Submitting a job: of a file, through a plan, or the unfinished one of the same spec."""

from pathlib import Path
from typing import Annotated, Any, Final

import typer

from meshloom.client import RestClient as Client
from services.cli import plan_command
from services.cli.connect import WATCHING_PATIENCE_S, connect
from services.cli.errors import CliError
from services.cli.output import answers, as_data, for_programs
from services.cli.references import plan_id_of
from services.cli.spec_file import judged, read_text
from services.cli.spec_places import SpecText
from services.cli.terminal import console
from services.cli.uploading import Code, with_code
from services.cli.watching import Follow, submitted
from services.contract.api.views import JobView
from services.contract.words.states import TERMINAL_STATES, JobState

_JOBS_LOOKED_AT: Final = 200


@answers
def submit(  # noqa: PLR0913 one parameter an option
    file: Annotated[
        Path | None,
        typer.Argument(metavar="FILE", help="A job spec in YAML; - reads standard input."),
    ] = None,
    *,
    follow: Follow = False,
    plan: Annotated[
        bool, typer.Option("--plan", help="Plan it first, and submit that plan if it is feasible.")
    ] = False,
    plan_id: Annotated[
        str | None,
        typer.Option("--plan-id", help="Submit this plan instead of a FILE.", metavar="PLAN"),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only say whether it would be accepted.")
    ] = False,
    key: Annotated[
        str | None,
        typer.Option(
            "--idempotency-key", metavar="KEY", help="The same key submits the same job only once."
        ),
    ] = None,
    rejoin: Annotated[
        bool, typer.Option("--rejoin", help="Attach to an unfinished job with this spec, if any.")
    ] = False,
    code: Code = None,
) -> None:
    """Submit a job.

    FILE is its spec; or --plan-id names a plan, to run exactly that plan. With -f the exit code is 0 if the job
    SUCCEEDED, else 1.

    Examples:
      meshloom submit job.yaml --code . -f

      meshloom submit job.yaml --dry-run

      sed 's/lr: .*/lr: 1e-4/' job.yaml | meshloom submit - -o json
    """
    source = _what_to_submit(file, plan_id)
    if code is not None and source is None:
        raise CliError("--code is for a FILE; a plan names the code that it was made with")
    with connect() as client, judged(source):
        if source is None:
            spec: dict[str, Any] = {"plan_id": plan_id_of(client, plan_id or "")}
        else:
            spec = with_code(client, dict(source.spec), code)
        unfinished = _unfinished(client, spec) if rejoin and source and not dry_run else None
        if plan and unfinished is None:
            spec = _through_a_plan(spec)
        job = unfinished or client.submit(spec, idempotency_key=key, dry_run=dry_run)
        if dry_run:
            if not as_data(job):
                console.print(f"{file or plan_id} is a valid spec; nothing was submitted")
            return
        verb = "submitted" if unfinished is None else "going on with"
        submitted(client, job, verb=verb, follow=follow)


def _what_to_submit(file: Path | None, plan_id: str | None) -> SpecText | None:
    """What a FILE says; None: a plan is named."""
    if (file is None) == (plan_id is None):
        raise CliError("say what to submit: a FILE, or --plan-id with the id of a plan")
    return None if file is None else read_text(file)


def _through_a_plan(spec: dict[str, Any]) -> dict[str, Any]:
    """The plan of a spec, as it is submitted; ends the command if it is not feasible."""
    if "plan_id" in spec:
        raise CliError("--plan makes a plan of a FILE; --plan-id has one already")
    with connect(WATCHING_PATIENCE_S) as client:
        made = plan_command.planned(client, spec)
    if not made.feasible:
        plan_command.show(made)
    plan_command.leave_unless_feasible(made)
    if not for_programs():
        console.print(f"{made.id}: {made.reason}")
    return {"plan_id": made.id}


def _unfinished(client: Client, spec: dict[str, Any]) -> JobView | None:
    for job in client.jobs(limit=_JOBS_LOOKED_AT).items:
        asked = job.spec.model_dump(mode="json", include=set(spec))
        if job.state not in TERMINAL_STATES | {JobState.PAUSED} and _covers(asked, spec):
            return job
    return None


def _covers(whole: object, part: object) -> bool:
    """Whether all that ``part`` says is in ``whole``, which has the defaults too."""
    if isinstance(whole, dict) and isinstance(part, dict):
        return all(key in whole and _covers(whole[key], value) for key, value in part.items())
    return whole == part
