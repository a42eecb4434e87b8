"""Estimated peaks against measured ones, on models and layouts of all kinds."""

from __future__ import annotations

from statistics import median

import pytest
import torch

from tests.engine.gang import Gang, Gangs
from tests.plan.suite import CASES, SHARED, Held, estimated, measured
from tests.plan.wide_suite import WIDE, measured_wide

pytestmark = [pytest.mark.ranks, pytest.mark.system]

HAS_BF16 = torch.backends.cpu.get_cpu_capability() == "AVX512"
# On processors where oneDNN has no convolutions in bf16 PyTorch's own take a second each.
SLOW = "convnet, bf16, recomputed"
# By world, so that ranks need not be restarted for each case.
BY_WORLD = sorted(CASES, key=lambda name: CASES[name].plan.mesh.ranks)
NAMES = [
    pytest.param(name, marks=pytest.mark.skipif(not HAS_BF16, reason="needs AVX-512"))
    if name == SLOW
    else name
    for name in BY_WORLD
]
OF_EACH_KIND = ["LSTM", "mixture of experts", "mixer"]
_held: dict[str, Held] = {}


def held(name: str, gangs: Gangs) -> Held:
    """By the rank that held most."""
    if name not in _held:
        ranks = gangs(CASES[name].plan.mesh.ranks).run(measured, name)
        _held[name] = Held(*(max(each) for each in zip(*map(tuple, ranks), strict=True)))
    return _held[name]


def off_by_tensors(name: str, gangs: Gangs) -> float:
    """How far the estimate without libraries is from live tensors, as a part of these."""
    predicted = estimated(CASES[name], only_tensors=True).peak.memory.total
    return abs(predicted / held(name, gangs).tensors - 1)


@pytest.mark.parametrize("name", NAMES)
def test_the_estimated_peak_is_within_a_tenth_of_the_allocators(name: str, gangs: Gangs) -> None:
    predicted = estimated(CASES[name]).peak.memory.total
    assert predicted == pytest.approx(held(name, gangs).allocated, rel=0.10)


@pytest.mark.parametrize("name", NAMES)
def test_without_libraries_it_is_within_a_tenth_of_live_tensors(name: str, gangs: Gangs) -> None:
    assert off_by_tensors(name, gangs) < 0.10


def test_half_of_all_estimates_are_within_a_hundredth_of_live_tensors(gangs: Gangs) -> None:
    names = [name for name in BY_WORLD if HAS_BF16 or name != SLOW]
    assert len(names) >= 12
    assert median(off_by_tensors(name, gangs) for name in names) < 0.01


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    is_whole = metafunc.config.getoption("--grid") == "full"
    if "wide" in metafunc.fixturenames:
        metafunc.parametrize("wide", [*WIDE] if is_whole else OF_EACH_KIND)
    if "shared" in metafunc.fixturenames:
        # Each starts ranks of its own: but for the full grid, each case shares memory in one of the two ways.
        metafunc.parametrize("shared", [*SHARED] if is_whole else [*SHARED][::4] + [*SHARED][3::4])


def test_recurrent_mixture_and_attention_free_models_are_within_a_tenth(
    wide: str, gangs: Gangs
) -> None:
    case = WIDE[wide]
    held = max(each.allocated for each in gangs(case.plan.mesh.ranks).run(measured_wide, wide))
    assert estimated(case).peak.memory.total == pytest.approx(held, rel=0.10)


def test_where_ranks_share_memory_the_estimate_is_within_a_tenth(shared: str) -> None:
    case = SHARED[shared]
    # Fresh storage: what earlier cases left in segments is used again.
    gang = Gang(case.plan.mesh.ranks, "cpu")
    held = max(each.allocated for each in gang.run(measured, shared))
    gang.close()
    assert estimated(case).peak.memory.total == pytest.approx(held, rel=0.10)
