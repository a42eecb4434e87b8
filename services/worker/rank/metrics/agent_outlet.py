"""A user's metrics on the rank's pipe, from where they reach the controller."""

from collections.abc import Callable, Sequence
from typing import Final

from services.contract.messages.rank_pipe import MetricPoint, RankMessage, RankMetrics
from services.worker.rank.metrics.points import VALIDATION, Point, thinned

_POINTS_A_LINE: Final = 32
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


class AgentOutlet:
    """Sends one message for all points of a second, at most 32 of the training among them.

    What the board tells is left out. A job of many steps sends every second step, every third and
    so on, such that those of the whole job are about 20 000.

    Args:
        send: Takes messages to the agent.
        steps: Of the whole job; None: nobody knows, and every step is sent.
    """

    name = "the controller"

    def __init__(self, send: Callable[[RankMessage], None], steps: int | None) -> None:
        self._send = send
        self._every = -(-(steps or 1) // _POINTS_A_JOB)

    def write(self, points: Sequence[Point]) -> None:
        """Sends them."""
        due = [p for p in points if p.is_validation or p.step % self._every == 0]
        told = [
            MetricPoint(step=point.step, values=values)
            for point in thinned([p for p in due if _users(p)], _POINTS_A_LINE)
            if (values := _users(point))
        ]
        for start in range(0, len(told), 2 * _POINTS_A_LINE):
            self._send(RankMetrics(points=tuple(told[start : start + 2 * _POINTS_A_LINE])))

    def close(self) -> None:
        """Nothing is kept."""


def _users(point: Point) -> dict[str, float | None]:
    own = {*OWN_FIGURES, VALIDATION + "loss"}
    return {name: value for name, value in point.finite.items() if name not in own}
