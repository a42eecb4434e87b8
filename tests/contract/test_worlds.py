"""Which numbers of ranks an elastic job can have, and what it costs to find them."""

import sys
from itertools import product
from types import FrameType
from typing import Any

import pytest

from services.contract.jobs.worlds import Share, possible_worlds


@pytest.mark.parametrize(("tp", "shards"), [(1, 1), (1, 2), (2, 1), (2, 3), (3, 2)])
def test_they_are_those_that_share_a_step_out_evenly(tp: int, shards: int) -> None:
    copy = tp * shards
    for batch, micro, least in product((1, 24, 36, 97, 98), (None, 1, 2, 3, 4), (1, 5)):
        even = [
            ranks
            for ranks in range(least, 100)
            if ranks % copy == 0
            if batch % (ranks // tp * (micro or 1)) == 0
        ]
        assert list(possible_worlds(Share(copy, tp, batch, micro), least, 99)) == even


@pytest.mark.parametrize("batch", [65_536 * 3, 735_134_400, 999_999_937, 999_950_884])
def test_they_are_found_without_trying_each_of_65536_numbers(batch: int) -> None:
    """A queue of two thousand jobs asks for those of each: a hundredth of a second for one stops it for long."""
    lines = 0

    def counted(_frame: FrameType, event: str, _argument: object) -> Any:  # noqa: ANN401 as sys has it
        nonlocal lines
        lines += event == "line"
        return counted

    possible_worlds(Share(1, 1, 2, None), 1, 65_536)  # what is made once
    before = sys.gettrace()
    sys.settrace(counted)
    try:
        worlds = possible_worlds(Share(1, 1, batch, None), 1, 65_536)
    finally:
        sys.settrace(before)
    assert worlds[0] == 1
    assert lines < 30_000
