"""An elastic job's losses are those of the run that was never resized."""

from pathlib import Path
from typing import Any

import pytest

from services.contract.jobs.specs import JobSpec
from tests.rank.gang import Attempt, Ranks, spec_of

pytestmark = [pytest.mark.ranks, pytest.mark.system]

STEPS = 9
TRAIN = {"steps": STEPS, "global_batch": 12, "seed": 7}


def elastic(library: Path, **parts: dict[str, Any]) -> JobSpec:
    base: dict[str, dict[str, Any]] = {
        "train": TRAIN,
        "resources": {"world": {"min": 1, "max": 4}},
    }
    return spec_of(library, **(base | parts))


def resized(ranks: Ranks, job: JobSpec, worlds: tuple[int, ...]) -> dict[int, Attempt]:
    """Attempts of these sizes, each from the commit three steps after the one before began."""
    source, attempts = None, {}
    for number, world in enumerate(worlds):
        attempt = ranks.start(job, world, fence=2 + number, resume_from=source).succeeded()
        attempts[3 * number] = attempt
        source = attempt.committed(3 * number + 3).checkpoint_id
    return attempts


@pytest.mark.parametrize(
    ("worlds", "parts"),
    [
        ((4, 2, 4), {"train": {**TRAIN, "micro_batch": 1}}),
        ((4, 2, 4), {"mesh": {"dp_shard": 2}}),
    ],
    ids=["sharded", "replicas"],
)
def test_resizing_at_checkpoints_keeps_the_curve_of_the_fixed_run(
    ranks: Ranks, library: Path, worlds: tuple[int, ...], parts: dict[str, Any]
) -> None:
    fixed = ranks.start(spec_of(library, train=TRAIN), 2).succeeded().steps()
    attempts = resized(ranks, elastic(library, **parts), worlds)
    curve = {
        step.step: step
        for first, attempt in attempts.items()
        for step in attempt.steps()
        if first < step.step <= first + 3
    }
    assert sorted(curve) == list(range(1, STEPS + 1))
    for step in fixed:
        assert curve[step.step].loss == pytest.approx(step.loss, abs=1e-5)
        assert curve[step.step].grad_norm == pytest.approx(step.grad_norm, rel=1e-3)
        assert curve[step.step].learning_rate == step.learning_rate
