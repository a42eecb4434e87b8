"""Checkpoints as a table, and one of them as a list."""

from services.cli.figures import number, short_age, size, state_text
from services.cli.layout import Cell, Column, Columns, Details, Exact, FittedTable
from services.contract.api.views import CheckpointList, CheckpointView, ExportView


def checkpoints_table(checkpoints: CheckpointList) -> FittedTable[CheckpointView]:
    """One row a checkpoint, newest first."""
    columns: Columns[CheckpointView] = (
        Column("checkpoint", lambda each: each.id),
        Column("state", lambda each: state_text(each.state)),
        Column("step", lambda each: str(each.step), drop=3),
        Column("loss", lambda each: number(each.loss, "{:.4f}"), drop=7),
        Column("validation", _judged, drop=6),
        Column("size", lambda each: size(each.bytes), drop=4),
        Column("ranks", lambda each: str(each.world_size), drop=8),
        Column("age", lambda each: short_age(each.created_at), drop=1),
        Column("kept", _kept, drop=2),
        Column("verified", _verified, drop=5),
    )
    return FittedTable(columns, checkpoints.items)


def checkpoint_details(checkpoint: CheckpointView) -> Details:
    """What one wants to know of a checkpoint, as a list."""
    verified = checkpoint.verified_at
    rows: list[tuple[Cell, Cell | None]] = [
        ("checkpoint", Exact(checkpoint.id)),
        ("state", state_text(checkpoint.state)),
        ("why", checkpoint.reason),
        ("step", str(checkpoint.step)),
        ("validation", _judged(checkpoint) or None),
        ("size", f"{checkpoint.bytes:,} bytes in {len(checkpoint.shards)} shards"),
        ("kept", ", ".join(_reasons_to_keep(checkpoint)) or None),
        *_export(checkpoint.export),
        ("verified", None if verified is None else f"{verified:%Y-%m-%d %H:%M:%S} UTC"),
    ]
    return Details(rows)


def _judged(checkpoint: CheckpointView) -> str:
    """Figures of its evaluation; the best one says so."""
    told = (f"{name} {number(value, '{:.4f}')}" for name, value in checkpoint.evaluation.items())
    return ", ".join([*told, *(["best"] if checkpoint.best else [])])


def _kept(checkpoint: CheckpointView) -> str:
    held = [f"for {len(checkpoint.held_by)}"] if checkpoint.held_by else []
    return ", ".join((["pinned"] if checkpoint.pinned else []) + held)


def _reasons_to_keep(checkpoint: CheckpointView) -> list[str]:
    held = [f"for {job}" for job in checkpoint.held_by]
    return (["pinned"] if checkpoint.pinned else []) + held


def _verified(checkpoint: CheckpointView) -> str:
    return f"{short_age(checkpoint.verified_at)} ago" if checkpoint.verified_at else ""


def _export(export: ExportView | None) -> list[tuple[Cell, Cell | None]]:
    if export is None:
        return []
    if export.state != "DONE":
        why = f": {export.reason}" if export.reason else ""
        return [("export", f"{export.state}{why}")]
    files: list[tuple[Cell, Cell | None]] = [
        ("files" if place == 0 else "", Exact(name)) for place, name in enumerate(export.files)
    ]
    return [
        ("export", f"{export.bytes:,} bytes, in this folder of the storage:"),
        ("folder", Exact(export.folder)),
        *files,
    ]
