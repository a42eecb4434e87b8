"""What a job's steps are measured by: the figures of the loop, and the user's metrics."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from services.contract.api.views import MetricPoint, MetricsPart, MetricsView, StepView
from services.contract.messages.telemetry import MetricRecord, StepRecord
from services.contract.system.long_work import in_turns
from services.contract.words.bounds import METRIC_NAMES_KEPT
from services.contract.words.problems import Fault
from services.controller.domain.errors import InvalidRequestError
from services.controller.domain.job.job import Job
from services.controller.ports.coordination import Ports
from services.controller.use_cases.progress import utilisation
from services.controller.use_cases.records import brought_back

_KEYS: Final = frozenset({"step", "fence"})
_FIGURES: Final = frozenset(StepView.model_fields) - _KEYS
_Record = TypeVar("_Record", StepRecord, MetricRecord)
_Any = TypeVar("_Any")


@dataclass(frozen=True)
class StepRange:
    """Which steps are asked for, both ends included, and how many points at most."""

    from_step: int = 0
    to_step: int | None = None
    max_points: int = 1000

    def holds(self, step: int) -> bool:
        """Whether the step is among them."""
        return self.from_step <= step and (self.to_step is None or step <= self.to_step)


@dataclass(frozen=True)
class _Names:
    """The user's metrics of a job: those that are kept, sorted, and how many are not."""

    kept: tuple[str, ...]
    left_out: int


async def get_metrics(ports: Ports, job_id: str, wanted: StepRange) -> MetricsView:
    """A job's steps and validation passes; of a step that was done twice, the newest attempt's.

    Raises:
        NotFoundError: There is no such job.
        RecordsAwayError: They are in storage, and no agent has brought them back.
    """
    job = (await ports.jobs.load(job_id)).job
    async with brought_back(ports, job):
        steps = await ports.telemetry.steps(job_id)
        told = await ports.telemetry.metrics(job_id)
    inside = _inside(newest_of_each_step(steps), wanted)
    names = await _names(told)
    points = await _points(told, frozenset(names.kept))
    return MetricsView(
        items=tuple(_step_views(job, thin_out(inside, wanted.max_points))),
        user_metrics=tuple(thin_out(_inside(points, wanted), wanted.max_points)),
        total=len(inside),
        **_in_common(job, wanted, names),
    )


async def get_some_metrics(
    ports: Ports, job_id: str, wanted: StepRange, asked: frozenset[str]
) -> MetricsPart:
    """The same, of the named metrics alone; those of the loop and the user's are thinned out apart.

    Raises:
        NotFoundError: There is no such job.
        RecordsAwayError: They are in storage, and no agent has brought them back.
        InvalidRequestError: There is no such metric.
    """
    job = (await ports.jobs.load(job_id)).job
    figures = asked & _FIGURES
    async with brought_back(ports, job):
        told = await ports.telemetry.metrics(job_id)
        steps = await ports.telemetry.steps(job_id) if figures else []
    names = await _names(told)
    unknown = sorted(asked - _FIGURES - set(names.kept))
    if unknown:
        known = ", ".join([*sorted(_FIGURES), *names.kept])
        detail = f"name: unknown metric {', '.join(unknown)}; known: {known}"
        raise InvalidRequestError([Fault(pointer="", detail=detail, code="unknown_metric")])
    rows: dict[tuple[int, int], dict[str, int | float | None]] = {}
    total = 0
    if figures:
        inside = _inside(newest_of_each_step(steps), wanted)
        total = len(inside)
        for view in _step_views(job, thin_out(inside, wanted.max_points)):
            rows[view.step, view.fence] = view.model_dump(include=set(figures | _KEYS))
    if of_user := asked - _FIGURES:
        points = _inside(await _points(told, of_user), wanted)
        total = max(total, len(points))
        for point in thin_out(points, wanted.max_points):
            row = rows.setdefault(
                (point.step, point.fence), {"step": point.step, "fence": point.fence}
            )
            row.update(point.values)
    items = tuple(rows[place] for place in sorted(rows))
    return MetricsPart(items=items, total=total, **_in_common(job, wanted, names))


def newest_of_each_step(records: Iterable[_Record]) -> list[_Record]:
    """One record a step, that of the highest fence (the later one of equals), by step."""
    best: dict[int, _Record] = {}
    for record in records:
        known = best.get(record.step)
        if known is None or record.fence >= known.fence:
            best[record.step] = record
    return [best[step] for step in sorted(best)]


def thin_out(records: list[_Any], max_points: int) -> list[_Any]:
    """At most ``max_points`` (at least 2) records, evenly chosen, the first and last kept."""
    if len(records) <= max_points:
        return records
    last = len(records) - 1
    indices = sorted({round(i * last / (max_points - 1)) for i in range(max_points)})
    return [records[index] for index in indices]


async def _names(told: Iterable[MetricRecord]) -> _Names:
    """As each attempt has a bound of its own, so has the job: the first 64 names."""
    seen: dict[str, None] = {}
    left_out = 0
    async for record in in_turns(told):
        seen |= dict.fromkeys(record.values)
        left_out = max(left_out, record.left_out)
    kept = tuple(seen)[:METRIC_NAMES_KEPT]
    return _Names(tuple(sorted(kept)), left_out + len(seen) - len(kept))


async def _points(told: Iterable[MetricRecord], names: frozenset[str]) -> list[MetricPoint]:
    """One a step, with the values that were told at it; a newer attempt takes an older one's place."""
    newest: dict[int, MetricPoint] = {}
    async for record in in_turns(told):
        values = {name: value for name, value in record.values.items() if name in names}
        known = newest.get(record.step)
        if not values or (known is not None and record.fence < known.fence):
            continue
        if known is not None and record.fence == known.fence:
            values = {**known.values, **values}
        newest[record.step] = MetricPoint(step=record.step, fence=record.fence, values=values)
    return [newest[step] for step in sorted(newest)]


def _inside(records: Sequence[_Any], wanted: StepRange) -> list[_Any]:
    return [record for record in records if wanted.holds(record.step)]  # type: ignore[attr-defined]


def _step_views(job: Job, records: Iterable[StepRecord]) -> list[StepView]:
    worlds = {attempt.fence: attempt.world_size for attempt in job.attempts}
    return [
        StepView(**dict(r), mfu=utilisation(job, worlds.get(r.fence), r.step_time_s))
        for r in records
    ]


def _in_common(job: Job, wanted: StepRange, names: _Names) -> Mapping[str, Any]:
    return {
        "evaluations": tuple(e for e in job.evaluations if wanted.holds(e.step)),
        "names": names.kept,
        "names_left_out": names.left_out,
        "throughput_unit": job.throughput_unit,
        "loss_unit": job.loss_unit,
    }
