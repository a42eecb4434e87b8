"""What must be well before a job can run, looked at from the client's side, one finding each."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import typer
from rich.text import Text

from meshloom.client import RestClient as Client
from services.cli.connect import connect
from services.cli.errors import CliError
from services.cli.output import answers, as_data
from services.cli.terminal import console
from services.contract.api.views import NodeView
from services.contract.words.states import NodeState

_MOST_NAMED: Final = 5
_EXIT_UNWELL: Final = 1
_RECORDS: Final = (
    "the controller's log says why (record_unreadable): run the version that wrote it, or delete "
    "the job; a node's record is rewritten when its agent starts; a key of another type is renamed "
    "or deleted in Redis"
)


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at; ``advice`` says what to do where it is not well."""

    what: str
    healthy: bool
    detail: str
    advice: str = ""

    def line(self) -> Text:
        """The finding as a line for people."""
        mark = ("ok  ", "green") if self.healthy else ("FAIL", "bold red")
        advice = f"; {self.advice}" if self.advice and not self.healthy else ""
        return Text.assemble(mark, f" {self.what}: {self.detail}{advice}")


@answers
def doctor() -> None:
    """Check, from here, all that a job needs.

    The exit code is 1 if something is missing; each finding says what to do.

    Example:
      meshloom doctor
    """
    with connect() as client:
        findings = list(examine(client))
    if not as_data({"findings": [vars(finding) for finding in findings]}):
        for finding in findings:
            console.print(finding.line())
    if not all(finding.healthy for finding in findings):
        raise typer.Exit(_EXIT_UNWELL)


def examine(client: Client) -> Iterator[Finding]:
    """Look at the controller, its Redis, the token and the nodes, in the order of need."""
    try:
        version = client.version()
    except CliError as error:
        yield Finding("controller", healthy=False, detail=str(error))
        return
    yield Finding("controller", healthy=True, detail=f"{client.base_url}, {version.version}")
    health = client.readiness()
    for part, state in health.checks.items():
        yield Finding(
            part,
            healthy=state == "ok" or (health.status == "ok" and part != "records"),
            detail=_named(client, state) if part == "records" else state,
            advice=_RECORDS if part == "records" else "see the controller's log",
        )
    try:
        nodes = client.nodes()
    except CliError as error:
        yield Finding("access", healthy=False, detail=str(error), advice="set MESHLOOM_TOKEN")
        return
    ready = [node for node in nodes.items if node.state is NodeState.READY]
    yield Finding(
        "nodes",
        healthy=bool(ready),
        detail=f"{len(ready)} of {len(nodes.items)} ready",
        advice="start an agent: python -m services.worker.agent",
    )
    yield from _storage(ready)
    for node in ready:
        accelerators = len(node.inventory.accelerators)
        yield Finding(
            f"node {node.id}",
            healthy=True,
            detail=f"{node.inventory.cpu_slots} CPU slots, {accelerators} GPUs, "
            f"{len(node.jobs)} jobs",
        )


def _storage(nodes: Sequence[NodeView]) -> Iterator[Finding]:
    """Whether nodes have the same storage of checkpoints; each names the one that it has."""
    by_storage: dict[str, list[str]] = {}
    for node in nodes:
        if node.inventory.storage_id is not None:
            by_storage.setdefault(node.inventory.storage_id, []).append(node.id)
    unknown = [node.id for node in nodes if node.inventory.storage_id is None]
    if unknown:
        # No failure: an agent of an older version does not tell. One that cannot write there reports it elsewhere.
        yield Finding(
            "storage",
            healthy=True,
            detail=f"not known of {', '.join(unknown[:_MOST_NAMED])}: the agent could not use it when it started, "
            "or is of an older version",
        )
    by_fault: dict[str, list[str]] = {}
    for node in nodes:
        if node.inventory.storage_fault is not None:
            by_fault.setdefault(node.inventory.storage_fault, []).append(node.id)
    for fault, names in by_fault.items():
        yield Finding(
            "storage",
            healthy=False,
            detail=f"of {', '.join(names[:_MOST_NAMED])}: {fault}",
            advice="restart the agents when that is repaired",
        )
    if len(nodes) > 1 and by_storage:
        several = "; ".join(
            f"{', '.join(names[:_MOST_NAMED])}: {name[:8]}" for name, names in by_storage.items()
        )
        yield Finding(
            "storage",
            healthy=len(by_storage) == 1,
            detail=f"shared by {len(nodes) - len(unknown)} nodes"
            if len(by_storage) == 1
            else f"{len(by_storage)} different storages ({several})",
            advice="mount one file system on all nodes at MESHLOOM_CHECKPOINT_ROOT, and restart the agents: a job "
            "that moves does not find its checkpoints otherwise",
        )


def _named(client: Client, state: str) -> str:
    """With the first of the records, for who may know them."""
    try:
        known = client.unreadable(limit=_MOST_NAMED)
    except CliError:  # another scope's token, or an older controller
        return state
    more = f" and {known.left_out} more" if known.left_out else ""
    return f"{state}: {', '.join(known.items)}{more}"
