"""Jobs, ranks, checkpoints and nodes as tables for a terminal."""

from datetime import UTC, datetime
from typing import Final

import humanize
from rich.table import Table
from rich.text import Text

from services.contract.api.plan_views import EstimateView
from services.contract.api.queue import CapacityView, QueueEntry, QueueView
from services.contract.api.views import (
    CheckpointList,
    CheckpointView,
    DiagnosisView,
    EventPage,
    JobPage,
    JobView,
    NodeList,
    Progress,
    RankList,
    RankView,
)
from services.contract.words.states import CheckpointState, FailureClass, JobState, NodeState

_STATE_STYLES: Final = {
    JobState.RUNNING: "cyan",
    JobState.SUCCEEDED: "green",
    JobState.FAILED: "bold red",
    JobState.CANCELLED: "yellow",
    JobState.PAUSED: "yellow",
    CheckpointState.COMMITTED: "green",
    CheckpointState.ABORTED: "red",
    CheckpointState.CORRUPT: "bold red",
    NodeState.READY: "green",
    NodeState.DRAINING: "yellow",
    NodeState.LOST: "bold red",
}


def state_text(state: JobState | CheckpointState | NodeState) -> Text:
    """The state's word in its colour."""
    return Text(state, style=_STATE_STYLES.get(state, "blue"))


def jobs_table(page: JobPage) -> Table:
    """One row a job, in their order."""
    table = _table("job", "name", "state", "step", "loss", "throughput", "eta", "age")
    for job in page.items:
        table.add_row(
            job.id,
            job.name,
            state_text(job.state),
            f"{job.progress.step}/{_all_steps(job)}",
            number(job.progress.loss, "{:.4f}"),
            throughput(job.progress),
            duration(job.progress.eta_s),
            age(job.created_at),
        )
    return table


def _all_steps(job: JobView) -> str:
    """How many steps it makes; a script may not say."""
    return "?" if job.progress.of is None else str(job.progress.of)


def job_details(job: JobView) -> Table:
    """What one wants to know of a job, as a list."""
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold")
    table.add_column()
    rows: list[tuple[str | Text, str | Text | None]] = [
        ("job", job.id),
        ("name", job.name),
        ("state", state_text(job.state)),
        ("why", job.reason),
        ("exit reason", job.exit_reason),
        ("step", f"{job.progress.step} of {_all_steps(job)}"),
        ("loss", loss(job.progress.loss, job.progress)),
        ("validation", _evaluation(job)),
        (per_s(job.progress), number(job.progress.tokens_per_s, "{:,.0f}")),
        ("MFU", None if job.progress.mfu is None else f"{100 * job.progress.mfu:.3g} %"),
        *_user_metrics(job),
        ("eta", duration(job.progress.eta_s)),
        ("attempt", f"{job.attempt} ({job.restarts} restarts)" if job.attempt else None),
        ("ranks", _ranks(job)),
        ("code", job.spec.code),
        ("mesh", _mesh(job)),
        ("layout", job.estimate.reason if job.estimate else None),
        ("memory", estimate_line(job.estimate) if job.estimate else None),
        ("checkpoint", job.latest_checkpoint),
        ("submitted", f"{job.created_at:%Y-%m-%d %H:%M:%S} UTC ({age(job.created_at)} ago)"),
    ]
    for name, value in rows:
        if value is not None and str(value) != "-":
            table.add_row(name, value)
    return table


def ranks_table(ranks: RankList) -> Table:
    """One row a rank; the one for which the others wait is marked."""
    table = _table(
        "rank", "node", "device", "phase", "unit", "step", "step time", "for data", "lag",
        "waited for", "loss", f"{ranks.throughput_unit}/s", "memory", "seen",
    )  # fmt: skip
    for rank in ranks.items:
        table.add_row(
            str(rank.rank),
            rank.node_id,
            rank.device,
            rank.phase,
            rank.unit or "",
            str(rank.step),
            number(rank.step_time_s, "{:.3f} s"),
            number(rank.data_wait_s, "{:.3f} s"),
            number(rank.arrival_lag_s, "{:.4f} s"),
            _waited_for(rank),
            number(rank.loss, "{:.4f}"),
            number(rank.tokens_per_s, "{:,.0f}"),
            humanize.naturalsize(rank.memory_bytes, binary=True),
            f"{age(rank.last_seen_at)} ago" if rank.last_seen_at else "never",
        )
    return table


