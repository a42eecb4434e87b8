"""``meshloom nodes``: the machines, and what each found when it measured its devices."""

import re
from collections.abc import Iterator
from typing import Annotated, Final

import humanize
import typer
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from fsdp_core.plan.model import NodeFacts
from services.cli import tables
from services.cli.connect import connect
from services.cli.errors import CliError
from services.cli.terminal import console
from services.contract.api.views import MeasuredView, NodeView

_NODE_ID: Final = re.compile(r"[\w.-]+", re.ASCII)
_WAYS: Final = {"copy": "memory", "storage": "storage"}
_PREFIXES: Final = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"))


def nodes(
    node: Annotated[
        str | None, typer.Argument(metavar="NODE", help="One node, with all that is known of it.")
    ] = None,
    *,
    measured: Annotated[
        bool, typer.Option("--measured", help="What each measured of itself, too.")
    ] = False,
) -> None:
    """List the nodes and what runs there."""
    if node is not None and (not _NODE_ID.fullmatch(node) or node.strip(".") == ""):
        raise CliError(f"{node!r} is no name of a node; `meshloom nodes` lists them")
    with connect() as client:
        if node is not None:
            one = client.node(node)
            console.print(node_details(one))
            found: tuple[NodeView, ...] = (one,)
        else:
            every = client.nodes()
            console.print(tables.nodes_table(every))
            found = every.items
    for each in found if measured or node is not None else ():
        for part in measured_parts(each):
            console.print(part)


def node_details(node: NodeView) -> Table:
    """What one wants to know of a node."""
    table = _grid()
    inventory = node.inventory
    table.add_row("node", f"{node.id} on {inventory.hostname}")
    table.add_row("state", tables.state_text(node.state))
    lease = "over" if node.lease_s is None else f"{node.lease_s:.0f} s left"
    table.add_row("lease", lease)
    table.add_row("CPU slots", f"{node.cpu_slots_used} of {inventory.cpu_slots} taken")
    table.add_row("cores, memory", f"{inventory.cpu_count}, {tables.size(inventory.memory_bytes)}")
    for device in inventory.accelerators:
        table.add_row(f"cuda:{device.index}", f"{device.name}, {tables.size(device.memory_bytes)}")
    table.add_row("versions", ", ".join(f"{name} {v}" for name, v in inventory.versions.items()))
    table.add_row("jobs", ", ".join(node.jobs) or "none")
    return table


def measured_parts(node: NodeView) -> Iterator[RenderableType]:
    """What a node measured, by type of device, or why it did not."""
    if not node.measured:
        yield Text(f"\n{node.id} has measured nothing yet: the first plan has it do so", "dim")
    for device, found in node.measured.items():
        when = f"{tables.age(found.measured_at)} ago"
        yield Text(f"\n{node.id}, {device}: measured {when}", style="bold")
        yield _figures(found)


def _figures(found: MeasuredView) -> Table:
    table = _grid()
    if found.facts is None:
        table.add_row("not measured", found.failure or "it did not say why")
        return table
    for name, figure in figures(found.facts):
        table.add_row(name, figure)
    return table


def figures(facts: NodeFacts) -> Iterator[tuple[str, str]]:
    """Names and values, of each rank while its fellows are at work."""
    for dtype, flops in facts.matmul_flops.items():
        yield f"products in {dtype}", _rate(flops, "FLOP/s")
    yield "memory", _rate(facts.memory_bandwidth, "B/s")
    yield "link between ranks", _rate(facts.link_bandwidth, "B/s")
    yield "network", f"{_rate(facts.network_bandwidth, 'B/s')}, between processes of the node"
    yield "latency of a collective", humanize.metric(facts.collective_latency, "s")
    for kind, known in facts.exchanges.items():
        name = kind.replace("_", "-")
        latency = humanize.metric(known.latency, "s")
        yield f"{name} in the engine", f"{latency} and {_rate(known.bandwidth, 'B/s')}"
    for way, of_kind in facts.shared_exchanges.items():
        for kind, known in of_kind.items():
            name = f"{kind.replace('_', '-')}, shared {_WAYS[way]}"
            latency = humanize.metric(known.latency, "s")
            yield name, f"{latency} and {_rate(known.bandwidth, 'B/s')}"
    if facts.dispatch_s:
        yield "launching an operator", humanize.metric(facts.dispatch_s, "s")
        yield "a unit in a pass", humanize.metric(facts.unit_s, "s")
    yield "overlap", f"{facts.overlap:.0%} of an exchange is hidden by computation"
    yield "ranks", f"{facts.ranks} seated"


def _rate(value: float, unit: str) -> str:
    for size, prefix in _PREFIXES:
        if value >= size:
            return f"{value / size:.3g} {prefix}{unit}"
    return f"{value:.3g} {unit}"


def _grid() -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold")
    table.add_column()
    return table
