"""Jobs, their ranks, attempts and events as tables for a terminal."""

from collections.abc import Iterator
from typing import Final

from rich.text import Text

from services.cli.figures import (
    age,
    duration,
    figure,
    loss,
    number,
    per_s,
    plural,
    short_age,
    size,
    state_text,
    steps_of,
    throughput,
)
from services.cli.layout import Cell, Column, Columns, Details, Exact, FittedTable
from services.contract.api.plan_views import EstimateView
from services.contract.api.views import (
    AttemptList,
    AttemptView,
    DiagnosisView,
    EventPage,
    EventView,
    JobPage,
    JobView,
    RankList,
    RankView,
)
from services.contract.words.states import FailureClass

_MEASURED: Final = {"resident_growth": "of the process's memory", "allocated": "allocated"}
_TELEMETRY_AWAY: Final = (
    "away: its Redis does not answer, or the agents write to another one "
    "(MESHLOOM_TELEMETRY_REDIS_URL); the step is that of the record"
)


def jobs_table(page: JobPage) -> FittedTable[JobView]:
    """One row a job, in their order."""
    columns: Columns[JobView] = (
        Column("job", lambda job: job.id),
        Column("name", lambda job: job.name, fit="cut"),
        Column("state", lambda job: state_text(job.state)),
        Column("step", steps_of, drop=1),
        Column("loss", lambda job: number(job.progress.loss, "{:.4f}"), drop=3),
        Column("throughput", lambda job: throughput(job.progress), drop=5),
        Column("eta", lambda job: duration(job.progress.eta_s), drop=4),
        Column("age", lambda job: short_age(job.created_at), drop=2),
        Column("priority", lambda job: str(job.priority or ""), drop=6),
        Column("owner", lambda job: job.owner, drop=7),
    )
    return FittedTable(columns, page.items)


def _replicas(job: JobView) -> str | None:
    """How many take part, of a job that continues without lost ones."""
    if job.replicas is None:
        return None
    of = job.replicas
    return f"{of.present} of {of.count} present ({of.lost} lost so far, {of.returned} returned)"


def job_details(job: JobView) -> Details:
    """What one wants to know of a job, as a list."""
    step, of = steps_of(job).split("/")
    tries = f"{job.attempt} ({plural(job.restarts, 'restart')})" if job.attempt else None
    rows: list[tuple[Cell, Cell | None]] = [
        ("job", Exact(job.id)),
        ("name", Exact(job.name)),
        ("state", state_text(job.state)),
        ("why", job.reason),
        ("exit reason", job.exit_reason),
        ("telemetry", _TELEMETRY_AWAY if job.telemetry_away else None),
        ("step", f"{step} of {of}"),
        ("loss", loss(job.progress.loss, job.progress)),
        ("validation", _evaluation(job)),
        (per_s(job.progress), number(job.progress.tokens_per_s, "{:,.0f}")),
        ("MFU", None if job.progress.mfu is None else f"{100 * job.progress.mfu:.3g} %"),
        *_user_metrics(job),
        ("eta", duration(job.progress.eta_s)),
        ("attempt", tries),
        ("ranks", _ranks(job)),
        ("code", Exact(job.spec.code) if job.spec.code else None),
        ("mesh", _mesh(job)),
        ("replicas", _replicas(job)),
        ("layout", job.estimate.reason if job.estimate else None),
        ("memory", estimate_line(job.estimate) if job.estimate else None),
        ("checkpoint", Exact(job.latest_checkpoint) if job.latest_checkpoint else None),
        ("submitted", f"{job.created_at:%Y-%m-%d %H:%M:%S} UTC ({age(job.created_at)} ago)"),
    ]
    return Details((name, value) for name, value in rows if value is not None and str(value) != "-")


def ranks_table(ranks: RankList) -> FittedTable[RankView]:
    """One row a rank; the one for which the others wait is marked."""
    per_second = f"{ranks.throughput_unit}/s"
    columns: Columns[RankView] = (
        Column("rank", lambda rank: str(rank.rank)),
        Column("node", lambda rank: rank.node_id, drop=5),
        Column("device", lambda rank: rank.device, drop=11, fit="cut", least=6),
        Column("phase", lambda rank: rank.phase, fit="cut"),
        Column("unit", lambda rank: rank.unit or "", drop=7, fit="cut"),
        Column("step", lambda rank: str(rank.step)),
        Column("step time", lambda rank: number(rank.step_time_s, "{:.3f} s"), drop=2),
        Column("for data", lambda rank: number(rank.data_wait_s, "{:.3f} s"), drop=9),
        Column("lag", lambda rank: number(rank.arrival_lag_s, "{:.4f} s"), drop=10),
        Column("waited for", _waited_for, drop=1),
        Column("loss", lambda rank: number(rank.loss, "{:.4f}"), drop=8),
        Column(per_second, lambda rank: number(rank.tokens_per_s, "{:,.0f}"), drop=6),
        Column("memory", lambda rank: size(rank.memory_bytes), drop=3),
        Column("seen", _seen, drop=4),
    )
    return FittedTable(columns, ranks.items)


