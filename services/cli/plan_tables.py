"""Plans for a terminal: mesh, units, a bar of memory for each kind of rank, traffic, alternatives."""

from collections.abc import Iterable, Iterator
from itertools import groupby
from typing import Final

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from fsdp_core.plan.model import MeshPlan
from services.cli.tables import age, number, size
from services.contract.api.plan_views import (
    MemoryView,
    PlanList,
    PlanSummary,
    PlanUnit,
    PlanView,
    RankMemory,
)
from services.contract.words.states import PlanState

_BAR_CELLS: Final = 48
_KINDS: Final = {
    "parameters": "blue",
    "buffers": "bright_black",
    "gradients": "magenta",
    "optimizer": "cyan",
    "unsharded": "bright_blue",
    "whole_gradients": "bright_magenta",
    "activations": "yellow",
    "communication": "green",
    "workspace": "bright_yellow",
}
_RANKS_NAMED: Final = 8
_SHARED: Final = {"copy": "copied from shared memory", "storage": "one copy a host"}


def plan_parts(plan: PlanView) -> Iterator[RenderableType]:
    """What one wants to know of a plan, part by part."""
    yield _summary(plan)
    if plan.units:
        yield Text("\nunits", style="bold")
        yield _units_table(plan.units)
    if plan.memory:
        yield Text("\nmemory of a rank at its peak", style="bold")
        for kind in plan.memory:
            yield from _memory_bar(kind, plan.memory_limit_bytes)
    if plan.traffic:
        yield Text("\ntraffic of a rank in a step", style="bold")
        yield _traffic_table(plan)
    if plan.alternatives:
        yield Text("\nwhat else was considered", style="bold")
        yield _alternatives_table(plan)


def plans_table(page: PlanList) -> Table:
    """One row a plan, the newest first."""
    table = _table("plan", "verdict", "name", "ranks", "mesh", "peak", "step time", "age", "why")
    table.columns[0].no_wrap = True
    for plan in page.items:
        limit = "" if plan.memory_limit_bytes is None else f" of {size(plan.memory_limit_bytes)}"
        table.add_row(
            plan.id,
            _verdict(plan),
            plan.name,
            str(plan.ranks),
            "-" if plan.mesh is None else _axes(plan.mesh),
            "-" if plan.peak_bytes is None else size(plan.peak_bytes) + limit,
            number(plan.step_time_s, "{:.4g} s"),
            age(plan.created_at),
            plan.reason,
        )
    return table


def _verdict(plan: PlanView | PlanSummary) -> Text:
    styles = {None: "blue", True: "green", False: "bold red"}
    words = {None: plan.state.value, True: "feasible", False: "infeasible"}
    failed = plan.state is PlanState.FAILED
    return Text(words[plan.feasible], style="bold red" if failed else styles[plan.feasible])


def _axes(mesh: MeshPlan) -> str:
    return f"dp_replicate {mesh.dp_replicate} x dp_shard {mesh.dp_shard} x tp {mesh.tp}"


def _summary(plan: PlanView) -> Table:
    table = _grid()
    table.add_row("plan", f"{plan.id}, until {plan.expires_at:%Y-%m-%d %H:%M} UTC")
    table.add_row("verdict", _verdict(plan))
    table.add_row("why", plan.reason)
    if plan.failure is not None:
        table.add_row("advice", plan.failure.advice)
    for line in plan.advice:
        table.add_row("advice", line)
    if plan.mesh is not None:
        table.add_row("mesh", f"{_axes(plan.mesh)} on {plan.device_type}")
        table.add_row("micro batch", f"{plan.micro_batch}, {plan.accumulation} times a step")
    if plan.ranks:
        by_node = groupby(plan.ranks, key=lambda seat: seat.node_id)
        seats = (f"{node}: ranks {_listed(s.rank for s in some)}" for node, some in by_node)
        table.add_row("room now", "; ".join(seats))
    elif plan.placement:
        table.add_row("room now", f"none: {plan.placement}")
    if plan.step_time is not None:
        time = plan.step_time
        table.add_row(
            "step time",
            f"{time.total_s:.4g} s ({time.compute_s:.4g} s of computation, "
            f"{time.optimizer_s:.4g} s of the optimizer), {time.tokens_per_s:,.0f} tokens/s",
        )
    elif plan.mesh is not None:
        table.add_row("step time", "not known: no node has measured its devices yet")
    cached = (
        "known from before" if plan.probe.cached else f"{number(plan.probe.took_s, '{:.1f}')} s"
    )
    table.add_row("profiled on", f"{plan.probe.node_id} ({cached})")
    return table


