"""The commands of ``meshloom``. Each is a few REST requests and what a person sees of them."""

from pathlib import Path
from typing import Annotated, Any, Final

import typer

from services.cli import plan_command, tables
from services.cli.access import audit, tokens
from services.cli.attempts import attempts_table
from services.cli.client import Client
from services.cli.code_folder import with_code
from services.cli.connect import PATIENCE_S as _PATIENCE_S
from services.cli.connect import WATCHING_PATIENCE_S as _WATCHING_PATIENCE_S
from services.cli.connect import connect as _connect
from services.cli.diagnosing import looked_into
from services.cli.doctor import examine
from services.cli.errors import CliError
from services.cli.follow import follow as follow_job
from services.cli.keeping import export, pin, remove_checkpoint, unpin, verify
from services.cli.metrics import show_metrics
from services.cli.moments import Since, Until
from services.cli.naming import Job
from services.cli.naming import resolve as _resolve
from services.cli.nodes import nodes
from services.cli.profiling import profile
from services.cli.settings import CliSettings
from services.cli.spec_file import read_model, read_overrides, read_spec
from services.cli.terminal import console, one_line, print_json
from services.cli.tokenizing import data
from services.contract.api.queue import DrainRequest
from services.contract.api.requests import CloneRequest, JobPatch
from services.contract.api.views import JobView, ResumeRequest, StopRequest
from services.contract.words.states import TERMINAL_STATES, CheckpointState, JobState

_EXIT_JOB_FAILED: Final = 1
_EXIT_INTERRUPTED: Final = 130
_JOBS_LOOKED_AT: Final = 200


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

Follow = Annotated[bool, typer.Option("--follow", "-f", help="Watch it until it has ended.")]
Keep = Annotated[
    str,
    typer.Option(
        "--checkpoint", help="Before stopping: required, best_effort or none.", metavar="WHEN"
    ),
]
Grace = Annotated[float, typer.Option("--grace", help="Seconds before ranks are killed.", min=0)]


@app.command()
def submit(  # noqa: PLR0913 one parameter an option
    file: Annotated[Path | None, typer.Argument(metavar="FILE", help="A job spec in YAML.")] = None,
    *,
    follow: Follow = False,
    plan: Annotated[
        bool, typer.Option("--plan", help="Plan it first, and submit that plan if it is feasible.")
    ] = False,
    plan_id: Annotated[
        str | None, typer.Option("--plan-id", help="Submit this plan instead of a FILE.")
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only say whether it would be accepted.")
    ] = False,
    key: Annotated[
        str | None,
        typer.Option("--idempotency-key", help="The same key submits the same job only once."),
    ] = None,
    rejoin: Annotated[
        bool, typer.Option("--rejoin", help="Take the unfinished job of the same spec, if any.")
    ] = False,
    code: plan_command.Code = None,
) -> None:
    """Submit the job in FILE, or the one of a plan."""
    spec = _what_to_submit(file, plan_id)
    if code is not None and file is None:
        raise CliError("--code is for a FILE; a plan names the code that it was made with")
    with _connect() as client:
        spec = with_code(client, spec, code)
        unfinished = _unfinished(client, spec) if rejoin and file and not dry_run else None
        if plan and unfinished is None:
            spec = _through_a_plan(spec)
        job = unfinished or client.submit(spec, idempotency_key=key, dry_run=dry_run)
        if dry_run:
            console.print(f"{file or plan_id} is a valid spec; nothing was submitted")
            return
        verb = "submitted" if unfinished is None else "going on with"
        console.print(f"{verb} {job.id}  {client.base_url}/#/jobs/{job.id}", soft_wrap=True)
        if follow:
            _watch(job.id)


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
            _watch(job_id)
            return
        view = client.job(job_id)
        if json:
            print_json(view)
            return
        console.print(tables.job_details(view))
        ranks = client.ranks(job_id)
        if ranks.items:
            console.print(tables.ranks_table(ranks))
        _print_failure(view)


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
        console.print("no rank was placed yet")


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


