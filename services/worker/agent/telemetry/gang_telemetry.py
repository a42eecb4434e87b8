"""What an agent sees of a gang from outside: its boards and its output, for the next beats."""

import itertools
import math
import statistics
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, TypeVar

import structlog

from services.contract.messages.board import (
    ARRIVALS_KEPT,
    BoardError,
    BoardReader,
    BoardSnapshot,
    BoardStep,
)
from services.contract.messages.findings import RankFinding
from services.contract.messages.rank_pipe import RankMetrics, RankReady
from services.contract.messages.telemetry import LogLine, MetricRecord, RankSample, StepRecord
from services.contract.redis.redis_keys import STEPS_KEPT
from services.contract.words.bounds import METRIC_NAMES_KEPT, MOST_MS, MOST_SECONDS, MOST_WHOLE
from services.contract.words.states import RankPhase
from services.worker.agent.host.folders import AttemptFolder
from services.worker.agent.host.processes import process_state
from services.worker.agent.host.stacks import Stacks
from services.worker.agent.ranks.launch import Crew
from services.worker.agent.telemetry.arrivals import ArrivalKey, ArrivalMeter, ArrivalPacing
from services.worker.agent.telemetry.gang_logs import GangLogs
from services.worker.agent.telemetry.hang import Mark

STEPS_PER_BEAT: Final = 2_000
METRICS_PER_BEAT: Final = 500
_METRICS_HELD: Final = 10_000
_NAMES_COUNTED: Final = 1_024
_STEPS_FOR_MEDIAN: Final = 32
_NS: Final = 1_000_000_000
_log = structlog.get_logger()
_T = TypeVar("_T")


@dataclass(frozen=True)
class LastPhase:
    """What a rank's board showed last."""

    step: int
    phase: str


@dataclass(frozen=True)
class Records:
    """What a beat appends for one gang, each record once."""

    job_id: str
    fence: int
    steps: tuple[StepRecord, ...]
    logs: tuple[LogLine, ...]
    metrics: tuple[MetricRecord, ...] = ()


