"""The table of a job's states: every transition that there is, and what causes it.

The decisions are checked against it, the property tests walk along it, and ``docs/lifecycle.md``
is written from it.
"""

from collections.abc import Mapping
from typing import Final, NamedTuple

from services.contract.words.states import TERMINAL_STATES, JobState


class Edge(NamedTuple):
    """A transition from one state to another, and its cause in words."""

    source: JobState
    target: JobState
    cause: str


_DONE: Final = "the ranks had done all steps before the stop took effect"
_LATE: Final = "the commit of its last checkpoint was reported after its attempt was abandoned"
_RETRIED: Final = "the attempt ended before its work was done, and another attempt follows"
_GIVEN_UP: Final = "a failure of the job itself, or the restart budget is used up"
_ALL_DONE: Final = "all steps are done and the last checkpoint is committed"
_PAUSE: Final = "pause: the ranks drain"
_STOP: Final = "cancel or kill: the ranks drain or are killed"
_STOOD: Final = "the ranks drained, and Redis lost who had requested it"
_ADOPTED: Final = (
    "Redis had lost the job; it was found in storage, and its ranks were still training"
)
_NO_RANK: Final = "; no rank is running"

EDGES: Final[tuple[Edge, ...]] = (
    Edge(JobState.QUEUED, JobState.PLACING, "there are slots for all ranks: attempt opened"),
    Edge(JobState.QUEUED, JobState.RUNNING, _ADOPTED),
    Edge(JobState.QUEUED, JobState.PAUSED, "pause" + _NO_RANK),
    Edge(JobState.QUEUED, JobState.CANCELLED, "cancel or kill" + _NO_RANK),
    Edge(JobState.QUEUED, JobState.SUCCEEDED, _LATE),
    Edge(
        JobState.QUEUED,
        JobState.FAILED,
        "its plan is infeasible, or its probe found an error in the spec",
    ),
    Edge(JobState.PLACING, JobState.STARTING, "all ranks are launched"),
    Edge(JobState.PLACING, JobState.RUNNING, "the first step, reported before the launch"),
    Edge(JobState.PLACING, JobState.PAUSING, _PAUSE),
    Edge(JobState.PLACING, JobState.PAUSED, _STOOD),
    Edge(JobState.PLACING, JobState.RESTARTING, _RETRIED),
    Edge(JobState.PLACING, JobState.CANCELLING, _STOP),
    Edge(JobState.PLACING, JobState.SUCCEEDED, _ALL_DONE),
    Edge(JobState.PLACING, JobState.FAILED, _GIVEN_UP),
    Edge(JobState.STARTING, JobState.RUNNING, "the first step of the attempt"),
    Edge(JobState.STARTING, JobState.PAUSING, _PAUSE),
    Edge(JobState.STARTING, JobState.PAUSED, _STOOD),
    Edge(JobState.STARTING, JobState.RESTARTING, _RETRIED),
    Edge(JobState.STARTING, JobState.CANCELLING, _STOP),
    Edge(JobState.STARTING, JobState.SUCCEEDED, _ALL_DONE),
    Edge(JobState.STARTING, JobState.FAILED, _GIVEN_UP),
    Edge(JobState.RUNNING, JobState.PAUSING, _PAUSE),
    Edge(JobState.RUNNING, JobState.PAUSED, _STOOD),
    Edge(
        JobState.RUNNING,
        JobState.RESTARTING,
        "a rank or node was lost, or the gang drained: it was preempted, its node is drained, or "
        "its size changes",
    ),
    Edge(JobState.RUNNING, JobState.CANCELLING, _STOP),
    Edge(JobState.RUNNING, JobState.SUCCEEDED, _ALL_DONE),
    Edge(JobState.RUNNING, JobState.FAILED, _GIVEN_UP),
    Edge(JobState.PAUSING, JobState.PAUSED, "all ranks have ended"),
    Edge(
        JobState.PAUSING,
        JobState.RESTARTING,
        "the checkpoint that the pause required failed: the job continues",
    ),
    Edge(JobState.PAUSING, JobState.CANCELLING, "cancel or kill: more severe than a pause"),
    Edge(JobState.PAUSING, JobState.SUCCEEDED, _DONE),
    Edge(JobState.PAUSING, JobState.FAILED, _GIVEN_UP),
    Edge(JobState.PAUSED, JobState.QUEUED, "resume"),
    Edge(JobState.PAUSED, JobState.CANCELLED, "cancel or kill" + _NO_RANK),
    Edge(JobState.PAUSED, JobState.RUNNING, _ADOPTED),
    Edge(JobState.RESTARTING, JobState.PLACING, "the wait is over and there are slots"),
    Edge(JobState.RESTARTING, JobState.QUEUED, "preempted: it waits for slots like any other job"),
    Edge(JobState.RESTARTING, JobState.PAUSED, "pause" + _NO_RANK),
    Edge(JobState.RESTARTING, JobState.CANCELLED, "cancel or kill" + _NO_RANK),
    Edge(JobState.RESTARTING, JobState.SUCCEEDED, _LATE),
    Edge(JobState.CANCELLING, JobState.CANCELLED, "all ranks have ended"),
    Edge(JobState.CANCELLING, JobState.SUCCEEDED, _DONE),
    Edge(JobState.CANCELLED, JobState.QUEUED, "resume"),
    Edge(JobState.FAILED, JobState.QUEUED, "resume, with a fresh restart budget"),
    Edge(JobState.FAILED, JobState.SUCCEEDED, _LATE),
)

TRANSITIONS: Final[Mapping[JobState, frozenset[JobState]]] = {
    state: frozenset(edge.target for edge in EDGES if edge.source == state) for state in JobState
}
"""From each state, those that may follow."""

LEFT_ON_REQUEST: Final = frozenset(
    (edge.source, edge.target) for edge in EDGES if edge.source in TERMINAL_STATES
)
"""The documented ways out of a state in which a job has ended."""
