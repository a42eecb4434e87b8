"""The commands of ``meshloom``, by group. Each is a few REST requests and what a person sees of them."""

from typing import Annotated, Final

import typer

from services.cli.lazy import LazyGroup, Listed

_JOBS: Final = "Jobs"
_CHECKPOINTS: Final = "Checkpoints"
_PLANS: Final = "Plans"
_CLUSTER: Final = "Cluster"
_ADMIN: Final = "Admin"


def _of(panel: str, module: str, *commands: tuple[str, str, str]) -> tuple[Listed, ...]:
    return tuple(
        Listed(name, panel, f"services.cli.{module}:{function}", summary)
        for name, function, summary in commands
    )


COMMANDS: Final = (
    *_of(_JOBS, "starting", ("init", "init", "Write a commented job spec to begin with.")),
    *_of(_JOBS, "submitting", ("submit", "submit", "Submit a job.")),
    *_of(
        _JOBS,
        "jobs",
        ("ls", "ls", "List jobs, the newest first."),
        ("status", "status", "Show the state of a job and of its ranks."),
    ),
    *_of(_JOBS, "watching", ("watch", "watch", "Watch a job and its ranks live, until it ends.")),
    *_of(
        _JOBS, "waiting", ("wait", "wait", "Wait until a job ends; the exit code is its outcome.")
    ),
    *_of(_JOBS, "logs", ("logs", "logs", "Print the output of a job's ranks.")),
    *_of(
        _JOBS,
        "metrics",
        ("metrics", "metrics", "Show the metrics of a job: loss, step time, your own."),
    ),
    *_of(_JOBS, "comparing", ("compare", "compare", "Compare the specs and metrics of two jobs.")),
    *_of(
        _JOBS,
        "jobs",
        (
            "ranks",
            "ranks",
            "Show every rank: phase, unit, step, and which one the others wait for.",
        ),
        ("events", "events", "List what happened to a job."),
        ("attempts", "attempts", "List the attempts of a job, and how each ended."),
        ("diagnose", "diagnose", "Find out why a job hangs or has failed."),
    ),
    *_of(
        _JOBS,
        "profiling",
        ("profile", "profile", "Record the next steps of a running job as a trace for Perfetto."),
    ),
    *_of(
        _JOBS,
        "course",
        ("pause", "pause", "Stop a job after a checkpoint; `resume` continues it."),
        ("resume", "resume", "Continue a paused, cancelled or failed job from a checkpoint."),
        ("cancel", "cancel", "Stop a job for good, after a checkpoint."),
        ("kill", "kill", "Stop a job at once, without a checkpoint."),
        ("patch", "patch", "Change the priority, labels, retention or bounds of a job."),
    ),
    *_of(
        _JOBS,
        "jobs",
        ("clone", "clone", "Submit another job with the same spec, changed if you like."),
        ("delete", "delete", "Delete a job that has ended."),
    ),
    *_of(
        _CHECKPOINTS,
        "checkpoints",
        ("checkpoints", "checkpoints", "List the checkpoints of a job, or take one."),
        ("verify", "verify", "Read every file of a checkpoint and compare its digest."),
        ("export", "export", "Export the model of a checkpoint as safetensors files."),
        ("pin", "pin", "Keep a checkpoint, whatever retention says."),
        ("unpin", "unpin", "Leave a checkpoint to retention again."),
        ("rm-checkpoint", "remove_checkpoint", "Delete a checkpoint that nothing needs any more."),
    ),
    *_of(
        _PLANS,
        "plan_command",
        ("plan", "plan", "Predict mesh, memory and step time of a job; allocates nothing."),
        ("plans", "plans", "List the plans of the last seven days, or show one."),
    ),
    *_of(_CLUSTER, "top", ("top", "top", "Watch nodes, running jobs and the queue live.")),
    *_of(_CLUSTER, "nodes", ("nodes", "nodes", "List the nodes, or show one.")),
    *_of(
        _CLUSTER,
        "cluster",
        ("queue", "queue", "List the jobs that wait, and why."),
        ("capacity", "capacity", "Show the free slots of every node."),
        ("pools", "pools", "List the pools that bring nodes, and what they have brought."),
        ("drain", "drain", "Move the jobs of a node elsewhere and start no more there."),
        ("undrain", "undrain", "Let jobs start on a node again."),
        ("forget", "forget", "Delete the record of a lost node."),
    ),
    *_of(
        _ADMIN,
        "access",
        ("tokens", "tokens", "Make, list and revoke access tokens."),
        ("audit", "audit", "List who changed what, and who was refused."),
    ),
    *_of(_ADMIN, "webhooks", ("webhooks", "webhooks", "Send events of jobs to a URL.")),
    *_of(_ADMIN, "doctor", ("doctor", "doctor", "Check, from here, all that a job needs.")),
    *_of(_ADMIN, "tokenizing", ("data", "data", "Prepare data for training.")),
)
"""Every command, in the order in which help lists them."""


class Meshloom(LazyGroup):
    """``meshloom`` itself."""

    listed = COMMANDS


app = typer.Typer(
    cls=Meshloom,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="The controller is at MESHLOOM_URL, else at 127.0.0.1 and MESHLOOM_PORT (8400). "
    "MESHLOOM_TOKEN is sent if it is set. JOB is a job's id, the beginning of one, a name, or 'last'. "
    "Commands that answer take -o table, wide, json or yaml.",
)


def _print_version(wanted: bool) -> None:  # noqa: FBT001 typer's signature
    if wanted:
        from importlib.metadata import version  # noqa: PLC0415 (only this option needs it)

        typer.echo(f"meshloom {version('meshloom')}")
        raise typer.Exit


@app.callback()
def meshloom(
    *,
    version: Annotated[
        bool,
        typer.Option(
            "--version",
            metavar="",
            help="Print the version.",
            callback=_print_version,
            is_eager=True,
        ),
    ] = False,
) -> None:
    """Launch sharded training, watch every rank, resume from committed checkpoints."""
