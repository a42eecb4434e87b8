"""Looking at ranks, metrics and nodes."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from services.contract.messages.telemetry import StepRecord
from services.contract.problems import Fault
from services.contract.views import (
    DiagnosisView,
    MetricsPart,
    MetricsView,
    NodeList,
    NodeView,
    RankList,
    RankView,
)
from services.controller.domain.errors import InvalidRequestError, NotFoundError
from services.controller.domain.placement import stand
from services.controller.ports.office import Ports
from services.controller.use_cases.present import diagnosis_view, node_view, rank_views

_KEYS: Final = frozenset({"step", "fence"})
METRICS: Final = frozenset(StepRecord.model_fields) - _KEYS
"""What a step is measured by."""


@dataclass(frozen=True)
class StepRange:
    """Which steps are asked for, both ends included, and how many points at most."""

    from_step: int = 0
    to_step: int | None = None
    max_points: int = 1000

    def holds(self, step: int) -> bool:
        """Whether the step is among them."""
        return self.from_step <= step and (self.to_step is None or step <= self.to_step)


async def list_ranks(ports: Ports, job_id: str) -> RankList:
    """The ranks of a job's newest attempt.

    Raises:
        NotFoundError: There is no such job.
    """
    stored = await ports.jobs.load(job_id)
    samples = (await ports.telemetry.samples([job_id]))[job_id]
    return RankList(attempt=stored.job.fence, items=rank_views(stored.job, samples))


async def get_rank(ports: Ports, job_id: str, rank: int) -> RankView:
    """One of them.

    Raises:
        NotFoundError: There is no such job or rank.
    """
    ranks = await list_ranks(ports, job_id)
    for view in ranks.items:
        if view.rank == rank:
            return view
    raise NotFoundError(f"attempt {ranks.attempt} of {job_id} has no rank {rank}")


async def get_diagnosis(ports: Ports, job_id: str) -> DiagnosisView:
    """What ails the newest attempt that was looked into or failed, or what ended it.

    Raises:
        NotFoundError: There is no such job, or no attempt of it failed or was looked into.
    """
    job = (await ports.jobs.load(job_id)).job
    for attempt in reversed(job.attempts):
        if attempt.diagnosis is not None:
            stacks = await ports.telemetry.stacks(job_id)
            return diagnosis_view(job_id, attempt.fence, attempt.diagnosis, stacks)
    raise NotFoundError(
        f"no attempt of {job_id} has failed or was looked into; "
        f"POST /v1/jobs/{job_id}/diagnose looks into running ranks"
    )


async def get_metrics(ports: Ports, job_id: str, wanted: StepRange) -> MetricsView:
    """A job's steps and validation passes; of a step that was done twice, the newest attempt's.

    Raises:
        NotFoundError: There is no such job.
    """
    stored = await ports.jobs.load(job_id)
    records = newest_of_each_step(await ports.telemetry.steps(job_id))
    inside = [record for record in records if wanted.holds(record.step)]
    return MetricsView(
        items=tuple(thin_out(inside, wanted.max_points)),
        evaluations=tuple(e for e in stored.job.evaluations if wanted.holds(e.step)),
        total=len(inside),
    )


async def get_some_metrics(
    ports: Ports, job_id: str, wanted: StepRange, names: frozenset[str]
) -> MetricsPart:
    """The same, of the named metrics alone.

    Raises:
        NotFoundError: There is no such job.
        InvalidRequestError: There is no such metric.
    """
    unknown = sorted(names - METRICS)
    if unknown:
        detail = f"name: no metric is called {', '.join(unknown)}; {', '.join(sorted(METRICS))} are"
        raise InvalidRequestError([Fault(pointer="", detail=detail, code="unknown_metric")])
    whole = await get_metrics(ports, job_id, wanted)
    items = tuple(record.model_dump(include=set(names | _KEYS)) for record in whole.items)
    return MetricsPart(items=items, evaluations=whole.evaluations, total=whole.total)


async def list_nodes(ports: Ports) -> NodeList:
    """All nodes that ever joined, and what runs there."""
    nodes = await ports.nodes.nodes()
    leases = await ports.nodes.leases([node.id for node in nodes])
    jobs = [stored.job for stored in await ports.jobs.active()]
    standings = stand(nodes, jobs, leases)
    return NodeList(items=tuple(node_view(s, leases.get(s.node.id)) for s in standings))


async def get_node(ports: Ports, node_id: str) -> NodeView:
    """One node.

    Raises:
        NotFoundError: There is none.
    """
    for view in (await list_nodes(ports)).items:
        if view.id == node_id:
            return view
    raise NotFoundError(f"there is no node {node_id}")


def newest_of_each_step(records: Iterable[StepRecord]) -> list[StepRecord]:
    """One record a step, that of the highest fence (the later one of equals), by step."""
    best: dict[int, StepRecord] = {}
    for record in records:
        known = best.get(record.step)
        if known is None or record.fence >= known.fence:
            best[record.step] = record
    return [best[step] for step in sorted(best)]


def thin_out(records: list[StepRecord], max_points: int) -> list[StepRecord]:
    """At most ``max_points`` (at least 2) records, evenly chosen, the first and last kept."""
    if len(records) <= max_points:
        return records
    last = len(records) - 1
    indices = sorted({round(i * last / (max_points - 1)) for i in range(max_points)})
    return [records[index] for index in indices]
