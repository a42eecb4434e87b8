"""Looks at layouts in the order of their bounds until none that is left can be better."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from fsdp_core.errors import PlanError
from fsdp_core.plan.model.answer import Candidate
from fsdp_core.plan.model.estimating import estimate
from fsdp_core.plan.model.floors import Divided, Floors
from fsdp_core.plan.model.score import Score, Spent, score
from fsdp_core.plan.model.space import Layout, LayoutSpace

# Steps that are followed before a search settles for what it has; of an 80-block model each takes
# some 10 ms.
_AT_MOST = 96
_FRUGAL = 24
# Fewer of a model with tens of thousands of parameters, of which each takes a second.
_MOST_FOLLOWED = 300_000
_AT_LEAST = 4


@dataclass(frozen=True)
class Found:
    """A layout with its estimate."""

    layout: Layout
    candidate: Candidate
    score: Score

    @property
    def key(self) -> tuple[Score, int, tuple[int, ...]]:
        """Orders what fits: the fastest, then the smallest, then the simplest."""
        return self.score, self.candidate.estimate.peak.memory.total, self.layout.complexity


class Hunt:
    """A search through one space; remembers what was estimated.

    Attributes:
        found: All that was estimated, by layout.
        refused: Layouts that the model does not allow, and why.
        exhaustive: Whether nothing was left out but by bounds.
        memory: Bytes that a rank may hold.
        at_most: Estimates that a search makes before it settles for what it has.
    """

    def __init__(self, space: LayoutSpace, divided: Divided | None = None) -> None:
        """Knows nothing yet.

        Args:
            space: To search.
            divided: As of `Floors`.
        """
        self._space = space
        self._floors = Floors(space, divided)
        self._memory: dict[Layout, int] = {}
        self._scores: dict[Layout, Score] = {}
        self.found: dict[Layout, Found] = {}
        self.refused: dict[Layout, str] = {}
        self.exhaustive = True
        self.memory = space.question.seats.memory
        self.at_most = max(min(_MOST_FOLLOWED // space.weight, _AT_MOST), _AT_LEAST)

    def best(self, layouts: Iterable[Layout]) -> Found | None:
        """The best of `layouts` that fits; None if there is none."""
        possible = [
            each for each in self.allowed(layouts) if self.least_memory(each) <= self.memory
        ]
        possible.sort(key=lambda each: (self.best_score(each), each.complexity))
        best: Found | None = None
        for number, layout in enumerate(possible):
            if best is not None and self.best_score(layout) > best.score:
                return best
            if number >= self.at_most:
                self.exhaustive = False
                return best or self._most_frugal(possible[number:])
            found = self.look(layout)
            if found is not None and found.candidate.fits:
                best = found if best is None else min(best, found, key=lambda each: each.key)
        return best

    def least(self, layouts: Iterable[Layout]) -> Found | None:
        """That which needs least memory, fit or not."""
        best: Found | None = None
        order = sorted(
            self.allowed(layouts), key=lambda each: (self.least_memory(each), each.complexity)
        )
        for number, layout in enumerate(order):
            if best is not None and self.least_memory(layout) > _total(best):
                break
            if number >= self.at_most:
                self.exhaustive = False
                break
            found = self.look(layout)
            if found is not None:
                options = [found] if best is None else [best, found]
                best = min(options, key=lambda each: (_total(each), each.key))
        return best

    def look(self, layout: Layout) -> Found | None:
        """A layout's estimate; None if the model does not allow it."""
        if layout in self.refused:
            return None
        if layout not in self.found:
            plan, training = self._space.plan(layout), self._space.training(layout)
            seats = self._space.question.seats
            try:
                cost = estimate(self._space.profile, plan, training, seats.node)
            except PlanError as error:
                self.refused[layout] = str(error)
                return None
            fits = cost.peak.memory.total <= seats.memory
            candidate = Candidate(plan, training.micro_batch, training.accumulation, cost, fits)
            spent = Spent(cost.flops, cost.sent, cost.time, cost.sent_in_groups)
            self.found[layout] = Found(layout, candidate, score(spent, plan.mesh, seats))
        return self.found[layout]

    def allowed(self, layouts: Iterable[Layout]) -> list[Layout]:
        """Those of which something can be said; why not, of the others, is in `refused`."""
        return [layout for layout in layouts if self._is_allowed(layout)]

    def _is_allowed(self, layout: Layout) -> bool:
        try:
            self.least_memory(layout)
        except PlanError as error:
            self.refused[layout] = str(error)
        return layout not in self.refused

    def least_memory(self, layout: Layout) -> int:
        """A bound below the bytes that a layout needs."""
        if layout not in self._memory:
            self._memory[layout] = self._floors.memory(layout)
        return self._memory[layout]

    def best_score(self, layout: Layout) -> Score:
        """A bound below a layout's score."""
        if layout not in self._scores:
            self._scores[layout] = self._floors.score(layout)
        return self._scores[layout]

    def _most_frugal(self, layouts: Iterable[Layout]) -> Found | None:
        order = sorted(layouts, key=lambda each: (self.least_memory(each), each.complexity))
        tried = (self.look(layout) for layout in order[: min(_FRUGAL, self.at_most)])
        fitting = [found for found in tried if found is not None and found.candidate.fits]
        return min(fitting, key=lambda each: each.key, default=None)


def _total(found: Found) -> int:
    return found.candidate.estimate.peak.memory.total
