"""The checkpoints of a job, and what people do with one: have it read, exported, kept, deleted."""

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Final

import typer
from tenacity import Retrying, retry_if_result, wait_fixed

from meshloom.client import Checkpoint as Downloadable
from meshloom.client import RestClient as Client
from meshloom.client.downloads import ExportFormat
from services.cli.checkpoint_tables import checkpoint_details, checkpoints_table
from services.cli.connect import PATIENCE_S, WATCHING_PATIENCE_S, connect
from services.cli.errors import CliError
from services.cli.output import answers, as_data
from services.cli.references import Checkpoint, Job, checkpoint_id_of, job_id_of
from services.cli.terminal import console
from services.contract.api.views import CheckpointView
from services.contract.words.states import CheckpointState

_EXIT_BAD: Final = 1
_LOOK_EVERY_S: Final = 0.3


@answers
def checkpoints(
    job: Job,
    *,
    take: Annotated[bool, typer.Option("--take", help="Ask for one at the next step.")] = False,
) -> None:
    """List the checkpoints of a job, or take one.

    Examples:
      meshloom checkpoints last

      meshloom checkpoints my-model --take
    """
    with connect() as client:
        job_id = job_id_of(client, job)
        if take:
            client.take_checkpoint(job_id)
            if not as_data({"id": job_id, "asked": True}):
                console.print("asked for a checkpoint at the next agreed step")
            return
        found = client.checkpoints(job_id)
    if not as_data(found):
        console.print(checkpoints_table(found))


@answers
def verify(
    checkpoint: Checkpoint,
    *,
    wait: Annotated[bool, typer.Option(help="Wait until every file was read.")] = True,
) -> None:
    """Read every file of a checkpoint and compare its digest.

    The exit code is 1 if it is corrupt, and 2 if it could not be verified.

    Example:
      meshloom verify last
    """
    with connect(WATCHING_PATIENCE_S if wait else PATIENCE_S) as client:
        checkpoint = checkpoint_id_of(client, checkpoint)
        before = client.checkpoint(checkpoint)
        view = client.verify(checkpoint)
        if wait:
            view = _awaited(client, checkpoint, lambda now: now.checked_at != before.checked_at)
    _show(view)
    if view.state is CheckpointState.CORRUPT:
        raise typer.Exit(_EXIT_BAD)
    # Both are of one moment where all was read; what an earlier look found says nothing of this one.
    if wait and (view.checked_at is None or view.verified_at != view.checked_at):
        raise CliError(
            f"it is not verified: a node could not read it; `meshloom events {view.job_id}` says why"
        )


@answers
def export(
    checkpoint: Checkpoint,
    *,
    wait: Annotated[bool, typer.Option(help="Wait until it is done.")] = True,
    output: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR", help="Download it to this folder; a broken download is resumed."
        ),
    ] = None,
    file_format: Annotated[
        ExportFormat,
        typer.Option(
            "--format",
            metavar="FORMAT",
            help="Of a download: safetensors; hf, with config.json; or dcp.",
        ),
    ] = "safetensors",
) -> None:
    """Export the model of a checkpoint as safetensors files.

    They are written in the storage of the nodes, and with --output downloaded to a folder here. The exit code
    is 1 if the export failed.

    Examples:
      meshloom export last

      meshloom export my-model --output exported --format hf
    """
    if output is not None:
        _download(checkpoint, output, file_format)
        return
    with connect(WATCHING_PATIENCE_S if wait else PATIENCE_S) as client:
        checkpoint = checkpoint_id_of(client, checkpoint)
        view = client.export(checkpoint)
        if wait:
            view = _awaited(client, checkpoint, _export_is_over)
    _show(view)
    if view.export is not None and view.export.state == "FAILED":
        raise typer.Exit(_EXIT_BAD)


def _download(checkpoint: str, folder: Path, file_format: ExportFormat) -> None:
    with connect(WATCHING_PATIENCE_S) as client:
        view = client.checkpoint(checkpoint_id_of(client, checkpoint))
        files = Downloadable(client, view).download(folder, format=file_format)
    if not as_data({"checkpoint": view.id, "files": [str(path) for path in files]}):
        for path in files:
            console.print(str(path))


@answers
def pin(checkpoint: Checkpoint) -> None:
    """Keep a checkpoint, whatever retention says.

    Example:
      meshloom pin last
    """
    with connect() as client:
        _show(client.pin(checkpoint_id_of(client, checkpoint)))


@answers
def unpin(checkpoint: Checkpoint) -> None:
    """Leave a checkpoint to retention again.

    Example:
      meshloom unpin ckpt_01m80dqny75dcp2ta9620emyrc-s000000400-a0001
    """
    with connect() as client:
        _show(client.pin(checkpoint_id_of(client, checkpoint), keep=False))


@answers
def remove_checkpoint(
    checkpoint: Annotated[
        str, typer.Argument(metavar="CHECKPOINT", help="A checkpoint's id or the beginning of one.")
    ],
) -> None:
    """Delete a checkpoint that nothing needs any more.

    Example:
      meshloom rm-checkpoint ckpt_01m80dqny75dcp2ta9620emyrc-s000000400-a0001
    """
    if not checkpoint.startswith("ckpt_"):
        # Of a job the newest one would be meant, and nobody deletes that without looking.
        raise CliError("give the id of the checkpoint to delete, or the beginning of its id")
    with connect() as client:
        _show(client.remove_checkpoint(checkpoint_id_of(client, checkpoint)))


def _show(view: CheckpointView) -> None:
    if not as_data(view):
        console.print(checkpoint_details(view))


def _export_is_over(view: CheckpointView) -> bool:
    return view.export is not None and view.export.state != "RUNNING"


def _awaited(
    client: Client, checkpoint: str, is_done: Callable[[CheckpointView], bool]
) -> CheckpointView:
    look: Retrying = Retrying(
        retry=retry_if_result(lambda view: not is_done(view)), wait=wait_fixed(_LOOK_EVERY_S)
    )
    view: CheckpointView = look(client.checkpoint, checkpoint)
    return view
