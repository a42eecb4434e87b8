"""Where a training loop reports its metrics, once a step.

What is reported is only put aside; a thread of rank 0 takes it to the outlets once a second. An
outlet that fails is told of once, in the log, and never ends the training.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Final, Protocol, Self

from services.contract.messages.rank_pipe import RankMessage, RankSeat
from services.contract.system.own_process import say
from services.contract.words.bounds import encodable
from services.worker.rank.metrics.agent_outlet import AgentOutlet
from services.worker.rank.metrics.event_file import EventFile
from services.worker.rank.metrics.files import MetricFiles
from services.worker.rank.metrics.json_lines import JsonLines
from services.worker.rank.metrics.points import VALIDATION, Point
from services.worker.rank.metrics.trackers import trackers

_PENDING: Final = 100_000
_EVERY_S: Final = 1.0
# An agent gives a rank that has finished 20 s to leave, and one that has failed 5 s to say why.
_LEAVES_WITHIN_S: Final = 15.0
_FAILS_WITHIN_S: Final = 2.0


class Outlet(Protocol):
    """Where points go. Called by one thread; whatever it raises ends this outlet alone."""

    @property
    def name(self) -> str:
        """What people call it."""
        ...

    def write(self, points: Sequence[Point]) -> None:
        """Takes some points, oldest first; called about once a second."""
        ...

    def close(self) -> None:
        """No more points come."""
        ...


class MetricsReporter:
    """The metrics of one rank of an attempt: rank 0 speaks for the job, others do nothing.

    A context manager: leaving it writes what is left, which may take 15 s where a service of the
    user's is slow, 2 s after an exception; what is not taken by then is lost.

    Args:
        seat: The rank's seat.
        send: Takes messages to the agent; callable from any thread.
        outlets: Further ones, beside files, the agent and what the spec names.
    """

    def __init__(
        self, seat: RankSeat, send: Callable[[RankMessage], None], outlets: Sequence[Outlet] = ()
    ) -> None:
        self._is_effective = seat.rank == 0
        self._pending: deque[Point] = deque(maxlen=_PENDING)
        self._ends = threading.Event()
        self._thread: threading.Thread | None = None
        self._outlets: list[Outlet] = []
        if self._is_effective:
            files = MetricFiles.of(Path(seat.log_folder), seat.fence)
            self._outlets.append(JsonLines(files.json_lines, seat.fence))
            self._outlets.append(EventFile(files.events))
            if seat.hears_metrics:
                self._outlets.append(AgentOutlet(send, seat.spec.steps))
            self._outlets += [*trackers(seat), *outlets]

    def report(self, step: int, values: Mapping[str, float], *, validation: bool = False) -> None:
        """Reports values at a step; to be called on every rank, effective on rank 0.

        The names ``loss``, ``grad_norm``, ``learning_rate``, ``tokens_per_s``, ``samples_per_s``,
        ``step_time_s`` and ``data_wait_s`` are those of the job's own figures, which reach the
        controller by the board: here they go to files and services alone.

        Args:
            step: After which, from 1.
            values: Numbers by name, or what ``float`` makes one of (a tensor of one element). No
                finite number: a gap.
            validation: Whether they are of a validation pass: their names then begin with
                ``validation/``.

        Raises:
            TypeError: A value is no number; the metric is named.
        """
        if not self._is_effective or not values:
            return
        before = VALIDATION if validation else ""
        # What is no Unicode neither TensorBoard nor the pipe takes.
        taken = {
            encodable(f"{before}{name}"): _number(name, value) for name, value in values.items()
        }
        self._pending.append(Point(step, taken, time.time()))

    def __enter__(self) -> Self:
        """Begins to write."""
        if self._is_effective:
            self._thread = threading.Thread(target=self._write_on, name="metrics", daemon=True)
            self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Writes the rest."""
        if self._thread is not None:
            self._ends.set()
            self._thread.join(_LEAVES_WITHIN_S if kind is None else _FAILS_WITHIN_S)

    def _write_on(self) -> None:
        ended = False
        while not ended:
            ended = self._ends.wait(_EVERY_S)
            points = [self._pending.popleft() for _ in range(len(self._pending))]
            if points:
                self._each(lambda outlet: outlet.write(points))  # noqa: B023 called at once
        self._each(lambda outlet: outlet.close())

    def _each(self, act: Callable[[Outlet], None]) -> None:
        for outlet in tuple(self._outlets):
            try:
                act(outlet)
            except Exception as error:  # noqa: BLE001 no outlet may end the training
                self._outlets.remove(outlet)
                said = f"{type(error).__name__}: {error}"
                say(f"WARNING: metrics are no longer written to {outlet.name}: {said}\n", "stderr")


def _number(name: str, value: object) -> float:
    try:
        return float(value)  # type: ignore[arg-type]  # users give what they have
    except (TypeError, ValueError, RuntimeError) as error:
        kind = type(value).__name__
        raise TypeError(f"metric {name!r}: {kind} is no number: {error}") from error
