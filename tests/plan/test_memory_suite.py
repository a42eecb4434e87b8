"""Estimated peaks against measured ones, on models and layouts of all kinds."""

from __future__ import annotations

from statistics import median

import pytest

from tests.engine.gang import Gangs
from tests.plan.suite import CASES, estimated, measured

pytestmark = pytest.mark.ranks

# By world, so that ranks need not be started anew for each case.
NAMES = sorted(CASES, key=lambda name: CASES[name].plan.mesh.ranks)
_errors: dict[str, float] = {}


def error_of(name: str, gangs: Gangs) -> float:
    """How far the estimate lies off the rank that held most, as a part of that."""
    if name not in _errors:
        case = CASES[name]
        peak = max(gangs(case.plan.mesh.ranks).run(measured, name))
        _errors[name] = abs(estimated(case).peak.memory.total / peak - 1)
    return _errors[name]


@pytest.mark.parametrize("name", NAMES)
def test_the_estimated_peak_is_within_a_tenth_of_the_measured_one(name: str, gangs: Gangs) -> None:
    assert error_of(name, gangs) < 0.10


def test_half_of_all_estimates_are_within_a_hundredth(gangs: Gangs) -> None:
    assert len(NAMES) >= 12
    assert median(error_of(name, gangs) for name in NAMES) < 0.01
