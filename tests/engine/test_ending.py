"""What the end of a backward ends."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from fsdp_core.runtime.ending import Ending, ending_of


@dataclass(frozen=True)
class Unit:
    name: str
    is_in_forward: bool = False
    is_running: bool = False


ROOT, BODY, HEAD = Unit("root"), Unit("body"), Unit("head")
UNITS = [ROOT, BODY, HEAD]


def test_a_backward_through_a_forward_ends_all_units() -> None:
    assert ending_of(UNITS, {BODY}, None, ends_all=True) == Ending(
        (ROOT, BODY, HEAD), (), (), closes_pass=True
    )


def test_one_that_came_otherwise_ends_the_units_it_reached() -> None:
    assert ending_of(UNITS, {HEAD}, None, ends_all=False) == Ending(
        (HEAD,), (), (ROOT, BODY), closes_pass=False
    )


@pytest.mark.parametrize(("reached", "closes"), [({HEAD}, True), ({BODY}, False)])
def test_a_pass_is_over_with_its_opener(reached: set[Unit], closes: bool) -> None:  # noqa: FBT001 - a case
    assert ending_of(UNITS, reached, HEAD, ends_all=False).closes_pass is closes


@pytest.mark.parametrize("ends_all", [True, False])
def test_a_forward_that_is_running_goes_on(ends_all: bool) -> None:  # noqa: FBT001 - a case
    opener = Unit("root", is_in_forward=True, is_running=True)
    ending = ending_of([opener, BODY, HEAD], {opener, HEAD}, opener, ends_all=ends_all)
    ended, left_out = ((BODY, HEAD), ()) if ends_all else ((HEAD,), (BODY,))
    assert ending == Ending(ended, (opener,), left_out, closes_pass=False)
