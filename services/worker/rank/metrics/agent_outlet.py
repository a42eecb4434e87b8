"""A user's metrics on the rank's pipe, from where they reach the controller."""

import itertools
from collections.abc import Callable, Sequence
from typing import Final

from services.contract.messages.rank_pipe import MetricPoint, RankMessage, RankMetrics
from services.contract.words.bounds import METRIC_NAMES_KEPT, metric_name
from services.worker.rank.metrics.points import VALIDATION, Point, thinned

_POINTS_A_LINE: Final = 64
_LINES_A_SECOND: Final = 4
_VALUES_A_SECOND: Final = 4_096
_NAMES_COUNTED: Final = 1_024
_POINTS_A_JOB: Final = 20_000
OWN_FIGURES: Final = frozenset(
    {
        "loss",
        "grad_norm",
        "learning_rate",
        "tokens_per_s",
        "samples_per_s",
        "step_time_s",
        "data_wait_s",
    }
)
_OF_THE_BOARD: Final = OWN_FIGURES | {VALIDATION + "loss"}


class AgentOutlet:
    """Sends messages for the points of a second: four at most, of which each has 64 points at most.

    An agent reads 1 MiB a second of a pipe, so the more names there are, the fewer points are sent.
    What the board tells is left out, and so are all names but the first 64. A job of many steps sends
    every second step, every third and so on, such that those of the whole job are about 20 000.

    Args:
        send: Takes messages to the agent.
        steps: Of the whole job; None: nobody knows, and every step is sent.
    """

    name = "the controller"

    def __init__(self, send: Callable[[RankMessage], None], steps: int | None) -> None:
        self._send = send
        self._every = -(-(steps or 1) // _POINTS_A_JOB)
        self._names: dict[str, None] = {}

    def write(self, points: Sequence[Point]) -> None:
        """Sends them."""
        due = [p for p in points if p.is_validation or p.step % self._every == 0]
        told = [point for point in due if self._kept(point)]
        widest = max((len(self._kept(point)) for point in told), default=1)
        most = min(max(_VALUES_A_SECOND // widest, 2), _LINES_A_SECOND * _POINTS_A_LINE)
        sent = [
            MetricPoint(step=point.step, values=self._kept(point))
            for point in thinned(told, most)[-2 * most :]
        ]
        left_out = max(len(self._names) - METRIC_NAMES_KEPT, 0)
        for start in range(0, len(sent), _POINTS_A_LINE):
            part = tuple(sent[start : start + _POINTS_A_LINE])
            self._send(RankMetrics(points=part, left_out=left_out))

    def close(self) -> None:
        """Nothing is kept."""

    def _kept(self, point: Point) -> dict[str, float | None]:
        """The user's values of a point, of the first 64 names that the job has."""
        users = {metric_name(n): v for n, v in point.finite.items() if n not in _OF_THE_BOARD}
        for name in users:
            if len(self._names) < _NAMES_COUNTED:
                self._names.setdefault(name)
        known = set(itertools.islice(self._names, METRIC_NAMES_KEPT))
        return {name: value for name, value in users.items() if name in known}
