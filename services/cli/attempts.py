"""The tries of a job as a table: on how many ranks, on what mesh, and how each ended."""

from rich.table import Table

from services.cli.tables import duration
from services.contract.api.views import AttemptList, AttemptView


def attempts_table(attempts: AttemptList) -> Table:
    """One row an attempt, oldest first."""
    table = Table(box=None, header_style="bold dim", pad_edge=False)
    for column in ("no.", "ranks", "mesh", "nodes", "steps", "lost", "to 1st step", "end"):
        table.add_column(column)
    for number, attempt in enumerate(attempts.items):
        if number == 1 and attempts.left_out:
            table.add_row("…", f"{attempts.left_out} are no longer kept")
        table.add_row(
            str(attempt.fence),
            str(attempt.world_size),
            _mesh(attempt),
            ", ".join(attempt.node_ids),
            _steps(attempt),
            "-" if attempt.lost_steps is None else str(attempt.lost_steps),
            duration(attempt.time_to_first_step_s),
            attempt.exit_reason or "under way",
        )
    return table


def _mesh(attempt: AttemptView) -> str:
    """The axes that are wider than one."""
    mesh = attempt.mesh
    if mesh is None:
        return ""
    sizes = {"dp_replicate": mesh.dp_replicate, "dp_shard": mesh.dp_shard, "tp": mesh.tp}
    return " x ".join(f"{axis} {size}" for axis, size in sizes.items() if size > 1) or "one rank"


def _steps(attempt: AttemptView) -> str:
    if attempt.first_step is None:
        return "-"
    return f"{attempt.first_step} to {'now' if attempt.last_step is None else attempt.last_step}"