@app.command()
def cancel(job: Job, *, checkpoint: Keep = "best_effort", grace: Grace = 60.0) -> None:
    """Stop a job for good, after a checkpoint."""
    with _connect() as client:
        _say(client.cancel(_resolve(client, job), _stop(checkpoint, grace)))


@app.command()
def pause(job: Job, *, checkpoint: Keep = "required", grace: Grace = 60.0) -> None:
    """Stop a job after a checkpoint, to go on later."""
    with _connect() as client:
        _say(client.pause(_resolve(client, job), _stop(checkpoint, grace)))


@app.command()
def kill(job: Job) -> None:
    """Stop a job at once, without a checkpoint."""
    with _connect() as client:
        _say(client.kill(_resolve(client, job)))


@app.command()
def resume(
    job: Job,
    *,
    from_checkpoint: Annotated[
        str | None, typer.Option("--from", help="A committed checkpoint; else the latest.")
    ] = None,
    follow: Follow = False,
) -> None:
    """Go on with a paused, cancelled or failed job from a checkpoint."""
    with _connect() as client:
        job_id = _resolve(client, job)
        _say(client.resume(job_id, ResumeRequest(from_checkpoint=from_checkpoint)))
        if follow:
            _watch(job_id)


@app.command()
def patch(  # noqa: PLR0913 (what of a job may be changed)
    job: Job,
    *,
    priority: Annotated[int | None, typer.Option(help="Higher goes first.")] = None,
    label: Annotated[
        list[str] | None, typer.Option(help="KEY=VALUE sets a label, KEY- takes it away.")
    ] = None,
    keep_last: Annotated[
        int | None, typer.Option(help="How many committed checkpoints to keep.", min=1)
    ] = None,
    keep_best: Annotated[
        str | None,
        typer.Option(
            metavar="METRIC:MODE:COUNT",
            help="Keep the best ones too, such as loss:min:1 or accuracy:max; 'none': no longer.",
        ),
    ] = None,
    max_restarts: Annotated[int | None, typer.Option(help="The restart budget.", min=0)] = None,
    world: Annotated[
        str | None,
        typer.Option(metavar="MIN:MAX", help="Bounds of an elastic job; either may be left out."),
    ] = None,
) -> None:
    """Change a job's priority, labels, retention, restart budget or elastic bounds."""
    wanted: dict[str, Any] = {}
    if priority is not None:
        wanted["priority"] = priority
    if label:
        wanted["labels"] = dict(map(_label, label))
    if keep_last is not None:
        wanted["checkpoint"] = {"keep_last": keep_last}
    if keep_best is not None:
        wanted.setdefault("checkpoint", {})["keep_best"] = _best(keep_best)
    if max_restarts is not None:
        wanted["faults"] = {"max_restarts": max_restarts}
    if world is not None:
        wanted["resources"] = {"world": _bounds(world)}
    if not wanted:
        raise CliError(
            "say what to change: --priority, --label, --keep-last, --keep-best, --max-restarts or "
            "--world"
        )
    with _connect() as client:
        view = client.patch(_resolve(client, job), read_model(JobPatch, wanted))
        console.print(f"{view.id} has revision {view.revision}")


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
            _watch(view.id)


@app.command()
def delete(
    job: Job,
    *,
    purge: Annotated[
        bool, typer.Option("--purge-checkpoints", help="Remove its checkpoints, too.")
    ] = False,
) -> None:
    """Forget a job that has ended."""
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


@app.command()
def queue() -> None:
    """List who waits for seats, and why."""
    with _connect() as client:
        console.print(tables.queue_table(client.queue()))


@app.command()
def capacity() -> None:
    """Show the room that there is, node by node."""
    with _connect() as client:
        found = client.capacity()
    console.print(tables.capacity_table(found))
    console.print(
        f"the largest gang that fits now: {found.largest_cpu_gang} CPU ranks, "
        f"{found.largest_cuda_gang} CUDA ranks"
    )


