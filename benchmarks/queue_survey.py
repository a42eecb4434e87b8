"""How long it takes to go through the queue, with the kinds of jobs that make it long.

    python -m benchmarks.queue_survey

Nodes and jobs are records in memory, made by the controller's own decisions: what is timed is the schedule alone,
as the leader and a request that shows a waiting job make it. Times in ms: the median of five, and the longest.
"""

import argparse
import os
import random
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Final

from benchmarks.simulated_cluster import simulated_node, spec
from services.contract.jobs.specs import JobSpec
from services.contract.messages.facts import GangLaunched, GangProgressed
from services.contract.words.ids import new_job_id
from services.controller.domain.decisions.dispatch import decide
from services.controller.domain.job.events import GangPlaced
from services.controller.domain.job.job import Job
from services.controller.domain.plans import default_plan
from services.controller.domain.scheduling.node import Lease, Node
from services.controller.domain.scheduling.placement import GangRequest, NodeUsage, Placed, place
from services.controller.domain.scheduling.survey import Snapshot, Survey

_NOW: Final = 1_000_000
_ROUNDS: Final = 5
# Many divisors: as many numbers of ranks are possible as a spec can have.
_BATCH: Final = 2**5 * 3**2 * 5 * 7 * 11


def main() -> None:
    """Measure and print."""
    argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0]).parse_args()
    for words, jobs, nodes in _cases():
        leases = {node.id: Lease(node.incarnation, 5_000) for node in nodes}
        took = []
        for _ in range(_ROUNDS):
            began = time.perf_counter()
            Survey.of(Snapshot(tuple(jobs), tuple(nodes), leases, {}), {}, _NOW)
            took.append(1e3 * (time.perf_counter() - began))
        sys.stdout.write(f"{words:<72}{statistics.median(took):8.1f}{max(took):8.1f}\n")
        sys.stdout.flush()


def _cases() -> Iterator[tuple[str, Sequence[Job], Sequence[Node]]]:
    nodes = [simulated_node(f"n{number:03}", 64) for number in range(4)]
    runs = [_running(_elastic(), nodes[number % 4], number) for number in range(200)]
    head = _job(spec(256), 200)
    yield "200 elastic jobs on 4 nodes of 64 slots, one waits for all of them", [*runs, head], nodes
    nodes = [simulated_node(f"n{number:03}", 20) for number in range(100)]
    runs = [_running(_elastic(), nodes[number % 100], number) for number in range(1_000)]
    head = _job(spec(2_000), 1_000)
    words = "1 000 elastic jobs on 100 nodes of 20 slots, one waits for all of them"
    yield words, [*runs, head], nodes
    alike = [_running(_elastic(most=2), nodes[number % 100], number) for number in range(1_000)]
    yield "1 000 elastic jobs on 100 nodes of 20 slots, all could grow", alike, nodes
    runs = [_running(spec(1), nodes[number % 100], number) for number in range(1_999)]
    head = _job(spec(2_000, priority=1), 2_000)
    yield (
        "1 999 jobs on 100 nodes of 20 slots, all in the way of an urgent one",
        [*runs, head],
        nodes,
    )
    nodes = [simulated_node(f"n{number:03}", 4) for number in range(100)]
    runs = [_running(spec(3), node, number) for number, node in enumerate(nodes)]
    for kinds in (1, 400):
        drawn = random.Random(7)  # noqa: S311 sizes of jobs, and the same ones each time
        waits = [_job(spec(drawn.randint(2, kinds + 1)), 100 + n) for n in range(2_000)]
        words = (
            f"2 000 jobs of {kinds} kind{'s' if kinds > 1 else ''} wait for 100 nodes of 4 slots"
        )
        yield words, [*runs, *waits], nodes


def _elastic(most: int = 65_536) -> JobSpec:
    world = {"world": {"min": 1, "max": most}}
    return spec(1, resources=world, train={"steps": 100, "global_batch": _BATCH})


def _job(wanted: JobSpec, number: int) -> Job:
    made_ms = _NOW + number
    job_id = new_job_id(made_ms, os.urandom(10))
    return Job(id=job_id, spec=wanted, created_ms=made_ms, updated_ms=made_ms)


def _running(wanted: JobSpec, node: Node, number: int) -> Job:
    job = _job(wanted, number)
    placed = place(GangRequest.of(wanted), [NodeUsage(node)])
    if not isinstance(placed, Placed):
        raise TypeError(f"the benchmark's node does not hold its job: {placed.reason}")
    pids = {seat.rank: 100 + seat.rank for seat in placed.ranks}
    events = (
        GangPlaced(default_plan.gang(wanted, placed), placed.incarnations),
        GangLaunched(job_id=job.id, fence=1, node_id=node.id, pids=pids),
        GangProgressed(job_id=job.id, fence=1, node_id=node.id, step=1),
    )
    for event in events:
        job = decide(job, event, job.created_ms).job
    return job


if __name__ == "__main__":
    main()