def attempts_table(attempts: AttemptList) -> FittedTable[AttemptView]:
    """One row an attempt, oldest first."""
    columns: Columns[AttemptView] = (
        Column("no.", lambda each: str(each.fence)),
        Column("ranks", lambda each: str(each.world_size)),
        Column("mesh", _axes_of_attempt, drop=4),
        Column("nodes", lambda each: ", ".join(each.node_ids), drop=5),
        Column("steps", _steps, drop=1),
        Column("lost", lambda each: number(each.lost_steps, "{}"), drop=3),
        Column("to 1st step", lambda each: duration(each.time_to_first_step_s), drop=6),
        Column("end", lambda each: each.exit_reason or "under way"),
    )
    return FittedTable(columns, attempts.items)


def events_table(events: EventPage) -> FittedTable[EventView]:
    """One row an event, oldest first."""
    columns: Columns[EventView] = (
        Column("time (UTC)", lambda event: f"{event.at:%H:%M:%S}"),
        Column("event", lambda event: event.kind),
        Column("by", lambda event: event.actor, drop=1, fit="cut"),
        Column("what happened", lambda event: event.message, fit="note"),
    )
    return FittedTable(columns, events.items)


def diagnosis_details(diagnosis: DiagnosisView, place: str | None = None) -> Details:
    """The verdict, what speaks for it, and what to do; ``place``: file and line of the user's code."""
    style = "green" if diagnosis.verdict is FailureClass.NONE else "bold red"
    kind = "running" if diagnosis.live else "ended"
    rows: list[tuple[Cell, Cell | None]] = [
        ("attempt", f"{diagnosis.attempt} ({kind}), {age(diagnosis.at)} ago"),
        ("verdict", Text(diagnosis.verdict, style=style)),
    ]
    if diagnosis.rank is not None:
        rows.append(("first rank", f"{diagnosis.rank} on {diagnosis.node_id}"))
    rows.append(("what", diagnosis.summary))
    if place is not None:
        rows.append(("where", Exact(place)))
    for index, line in enumerate(diagnosis.evidence):
        rows.append(("evidence" if index == 0 else "", line))
    return Details([*rows, ("advice", diagnosis.advice)])


def estimate_line(estimate: EstimateView) -> str:
    """What a plan estimated of memory, and what was measured."""
    estimated = f"{size(estimate.peak.total)} in {estimate.where}"
    if estimate.unit:
        estimated += f" of {estimate.unit}"
    if estimate.measured_peak_bytes is None:
        return f"{estimated} estimated; nothing measured yet"
    measured_as = _MEASURED.get(estimate.measured_as or "", "")
    words = f"{estimated} estimated; {size(estimate.measured_peak_bytes)} measured ({measured_as})"
    if estimate.ratio is not None:
        words += f": {estimate.ratio:.2f} times as much"
    if estimate.measured_fragments_bytes is not None:
        words += f"; and {size(estimate.measured_fragments_bytes)} of fragments"
    return words


def _waited_for(rank: RankView) -> Text:
    share = number(rank.straggler_score, "{:.0%}")
    return Text(f"{share} straggler", style="bold red") if rank.is_straggler else Text(share)


def _seen(rank: RankView) -> str:
    return f"{short_age(rank.last_seen_at)} ago" if rank.last_seen_at else "never"


def _axes_of_attempt(attempt: AttemptView) -> str:
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


def _evaluation(job: JobView) -> str | None:
    passed = job.evaluation
    if passed is None:
        return None
    unit = f" {job.progress.loss_unit}".rstrip()
    told = "not finite" if passed.loss is None else f"{passed.loss:.4f}{unit}"
    beside = [f"{name} {value:.3f}" for name, value in passed.baselines.items()]
    beside += [f"{name} {figure(value)}" for name, value in passed.metrics.items()]
    return told + (f" ({', '.join(beside)})" if beside else "")


def _user_metrics(job: JobView) -> Iterator[tuple[str, str]]:
    passed = {} if job.evaluation is None else job.evaluation.metrics
    shown = {f"validation/{name}" for name in passed}
    values = job.progress.metrics.items()
    yield from ((name, figure(value)) for name, value in values if name not in shown)


def _ranks(job: JobView) -> str:
    bounds = "" if job.world is None else f", elastic from {job.world.min} to {job.world.max}"
    return f"{job.world_size}{bounds}"


def _mesh(job: JobView) -> str | None:
    if job.plan is None:
        return None
    mesh = job.plan.sharding.mesh
    return (
        f"dp_replicate {mesh.dp_replicate} x dp_shard {mesh.dp_shard} x tp {mesh.tp} "
        f"on {job.plan.device_type}"
    )
