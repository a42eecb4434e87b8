"""Plans for a terminal: mesh, units, a bar of memory for each kind of rank, traffic, alternatives."""

from collections.abc import Iterable, Iterator
from itertools import groupby
from typing import Final

from rich.console import RenderableType
from rich.text import Text

from fsdp_core.plan.model import MeshPlan
from services.cli.figures import number, short_age, size
from services.cli.layout import Cell, Column, Columns, Details, Exact, FittedTable, Flow
from services.contract.api.plan_views import (
    AxisTraffic,
    MemoryView,
    PlanAlternative,
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
        if plan.memory_reserve_bytes is not None:
            left = size(plan.memory_reserve_bytes)
            yield Text(
                f"{left} of the GPU are left to the allocator's fragments and the process itself"
            )
    if plan.traffic:
        yield Text("\ntraffic of a rank in a step", style="bold")
        yield _traffic_table(plan)
    if plan.alternatives:
        yield Text("\nwhat else was considered", style="bold")
        yield _alternatives_table(plan)


def plans_table(page: PlanList) -> FittedTable[PlanSummary]:
    """One row a plan, the newest first."""
    columns: Columns[PlanSummary] = (
        Column("plan", lambda plan: plan.id),
        Column("verdict", _verdict),
        Column("name", lambda plan: plan.name, fit="cut"),
        Column("ranks", lambda plan: str(plan.ranks), drop=3),
        Column("mesh", lambda plan: "-" if plan.mesh is None else _axes(plan.mesh), drop=5),
        Column("peak", _peak, drop=4),
        Column("step time", lambda plan: number(plan.step_time_s, "{:.4g} s"), drop=2),
        Column("age", lambda plan: short_age(plan.created_at), drop=1),
        Column("why", lambda plan: plan.reason, fit="note"),
    )
    return FittedTable(columns, page.items)


def _peak(plan: PlanSummary) -> str:
    limit = "" if plan.memory_limit_bytes is None else f" of {size(plan.memory_limit_bytes)}"
    return "-" if plan.peak_bytes is None else size(plan.peak_bytes) + limit


def _verdict(plan: PlanView | PlanSummary) -> Text:
    styles = {None: "blue", True: "green", False: "bold red"}
    words = {None: plan.state.value, True: "feasible", False: "infeasible"}
    failed = plan.state is PlanState.FAILED
    return Text(words[plan.feasible], style="bold red" if failed else styles[plan.feasible])


def _axes(mesh: MeshPlan) -> str:
    return f"dp_replicate {mesh.dp_replicate} x dp_shard {mesh.dp_shard} x tp {mesh.tp}"


def _summary(plan: PlanView) -> Details:
    rows: list[tuple[Cell, Cell | None]] = [
        ("plan", Exact(plan.id)),
        ("until", f"{plan.expires_at:%Y-%m-%d %H:%M} UTC"),
        ("verdict", _verdict(plan)),
        ("why", plan.reason),
        ("advice", None if plan.failure is None else plan.failure.advice),
        *(("advice", line) for line in plan.advice),
        *_layout_rows(plan),
        ("profiled on", f"{plan.probe.node_id} ({_took(plan)})"),
    ]
    return Details(rows)


def _layout_rows(plan: PlanView) -> Iterator[tuple[Cell, Cell | None]]:
    if plan.mesh is not None:
        yield "mesh", f"{_axes(plan.mesh)} on {plan.device_type}"
        times = "once a step" if plan.accumulation == 1 else f"{plan.accumulation} times a step"
        yield "micro-batch", f"{plan.micro_batch}, {times}"
    if plan.ranks:
        by_node = groupby(plan.ranks, key=lambda seat: seat.node_id)
        seats = (f"{node}: ranks {_listed(s.rank for s in some)}" for node, some in by_node)
        yield "room now", "; ".join(seats)
    elif plan.placement:
        yield "room now", f"none: {plan.placement}"
    if plan.step_time is not None:
        time = plan.step_time
        yield (
            "step time",
            (
                f"{time.total_s:.4g} s ({time.compute_s:.4g} s of computation, "
                f"{time.optimizer_s:.4g} s of the optimizer), {time.tokens_per_s:,.0f} {time.throughput_unit}/s"
            ),
        )
    elif plan.mesh is not None:
        yield "step time", "not known: no node has measured its devices yet"


def _took(plan: PlanView) -> str:
    return "known from before" if plan.probe.cached else f"{number(plan.probe.took_s, '{:.1f}')} s"


def _units_table(units: Iterable[PlanUnit]) -> FittedTable[list[PlanUnit]]:
    """One row for units in a row that are alike."""
    columns: Columns[list[PlanUnit]] = (
        Column("modules", _modules),
        Column("units", lambda row: str(len(row)), drop=2),
        Column("parameters", lambda row: f"{row[0].parameters:,}", drop=1),
        Column("kept by a rank", lambda row: size(row[0].rank_bytes), drop=3),
        Column("after forward", lambda row: _after_forward(row[0]), drop=4),
        Column("options", lambda row: ", ".join(_options(row[0])), drop=5),
    )
    return FittedTable(columns, [list(some) for _, some in groupby(units, key=_figures)])


def _modules(row: list[PlanUnit]) -> str:
    first, last = ", ".join(row[0].modules) or "(root)", ", ".join(row[-1].modules)
    return first if len(row) == 1 else f"{first} … {last}"


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
    yield Text(f"ranks {_listed(kind.ranks)}: {size(kind.peak.total)}{of}, in {where}")
    yield bar
    yield _legend(kind.peak)
    if kind.host_bytes:
        yield Text(f"and {size(kind.host_bytes)} of the host")


def _legend(memory: MemoryView) -> Flow:
    parts = (
        Text.assemble(("■ ", style), f"{name.replace('_', ' ')} {size(getattr(memory, name))}")
        for name, style in _KINDS.items()
        if getattr(memory, name)
    )
    return Flow(parts)


def _traffic_table(plan: PlanView) -> FittedTable[AxisTraffic]:
    columns: Columns[AxisTraffic] = (
        Column("axis", lambda axis: axis.axis),
        Column("ranks", lambda axis: str(axis.ranks)),
        Column("sent", lambda axis: size(axis.bytes_sent)),
        Column("collectives", lambda axis: str(axis.collectives)),
        Column("seconds", lambda axis: number(axis.seconds, "{:.4g}")),
    )
    return FittedTable(columns, plan.traffic)


def _alternatives_table(plan: PlanView) -> FittedTable[PlanAlternative]:
    columns: Columns[PlanAlternative] = (
        Column("layout", lambda other: other.title),
        Column("micro-batch", lambda other: str(other.micro_batch), drop=3),
        Column(
            "peak",
            lambda other: "-" if other.peak_bytes is None else size(other.peak_bytes),
            drop=2,
        ),
        Column("step time", lambda other: number(other.step_time_s, "{:.4g} s"), drop=1),
        Column("why not", lambda other: other.lost_because, fit="note"),
    )
    return FittedTable(columns, plan.alternatives)


def _listed(ranks: Iterable[int]) -> str:
    every = list(ranks)
    if len(every) <= _RANKS_NAMED:
        return ", ".join(map(str, every))
    return f"{every[0]} … {every[-1]} ({len(every)} of them)"
