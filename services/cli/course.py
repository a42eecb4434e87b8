"""Changing a job's course: stop it, go on with it, change what of it may be changed."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from services.cli.connect import connect
from services.cli.errors import CliError
from services.cli.output import answers, as_data, for_programs
from services.cli.references import Job, checkpoint_id_of, job_id_of
from services.cli.request_bodies import read_model
from services.cli.terminal import console
from services.cli.watching import Follow, follow_to_its_end
from services.contract.api.requests import JobPatch
from services.contract.api.views import JobView, ResumeRequest, StopRequest


class BeforeStopping(StrEnum):
    """What becomes of a checkpoint before ranks are stopped."""

    REQUIRED = "required"
    """Without one the job runs on."""
    BEST_EFFORT = "best_effort"
    """Without one the job is stopped all the same."""
    NONE = "none"
    """None is taken."""


# One default for command line, dashboard and API: a job that cannot write a checkpoint must stop, too, when a person
# says so, and the last committed checkpoint is kept anyway.
_USUAL: Final = BeforeStopping(StopRequest().checkpoint)

Keep = Annotated[
    BeforeStopping,
    typer.Option(
        "--checkpoint",
        help="best_effort: take a checkpoint if that works. required: if it fails, keep running. "
        "none: take none.",
        metavar="WHEN",
    ),
]
Grace = Annotated[
    float,
    typer.Option("--grace", help="Seconds before ranks are killed.", min=0, metavar="SECONDS"),
]


@answers
def cancel(job: Job, *, checkpoint: Keep = _USUAL, grace: Grace = 60.0) -> None:
    """Stop a job for good, after a checkpoint.

    Example:
      meshloom cancel last --checkpoint none
    """
    with connect() as client:
        say(client.cancel(job_id_of(client, job), _stop(checkpoint, grace)))


@answers
def pause(job: Job, *, checkpoint: Keep = _USUAL, grace: Grace = 60.0) -> None:
    """Stop a job after a checkpoint; `resume` continues it.

    Example:
      meshloom pause my-model --checkpoint required
    """
    with connect() as client:
        say(client.pause(job_id_of(client, job), _stop(checkpoint, grace)))


@answers
def kill(job: Job) -> None:
    """Stop a job at once, without a checkpoint.

    Example:
      meshloom kill last
    """
    with connect() as client:
        say(client.kill(job_id_of(client, job)))


@answers
def resume(
    job: Job,
    *,
    from_checkpoint: Annotated[
        str | None,
        typer.Option(
            "--from",
            metavar="CHECKPOINT",
            help="A committed checkpoint of the job: an id, its beginning, or 'last' (the default).",
        ),
    ] = None,
    follow: Follow = False,
) -> None:
    """Continue a paused, cancelled or failed job from a checkpoint.

    Examples:
      meshloom resume last -f

      meshloom resume my-model --from ckpt_01m80dqny75dcp2ta9620emyrc-s000000400-a0001
    """
    with connect() as client:
        job_id = job_id_of(client, job)
        chosen = from_checkpoint and checkpoint_id_of(client, from_checkpoint, job_id)
        resumed = client.resume(job_id, read_model(ResumeRequest, {"from_checkpoint": chosen}))
        if not (follow and for_programs()):
            say(resumed)
        if follow:
            follow_to_its_end(job_id)


@answers
def patch(  # noqa: PLR0913 (what of a job may be changed)
    job: Job,
    *,
    priority: Annotated[int | None, typer.Option(help="Higher starts first.", metavar="N")] = None,
    label: Annotated[
        list[str] | None,
        typer.Option(help="KEY=VALUE sets a label, KEY- takes it away.", metavar="LABEL"),
    ] = None,
    keep_last: Annotated[
        int | None, typer.Option(help="How many committed checkpoints to keep.", min=1, metavar="N")
    ] = None,
    keep_best: Annotated[
        str | None,
        typer.Option(
            metavar="METRIC:MODE:COUNT",
            help="Keep the best ones too, such as loss:min:1 or accuracy:max; 'none': no longer.",
        ),
    ] = None,
    max_restarts: Annotated[
        int | None, typer.Option(help="How many restarts a run may cost.", min=0, metavar="N")
    ] = None,
    world: Annotated[
        str | None,
        typer.Option(metavar="MIN:MAX", help="Bounds of an elastic job; either may be left out."),
    ] = None,
    file: Annotated[
        Path | None,
        typer.Option(
            "--file",
            metavar="FILE",
            help="A merge patch in YAML instead of options; - reads standard input.",
        ),
    ] = None,
) -> None:
    """Change the priority, labels, retention or bounds of a job.

    Examples:
      meshloom patch last --priority 5 --label team=vision

      echo 'priority: 5' | meshloom patch last --file -

      meshloom patch my-model --keep-last 3 --keep-best accuracy:max:2
    """
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
    if bool(wanted) == (file is not None):
        raise CliError(
            "say what to change: --priority, --label, --keep-last, --keep-best, --max-restarts or "
            "--world; or --file, alone"
        )
    from services.cli.spec_file import judged, read_text  # noqa: PLC0415 (it reads YAML)

    source = None if file is None else read_text(file)
    body = read_model(JobPatch, wanted if source is None else source.spec, source)
    with connect() as client, judged(source, "patch"):
        view = client.patch(job_id_of(client, job), body)
    if not as_data(view):
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


def _stop(checkpoint: BeforeStopping, grace: float) -> StopRequest:
    return read_model(StopRequest, {"checkpoint": checkpoint.value, "grace_s": grace})


def say(job: JobView) -> None:
    """Print where the job stands, and why."""
    if not as_data(job):
        console.print(f"{job.id} is {job.state}" + (f": {job.reason}" if job.reason else ""))
