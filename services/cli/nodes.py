"""``meshloom nodes``: the machines, and what each found when it measured its devices."""

import re
from collections.abc import Iterator
from typing import Annotated, Final

import humanize
import typer
from rich.console import RenderableType
from rich.text import Text

from fsdp_core.plan.model import NodeFacts
from services.cli.cluster_tables import nodes_table
from services.cli.connect import connect
from services.cli.errors import CliError
from services.cli.figures import age, size, state_text
from services.cli.layout import Cell, Details, Exact
from services.cli.output import answers, as_data
from services.cli.terminal import console
from services.contract.api.views import MeasuredView, NodeView

_NODE_ID: Final = re.compile(r"[\w.-]+", re.ASCII)
_WAYS: Final = {"copy": "memory", "storage": "storage"}
_PREFIXES: Final = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"))


@answers
def nodes(
    node: Annotated[
        str | None, typer.Argument(metavar="NODE", help="One node, with all that is known of it.")
    ] = None,
    *,
    measured: Annotated[
        bool, typer.Option("--measured", help="What each measured of itself, too.")
    ] = False,
) -> None:
    """List the nodes, or show one.

    Examples:
      meshloom nodes

      meshloom nodes loom-1
    """
    if node is not None and (not _NODE_ID.fullmatch(node) or node.strip(".") == ""):
        raise CliError(f"{node!r} is no name of a node; `meshloom nodes` lists them")
    with connect() as client:
        if node is None:
            every = client.nodes()
            if as_data(every):
                return
            console.print(nodes_table(every))
            found = every.items if measured else ()
        else:
            one = client.node(node)
            if as_data(one):
                return
            console.print(node_details(one))
            found = (one,)
    for each in found:
        for part in measured_parts(each):
            console.print(part)


def node_details(node: NodeView) -> Details:
    """What one wants to know of a node."""
    inventory = node.inventory
    lease = "over" if node.lease_s is None else f"{node.lease_s:.0f} s left"
    devices = (
        (f"cuda:{device.index}", f"{device.name}, {size(device.memory_bytes)}")
        for device in inventory.accelerators
    )
    rows: list[tuple[Cell, Cell | None]] = [
        ("node", f"{node.id} on {inventory.hostname}"),
        ("state", state_text(node.state)),
        ("lease", lease),
        ("CPU slots", f"{node.cpu_slots_used} of {inventory.cpu_slots} taken"),
        ("cores, memory", f"{inventory.cpu_count}, {size(inventory.memory_bytes)}"),
        *devices,
        ("versions", ", ".join(f"{name} {v}" for name, v in inventory.versions.items())),
        *(("jobs" if place == 0 else "", Exact(job)) for place, job in enumerate(node.jobs)),
    ]
    return Details(rows if node.jobs else [*rows, ("jobs", "none")])


def measured_parts(node: NodeView) -> Iterator[RenderableType]:
    """What a node measured, by type of device, or why it did not."""
    if not node.measured:
        yield Text(f"\n{node.id} has measured nothing yet: the first plan has it do so", "dim")
    for device, found in node.measured.items():
        when = f"{age(found.measured_at)} ago"
        yield Text(f"\n{node.id}, {device}: measured {when}", style="bold")
        yield _figures(found)


def _figures(found: MeasuredView) -> Details:
    if found.facts is None:
        return Details([("not measured", found.failure or "it did not say why")])
    return Details(figures(found.facts))


def figures(facts: NodeFacts) -> Iterator[tuple[str, str]]:
    """Names and values, of each rank while the others are at work."""
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
    for step, prefix in _PREFIXES:
        if value >= step:
            return f"{value / step:.3g} {prefix}{unit}"
    return f"{value:.3g} {unit}"