def _units_table(units: Iterable[PlanUnit]) -> Table:
    """One row for units in a row that are alike."""
    table = _table("modules", "units", "parameters", "kept by a rank", "after forward", "options")
    for alike, some in groupby(units, key=_figures):
        row = list(some)
        first, last = ", ".join(row[0].modules) or "(root)", ", ".join(row[-1].modules)
        table.add_row(
            first if len(row) == 1 else f"{first} … {last}",
            str(len(row)),
            f"{row[0].parameters:,}",
            size(row[0].rank_bytes),
            _after_forward(row[0]),
            ", ".join(alike[-1]),
        )
    return table


def _figures(unit: PlanUnit) -> tuple[int, int, bool | int, tuple[str, ...]]:
    return unit.parameters, unit.rank_bytes, unit.reshard_after_forward, tuple(_options(unit))


def _after_forward(unit: PlanUnit) -> str:
    kept = unit.reshard_after_forward
    if isinstance(kept, bool):
        return "slices" if kept else "kept whole"
    return f"slices over {kept} ranks"


def _options(unit: PlanUnit) -> Iterator[str]:
    if unit.param_dtype:
        yield unit.param_dtype
    if unit.reduce_dtype:
        yield f"reduced in {unit.reduce_dtype}"
    if unit.prefetch is not None:
        yield f"prefetch {unit.prefetch}"
    for name in ("recompute", "offload", "compile"):
        if getattr(unit, name):
            yield name
    if unit.shared_memory:
        yield _SHARED[unit.shared_memory]


def _memory_bar(kind: RankMemory, limit: int | None) -> Iterator[RenderableType]:
    whole = max(limit or 0, kind.peak.total, 1)
    bar = Text()
    for name, style in _KINDS.items():
        part = getattr(kind.peak, name)
        # What counts at the peak is seen, however much room there is.
        least = int(part * _BAR_CELLS > kind.peak.total)
        bar.append("█" * max(round(_BAR_CELLS * part / whole), least), style=style)
    bar.append("░" * max(_BAR_CELLS - len(bar), 0), style="dim")
    of = f" of {size(limit)}" if limit else ""
    where = kind.where + (f" of {kind.unit}" if kind.unit else "")
    bar.append(f" {size(kind.peak.total)}{of}, in {where}")
    yield Text(f"ranks {_listed(kind.ranks)}")
    yield bar
    yield _legend(kind.peak)
    if kind.host_bytes:
        yield Text(f"and {size(kind.host_bytes)} of the host")


def _legend(memory: MemoryView) -> Text:
    text = Text()
    for name, style in _KINDS.items():
        if getattr(memory, name):
            text.append("■ ", style=style)
            text.append(f"{name.replace('_', ' ')} {size(getattr(memory, name))}  ")
    return text


def _traffic_table(plan: PlanView) -> Table:
    table = _table("axis", "ranks", "sent", "collectives", "seconds")
    for axis in plan.traffic:
        table.add_row(
            axis.axis,
            str(axis.ranks),
            size(axis.bytes_sent),
            str(axis.collectives),
            number(axis.seconds, "{:.4g}"),
        )
    return table


def _alternatives_table(plan: PlanView) -> Table:
    table = _table("layout", "micro batch", "peak", "step time", "why not")
    for other in plan.alternatives:
        table.add_row(
            other.title,
            str(other.micro_batch),
            "-" if other.peak_bytes is None else size(other.peak_bytes),
            number(other.step_time_s, "{:.4g} s"),
            other.lost_because,
        )
    return table


def _listed(ranks: Iterable[int]) -> str:
    every = list(ranks)
    if len(every) <= _RANKS_NAMED:
        return ", ".join(map(str, every))
    return f"{every[0]} … {every[-1]} ({len(every)} of them)"


def _grid() -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold")
    table.add_column()
    return table


def _table(*columns: str) -> Table:
    table = Table(box=None, header_style="bold dim", pad_edge=False)
    for column in columns:
        table.add_column(column)
    return table
