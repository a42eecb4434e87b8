"""A job's metrics: the newest ones, the course of some, or all of them as CSV."""

import csv
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from rich.table import Table
from rich.text import Text

from meshloom.client import RestClient as Client
from services.cli.tables import figure
from services.cli.terminal import console
from services.contract.api.views import MetricsView, StepView

CSV_POINTS: Final = 10_000
SHOWN_POINTS: Final = 20
_KEYS: Final = ("step", "fence")
_FIGURES: Final = tuple(name for name in StepView.model_fields if name not in _KEYS)
_Row = Mapping[str, int | float | None]


def show_metrics(client: Client, job_id: str, names: Sequence[str], *, as_csv: bool) -> None:
    """Print them: all names in one line each, or the named ones step by step.

    Raises:
        RefusedError: The job has no metric of such a name.
    """
    points = CSV_POINTS if as_csv else SHOWN_POINTS
    if names:
        found = client.some_metrics(job_id, names, max_points=points)
        _print(found.items, names, as_csv=as_csv)
        left_out = found.names_left_out
    else:
        whole = client.metrics(job_id, max_points=CSV_POINTS)
        rows, columns = _rows(whole), (*_FIGURES, *whole.names)
        if as_csv:
            _write_csv(rows, columns)
        else:
            console.print(_overview(rows, columns, whole.throughput_unit))
        left_out = whole.names_left_out
    if left_out and not as_csv:
        console.print(f"of {left_out} further names nothing is kept: a job may have 64")


def _print(rows: Iterable[_Row], names: Sequence[str], *, as_csv: bool) -> None:
    if as_csv:
        _write_csv(rows, names)
        return
    table = _table("step", *names)
    for row in rows:
        table.add_row(str(row["step"]), *(_cell(row, name) for name in names))
    console.print(table)


def _rows(whole: MetricsView) -> list[_Row]:
    """One a step, of the loop's figures and the user's values."""
    rows: dict[tuple[int, int], dict[str, Any]] = {
        (each.step, each.fence): each.model_dump() for each in whole.items
    }
    for point in whole.user_metrics:
        place = (point.step, point.fence)
        row = rows.setdefault(place, {"step": point.step, "fence": point.fence})
        row.update(point.values)
    return [rows[place] for place in sorted(rows)]


def _overview(rows: Sequence[_Row], columns: Sequence[str], throughput_unit: str) -> Table:
    table = _table("metric", "newest", "at step", "least", "most")
    for name in columns:
        told = [(row["step"], value) for row in rows if (value := row.get(name)) is not None]
        if told:
            step, newest = told[-1]
            values = [value for _, value in told]
            counted = f" ({throughput_unit})" if name == "tokens_per_s" else ""
            table.add_row(
                Text(name + counted),
                figure(newest),
                str(step),
                figure(min(values)),
                figure(max(values)),
            )
    return table


def _write_csv(rows: Iterable[_Row], columns: Sequence[str]) -> None:
    """To standard output: step and attempt, then a column a metric; empty where nothing is known."""
    writer = csv.writer(sys.stdout, lineterminator="\n")
    writer.writerow(["step", "attempt", *columns])
    for row in rows:
        values = (row.get(name) for name in columns)
        writer.writerow([row["step"], row["fence"], *("" if v is None else v for v in values)])


def _cell(row: _Row, name: str) -> str:
    return figure(row[name]) if name in row else "-"


def _table(*columns: str) -> Table:
    table = Table(box=None, header_style="bold dim", pad_edge=False)
    for column in columns:
        table.add_column(Text(column))
    return table
