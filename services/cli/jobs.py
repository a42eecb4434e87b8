"""Commands that show a job, and those that make or delete one of another."""

from textwrap import indent
from typing import Annotated, Final

import typer

from meshloom.client import RestClient as Client
from services.cli import tables
from services.cli.connect import connect
from services.cli.diagnosing import looked_into
from services.cli.output import answers, as_data
from services.cli.references import Job, checkpoint_id_of, job_id_of
from services.cli.request_bodies import read_model
from services.cli.terminal import console
from services.cli.tracebacks import own_place
from services.cli.uploading import Code, with_code
from services.cli.watching import Follow, follow_to_its_end, print_failure, submitted
from services.contract.api.requests import CloneRequest
from services.contract.api.views import DiagnosisView, EventPage, JobView
from services.contract.words.states import JobState

_LIVE_STATES: Final = frozenset(
    {JobState.STARTING, JobState.RUNNING, JobState.PAUSING, JobState.CANCELLING}
)
_EVENTS_AT_ONCE: Final = 200
_BY_WORD: Final = frozenset({"latest", "best"})


@answers
def ls(
    state: Annotated[
        JobState | None,
        typer.Option(help="Only jobs in this state.", case_sensitive=False, metavar="STATE"),
    ] = None,
    *,
    owner: Annotated[
        str | None, typer.Option(help="Only this person's jobs.", metavar="NAME")
    ] = None,
    label: Annotated[
        str | None, typer.Option(help="Only jobs with this label.", metavar="KEY[=VALUE]")
    ] = None,
    query: Annotated[
        str | None, typer.Option("--q", help="Text in the id or the name.", metavar="TEXT")
    ] = None,
    sort: Annotated[
        str,
        typer.Option(
            help="created, updated or priority; with - in front, the highest first.",
            metavar="FIELD",
        ),
    ] = "-created",
    limit: Annotated[int, typer.Option(help="How many.", min=1, max=200, metavar="N")] = 20,
) -> None:
    """List jobs, the newest first.

    Examples:
      meshloom ls --state running

      meshloom ls --label team=vision --sort -priority -o wide
    """
    given = {"state": state, "owner": owner, "label": label, "q": query, "sort": sort}
    with connect() as client:
        page = client.jobs(limit=limit, **{name: text for name, text in given.items() if text})
    if not as_data(page):
        console.print(tables.jobs_table(page))


@answers
def status(job: Job, *, follow: Follow = False) -> None:
    """Show the state of a job and of its ranks.

    With -f the exit code is 0 if the job SUCCEEDED, else 1.

    Examples:
      meshloom status last

      meshloom status my-model -f
    """
    with connect() as client:
        job_id = job_id_of(client, job)
        if follow:
            follow_to_its_end(job_id)
            return
        view = client.job(job_id)
        if as_data(view):
            return
        console.print(tables.job_details(view))
        found = client.ranks(job_id)
        if found.items:
            console.print()
            console.print(tables.ranks_table(found))
        print_failure(view)


@answers
def ranks(job: Job) -> None:
    """Show every rank: phase, unit, step, and which one the others wait for.

    Example:
      meshloom ranks last -o wide
    """
    with connect() as client:
        found = client.ranks(job_id_of(client, job))
    if as_data(found):
        return
    if found.items:
        console.print(tables.ranks_table(found))
    else:
        console.print("No ranks placed yet")


@answers
def diagnose(
    job: Job,
    *,
    last: Annotated[
        bool, typer.Option("--last", help="Do not look into running ranks; show what is known.")
    ] = False,
    stacks: Annotated[bool, typer.Option("--stacks", help="Print every rank's stacks.")] = False,
) -> None:
    """Find out why a job hangs or has failed.

    It names the first rank in trouble, the cause, and what to do. Running ranks are inspected now.

    Example:
      meshloom diagnose last --stacks
    """
    with connect() as client:
        view = client.job(job_id_of(client, job))
        lives = view.state in _LIVE_STATES
        found = client.diagnosis(view.id) if last or not lives else looked_into(client, view.id)
    if as_data(found):
        return
    console.print(tables.diagnosis_details(found, _place_of(view, found)))
    if stacks:
        for entry in found.stacks:
            console.print(f"\nrank {entry.rank} on {entry.node_id}\n{indent(entry.text, '  ')}")


def _place_of(job: JobView, found: DiagnosisView) -> str | None:
    """Where in the user's code the rank failed that the diagnosis names."""
    failure = job.failure
    if found.live or failure is None or not failure.traceback or failure.rank != found.rank:
        return None
    return own_place(failure.traceback)


@answers
def events(job: Job) -> None:
    """List what happened to a job.

    Example:
      meshloom events last
    """
    with connect() as client:
        page = _all_events(client, job_id_of(client, job))
    if not as_data(page):
        console.print(tables.events_table(page))


def _all_events(client: Client, job_id: str) -> EventPage:
    page = client.events(job_id, limit=_EVENTS_AT_ONCE)
    items = list(page.items)
    while page.next_cursor is not None and page.items:
        page = client.events(job_id, limit=_EVENTS_AT_ONCE, cursor=page.next_cursor)
        items += page.items
    return EventPage(items=tuple(items))


@answers
def attempts(job: Job) -> None:
    """List the attempts of a job, and how each ended.

    Example:
      meshloom attempts last
    """
    with connect() as client:
        found = client.attempts(job_id_of(client, job))
    if as_data(found):
        return
    if not found.items:
        console.print("No attempts yet")
        return
    console.print(tables.attempts_table(found))
    if found.left_out:
        console.print(f"{found.left_out} attempts between the first two are no longer kept")


@answers
def clone(
    job: Job,
    *,
    overrides: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="FIELD=VALUE", help="Change a field; the value is YAML."),
    ] = None,
    from_checkpoint: Annotated[
        str | None,
        typer.Option(
            "--from",
            metavar="CHECKPOINT",
            help="Begin from a committed checkpoint of the job: 'latest', 'best', an id or its beginning.",
        ),
    ] = None,
    key: Annotated[
        str | None,
        typer.Option(
            "--idempotency-key", metavar="KEY", help="The same key clones the job only once."
        ),
    ] = None,
    follow: Follow = False,
    code: Code = None,
) -> None:
    """Submit another job with the same spec, changed if you like.

    Examples:
      meshloom clone last --set train.steps=500 --set name=longer

      meshloom clone my-model --from best -f
    """
    from services.cli.spec_file import read_overrides  # noqa: PLC0415 (no other command here needs YAML)

    patch = read_overrides(overrides or [])
    with connect() as client:
        patch = with_code(client, patch, code)
        job_id = job_id_of(client, job)
        if from_checkpoint is not None and from_checkpoint not in _BY_WORD:
            from_checkpoint = checkpoint_id_of(client, from_checkpoint, job_id)
        wanted = {"overrides": patch, "from_checkpoint": from_checkpoint}
        request = read_model(CloneRequest, wanted)
        view = client.clone(job_id, request, idempotency_key=key)
        submitted(client, view, follow=follow)


@answers
def delete(
    job: Job,
    *,
    purge: Annotated[
        bool, typer.Option("--purge-checkpoints", help="Remove its checkpoints, too.")
    ] = False,
) -> None:
    """Delete a job that has ended.

    Example:
      meshloom delete last --purge-checkpoints
    """
    with connect() as client:
        job_id = job_id_of(client, job)
        is_gone = client.delete(job_id, purge_checkpoints=purge)
    if as_data({"id": job_id, "deleted": is_gone}):
        return
    words = "is deleted" if is_gone else "is deleted once its checkpoints are removed"
    console.print(f"{job_id} {words}")
