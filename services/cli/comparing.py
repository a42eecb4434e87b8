"""``meshloom compare``: two jobs side by side, what was asked of them and what came of it."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from rich.text import Text

from meshloom.client import RestClient as Client
from services.cli.connect import connect
from services.cli.figures import figure, plural
from services.cli.layout import Column, Columns, Details, Exact, FittedTable
from services.cli.metrics import MetricRow, metric_names, rows_of
from services.cli.output import answers, as_data
from services.cli.references import Job, job_id_of
from services.cli.terminal import console
from services.contract.api.views import JobView, MetricsView

_POINTS: Final = 10_000
_LEAST_IS_TOLD: Final = frozenset({"loss", "step_time_s"})
_MOST_IS_TOLD: Final = frozenset({"tokens_per_s", "mfu", "memory_bytes"})
_NEITHER_IS_TOLD: Final = frozenset({"learning_rate", "grad_norm", "data_wait_s"})
_UNSAID: Final = "-"


@dataclass(frozen=True)
class Difference:
    """A field of the specs that is not the same; ``-`` where a spec does not have it."""

    field: str
    a: str
    b: str


@dataclass(frozen=True)
class Pair:
    """A figure of both jobs; None where one has none."""

    metric: str
    which: str
    a: float | None
    b: float | None


@answers
def compare(a: Job, b: Job) -> None:
    """Compare the specs and metrics of two jobs.

    Shown are the fields of the specs that differ, and of each metric the final value and the best one: the
    least loss and the highest throughput; of your own metrics the least and the most.

    Example:
      meshloom compare baseline wider
    """
    with connect() as client:
        ids = job_id_of(client, a), job_id_of(client, b)
        first, second = (client.job(each) for each in ids)
        differences = list(spec_differences(_spec(first), _spec(second)))
        pairs = list(metric_pairs(*(_metrics(client, each) for each in ids)))
    answer = {
        "a": ids[0],
        "b": ids[1],
        "spec": [vars(each) for each in differences],
        "metrics": [vars(each) for each in pairs],
    }
    if as_data(answer):
        return
    jobs = ((name, Exact(_title(job))) for name, job in (("A", first), ("B", second)))
    console.print(Details(jobs))
    console.print()
    if differences:
        console.print(_difference_table(differences))
    else:
        console.print("the specs are equal")
    console.print()
    console.print(_pair_table(pairs))


def spec_differences(a: Mapping[str, Any], b: Mapping[str, Any]) -> Iterator[Difference]:
    """The fields in which two specs differ, in their order."""
    for field, in_a_word in (("plan", _plan_in_a_word), ("mesh", _mesh_in_a_word)):
        if isinstance(a.get(field), Mapping) != isinstance(b.get(field), Mapping):
            # One says in a word what the other says in fields: they differ in the whole, not in each field.
            a, b = ({**each, field: in_a_word(each.get(field))} for each in (a, b))
    flat_a, flat_b = dict(_flat(a)), dict(_flat(b))
    for field in dict.fromkeys([*flat_a, *flat_b]):
        values = flat_a.get(field, _UNSAID), flat_b.get(field, _UNSAID)
        if values[0] != values[1]:
            yield Difference(field, *values)


def metric_pairs(a: MetricsView, b: MetricsView) -> Iterator[Pair]:
    """The final figures of two jobs, and the best ones."""
    rows = rows_of(a), rows_of(b)
    for name in dict.fromkeys([*metric_names(a), *metric_names(b)]):
        values = [_values(each, name) for each in rows]
        if any(values):
            yield Pair(name, "final", *(told[-1] if told else None for told in values))
            yield from _best(name, *values)
    losses = [[e.loss for e in each.evaluations if e.loss is not None] for each in (a, b)]
    if any(losses):
        yield Pair("validation loss", "final", *(told[-1] if told else None for told in losses))
        yield Pair("validation loss", "least", *(min(told, default=None) for told in losses))


def _best(name: str, a: list[float], b: list[float]) -> Iterator[Pair]:
    if name in _NEITHER_IS_TOLD:
        return
    if name not in _MOST_IS_TOLD:
        yield Pair(name, "least", min(a, default=None), min(b, default=None))
    if name not in _LEAST_IS_TOLD:
        yield Pair(name, "most", max(a, default=None), max(b, default=None))


def _values(rows: list[MetricRow], name: str) -> list[float]:
    return [value for row in rows if (value := row.get(name)) is not None]


def _metrics(client: Client, job_id: str) -> MetricsView:
    return client.metrics(job_id, max_points=_POINTS)


def _spec(job: JobView) -> dict[str, Any]:
    return job.spec.model_dump(mode="json")


def _plan_in_a_word(plan: object) -> object:
    """A word as it is; fields as what they are: how many units they name, and how many other fields."""
    if not isinstance(plan, Mapping):
        return plan
    units = plan.get("units")
    count = len(units) if isinstance(units, list) else 0
    return f"a layout with {plural(count, 'unit')} of its own" if count else "a layout of its own"


def _mesh_in_a_word(mesh: object) -> object:
    if not isinstance(mesh, Mapping):
        return mesh
    return " x ".join(f"{axis} {size}" for axis, size in mesh.items())


def _flat(value: object, path: str = "") -> Iterator[tuple[str, str]]:
    if isinstance(value, Mapping) and value:
        for name, each in value.items():
            yield from _flat(each, f"{path}.{name}".removeprefix("."))
    else:
        yield path, str(value) if isinstance(value, str) else _as_yaml(value)


def _as_yaml(value: object) -> str:
    words = {None: "null", True: "true", False: "false"}
    if value is None or isinstance(value, bool):
        return words[value]
    return str(value)


def _title(job: JobView) -> str:
    return f"{job.id}  {job.name}  {job.state}"


def _difference_table(differences: list[Difference]) -> FittedTable[Difference]:
    columns: Columns[Difference] = (
        Column("field", lambda each: each.field),
        Column("A", lambda each: each.a, fit="cut"),
        Column("B", lambda each: each.b, fit="cut"),
    )
    return FittedTable(columns, differences)


def _pair_table(pairs: list[Pair]) -> FittedTable[Pair]:
    columns: Columns[Pair] = (
        Column("metric", lambda each: each.metric, fit="cut", least=16),
        Column("", lambda each: Text(each.which, style="dim")),
        Column("A", lambda each: _figure(each.a)),
        Column("B", lambda each: _figure(each.b)),
        Column("B - A", _change),
    )
    return FittedTable(columns, pairs)


def _figure(value: float | None) -> str:
    return "-" if value is None else figure(value)


def _change(pair: Pair) -> str:
    if pair.a is None or pair.b is None:
        return "-"
    share = f" ({(pair.b - pair.a) / abs(pair.a):+.1%})" if pair.a else ""
    return f"{pair.b - pair.a:+.5g}{share}"
