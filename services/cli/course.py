"""Changing a job's course: stop it, go on with it, change what of it may be changed."""

from typing import Annotated, Any

import typer

from services.cli.connect import connect
from services.cli.errors import CliError
from services.cli.job_names import Job, resolve
from services.cli.spec_file import read_model
from services.cli.terminal import console
from services.cli.watching import Follow, watch
from services.contract.api.requests import JobPatch
from services.contract.api.views import JobView, ResumeRequest, StopRequest

Keep = Annotated[
    str,
    typer.Option(
        "--checkpoint", help="Before stopping: required, best_effort or none.", metavar="WHEN"
    ),
]
Grace = Annotated[float, typer.Option("--grace", help="Seconds before ranks are killed.", min=0)]


def cancel(job: Job, *, checkpoint: Keep = "best_effort", grace: Grace = 60.0) -> None:
    """Stop a job for good, after a checkpoint."""
    with connect() as client:
        say(client.cancel(resolve(client, job), _stop(checkpoint, grace)))


def pause(job: Job, *, checkpoint: Keep = "required", grace: Grace = 60.0) -> None:
    """Stop a job after a checkpoint, to go on later."""
    with connect() as client:
        say(client.pause(resolve(client, job), _stop(checkpoint, grace)))


def kill(job: Job) -> None:
    """Stop a job at once, without a checkpoint."""
    with connect() as client:
        say(client.kill(resolve(client, job)))


def resume(
    job: Job,
    *,
    from_checkpoint: Annotated[
        str | None, typer.Option("--from", help="A committed checkpoint; else the latest.")
    ] = None,
    follow: Follow = False,
) -> None:
    """Go on with a paused, cancelled or failed job from a checkpoint."""
    with connect() as client:
        job_id = resolve(client, job)
        say(client.resume(job_id, ResumeRequest(from_checkpoint=from_checkpoint)))
        if follow:
            watch(job_id)


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
    with connect() as client:
        view = client.patch(resolve(client, job), read_model(JobPatch, wanted))
        console.print(f"{view.id} has revision {view.revision}")


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


def say(job: JobView) -> None:
    """Print where the job stands, and why."""
    console.print(f"{job.id} is {job.state}" + (f": {job.reason}" if job.reason else ""))
