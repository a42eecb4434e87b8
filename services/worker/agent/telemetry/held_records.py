"""Records that no server has taken yet: they wait here for later beats, bounded in all."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Final

from services.worker.agent.telemetry.beat import GangKey
from services.worker.agent.telemetry.gang_logs import LINES_PER_BEAT
from services.worker.agent.telemetry.gang_telemetry import (
    METRICS_PER_BEAT,
    STEPS_PER_BEAT,
    Records,
)

STEPS_HELD: Final = 100_000
LINES_HELD: Final = 10_000
METRICS_HELD: Final = 10_000
STEPS_OF_ALL: Final = 10_000
"""So many go with one beat, of all gangs: ten thousands take the loop, and Redis, a second to write."""
LINES_OF_ALL: Final = 4_000
METRICS_OF_ALL: Final = 2_000


class HeldRecords:
    """Records of gangs, those that have ended too, in the order in which they came.

    There are at most 100 000 steps, 10 000 lines of output and 10 000 metrics of all gangs together: beyond
    that the oldest of the gang that was heard of longest ago are let go.
    """

    def __init__(self) -> None:
        self._by_gang: dict[GangKey, Records] = {}

    @property
    def gangs(self) -> set[GangKey]:
        """Whose records are here."""
        return set(self._by_gang)

    def add(self, taken: Iterable[Records]) -> None:
        """Hold what came since."""
        for new in taken:
            old = self._by_gang.pop((new.job_id, new.fence), None)
            self._by_gang[new.job_id, new.fence] = new if old is None else _joined(old, new)
        self._let_go()

    def put_back(self, taken: Iterable[Records]) -> None:
        """Hold what was to be in a beat and could not be written: it is older than what is here."""
        for old in taken:
            key = (old.job_id, old.fence)
            new = self._by_gang.get(key)
            self._by_gang[key] = old if new is None else _joined(old, new)
        self._let_go()

    def next_beat(self) -> list[Records]:
        """Hand out the oldest of each gang, as much as one beat takes."""
        beat = []
        gangs = dict(self._by_gang)
        steps = _shares({k: len(h.steps) for k, h in gangs.items()}, STEPS_PER_BEAT, STEPS_OF_ALL)
        lines = _shares({k: len(h.logs) for k, h in gangs.items()}, LINES_PER_BEAT, LINES_OF_ALL)
        metrics = _shares(
            {k: len(h.metrics) for k, h in gangs.items()}, METRICS_PER_BEAT, METRICS_OF_ALL
        )
        for key, held in gangs.items():
            now, later = _split(held, steps[key], lines[key], metrics[key])
            beat.append(now)
            if later.steps or later.logs or later.metrics:
                self._by_gang[key] = later
            else:
                del self._by_gang[key]
        return beat

    def _let_go(self) -> None:
        left = [STEPS_HELD, LINES_HELD, METRICS_HELD]
        for key, held in reversed(self._by_gang.items()):
            parts: Sequence[Sequence[object]] = (held.steps, held.logs, held.metrics)
            over = [max(0, len(part) - most) for part, most in zip(parts, left, strict=True)]
            if any(over):
                _, self._by_gang[key] = _split(held, *over)
            left = [max(0, most - len(part)) for part, most in zip(parts, left, strict=True)]


def _shares(waiting: Mapping[GangKey, int], most: int, of_all: int) -> dict[GangKey, int]:
    """How many of each gang go now: who has few waiting waits for nobody, the others share what is left."""
    found: dict[GangKey, int] = {}
    for place, (key, count) in enumerate(sorted(waiting.items(), key=lambda item: item[1])):
        found[key] = min(count, most, of_all // (len(waiting) - place))
        of_all -= found[key]
    return found


def _joined(old: Records, new: Records) -> Records:
    return replace(
        new,
        steps=old.steps + new.steps,
        logs=old.logs + new.logs,
        metrics=old.metrics + new.metrics,
    )


def _split(held: Records, steps: int, lines: int, metrics: int) -> tuple[Records, Records]:
    """The first so many of each, and the others."""
    first = replace(
        held, steps=held.steps[:steps], logs=held.logs[:lines], metrics=held.metrics[:metrics]
    )
    others = replace(
        held, steps=held.steps[steps:], logs=held.logs[lines:], metrics=held.metrics[metrics:]
    )
    return first, others