@app.command()
def drain(
    node: Annotated[str, typer.Argument(metavar="NODE", help="A node's id.")],
    *,
    grace: Grace = 60.0,
) -> None:
    """Empty a node: its gangs checkpoint and move, and no more are placed there."""
    with _connect() as client:
        view = client.drain(node, DrainRequest(grace_s=grace))
    moving = f"; to be moved: {', '.join(view.jobs)}" if view.jobs else ""
    console.print(f"{view.id} is {view.state}{moving}")


@app.command()
def undrain(node: Annotated[str, typer.Argument(metavar="NODE", help="A node's id.")]) -> None:
    """Have gangs placed on a node again."""
    with _connect() as client:
        view = client.undrain(node)
    console.print(f"{view.id} is {view.state}")


@app.command()
def forget(node: Annotated[str, typer.Argument(metavar="NODE", help="A node's id.")]) -> None:
    """Delete the record of a lost node."""
    with _connect() as client:
        client.forget(node)
    console.print(f"{node} is deleted; its agent may join again")


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


def _what_to_submit(file: Path | None, plan_id: str | None) -> dict[str, Any]:
    if (file is None) == (plan_id is None):
        raise CliError("say what to submit: a FILE, or --plan-id with the id of a plan")
    return {"plan_id": plan_id} if file is None else read_spec(file)


def _through_a_plan(spec: dict[str, Any]) -> dict[str, Any]:
    """The plan of a spec, as it is submitted; ends the command if it is not feasible."""
    if "plan_id" in spec:
        raise CliError("--plan makes a plan of a FILE; --plan-id has one already")
    with _connect(_WATCHING_PATIENCE_S) as client:
        made = plan_command.planned(client, spec)
    if not made.feasible:
        plan_command.show(made)
    plan_command.leave_unless_feasible(made)
    console.print(f"{made.id}: {made.reason}", soft_wrap=True)
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


def _label(text: str) -> tuple[str, str | None]:
    key, equals, value = text.partition("=")
    if equals:
        return key, value
    if text.endswith("-"):
        return text[:-1], None
    raise CliError(f"--label is KEY=VALUE, or KEY- to take the label away, not {text!r}")


def _bounds(text: str) -> dict[str, int]:
    least, colon, most = text.partition(":")
    named = {"min": least, "max": most}
    given = {name: int(part) for name, part in named.items() if part.isdecimal()}
    if not colon or not given or any(named[name] for name in named.keys() - given.keys()):
        raise CliError(f"--world is MIN:MAX, such as 2:8, or :8 for the upper bound, not {text!r}")
    return given


def _best(text: str) -> dict[str, str] | None:
    if text == "none":
        return None
    fields = zip(("metric", "mode", "count"), text.split(":"), strict=False)
    given = {name: part for name, part in fields if part}
    if not given or text.count(":") > 2:  # noqa: PLR2004 (between three parts)
        raise CliError(
            f"--keep-best is METRIC:MODE:COUNT, such as accuracy:max:1, or 'none', not {text!r}"
        )
    return given


def _stop(checkpoint: str, grace: float) -> StopRequest:
    if checkpoint not in {"required", "best_effort", "none"}:
        raise CliError(f"--checkpoint is required, best_effort or none, not {checkpoint}")
    return StopRequest.model_validate({"checkpoint": checkpoint, "grace_s": grace})


def _say(job: JobView) -> None:
    console.print(f"{job.id} is {job.state}" + (f": {job.reason}" if job.reason else ""))


def _watch(job_id: str) -> None:
    # Patient: a controller that restarts does not end the watching.
    with _connect(_WATCHING_PATIENCE_S) as client:
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
    _print_failure(job)


def _print_failure(job: JobView) -> None:
    failure = job.failure
    if failure is None or job.state is not JobState.FAILED:
        return
    where = "" if failure.rank is None else f"rank {failure.rank} failed first"
    at = "" if failure.step is None else f" at step {failure.step}"
    console.print(f"{where}{at}: {failure.error or failure.signal or failure.exit_code}")
    if failure.traceback:
        console.print(failure.traceback)
