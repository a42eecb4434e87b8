"""Which unit is gathered ahead of its use."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from fsdp_core.schedule import BackwardOrder, ForwardOrder, InFlightWindow

passes = st.lists(st.integers(0, 5), max_size=8)


def run(order: ForwardOrder, units: list[int]) -> list[int | None]:
    order.begin(units[0] if units else 0)
    predicted = [order.enter(unit) for unit in units]
    order.end()
    return predicted


@given(passes)
def test_a_repeated_pass_is_predicted_wholly(units: list[int]) -> None:
    order = ForwardOrder()
    assert run(order, units) == [None] * len(units)
    assert run(order, units) == [*units[1:], None][: len(units)]


def test_a_pass_that_gathers_nothing_is_not_predicted_from() -> None:
    order = ForwardOrder()
    run(order, [0, 1, 2])
    assert run(order, []) == []
    assert run(order, [0, 1, 2]) == [1, 2, None]


def test_passes_that_alternate_as_the_root_is_whole_in_the_second_are_predicted() -> None:
    order = ForwardOrder()
    for gathered in ([0, 1, 2], [1, 2]):
        order.begin(0)
        assert [order.enter(unit) for unit in gathered] == [None] * len(gathered)
        order.end()
    for gathered in ([0, 1, 2], [1, 2], [0, 1, 2]):
        order.begin(0)
        assert [order.enter(unit) for unit in gathered] == [*gathered[1:], None]
        order.end()


def test_a_pass_that_deviates_is_not_guessed_at_again() -> None:
    order = ForwardOrder()
    run(order, [0, 1, 2, 3])
    assert run(order, [0, 2, 2, 3]) == [1, None, None, None]
    assert run(order, [0, 2, 2, 3]) == [2, 2, 3, None]


def test_a_unit_that_runs_alone_does_not_change_what_is_predicted_of_the_root() -> None:
    order = ForwardOrder()
    run(order, [0, 1, 2])
    run(order, [2])
    assert run(order, [0, 1, 2]) == [1, 2, None]


@given(passes)
def test_backward_predicts_the_reverse_of_forward(units: list[int]) -> None:
    order = BackwardOrder()
    for unit in units:
        order.record(unit)
    reverse = units[::-1]
    assert [order.take(unit) for unit in reverse] == [*reverse[1:], None][: len(units)]
    assert all(order.take(unit) is None for unit in units)


def test_a_cleared_order_predicts_nothing() -> None:
    order = BackwardOrder()
    order.record(0)
    order.record(1)
    order.clear()
    assert order.take(1) is None


@given(st.integers(1, 4), st.integers(0, 9))
def test_a_window_never_holds_more_than_its_capacity(capacity: int, items: int) -> None:
    window: InFlightWindow[int] = InFlightWindow(capacity)
    landed: list[int] = []
    for item in range(items):
        landed += window.room_for_one()
        window.admit(item)
        assert len(window) <= capacity
    assert [*landed, *window.drain()] == list(range(items))
    assert len(window) == 0
