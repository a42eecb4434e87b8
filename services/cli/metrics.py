"""A job's metrics: the newest ones, the course of some, or all of them as CSV."""

import csv
import operator
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Annotated, Any, Final

import typer

from services.cli.connect import connect
from services.cli.figures import figure
from services.cli.layout import Column, Columns, FittedTable
from services.cli.output import answers, as_data
from services.cli.references import Job, job_id_of
from services.cli.terminal import console
from services.contract.api.views import MetricsPart, MetricsView, StepView

CSV_POINTS: Final = 10_000
SHOWN_POINTS: Final = 20
_TIME: Final = "time_ms"
_FORMULAS: Final = ("=", "+", "-", "@", "\t", "\r")
_KEYS: Final = ("step", "fence", "of", _TIME)
_FIGURES: Final = tuple(name for name in StepView.model_fields if name not in _KEYS)
MetricRow = Mapping[str, int | float | None]


@answers
def metrics(
    job: Job,
    *,
    name: Annotated[
        list[str] | None,
        typer.Option("--name", metavar="NAME", help="This metric step by step; may be repeated."),
    ] = None,
    as_csv: Annotated[
        bool, typer.Option("--csv", help="All points as CSV, a column a metric.")
    ] = False,
) -> None:
    """Show the metrics of a job: loss, step time, your own.

    Examples:
      meshloom metrics last

      meshloom metrics last --name loss --name accuracy

      meshloom metrics last --csv > curve.csv
    """
    points = CSV_POINTS if as_csv or not name else SHOWN_POINTS
    with connect() as client:
        job_id = job_id_of(client, job)
        found: MetricsPart | MetricsView
        if name:
            found = client.some_metrics(job_id, name, max_points=points)
        else:
            found = client.metrics(job_id, max_points=points)
    rows = rows_of(found) if isinstance(found, MetricsView) else list(found.items)
    columns = metric_names(found) if isinstance(found, MetricsView) else tuple(name or ())
    if as_csv:
        _write_csv(rows, columns if name else (_TIME, *columns))
    elif not as_data(found):
        if isinstance(found, MetricsView):
            console.print(_overview(rows, columns, found.throughput_unit))
        else:
            console.print(_course(rows, columns))
        if found.names_left_out:
            console.print(
                f"of {found.names_left_out} further names nothing is kept: a job may have 64"
            )


def rows_of(whole: MetricsView) -> list[MetricRow]:
    """One row a step, of the loop's figures and the user's values."""
    rows: dict[tuple[int, int], dict[str, Any]] = {
        (each.step, each.fence): each.model_dump() for each in whole.items
    }
    for point in whole.user_metrics:
        place = (point.step, point.fence)
        row = rows.setdefault(place, {"step": point.step, "fence": point.fence})
        row.update(point.values)
    return [rows[place] for place in sorted(rows)]


def metric_names(whole: MetricsView) -> tuple[str, ...]:
    """All that a row may have: the loop's figures and the user's metrics."""
    return (*_FIGURES, *whole.names)


def _course(rows: Iterable[MetricRow], names: Sequence[str]) -> FittedTable[MetricRow]:
    def of(name: str) -> Callable[[MetricRow], str]:
        return lambda row: figure(row[name]) if name in row else "-"

    columns: list[Column[MetricRow]] = [Column("step", lambda row: str(row["step"]))]
    columns += (Column(each, of(each), drop=place) for place, each in enumerate(names))
    return FittedTable(columns, rows)


def _overview(
    rows: Sequence[MetricRow], columns: Sequence[str], throughput_unit: str
) -> FittedTable[tuple[str, ...]]:
    lines: list[tuple[str, ...]] = []
    for name in columns:
        told = [(row["step"], value) for row in rows if (value := row.get(name)) is not None]
        if told:
            step, newest = told[-1]
            values = [value for _, value in told]
            counted = f" ({throughput_unit})" if name == "tokens_per_s" else ""
            shown = (figure(newest), str(step), figure(min(values)), figure(max(values)))
            lines.append((name + counted, *shown))
    titles = ("metric", "newest", "at step", "least", "most")
    titled: Columns[tuple[str, ...]] = [
        Column(title, operator.itemgetter(place)) for place, title in enumerate(titles)
    ]
    return FittedTable(titled, lines)


def _write_csv(rows: Iterable[MetricRow], columns: Sequence[str]) -> None:
    """To standard output: step and attempt, then a column a metric; empty where nothing is known."""
    writer = csv.writer(sys.stdout, lineterminator="\n")
    writer.writerow(["step", "attempt", *map(_no_formula, columns)])
    for row in rows:
        values = (row.get(name) for name in columns)
        writer.writerow([row["step"], row["fence"], *("" if v is None else v for v in values)])


def _no_formula(name: str) -> str:
    """A metric's name, which a rank chose, such that no spreadsheet runs it."""
    return f"'{name}" if name.startswith(_FORMULAS) else name
