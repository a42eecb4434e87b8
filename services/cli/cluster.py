"""What waits, what is free, what pools bring, and nodes that are to be empty."""

from typing import Annotated

import typer

from services.cli.cluster_tables import capacity_table, pools_table, queue_table
from services.cli.connect import connect
from services.cli.course import Grace
from services.cli.output import answers, as_data
from services.cli.terminal import console
from services.contract.api.queue import DrainRequest
from services.contract.api.views import NodeView

Node = Annotated[str, typer.Argument(metavar="NODE", help="A node's id, as `nodes` shows it.")]


@answers
def queue() -> None:
    """List the jobs that wait, and why.

    Example:
      meshloom queue -o wide
    """
    with connect() as client:
        found = client.queue()
    if not as_data(found):
        console.print(queue_table(found) if found.items else "no job waits")


@answers
def capacity() -> None:
    """Show the free slots of every node.

    Example:
      meshloom capacity
    """
    with connect() as client:
        found = client.capacity()
    if as_data(found):
        return
    console.print(capacity_table(found))
    console.print(
        f"the largest gang that fits now: {found.largest_cpu_gang} CPU ranks, "
        f"{found.largest_cuda_gang} CUDA ranks"
    )


@answers
def pools() -> None:
    """List the pools that bring nodes, and what they have brought.

    A pool brings nodes when a job fits no free one.

    Example:
      meshloom pools
    """
    with connect() as client:
        found = client.pools()
    if not as_data(found):
        console.print(pools_table(found) if found.items else "no pools: nodes join by themselves")


@answers
def drain(node: Node, *, grace: Grace = 60.0) -> None:
    """Move the jobs of a node elsewhere and start no more there.

    Its jobs take a checkpoint first, within --grace.

    Example:
      meshloom drain loom-1 --grace 120
    """
    with connect() as client:
        view = client.drain(node, DrainRequest(grace_s=grace))
    _say(view, moving=True)


@answers
def undrain(node: Node) -> None:
    """Let jobs start on a node again.

    Example:
      meshloom undrain loom-1
    """
    with connect() as client:
        view = client.undrain(node)
    _say(view)


@answers
def forget(node: Node) -> None:
    """Delete the record of a lost node.

    Example:
      meshloom forget loom-1
    """
    with connect() as client:
        client.forget(node)
    if not as_data({"id": node, "deleted": True}):
        console.print(f"{node} is deleted; its agent may join again")


def _say(node: NodeView, *, moving: bool = False) -> None:
    if as_data(node):
        return
    jobs = f"; to be moved: {', '.join(node.jobs)}" if moving and node.jobs else ""
    console.print(f"{node.id} is {node.state}{jobs}")
