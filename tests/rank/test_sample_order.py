"""The order of samples is a function of seed and number, and every epoch has every sample once."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.worker.rank.data.order import SampleOrder, held_out, permuted

LENGTHS = st.integers(1, 300)
SEEDS = st.integers(0, 1 << 62)


@settings(max_examples=40)
@given(length=LENGTHS, keys=st.lists(SEEDS, min_size=8, max_size=8))
def test_a_permutation_has_every_place_once(length: int, keys: list[int]) -> None:
    assert sorted(permuted(np.arange(length), length, keys).tolist()) == list(range(length))


def test_no_place_is_likelier_than_another() -> None:
    order = SampleOrder([5], [1.0], seed=3)
    rows = np.array([ref.row for ref in order.refs(order.start, range(10_000))]).reshape(-1, 5)
    for place in range(5):
        share = np.bincount(rows[:, place], minlength=5) / len(rows)
        assert share == pytest.approx(np.full(5, 0.2), abs=0.03)


@settings(max_examples=40)
@given(length=LENGTHS, first=st.integers(0, 1000), count=st.integers(1, 700), seed=SEEDS)
def test_epochs_follow_each_other_without_a_gap(
    length: int, first: int, count: int, seed: int
) -> None:
    order = SampleOrder([length], [1.0], seed)
    refs = order.refs(order.start, range(first, first + count))
    assert [ref.number for ref in refs] == list(range(first, first + count))
    assert [ref.epoch for ref in refs] == [
        number // length for number in range(first, first + count)
    ]
    whole = order.refs(order.start, range((first + count) // length * length + length))
    assert whole[first : first + count] == refs
    for epoch in {ref.epoch for ref in refs}:
        assert sorted(ref.row for ref in whole if ref.epoch == epoch) == list(range(length))


def test_epochs_and_seeds_differ_in_order() -> None:
    one, other = (SampleOrder([50], [1.0], seed) for seed in (1, 2))
    rows = [ref.row for ref in one.refs(one.start, range(100))]
    assert rows[:50] != rows[50:]
    assert rows != [ref.row for ref in other.refs(other.start, range(100))]
    plain = SampleOrder([3], [1.0], 1, shuffled=[False])
    assert [ref.row for ref in plain.refs(plain.start, range(7))] == [0, 1, 2, 0, 1, 2, 0]


def test_the_order_is_that_of_every_version() -> None:
    order = SampleOrder([10, 4], [3.0, 1.0], seed=7)
    refs = order.refs(order.start, range(8))
    assert [ref.source for ref in refs] == [0, 0, 0, 0, 0, 1, 0, 1]
    assert [ref.row for ref in refs] == [0, 7, 2, 1, 9, 0, 4, 2]


@settings(max_examples=40)
@given(
    lengths=st.lists(st.integers(1, 20), min_size=2, max_size=4),
    cuts=st.lists(st.integers(0, 60), max_size=5),
    seed=SEEDS,
)
def test_a_mixture_counts_alike_wherever_it_is_begun(
    lengths: list[int], cuts: list[int], seed: int
) -> None:
    order = SampleOrder(lengths, [1.0 + each for each in range(len(lengths))], seed)
    position, found = order.start, []
    for count in cuts:
        found += order.refs(position, range(count))
        position = order.after(position, count)
    assert found == order.refs(order.start, range(sum(cuts)))
    assert position == order.after(order.start, sum(cuts))
    for source, length in enumerate(lengths):
        rows = [ref.row for ref in found if ref.source == source]
        for epoch in range(len(rows) // length):
            assert sorted(rows[epoch * length : (epoch + 1) * length]) == list(range(length))


def test_a_mixture_keeps_to_its_weights() -> None:
    order = SampleOrder([10, 10, 10], [5.0, 3.0, 2.0], seed=1)
    taken = np.array(order.after(order.start, 20_000).taken)
    assert taken / 20_000 == pytest.approx(np.array([0.5, 0.3, 0.2]), abs=0.02)


def test_what_is_held_out_follows_from_the_index_alone() -> None:
    kept, held = held_out(5_000, 0.1)
    assert sorted([*kept, *held]) == list(range(5_000))
    assert 400 < len(held) < 600
    assert set(held_out(1_000, 0.1)[1]) == {index for index in held if index < 1_000}
    assert len(held_out(50, 0.0)[1]) == 0
