"""What comes from the machines: nodes and leases, facts, telemetry."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from services.contract.messages.probing import DeviceType
from services.contract.messages.telemetry import (
    MetricRecord,
    RankProgress,
    RankSample,
    RankStacks,
    StepRecord,
)
from services.controller.domain.scheduling.node import Drain, Lease, Measurement, Node


class NodeStore(Protocol):
    """All nodes that ever joined, their leases, and which of them are to be drained."""

    async def nodes(self) -> list[Node]:
        """All of them, by id."""
        ...

    async def node(self, node_id: str) -> Node | None:
        """One of them; None where there is none that can be read."""
        ...

    async def put(self, node: Node, epoch: int, before: Node | None) -> None:
        """Write a node's record, in the place of the one that was read; None: whatever is there.

        Raises:
            DeposedError: ``epoch`` is not the present one.
            StaleWriteError: A join or a leave was written since ``before`` was read.
        """
        ...

    async def forget(self, node: Node, epoch: int | None) -> None:
        """Remove a node's record with all that is kept with it, unless its lease lives.

        Args:
            node: As it was read.
            epoch: The leadership in whose name this is done; None for a person's request.

        Raises:
            DeposedError: ``epoch`` is not the present one.
            StaleWriteError: It has joined or left since it was read, or its lease lives.
        """
        ...

    async def drain(self, node_id: str, drain: Drain | None) -> None:
        """Note that an operator wants the node empty, or (None) no longer does.

        Raises:
            NotFoundError: There is no such node.
        """
        ...

    async def keep_measured(
        self, node_id: str, device_type: DeviceType, found: Measurement, epoch: int
    ) -> None:
        """Keep what a node's devices of one type were found to do; its record tells of it.

        Raises:
            DeposedError: ``epoch`` is not the present one.
        """
        ...

    async def leases(self, node_ids: Iterable[str]) -> dict[str, Lease]:
        """The leases that live."""
        ...


@dataclass(frozen=True)
class Entry:
    """An entry of a stream: its id (``<milliseconds>-<number>``), and its JSON."""

    id: str
    body: str

    @property
    def time_ms(self) -> int:
        """When it was appended, by the store's clock."""
        return self.place[0]

    @property
    def place(self) -> tuple[int, int]:
        """Where it stands: later entries have greater places."""
        time_ms, _, number = self.id.partition("-")
        return int(time_ms), int(number or 0)


@dataclass(frozen=True)
class FactEntry(Entry):
    """A fact. ``sender``: the node whose agent told it; None where the store cannot say."""

    sender: str | None


class FactQueue(Protocol):
    """The facts of all agents, delivered until they are acknowledged."""

    async def prepare(self) -> None:
        """Make the queue if it is not there."""
        ...

    async def unacknowledged(self, limit: int) -> list[FactEntry]:
        """Facts that were delivered before, to the present leader or an earlier one."""
        ...

    async def next(self, limit: int, timeout_s: float) -> list[FactEntry]:
        """Facts that were not delivered yet; waits for one up to ``timeout_s`` seconds."""
        ...

    async def acknowledge(self, ids: Sequence[str]) -> None:
        """These are dealt with for good."""
        ...


class Log(StrEnum):
    """The logs that a job has."""

    EVENTS = "events"
    HISTORY = "history"
    OUTPUT = "logs"


class Telemetry(Protocol):
    """What ranks tell: overwritten or trimmed, never decided."""

    async def samples(self, job_ids: Sequence[str]) -> Mapping[str, dict[int, RankSample]]:
        """The last sample of each rank, by job."""
        ...

    async def progress(self, job_ids: Sequence[str]) -> Mapping[str, dict[int, RankProgress]]:
        """The same, but only what the view of a job is made of."""
        ...

    async def last_steps(
        self, job_ids: Sequence[str], count: int
    ) -> Mapping[str, list[StepRecord]]:
        """The last ``count`` step records of each job, oldest first."""
        ...

    async def recent_steps(
        self, job_ids: Sequence[str], count: int
    ) -> Mapping[str, list[StepRecord]]:
        """The same, but as they were at any time within the last second: for estimates."""
        ...

    async def steps(self, job_id: str) -> list[StepRecord]:
        """All step records that are kept, as they came."""
        ...

    async def last_metrics(
        self, job_ids: Sequence[str], count: int
    ) -> Mapping[str, list[MetricRecord]]:
        """The last ``count`` records of the users' metrics of each job, oldest first."""
        ...

    async def metrics(self, job_id: str) -> list[MetricRecord]:
        """All records of the user's metrics that are kept, as they came."""
        ...

    async def keep_stacks(self, job_id: str, stacks: Sequence[RankStacks]) -> None:
        """Keep what ranks were found in, in place of what they were found in before."""
        ...

    async def stacks(self, job_id: str) -> list[RankStacks]:
        """What ranks were last found in, by rank."""
        ...

    async def whole(self, job_id: str) -> str | None:
        """Says that what is here of a job's steps, metrics and output is all that is kept of them.

        None: storage may have more, for the store lost its data, or the job ended and was closed. Another text than
        before: it went meanwhile, and was brought back.
        """
        ...

    async def is_empty(self, job_id: str) -> bool:
        """Whether nothing of a job's steps, metrics and output is here."""
        ...

    async def ask_back(self, job_id: str, fence: int, node_id: str) -> bool:
        """Have a node's agent bring the rest from storage; answers whether nobody had asked yet."""
        ...

    async def put_together(self, job_id: str, *, has_ended: bool) -> bool:
        """Put what an agent has brought back beside what is here, once that is all of it.

        If the job has ended, it goes again after a while.

        Answers whether it was, and all that is kept is here now.
        """
        ...

    async def lacks_events(self, job_id: str) -> bool:
        """Whether storage has events of the job that are not here until they are brought back."""
        ...

    async def closed(self, job_id: str, fence: int, events_to: str | None) -> None:
        """Storage has all records of a job that has ended: the last few stay here, with its record.

        Its events up to ``events_to`` (None: none), too.

        The others go after a while, so that whoever reads them reads on. Nothing happens if another
        attempt of it began meanwhile.
        """
        ...

    async def read(self, job_id: str, log: Log, after: str | None, limit: int) -> list[Entry]:
        """Up to ``limit`` entries behind ``after``, oldest first.

        Raises:
            CursorExpiredError: Entries behind ``after`` may have been trimmed.
        """
        ...

    async def wait(self, job_id: str, log: Log, after: str | None, timeout_s: float) -> None:
        """Return once there is an entry behind ``after``, or after ``timeout_s`` seconds."""
        ...
