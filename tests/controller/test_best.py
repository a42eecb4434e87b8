"""Which checkpoints are the best, and that retention keeps them; runs that ended early."""

from collections.abc import Sequence
from dataclasses import dataclass
from unittest.mock import Mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.contract.api.requests import CloneRequest
from services.contract.jobs.specs import JobSpec
from services.contract.messages.facts import CheckpointVoted, GangEnded
from services.contract.words.states import CheckpointState, ExitReason, JobState
from services.controller.domain.job import job as jobs
from services.controller.domain.job.checkpoint import best_of
from services.controller.domain.job.events import JobEvent
from services.controller.domain.job.job import Job
from services.controller.use_cases.clone import _origin
from tests.controller.conftest import ControlPlane
from tests.controller.histories import finished, linked, play, running, saved, vote
from tests.waiting import until

Figures = dict[str, float | None]


def judged(job: Job, step: int, number: int, figures: Figures) -> list[JobEvent]:
    """A checkpoint from its beginning to its commit, with an evaluation."""
    events: list[JobEvent] = []
    for event in saved(job, step, number=number):
        if isinstance(event, CheckpointVoted):
            events.append(event.model_copy(update={"evaluation": figures}))
        else:
            events.append(event)
    return events


def committed(job: Job) -> set[int]:
    return {c.step for c in job.checkpoints.values() if c.state is CheckpointState.COMMITTED}


@dataclass
class Course:
    """A job that saves, and the number of its chain at which it stands."""

    job: Job
    number: int = 1

    def saves(self, step: int, figures: Figures) -> None:
        self.number += 1
        events = judged(self.job, step, self.number, figures)
        sealed = play(self.job, events[:-1]).job
        known = next(c for c in sealed.checkpoints.values() if c.step == step)
        link = linked(sealed, step, number=self.number)
        told = link.model_copy(update={"manifest": known.manifest})
        self.job = play(sealed, [told]).job


VALUES = st.lists(st.none() | st.integers(-3, 3).map(float), min_size=1, max_size=12)


@given(
    VALUES,
    st.integers(1, 3),
    st.integers(1, 3),
    st.sampled_from(["min", "max"]),
)
def test_the_best_of_all_that_were_ever_committed_stay_beside_the_last(
    values: list[float | None], last: int, count: int, mode: str
) -> None:
    keep = {"keep_last": last, "keep_best": {"metric": "f1", "mode": mode, "count": count}}
    course = Course(running(checkpoint=keep))
    for place, value in enumerate(values):
        course.saves(place + 2, {"loss": 1.0, "f1": value})
    steps = range(2, len(values) + 2)
    sign = -1.0 if mode == "max" else 1.0
    ranked = sorted(
        (sign * value, step) for step, value in zip(steps, values, strict=True) if value is not None
    )
    best = [step for _, step in ranked[:count]]
    assert committed(course.job) == {*best, *list(steps)[-last:]}
    found = course.job.best_checkpoint
    assert (found.step if found else None) == (best[0] if best else None)


def test_without_keep_best_the_last_stay_and_the_best_is_that_of_the_validation_loss() -> None:
    course = Course(running(checkpoint={"keep_last": 2}))
    for step, loss in ((2, 1.0), (4, 3.0), (6, 2.0)):
        course.saves(step, {"loss": loss})
    assert committed(course.job) == {4, 6}
    assert course.job.best_checkpoint is not None
    assert course.job.best_checkpoint.step == 6
    begins = _origin(course.job, CloneRequest(from_checkpoint="best"), course.job.spec)
    assert begins.step == 6


def test_a_clone_from_the_best_needs_an_evaluation() -> None:
    course = Course(running())
    course.saves(2, {})
    with pytest.raises(Exception, match="none yet with an evaluation at its step"):
        _origin(course.job, CloneRequest(from_checkpoint="best"), course.job.spec)


def early(job: Job, step: int) -> GangEnded:
    ended = finished(job, step=step)
    why = "stopped early: validation loss did not improve in 2 evaluations in a row"
    exits = [gone.model_copy(update={"early": why}) for gone in ended.exits]
    return ended.model_copy(update={"exits": tuple(exits)})


@pytest.mark.parametrize("is_late", [False, True])
def test_a_run_that_ended_early_has_succeeded_once_its_last_checkpoint_is_committed(
    *, is_late: bool
) -> None:
    job = running()
    *before, link = saved(job, 40)
    steps: Sequence[JobEvent] = (
        [*before, early(job, 40), link] if is_late else [*before, link, early(job, 40)]
    )
    done = play(job, steps).job
    assert (done.state, done.exit_reason) == (JobState.SUCCEEDED, ExitReason.COMPLETED)
    assert done.reason == (
        "stopped early: validation loss did not improve in 2 evaluations in a row; "
        "the last checkpoint is committed"
    )


def test_a_run_that_ended_early_without_its_last_checkpoint_goes_on() -> None:
    job = running()
    done = play(job, [*saved(job, 20), vote(job, 40, 0), early(job, 40)]).job
    assert done.state is JobState.RESTARTING


def test_a_script_has_no_evaluations_to_keep_the_best_by() -> None:
    fields = {"entrypoint": {"script": "train.py"}, "checkpoint": {"keep_best": {}}}
    with pytest.raises(ValueError, match=r"checkpoint\.keep_best: .* a script has none"):
        JobSpec.model_validate(fields)


@pytest.mark.redis
def test_of_a_list_of_checkpoints_the_best_is_looked_for_once(
    plane: ControlPlane, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A script may keep thousands: of 1200, eight lists at a time had the controller stand still for seconds."""
    plane.agent.join()
    job_id = plane.submit(train={"steps": 20}, checkpoint={"keep_last": 5})
    gang = plane.agent.launches(job_id)
    plane.agent.trains(gang, [1])
    for number, loss in enumerate((3.0, 1.0, 2.0), 2):
        plane.agent.saves(gang, number, number, evaluation={"loss": loss})
    path = f"/v1/jobs/{job_id}/checkpoints"
    until(lambda: [c["state"] for c in plane.get(path)["items"]] == ["COMMITTED"] * 3)
    looked = Mock(wraps=best_of)
    monkeypatch.setattr(jobs, "best_of", looked)
    items = plane.get(path)["items"]
    assert [(c["step"], c["best"]) for c in items] == [(4, False), (3, True), (2, False)]
    assert looked.call_count == 1
    shown = [plane.get(f"/v1/checkpoints/{c['id']}")["best"] for c in items]
    assert shown == [False, True, False]
