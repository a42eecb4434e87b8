"""The commands of ``meshloom``. Each is a few REST requests and what a person sees of them."""

from typing import Annotated, Final

import typer

from services.cli import plan_command, tables
from services.cli.access import audit, tokens
from services.cli.attempts import attempts_table
from services.cli.checkpoints import export, pin, remove_checkpoint, unpin, verify
from services.cli.cluster import capacity, drain, forget, queue, undrain
from services.cli.code_folder import with_code
from services.cli.connect import PATIENCE_S as _PATIENCE_S
from services.cli.connect import WATCHING_PATIENCE_S as _WATCHING_PATIENCE_S
from services.cli.connect import connect as _connect
from services.cli.course import cancel, kill, patch, pause, resume
from services.cli.diagnosing import looked_into
from services.cli.doctor import examine
from services.cli.job_names import Job
from services.cli.job_names import resolve as _resolve
from services.cli.metrics import show_metrics
from services.cli.nodes import nodes
from services.cli.profiling import profile
from services.cli.settings import CliSettings
from services.cli.spec_file import read_model, read_overrides
from services.cli.submitting import submit
from services.cli.terminal import console, one_line, print_json
from services.cli.times import Since, Until
from services.cli.tokenizing import data
from services.cli.watching import Follow, print_failure, watch
from services.contract.api.requests import CloneRequest
from services.contract.words.states import JobState

_EXIT_JOB_FAILED: Final = 1


_LIVE_STATES: Final = frozenset(
    {
        JobState.STARTING,
        JobState.RUNNING,
        JobState.PAUSING,
        JobState.CANCELLING,
    }
)

app = typer.Typer(
    help="Launch sharded training, watch every rank, never lose a committed step.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    epilog="The controller is found by MESHLOOM_URL (else 127.0.0.1 and MESHLOOM_PORT, 8400); "
    "MESHLOOM_TOKEN is sent where it is set. JOB is a job's id, or 'last' for the newest.",
)
app.add_typer(tokens, name="tokens")
app.add_typer(data, name="data")
app.command()(audit)
app.command()(nodes)
app.command()(plan_command.plan)
app.command()(plan_command.plans)
for command in (profile, verify, export, pin, unpin):
    app.command()(command)
app.command("rm-checkpoint")(remove_checkpoint)


app.command()(submit)


@app.command()
def ls(
    state: Annotated[
        JobState | None, typer.Option(help="Only jobs in this state.", case_sensitive=False)
    ] = None,
    *,
    owner: Annotated[str | None, typer.Option(help="Only this person's jobs.")] = None,
    label: Annotated[str | None, typer.Option(help="Only jobs with KEY or KEY=VALUE.")] = None,
    query: Annotated[str | None, typer.Option("--q", help="Text in the id or the name.")] = None,
    sort: Annotated[
        str,
        typer.Option(help="By created, updated or priority; with - in front, the highest first."),
    ] = "-created",
    limit: Annotated[int, typer.Option(help="How many.", min=1, max=200)] = 20,
) -> None:
    """List jobs, the newest first."""
    given = {"state": state, "owner": owner, "label": label, "q": query, "sort": sort}
    with _connect() as client:
        page = client.jobs(limit=limit, **{name: text for name, text in given.items() if text})
        console.print(tables.jobs_table(page))


@app.command()
def status(
    job: Job,
    *,
    follow: Follow = False,
    json: Annotated[bool, typer.Option("--json", help="The job as the API answers it.")] = False,
) -> None:
    """Show where a job stands, rank by rank."""
    with _connect() as client:
        job_id = _resolve(client, job)
        if follow:
            watch(job_id)
            return
        view = client.job(job_id)
        if json:
            print_json(view)
            return
        console.print(tables.job_details(view))
        ranks = client.ranks(job_id)
        if ranks.items:
            console.print(tables.ranks_table(ranks))
        print_failure(view)


@app.command()
def ranks(
    job: Job,
    *,
    json: Annotated[bool, typer.Option("--json", help="As the API answers it.")] = False,
) -> None:
    """Show every rank: phase, unit, step, and for whom the others wait."""
    with _connect() as client:
        found = client.ranks(_resolve(client, job))
    if json:
        print_json(found)
    elif found.items:
        console.print(tables.ranks_table(found))
    else:
        console.print("No ranks placed yet")


@app.command()
def diagnose(
    job: Job,
    *,
    last: Annotated[
        bool, typer.Option("--last", help="Do not look into running ranks; show what is known.")
    ] = False,
    stacks: Annotated[bool, typer.Option("--stacks", help="Print every rank's stacks.")] = False,
) -> None:
    """Diagnose a job that hangs or has ended: the first rank to fail, the cause, what to do."""
    with _connect() as client:
        job_id = _resolve(client, job)
        lives = client.job(job_id).state in _LIVE_STATES
        found = client.diagnosis(job_id) if last or not lives else looked_into(client, job_id)
    console.print(tables.diagnosis_table(found))
    if stacks:
        for entry in found.stacks:
            console.print(f"\nrank {entry.rank} on {entry.node_id}\n{entry.text}")


