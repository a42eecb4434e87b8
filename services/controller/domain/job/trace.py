"""A trace: REQUESTED → RECORDING (every agent has told its ranks) → DONE, or FAILED and why.

A rank writes its file whole or not at all, so a trace that FAILED may have the files of some ranks.
"""

from collections.abc import Iterable

from pydantic import Field

from services.contract.words.ids import NodeId, TraceId
from services.contract.words.states import TraceState
from services.controller.domain.record import Record


class TraceFile(Record):
    """One rank's file: where it lies on its node, its compressed bytes, its first and last step."""

    path: str
    bytes: int
    first_step: int
    last_step: int


class Trace(Record):
    """What is known of one trace. Times in milliseconds of Redis's clock.

    ``places`` names, by rank, the node on which it is recorded. ``ordered``: the nodes whose agents
    have told their ranks. ``failures``: why a rank recorded nothing. ``commanded_ms``: when agents were last
    told of it, and ``resent`` how often that was again.
    """

    id: TraceId
    fence: int
    steps: int
    places: dict[int, NodeId]
    state: TraceState = TraceState.REQUESTED
    ordered: tuple[NodeId, ...] = ()
    files: dict[int, TraceFile] = Field(default_factory=dict)
    failures: dict[int, str] = Field(default_factory=dict)
    reason: str | None = None
    asked_ms: int
    commanded_ms: int
    resent: int = 0
    ended_ms: int | None = None

    @property
    def is_open(self) -> bool:
        """Whether ranks are still to record, or to write."""
        return self.state in {TraceState.REQUESTED, TraceState.RECORDING}

    @property
    def total_bytes(self) -> int:
        """Of all files."""
        return sum(file.bytes for file in self.files.values())

    @property
    def silent_nodes(self) -> tuple[NodeId, ...]:
        """The nodes of which neither the agent nor each rank has said anything."""
        waiting = (node for rank, node in self.places.items() if not self.knows(rank))
        return tuple(node for node in dict.fromkeys(waiting) if node not in self.ordered)

    def knows(self, rank: int) -> bool:
        """Whether it is known what came of a rank."""
        return rank in self.files or rank in self.failures

    def ranks_on(self, node_id: str) -> tuple[int, ...]:
        """Those that are recorded on a node."""
        return tuple(rank for rank, node in self.places.items() if node == node_id)

    def set_back(self, by_ms: int) -> "Trace":
        """The trace after the clock of Redis was set back."""
        return self.model_copy(update={"commanded_ms": max(self.commanded_ms - by_ms, 0)})


def with_order(trace: Trace, node_id: str, now_ms: int) -> Trace:
    """The trace once the agent of a node has told its ranks; itself if that is no news."""
    if not trace.is_open or node_id in trace.ordered or not trace.ranks_on(node_id):
        return trace
    return _advanced(trace.model_copy(update={"ordered": (*trace.ordered, node_id)}), now_ms)


def with_file(trace: Trace, rank: int, file: TraceFile, now_ms: int) -> Trace:
    """The trace once a rank's file is written; itself if that is no news."""
    if not trace.is_open or rank not in trace.places or trace.knows(rank):
        return trace
    return _advanced(trace.model_copy(update={"files": {**trace.files, rank: file}}), now_ms)


def with_failure(trace: Trace, ranks: Iterable[int], reason: str, now_ms: int) -> Trace:
    """The trace once it is known that these ranks record nothing; itself if that is no news."""
    new = {rank: reason for rank in ranks if rank in trace.places and not trace.knows(rank)}
    if not trace.is_open or not new:
        return trace
    failed = {"failures": {**trace.failures, **new}, "reason": trace.reason or reason}
    return _advanced(trace.model_copy(update=failed), now_ms)


def _advanced(trace: Trace, now_ms: int) -> Trace:
    if all(map(trace.knows, trace.places)):
        state = TraceState.FAILED if trace.failures else TraceState.DONE
        return trace.model_copy(update={"state": state, "ended_ms": now_ms})
    if not trace.silent_nodes:
        return trace.model_copy(update={"state": TraceState.RECORDING})
    return trace