def diagnosis_table(diagnosis: DiagnosisView) -> Table:
    """The verdict, what speaks for it, and what to do."""
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold")
    table.add_column()
    style = "green" if diagnosis.verdict is FailureClass.NONE else "bold red"
    kind = "running" if diagnosis.live else "ended"
    table.add_row("attempt", f"{diagnosis.attempt} ({kind}), {age(diagnosis.at)} ago")
    table.add_row("verdict", Text(diagnosis.verdict, style=style))
    if diagnosis.rank is not None:
        table.add_row("first rank", f"{diagnosis.rank} on {diagnosis.node_id}")
    table.add_row("what", diagnosis.summary)
    for number, line in enumerate(diagnosis.evidence):
        table.add_row("evidence" if number == 0 else "", Text(line))
    table.add_row("advice", diagnosis.advice)
    return table


def checkpoints_table(checkpoints: CheckpointList) -> Table:
    """One row a checkpoint, newest first."""
    table = _table(
        "checkpoint",
        "state",
        "step",
        "loss",
        "validation",
        "size",
        "world",
        "age",
        "kept",
        "verified",
    )
    for checkpoint in checkpoints.items:
        table.add_row(
            checkpoint.id,
            state_text(checkpoint.state),
            str(checkpoint.step),
            number(checkpoint.loss, "{:.4f}"),
            _judged(checkpoint),
            humanize.naturalsize(checkpoint.bytes, binary=True),
            str(checkpoint.world_size),
            age(checkpoint.created_at),
            _kept(checkpoint),
            f"{age(checkpoint.verified_at)} ago" if checkpoint.verified_at else "",
        )
    return table


def checkpoint_details(checkpoint: CheckpointView) -> Table:
    """What one wants to know of a checkpoint, as a list."""
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold")
    table.add_column(overflow="fold")  # a path that is cut is of no use
    rows: list[tuple[str, str | Text | None]] = [
        ("checkpoint", checkpoint.id),
        ("state", state_text(checkpoint.state)),
        ("why", checkpoint.reason),
        ("step", str(checkpoint.step)),
        ("validation", _judged(checkpoint) or None),
        ("size", f"{checkpoint.bytes:,} bytes in {len(checkpoint.shards)} shards"),
        ("kept", _kept(checkpoint) or None),
        ("export", _export(checkpoint)),
        (
            "verified",
            f"{checkpoint.verified_at:%Y-%m-%d %H:%M:%S} UTC" if checkpoint.verified_at else None,
        ),
    ]
    for name, value in rows:
        if value is not None:
            table.add_row(name, value)
    return table


def _judged(checkpoint: CheckpointView) -> str:
    """Figures of its evaluation; the best one says so."""
    told = (f"{name} {number(value, '{:.4f}')}" for name, value in checkpoint.evaluation.items())
    return ", ".join([*told, *(["best"] if checkpoint.best else [])])


def nodes_table(nodes: NodeList) -> Table:
    """One row a node."""
    table = _table("node", "state", "CPU slots", "GPUs", "memory", "jobs")
    for node in nodes.items:
        table.add_row(
            node.id,
            state_text(node.state),
            f"{node.cpu_slots_used}/{node.inventory.cpu_slots}",
            f"{node.accelerators_used}/{len(node.inventory.accelerators)}",
            humanize.naturalsize(node.inventory.memory_bytes, binary=True),
            ", ".join(node.jobs),
        )
    return table


def queue_table(queue: QueueView) -> Table:
    """One row a waiting job, the next one first."""
    table = _table("#", "job", "name", "priority", "ranks", "waits", "starts in", "why")
    for entry in queue.items:
        soon = entry.expected_start_at
        wait_s = None if soon is None else (soon - datetime.now(UTC)).total_seconds()
        table.add_row(
            str(entry.position),
            entry.job_id,
            entry.name,
            str(entry.priority),
            f"{_needed(entry)} {entry.device}",
            age(entry.waiting_since),
            duration(None if wait_s is None else max(wait_s, 0)),
            entry.reason,
        )
    return table


def capacity_table(capacity: CapacityView) -> Table:
    """One row a node, and the sum."""
    table = _table("node", "state", "free CPU slots", "free GPUs")
    for node in capacity.nodes:
        table.add_row(
            node.node_id,
            state_text(node.state),
            f"{node.cpu_slots_free} of {node.cpu_slots}",
            f"{node.accelerators_free} of {node.accelerators}",
        )
    table.add_row(
        "all",
        "",
        f"{capacity.cpu_slots_free} of {capacity.cpu_slots}",
        f"{capacity.accelerators_free} of {capacity.accelerators}",
        style="bold",
    )
    return table


def events_table(events: EventPage) -> Table:
    """One row an event, oldest first."""
    table = _table("time (UTC)", "event", "what happened")
    for event in events.items:
        table.add_row(f"{event.at:%H:%M:%S}", event.kind, event.message)
    return table


