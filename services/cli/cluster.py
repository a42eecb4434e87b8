"""What waits, what is free, and nodes that are to be empty."""

from typing import Annotated

import typer

from services.cli import tables
from services.cli.connect import connect
from services.cli.course import Grace
from services.cli.terminal import console
from services.contract.api.queue import DrainRequest


def queue() -> None:
    """List queued jobs and why they wait."""
    with connect() as client:
        console.print(tables.queue_table(client.queue()))


def capacity() -> None:
    """Show the room that there is, node by node."""
    with connect() as client:
        found = client.capacity()
    console.print(tables.capacity_table(found))
    console.print(
        f"the largest gang that fits now: {found.largest_cpu_gang} CPU ranks, "
        f"{found.largest_cuda_gang} CUDA ranks"
    )


def drain(
    node: Annotated[str, typer.Argument(metavar="NODE", help="A node's id.")],
    *,
    grace: Grace = 60.0,
) -> None:
    """Empty a node: its gangs checkpoint and move, and no more are placed there."""
    with connect() as client:
        view = client.drain(node, DrainRequest(grace_s=grace))
    moving = f"; to be moved: {', '.join(view.jobs)}" if view.jobs else ""
    console.print(f"{view.id} is {view.state}{moving}")


def undrain(node: Annotated[str, typer.Argument(metavar="NODE", help="A node's id.")]) -> None:
    """Make a node schedulable again."""
    with connect() as client:
        view = client.undrain(node)
    console.print(f"{view.id} is {view.state}")


def forget(node: Annotated[str, typer.Argument(metavar="NODE", help="A node's id.")]) -> None:
    """Delete the record of a lost node."""
    with connect() as client:
        client.forget(node)
    console.print(f"{node} is deleted; its agent may join again")
