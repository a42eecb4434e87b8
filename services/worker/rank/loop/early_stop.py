"""Decisions by evaluations: which figure counts, and when a run has stopped getting better.

Every rank has the same evaluation, so all decide alike without a word between them.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from meshloom.data import Batch
from services.contract.jobs.spec_parts import EarlyStopSpec
from services.contract.jobs.specs import JobSpec

_LOSS: Final = "loss"


class MetricChoiceError(ValueError):
    """The spec decides something by a metric that evaluations do not have."""


def check_validation(spec: JobSpec, validation: Callable[[], Sequence[Batch]]) -> None:
    """Before the first step: what needs evaluations needs data for them.

    Raises:
        MetricChoiceError: There is none.
    """
    asking = {
        "train.early_stop": spec.train.early_stop,
        "checkpoint.keep_best": spec.checkpoint.keep_best,
        "evaluation": spec.evaluation,
    }
    for field, asked in asking.items():
        if asked is not None and not validation():
            raise MetricChoiceError(
                f"{field}: it needs evaluations, and the data has no validation part; give it one, or "
                "leave the field out"
            )


def chosen_figure(figures: Mapping[str, float], metric: str, field: str) -> float:
    """The figure of an evaluation that ``field`` of the spec names.

    Raises:
        MetricChoiceError: There is none of that name.
    """
    if metric not in figures:
        raise MetricChoiceError(
            f"{field}.metric: an evaluation gives {', '.join(sorted(figures))}, and no {metric}; name "
            "one of these, or have the loss return it"
        )
    return figures[metric]


@dataclass(frozen=True)
class Course:
    """How evaluations went: the best figure, the step it is of, how many since were no better."""

    best: float | None = None
    best_step: int = 0
    since: int = 0

    def after(self, step: int, value: float, wanted: EarlyStopSpec) -> "Course":
        """The course with one more evaluation. A figure that is no number is no better."""
        is_first = self.best is None and math.isfinite(value)
        if is_first or (
            self.best is not None and wanted.is_better(value, self.best, wanted.min_delta)
        ):
            return Course(value, step)
        return replace(self, since=self.since + 1)


class EarlyStop:
    """Whether a run is to end; a part of its checkpoints.

    Args:
        wanted: What the spec says.
    """

    def __init__(self, wanted: EarlyStopSpec) -> None:
        self._wanted = wanted
        self.course = Course()

    def note(self, step: int, figures: Mapping[str, float]) -> None:
        """Takes an evaluation into account.

        Raises:
            MetricChoiceError: It lacks the metric.
        """
        value = chosen_figure(figures, self._wanted.metric, "train.early_stop")
        self.course = self.course.after(step, value, self._wanted)

    @property
    def reason(self) -> str | None:
        """Why the run ends now; None: it goes on."""
        course, wanted = self.course, self._wanted
        if course.since < wanted.patience:
            return None
        what = "validation loss" if wanted.metric == _LOSS else f"{wanted.metric} of validation"
        best = (
            "no finite value before"
            if course.best is None
            else f"the best is {course.best:.6g} of step {course.best_step}"
        )
        return (
            f"stopped early: {what} did not improve in {course.since} evaluations in a row ({best})"
        )

    def state(self) -> Mapping[str, Any]:
        """What a checkpoint holds of it, as JSON."""
        course = self.course
        return {
            "metric": self._wanted.metric,
            "mode": self._wanted.mode,
            "best": course.best,
            "best_step": course.best_step,
            "since": course.since,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Goes on from a checkpoint; by another metric it starts over."""
        if (state["metric"], state["mode"]) == (self._wanted.metric, self._wanted.mode):
            self.course = Course(state["best"], state["best_step"], state["since"])

    def start_over(self) -> None:
        """Forgets all evaluations: those of another job do not end this one."""
        self.course = Course()