def number(value: float | None, pattern: str) -> str:
    """The value in its pattern, or a dash where there is none."""
    return "-" if value is None else pattern.format(value)


def loss(value: float | None, progress: Progress) -> str:
    """A loss of a job, with its unit where that is known."""
    return number(value, f"{{:.5f}} {progress.loss_unit}".rstrip())


def throughput(progress: Progress) -> str:
    """What a job's data counts in a second, or a dash."""
    return number(progress.tokens_per_s, f"{{:,.0f}} {per_s(progress)}")


def per_s(progress: Progress) -> str:
    """The unit of a job's throughput."""
    return f"{progress.throughput_unit}/s"


def figure(value: float | None) -> str:
    """A number of any size in few digits; a metric without a value was no finite number."""
    return "not finite" if value is None else f"{value:.5g}"


def duration(seconds: float | None) -> str:
    """Seconds as ``4m 03s``, or a dash."""
    if seconds is None:
        return "-"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h {minutes:02d}m" if hours else f"{minutes}m {rest:02d}s"


def age(moment: datetime) -> str:
    """How long ago a moment was."""
    return humanize.naturaldelta(datetime.now(UTC) - moment)


def estimate_line(estimate: EstimateView) -> str:
    """What a plan estimated of memory, and what was measured."""
    estimated = f"{size(estimate.peak.total)} in {estimate.where}"
    if estimate.unit:
        estimated += f" of {estimate.unit}"
    if estimate.measured_peak_bytes is None:
        return f"{estimated} estimated; nothing measured yet"
    kinds = {"resident_growth": "of the process's memory", "allocated": "allocated"}
    measured_as = kinds.get(estimate.measured_as or "", "")
    words = f"{estimated} estimated; {size(estimate.measured_peak_bytes)} measured ({measured_as})"
    return words if estimate.ratio is None else f"{words}: {estimate.ratio:.2f} times as much"


def size(nbytes: int) -> str:
    """Bytes for people."""
    return humanize.naturalsize(nbytes, binary=True)


def _table(*columns: str) -> Table:
    table = Table(box=None, header_style="bold dim", pad_edge=False)
    for column in columns:
        table.add_column(column, no_wrap=column in {"job", "checkpoint", "state"})
    return table


def _waited_for(rank: RankView) -> Text:
    share = number(rank.straggler_score, "{:.0%}")
    return Text(f"{share} straggler", style="bold red") if rank.is_straggler else Text(share)


def _kept(checkpoint: CheckpointView) -> str:
    held = [f"for {job}" for job in checkpoint.held_by]
    return ", ".join((["pinned"] if checkpoint.pinned else []) + held)


def _export(checkpoint: CheckpointView) -> str | None:
    export = checkpoint.export
    if export is None:
        return None
    if export.state != "DONE":
        return export.state + (f": {export.reason}" if export.reason else "")
    files = ", ".join(export.files)
    return f"{export.bytes:,} bytes in {export.folder} of the storage: {files}"


def _evaluation(job: JobView) -> Text | None:
    passed = job.evaluation
    if passed is None:
        return None
    unit = f" {job.progress.loss_unit}".rstrip()
    told = "not finite" if passed.loss is None else f"{passed.loss:.4f}{unit}"
    beside = [f"{name} {value:.3f}" for name, value in passed.baselines.items()]
    beside += [f"{name} {figure(value)}" for name, value in passed.metrics.items()]
    return Text(told + (f" ({', '.join(beside)})" if beside else ""))


def _user_metrics(job: JobView) -> list[tuple[Text, str]]:
    # The names are the user's: as a plain string they could hold markup.
    passed = {} if job.evaluation is None else job.evaluation.metrics
    shown = {f"validation/{name}" for name in passed}
    values = job.progress.metrics.items()
    return [(Text(name), figure(value)) for name, value in values if name not in shown]


def _ranks(job: JobView) -> str:
    bounds = "" if job.world is None else f", elastic from {job.world.min} to {job.world.max}"
    return f"{job.world_size}{bounds}"


def _needed(entry: QueueEntry) -> str:
    return str(entry.ranks) if entry.world is None else f"{entry.ranks} to {entry.world.max}"


def _mesh(job: JobView) -> str | None:
    if job.plan is None:
        return None
    mesh = job.plan.sharding.mesh
    return (
        f"dp_replicate {mesh.dp_replicate} x dp_shard {mesh.dp_shard} x tp {mesh.tp} "
        f"on {job.plan.device_type}"
    )
