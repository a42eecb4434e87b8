"""What people do with one checkpoint: have it read, exported, kept, deleted."""

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Final

import typer
from tenacity import Retrying, retry_if_result, wait_fixed

from meshloom.client import Checkpoint as Downloadable
from meshloom.client import RestClient as Client
from meshloom.client.downloads import ExportFormat
from services.cli import tables
from services.cli.connect import PATIENCE_S, WATCHING_PATIENCE_S, connect
from services.cli.terminal import console
from services.contract.api.views import CheckpointView
from services.contract.words.states import CheckpointState

_EXIT_BAD: Final = 1
_LOOK_EVERY_S: Final = 0.3

Checkpoint = Annotated[
    str, typer.Argument(metavar="CHECKPOINT", help="A checkpoint's id, as `checkpoints` shows it.")
]


def verify(
    checkpoint: Checkpoint,
    *,
    wait: Annotated[bool, typer.Option(help="Wait until every file was read.")] = True,
) -> None:
    """Have every file of a checkpoint read and compared with its digest.

    Ends with code 1 if it is corrupt.
    """
    with connect(WATCHING_PATIENCE_S if wait else PATIENCE_S) as client:
        before = client.checkpoint(checkpoint)
        view = client.verify(checkpoint)
        if wait:
            view = _awaited(client, checkpoint, lambda now: now.checked_at != before.checked_at)
    console.print(tables.checkpoint_details(view))
    if view.state is CheckpointState.CORRUPT:
        raise typer.Exit(_EXIT_BAD)


def export(
    checkpoint: Checkpoint,
    *,
    wait: Annotated[bool, typer.Option(help="Wait until it is done.")] = True,
    output: Annotated[
        Path | None, typer.Option(help="Download it to this folder; a broken download is resumed.")
    ] = None,
    file_format: Annotated[
        ExportFormat,
        typer.Option("--format", help="Of a download: safetensors; hf, with config.json; or dcp."),
    ] = "safetensors",
) -> None:
    """Export the model of a checkpoint as safetensors files, in the storage or to a folder."""
    if output is not None:
        with connect(WATCHING_PATIENCE_S) as client:
            found = Downloadable(client, client.checkpoint(checkpoint))
            for path in found.download(output, format=file_format):
                console.print(str(path), soft_wrap=True)
        return
    with connect(WATCHING_PATIENCE_S if wait else PATIENCE_S) as client:
        view = client.export(checkpoint)
        if wait:
            view = _awaited(client, checkpoint, _export_is_over)
    console.print(tables.checkpoint_details(view))
    if view.export is not None and view.export.state == "FAILED":
        raise typer.Exit(_EXIT_BAD)


def pin(checkpoint: Checkpoint) -> None:
    """Keep a checkpoint, whatever retention says."""
    with connect() as client:
        console.print(tables.checkpoint_details(client.pin(checkpoint)))


def unpin(checkpoint: Checkpoint) -> None:
    """Leave a checkpoint to retention again."""
    with connect() as client:
        console.print(tables.checkpoint_details(client.pin(checkpoint, keep=False)))


def remove_checkpoint(checkpoint: Checkpoint) -> None:
    """Delete a checkpoint that nothing needs any more."""
    with connect() as client:
        console.print(tables.checkpoint_details(client.remove_checkpoint(checkpoint)))


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
