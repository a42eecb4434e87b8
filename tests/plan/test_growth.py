"""Numbers that grow with the micro-batch."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from fsdp_core.plan.model import Growth, Highest


def test_points_on_a_line_are_one() -> None:
    assert Growth.through({1: 7, 2: 10, 4: 16}) == Growth(4, 3)
    assert Growth.through({2: 5}) == Growth(5, 0)
    assert Growth(4, 3).at(100) == 304


def test_other_points_are_a_table_that_is_interpolated() -> None:
    bent = Growth.through({1: 10, 2: 0, 4: 8})
    assert [bent.at(size) for size in (1, 2, 3, 4, 6)] == [10, 0, 4, 8, 16]


def test_a_square_is_believed_if_a_fourth_point_lies_on_it() -> None:
    def at(size: int) -> int:
        return 100 + 3 * size + 4 * size**2

    found = Growth.through({size: at(size) for size in (2, 64, 128, 256)})
    assert [found.at(size) for size in (2, 100, 2048)] == [at(2), at(100), at(2048)]
    bent = Growth.through({2: 9000, 64: at(64), 128: at(128), 256: at(256)})
    assert bent.at(2048) < at(2048)


LINES = st.lists(st.tuples(st.integers(-9, 1000), st.integers(0, 50)), min_size=1, max_size=8)


@given(LINES, st.integers(1, 300))
def test_the_highest_of_lines_is_known_for_all_sizes_from_two(
    lines: list[tuple[int, int]], size: int
) -> None:
    levels = {m: [base + slope * m for base, slope in lines] for m in (1, 2, 4)}
    assert Highest.through(levels).at(size) == max(base + slope * size for base, slope in lines)


def test_only_lines_that_are_highest_somewhere_are_kept() -> None:
    levels = {m: [100, 10 * m, 5 * m, 90 + m // 2] for m in (2, 4)}
    assert Highest.through(levels).lines == (Growth(100, 0), Growth(0, 10))


def test_a_micro_batch_that_behaves_otherwise_keeps_its_own_value() -> None:
    peak = Highest.through({1: [50, 3], 2: [20], 4: [40]})
    assert [peak.at(size) for size in (1, 2, 3, 4, 8)] == [50, 20, 30, 40, 80]