@app.command()
def logs(
    job: Job,
    *,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on as lines come.")] = False,
    rank: Annotated[int | None, typer.Option(help="Only this rank.", min=0)] = None,
    stream: Annotated[str | None, typer.Option(help="Only stdout or stderr.")] = None,
    since: Since = None,
    until: Until = None,
) -> None:
    """Print what a job's ranks wrote."""
    times = {"since": since, "until": until}
    filters: dict[str, str | int] = {
        name: time.isoformat() for name, time in times.items() if time is not None
    }
    if rank is not None:
        filters["rank"] = rank
    if stream is not None:
        filters["stream"] = stream
    with _connect() as client:
        job_id = _resolve(client, job)
    # Patient: a controller that restarts does not end the following.
    with _connect(_WATCHING_PATIENCE_S if follow else _PATIENCE_S) as client:
        read = client.follow_logs if follow else client.logs
        for line in read(job_id, **filters):
            console.print(f"[{line.rank}] {one_line(line.text)}", soft_wrap=True)


@app.command()
def events(job: Job) -> None:
    """List what happened to a job."""
    with _connect() as client:
        console.print(tables.events_table(client.events(_resolve(client, job))))


@app.command()
def attempts(job: Job) -> None:
    """List a job's tries: on how many ranks, on what mesh, and how each ended."""
    with _connect() as client:
        console.print(attempts_table(client.attempts(_resolve(client, job))))


@app.command()
def metrics(
    job: Job,
    *,
    name: Annotated[
        list[str] | None,
        typer.Option("--name", metavar="NAME", help="This metric step by step; may be repeated."),
    ] = None,
    csv: Annotated[
        bool, typer.Option("--csv", help="All points as CSV, a column a metric.")
    ] = False,
) -> None:
    """Show what a job's steps are measured by, the user's metrics among it."""
    with _connect() as client:
        show_metrics(client, _resolve(client, job), name or (), as_csv=csv)


app.command()(cancel)


app.command()(pause)


app.command()(kill)


app.command()(resume)


app.command()(patch)


@app.command()
def clone(
    job: Job,
    *,
    overrides: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="FIELD=VALUE", help="Such as train.steps=500 (YAML)."),
    ] = None,
    from_checkpoint: Annotated[
        str | None,
        typer.Option("--from", help="A committed checkpoint of the job, 'latest' or 'best'."),
    ] = None,
    key: Annotated[
        str | None,
        typer.Option("--idempotency-key", help="The same key clones the job only once."),
    ] = None,
    follow: Follow = False,
    code: plan_command.Code = None,
) -> None:
    """Submit another job of the same spec, from a checkpoint or from the beginning."""
    patch = read_overrides(overrides or [])
    with _connect() as client:
        patch = with_code(client, patch, code)
        wanted = {"overrides": patch, "from_checkpoint": from_checkpoint}
        request = read_model(CloneRequest, wanted)
        view = client.clone(_resolve(client, job), request, idempotency_key=key)
        console.print(f"submitted {view.id}  {client.base_url}/#/jobs/{view.id}", soft_wrap=True)
        if follow:
            watch(view.id)


@app.command()
def delete(
    job: Job,
    *,
    purge: Annotated[
        bool, typer.Option("--purge-checkpoints", help="Remove its checkpoints, too.")
    ] = False,
) -> None:
    """Delete a finished job."""
    with _connect() as client:
        job_id = _resolve(client, job)
        is_gone = client.delete(job_id, purge_checkpoints=purge)
    words = "is forgotten" if is_gone else "is forgotten once its checkpoints are removed"
    console.print(f"{job_id} {words}")


@app.command()
def checkpoints(
    job: Job,
    *,
    take: Annotated[bool, typer.Option("--take", help="Ask for one at the next step.")] = False,
) -> None:
    """List a job's checkpoints."""
    with _connect() as client:
        job_id = _resolve(client, job)
        if take:
            client.take_checkpoint(job_id)
            console.print("asked for a checkpoint at the next agreed step")
            return
        console.print(tables.checkpoints_table(client.checkpoints(job_id)))


app.command()(queue)


app.command()(capacity)


app.command()(drain)


app.command()(undrain)


app.command()(forget)


@app.command()
def doctor() -> None:
    """Check, from here, all that a job needs."""
    settings = CliSettings()
    with _connect() as client:
        findings = list(examine(client, settings))
    for finding in findings:
        console.print(finding.line())
    if not all(finding.healthy for finding in findings):
        raise typer.Exit(_EXIT_JOB_FAILED)