class GangTelemetry:
    """Boards and logs of the ranks of one attempt on this node.

    Args:
        crew: The ranks; their boards are owned from now on.
        node_id: This node.
        folder: Where their files lie.
        beside: Has something done that may take long; may raise RuntimeError, as a thread that cannot start.

    Attributes:
        faults: By rank, what a board held or became that no rank of ours makes of it, in words
            that follow "rank 1 …". Such a board is not looked at again.
        mask: Takes secrets out of what the ranks say.
    """

    def __init__(
        self,
        crew: Crew,
        node_id: str,
        folder: AttemptFolder,
        beside: Callable[[Callable[[], None]], None] = lambda work: work(),
    ) -> None:
        self._beside = beside
        self.faults: dict[int, str] = {}
        self._seats = seats = dict(crew.seats)
        self._pids = dict(crew.pids)
        self._speaker = 0
        self._compares = not any(s.spec.continues_without_replicas for s in seats.values())
        self._node_id = node_id
        self._readers = dict(crew.boards)
        self._logs = GangLogs(folder, seats, beside)
        self.mask = self._logs.mask
        self._seen: dict[int, BoardSnapshot] = {}
        self._started: set[int] = set()
        # While Redis is away they wait here: more than Redis would keep are of no use.
        self._steps: deque[StepRecord] = deque(maxlen=STEPS_KEPT)
        self._metrics: deque[MetricRecord] = deque(maxlen=_METRICS_HELD)
        self._metric_names: dict[str, None] = {}
        self._last_step: int | None = None
        self._has_gaps = False
        self._step_times: deque[float] = deque(maxlen=_STEPS_FOR_MEDIAN)
        self._meter = ArrivalMeter(tuple(seats))
        self._arrival_pacing = ArrivalPacing(ARRIVALS_KEPT)

    def replace(self, crew: Crew) -> None:
        """Ranks were started again: their boards are other ones, and owned from now on."""
        self._seats |= crew.seats
        self._pids |= crew.pids
        for rank, board in crew.boards.items():
            before = self._readers.pop(rank, None)
            if before is not None:
                self._close(before)
            self._readers[rank] = board
            self.faults.pop(rank, None)
            self._seen.pop(rank, None)
            self._started.discard(rank)

    def speak_for(self, members: Sequence[int], replica_size: int | None) -> None:
        """The replicas that take part: the first rank of one of them speaks for the job."""
        if replica_size is None or not members or self._speaker // replica_size in members:
            return
        self._watch_steps()  # what the lost one had told
        self._speaker = members[0] * replica_size

    def watch(self, ready: Mapping[int, RankReady | None]) -> dict[int, int]:
        """Take in new steps and arrivals; answer the first step of each rank that just made one.

        To be called often: a ring holds the last 256 steps, and the last 192 arrivals of a group.

        Args:
            ready: By rank, what names the groups of its board.
        """
        self._logs.cut_back()
        begun = {rank: step for rank in self._seats if (step := self.begun(rank)) is not None}
        for rank in list(self._readers):
            self._snapshot(rank)
        self._watch_steps()
        self._watch_arrivals(ready)
        return begun

    def begun(self, rank: int) -> int | None:
        """The first step of a rank, once it has made one; answered once, and later looks cost nothing."""
        if rank in self._started:
            return None
        steps = self._ask(rank, lambda board: board.steps_after(0))
        if not steps:
            return None
        self._started.add(rank)
        return steps[0].step

    def take_metrics(self, rank: int, told: RankMetrics) -> None:
        """Take in what the user's code measured; rank 0 speaks for the job.

        Of an attempt the first 64 names are kept.
        """
        if rank != 0:
            return
        for point in told.points:
            for name in point.values:
                if len(self._metric_names) < _NAMES_COUNTED:
                    self._metric_names.setdefault(name)
            kept = set(itertools.islice(self._metric_names, METRIC_NAMES_KEPT))
            record = MetricRecord(
                step=point.step,
                fence=self._seats[0].fence,
                values={name: value for name, value in point.values.items() if name in kept},
                left_out=min(told.left_out + len(self._metric_names) - len(kept), MOST_WHOLE),
            )
            self._metrics.append(record)

    def samples(self, ready: Mapping[int, RankReady | None]) -> list[RankSample]:
        """Where each rank stands now."""
        return [self._sample(rank, ready[rank]) for rank in self._seats]

    def take(self, *, last: bool) -> Records:
        """The records for the next beat; each is handed out once.

        ``last`` says that no rank writes any more.
        """
        any_seat = next(iter(self._seats.values()))
        count = min(len(self._steps), STEPS_PER_BEAT)
        steps = tuple(self._steps.popleft() for _ in range(count))
        count = min(len(self._metrics), METRICS_PER_BEAT)
        metrics = tuple(self._metrics.popleft() for _ in range(count))
        logs = self._logs.take(last=last)
        return Records(any_seat.job_id, any_seat.fence, steps, logs, metrics)

    def drained(self) -> bool:
        """Whether there is nothing left to take."""
        return not (self._steps or self._metrics) and self._logs.drained()

    def last_seen(self) -> dict[int, LastPhase]:
        """What each board shows; a rank that died before it made one was only spawned."""
        seen = {}
        for rank in self._seats:
            snapshot = self._snapshot(rank)
            seen[rank] = LastPhase(step=snapshot.step, phase=snapshot.phase.name)
        return seen

    def marks(self) -> dict[int, Mark]:
        """What moves on each board while its rank makes progress, as ``watch`` saw it last."""
        return {rank: mark_of(self._shown(rank)) for rank in self._readers}

    def usual_step_s(self) -> float | None:
        """The median time between the last steps told in this attempt; None before the first."""
        return statistics.median(self._step_times) if self._step_times else None

    def find(
        self,
        rank: int,
        ready: RankReady | None,
        stacks: Stacks | None,
        *,
        lost_thread: bool = False,
    ) -> RankFinding:
        """What is to be seen of a rank now."""
        sample = self._sample(rank, ready)
        pulse_ns = self._ask(rank, BoardReader.pulse_ns)
        return RankFinding(
            rank=rank,
            pid=sample.pid,
            phase=sample.phase,
            unit=sample.unit,
            step=sample.step,
            process=process_state(sample.pid),
            still_s=sample.beat_age_s,
            pulse_age_s=None if pulse_ns is None else _age_s(pulse_ns),
            issued=sample.issued,
            completed=sample.completed,
            frames=stacks.frames if stacks is not None else (),
            stacks=stacks.text if stacks is not None else None,
            lost_thread=lost_thread,
        )

    def end(self) -> None:
        """All ranks are dead: what others write to their logs from now on is not read."""
        self._logs.end()

    def close(self) -> None:
        """Close the boards."""
        for reader in self._readers.values():
            self._close(reader)
        self._readers.clear()

    def _close(self, reader: BoardReader) -> None:
        # A rank can give its board any memory beyond its end, and take its name: the last to close it frees that.
        try:
            self._beside(reader.close)
        except RuntimeError:  # ranks may have taken all threads
            reader.close()

    def _watch_steps(self) -> None:
        # The figures of a step are the same on all ranks: rank 0 speaks for the job.
        speaks = self._speaker in self._seats
        if not speaks and self._compares:
            return
        # Whoever may have to speak later knows what was told.
        one = self._speaker if speaks else min(self._seats)
        boards = [self._shown(rank) for rank in self._seats]
        for entry in self._ask(one, lambda board: board.steps_after(self._last_step or 0)) or ():
            if not speaks:
                self._last_step = entry.step
                if math.isfinite(entry.step_time_s):
                    self._step_times.append(entry.step_time_s)
                continue
            # A script may report every tenth step: then that is how often its board moves.
            apart = 1 if self._last_step is None else entry.step - self._last_step
            is_gap = apart > 1 and self._seats[one].spec.entrypoint is None
            if is_gap and not self._has_gaps:  # once: a rank can write any numbers, at any rate
                self._has_gaps = True
                _log.warning("steps_overwritten_before_read", after=self._last_step, at=entry.step)
            self._last_step = entry.step
            if math.isfinite(entry.step_time_s):
                self._step_times.append(entry.step_time_s * apart)
            most = max(board.memory_bytes for board in boards)
            self._steps.append(step_record(entry, self._seats[one].fence, most))

    def _watch_arrivals(self, ready: Mapping[int, RankReady | None]) -> None:
        # Replicas that may be lost count their collectives by themselves, each from its own start.
        if len(self._seats) < 2 or not self._compares:  # noqa: PLR2004 a comparison takes two
            return
        boards = [self._shown(rank) for rank in self._readers]
        issued = max((max(board.issued) for board in boards), default=0)
        step = max((board.step for board in boards), default=0)
        if not self._arrival_pacing.is_due(issued, step, time.monotonic()):
            return
        arrivals: dict[int, dict[ArrivalKey, int]] = {}
        for rank in list(self._readers):
            groups = ready[rank]
            if groups is not None:
                arrivals[rank] = {
                    (name, number): moment
                    for place, name in enumerate(groups.groups)
                    for number, moment in (self._ask(rank, _arrivals_at(place)) or {}).items()
                }
        self._meter.take(arrivals, self.usual_step_s())

    def _ask(self, rank: int, question: Callable[[BoardReader], _T]) -> _T | None:
        """What the board of a rank answers; None without one, or where it is broken."""
        reader = self._readers.get(rank)
        if reader is None:
            return None
        try:
            return question(reader)
        except BoardError as error:
            self.faults[rank] = str(error)
            self._close(self._readers.pop(rank))
            return None

    def _snapshot(self, rank: int) -> BoardSnapshot:
        read = self._ask(rank, BoardReader.read)
        # A fast writer can tear both snapshots under one look: what was seen before still holds.
        if read is not None:
            self._seen[rank] = read
        return self._shown(rank)

    def _shown(self, rank: int) -> BoardSnapshot:
        """What the board was last seen to show."""
        return self._seen.get(rank) or BoardSnapshot(fence=self._seats[rank].fence)

    def _sample(self, rank: int, ready: RankReady | None) -> RankSample:
        seat, board = self._seats[rank], self._snapshot(rank)
        units = ready.units if ready is not None else ()
        groups = ready.groups if ready is not None else ()
        lateness = self._meter.of(rank)
        newest = self._ask(rank, lambda reader: reader.step(max(board.step, 0)))
        fragments = self._ask(rank, BoardReader.fragments_bytes)
        return RankSample(
            rank=rank,
            local_rank=seat.local_rank,
            fence=seat.fence,
            node_id=self._node_id,
            device=seat.device,
            pid=self._pids[rank],
            phase=RankPhase(board.phase).name,
            unit=next(itertools.islice(units, board.unit_index, None), None)
            if board.unit_index is not None
            else None,
            step=max(board.step, 0),
            loss=_finite(board.loss),
            tokens_per_s=_finite(board.tokens_per_s),
            step_time_s=_finite(board.step_time_s),
            data_wait_s=None if newest is None else _finite(newest.data_wait_s),
            memory_bytes=max(board.memory_bytes, 0),
            peak_bytes=max(board.peak_bytes, 0) or None,
            fragments_bytes=fragments,
            issued=dict(zip(groups, board.issued, strict=False)),
            completed=dict(zip(groups, board.completed, strict=False)),
            beat_age_s=_age_s(board.stored_ns) if board.stored_ns else 0.0,
            arrival_lag_s=lateness.lag_s if lateness is not None else None,
            straggler_score=lateness.score if lateness is not None else None,
        )


