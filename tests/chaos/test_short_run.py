"""The chaos program in short: one seed, few faults, every check."""

import io
from itertools import islice
from pathlib import Path

import pytest
from rich.console import Console

from tests.chaos.faults import FAULTS, schedule
from tests.chaos.program import Options, torment

pytestmark = [pytest.mark.ranks, pytest.mark.redis]


def test_a_seed_names_its_faults_and_each_kind_comes_before_any_comes_twice() -> None:
    kinds = len(FAULTS)
    first, again, other = (list(islice(schedule(seed, 60, 2), 2 * kinds)) for seed in (7, 7, 8))
    assert first == again
    assert first != other
    for half in (first[:kinds], first[kinds:]):
        assert {planned.fault for planned in half} == set(FAULTS)


@pytest.mark.timeout(600)
def test_a_short_run_breaks_no_promise(tmp_path: Path) -> None:
    options = Options(seed=441, minutes=10, kill_every_s=1, faults=4, steps=500, pace_s=0.05)
    said = io.StringIO()
    figures = torment(options, tmp_path, Console(file=said, width=120))
    assert figures.violation is None, said.getvalue()
    assert len(figures.faults) == options.faults
    assert 0 < figures.useful_part < 1
    figures.write(tmp_path / "figures.json")
