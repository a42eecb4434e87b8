"""How long the steps of jobs took beside what their plans estimated, by model and kind of node."""

import statistics
from collections.abc import Iterable, Sequence
from typing import Final

from services.contract.messages.facts import Inventory
from services.contract.messages.probing import DeviceType
from services.contract.messages.telemetry import StepRecord
from services.contract.words.states import JobState
from services.controller.domain.job.job import Job
from services.controller.domain.record import Record
from services.controller.domain.scheduling.node import Node

STEPS_READ: Final = 32
PACES_KEPT: Final = 16
# Memory is measured in an attempt's first steps, and caches fill.
_LEFT_OUT: Final = 3
_STEPS_NEEDED: Final = 10
# Beyond that something else is wrong than the rates of a node.
_LEAST, _MOST = 0.1, 10.0


class Pace(Record):
    """Median seconds of an attempt's steps, and those that its plan estimated before correction."""

    job_id: str
    fence: int
    kind: str
    foreseen_s: float
    taken_s: float


def can_tell(job: Job) -> bool:
    """Whether the job runs as its plan says, and the plan estimated seconds."""
    found = job.estimate
    return (
        job.state is JobState.RUNNING
        and job.attempt is not None
        and job.plan is not None
        and job.plan.world_size == job.spec.fewest_ranks
        and found is not None
        and found.probe_id is not None
        and bool(found.step_time_s)
    )


def pace_of(job: Job, records: Sequence[StepRecord], nodes: Iterable[Node]) -> Pace | None:
    """What the steps so far tell; None: too few, or their node is not known any more.

    Args:
        job: One that can tell.
        records: Its last steps.
        nodes: All that are known.
    """
    node = next((each for each in nodes if each.id == job.head_node), None)
    if job.attempt is None or job.plan is None or job.estimate is None or node is None:
        return None
    estimated = job.estimate.step_time_s
    first = (job.attempt.first_step or 1) + _LEFT_OUT
    times = [r.step_time_s for r in records if r.fence == job.fence and r.step >= first]
    if len(times) < _STEPS_NEEDED or not estimated:
        return None
    return Pace(
        job_id=job.id,
        fence=job.fence,
        kind=kind_of(node.inventory, job.plan.device_type),
        foreseen_s=estimated / job.estimate.time_scale,
        taken_s=statistics.median(times),
    )


def scale_of(paces: Iterable[Pace], kind: str) -> float:
    """By what estimated seconds are multiplied on such nodes: the median of what was seen."""
    ratios = [each.taken_s / each.foreseen_s for each in paces if each.kind == kind]
    return min(max(statistics.median(ratios), _LEAST), _MOST) if ratios else 1.0


def kind_of(inventory: Inventory, device_type: DeviceType) -> str:
    """Nodes of one kind are taken to be equally fast."""
    if device_type == "cuda":
        return ", ".join(sorted(each.name for each in inventory.accelerators))
    return f"{inventory.cpu_slots} slots on {inventory.cpu_count} processors"