def step_record(entry: BoardStep, fence: int, most_memory: int = 0) -> StepRecord:
    """A finished step as the controller reads it; ``most_memory``: what another rank may hold."""
    return StepRecord(
        step=entry.step,
        fence=fence,
        loss=_finite(entry.loss),
        grad_norm=_finite(entry.grad_norm),
        learning_rate=_finite(entry.learning_rate),
        tokens_per_s=_finite(entry.tokens_per_s) or 0.0,
        step_time_s=_finite(entry.step_time_s) or 0.0,
        data_wait_s=_finite(entry.data_wait_s),
        memory_bytes=max(entry.memory_bytes, most_memory, 0) or None,
        time_ms=entry.ended_ms if 0 < entry.ended_ms <= MOST_MS else None,
        of=entry.of or None,
    )


def _arrivals_at(place: int) -> Callable[[BoardReader], dict[int, int]]:
    return lambda board: board.arrivals(place)


def mark_of(board: BoardSnapshot) -> Mark:
    """What of a snapshot moves with the training."""
    return Mark(
        step=board.step,
        phase=board.phase,
        issued=tuple(board.issued),
        completed=tuple(board.completed),
        unit_index=board.unit_index,
    )


def _age_s(moment_ns: int) -> float:
    # A rank may write any moment to its board.
    return min(max(time.monotonic_ns() - moment_ns, 0) / _NS, MOST_SECONDS)


def _finite(figure: float) -> float | None:
    return figure if math.isfinite(figure) else None
