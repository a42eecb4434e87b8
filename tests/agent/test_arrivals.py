"""Who is late: the arrivals of ranks, on virtual clocks."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.worker.agent.telemetry.arrivals import ArrivalKey, ArrivalMeter, ArrivalPacing

SECOND = 1_000_000_000
Arrivals = dict[int, dict[ArrivalKey, int]]


def arrivals(
    late_s: dict[int, float], count: int, *, every_s: float = 1.0, start: int = 1
) -> Arrivals:
    """Collectives ``every_s`` apart at which each rank is late by so much."""
    return {
        rank: {
            ("dp_shard", number): round((100 + number * every_s + late) * SECOND)
            for number in range(start, start + count)
        }
        for rank, late in late_s.items()
    }


def figures(meter: ArrivalMeter, rank: int) -> tuple[float, float]:
    late = meter.of(rank)
    assert late is not None
    return late.lag_s, late.score


def test_the_rank_that_comes_late_is_named_with_its_lag_and_the_share_of_the_time() -> None:
    meter = ArrivalMeter((0, 1))
    meter.take(arrivals({0: 0.0, 1: 0.25}, 50), step_time_s=5.0)
    assert figures(meter, 0) == (0.0, 0.0)
    lag, score = figures(meter, 1)
    assert lag == pytest.approx(0.25)
    assert score == pytest.approx(0.25, rel=0.05)


def test_of_several_ranks_only_those_behind_the_half_are_waited_for() -> None:
    meter = ArrivalMeter((0, 1, 2, 3))
    meter.take(arrivals({0: 0.0, 1: 0.01, 2: 0.01, 3: 0.5}, 50), step_time_s=None)
    assert figures(meter, 3)[1] == pytest.approx(0.49, rel=0.05)
    assert [figures(meter, rank)[1] for rank in (0, 1, 2)] == [0, 0, 0]


def test_one_delay_before_several_collectives_in_flight_counts_once() -> None:
    """Prefetching issues them in a row: the rank is late at each, but for one reason."""
    meter = ArrivalMeter((0, 1))
    burst: Arrivals = {0: {}, 1: {}}
    for step in range(1, 40):
        for offset in range(4):
            number = 4 * step + offset
            burst[0]["dp_shard", number] = step * SECOND + offset
            burst[1]["dp_shard", number] = step * SECOND + SECOND // 5 + offset
    meter.take(burst, step_time_s=1.0)
    assert figures(meter, 1)[1] == pytest.approx(0.2, rel=0.05)


def test_it_does_not_matter_how_often_one_looks() -> None:
    whole, often = ArrivalMeter((0, 1)), ArrivalMeter((0, 1))
    seen = arrivals({0: 0.0, 1: 0.3}, 40)
    whole.take(seen, 1.0)
    for upto in range(1, 41):
        part = {rank: dict(list(row.items())[: upto + rank - 1]) for rank, row in seen.items()}
        often.take(part, 1.0)
        often.take(part, 1.0)
    for seen_at_once, seen_often in zip(figures(whole, 1), figures(often, 1), strict=True):
        assert seen_often == pytest.approx(seen_at_once, rel=0.05)


def test_a_straggler_that_recovers_is_forgiven() -> None:
    meter = ArrivalMeter((0, 1))
    meter.take(arrivals({0: 0.0, 1: 0.4}, 50), 1.0)
    meter.take(arrivals({0: 0.0, 1: 0.0}, 300, start=51), 1.0)
    lag, score = figures(meter, 1)
    assert lag < 0.001
    assert score < 0.001


def test_ranks_that_a_busy_host_delays_in_turn_have_like_scores() -> None:
    """The step would be as long without either one: the difference of the scores is what one costs."""
    meter = ArrivalMeter((0, 1))
    for block in range(40):
        late = block % 2
        seen = arrivals({late: 0.3, 1 - late: 0.0}, 3, start=1 + 3 * block)
        meter.take(seen, 1.0)
    first, second = figures(meter, 0)[1], figures(meter, 1)[1]
    assert min(first, second) > 0.1
    assert abs(first - second) < 0.05


def test_a_single_long_delay_makes_no_straggler() -> None:
    meter = ArrivalMeter((0, 1))
    meter.take(arrivals({0: 0.0, 1: 0.0}, 50, every_s=0.3), 0.3)
    stopped = arrivals({0: 0.0, 1: 5.0}, 1, every_s=0.3, start=51)
    meter.take(stopped, 0.3)
    after = arrivals({0: 5.0, 1: 5.0}, 4, every_s=0.3, start=52)
    meter.take(after, 0.3)
    assert figures(meter, 1)[1] < 0.05


def test_what_was_overwritten_before_a_look_is_counted_neither_as_time_nor_as_lateness() -> None:
    meter = ArrivalMeter((0, 1))
    meter.take(arrivals({0: 0.0, 1: 0.25}, 50), 5.0)
    before = figures(meter, 1)[1]
    meter.take(arrivals({0: 0.0, 1: 0.25}, 50, start=1000), 5.0)
    assert figures(meter, 1)[1] == pytest.approx(before, rel=0.05)


def test_a_rank_alone_is_compared_with_nobody() -> None:
    meter = ArrivalMeter((0,))
    meter.take(arrivals({0: 0.0}, 10), None)
    assert meter.of(0) is None


def readings(*, per_step: int, steps_per_s: float, seconds: float = 10.0) -> list[int]:
    """At a look every tenth of a second, the newest collective at each that read the rings of 192."""
    pacing = ArrivalPacing(192)
    found = []
    for look in range(round(10 * seconds)):
        now = look / 10
        issued = int(per_step * steps_per_s * now)
        if pacing.is_due(issued, int(steps_per_s * now), now):
            found.append(issued)
    return found


def test_rings_that_hold_two_whole_steps_are_read_once_a_second() -> None:
    assert len(readings(per_step=9, steps_per_s=60)) == 10
    assert len(readings(per_step=9, steps_per_s=0.5)) == 10


def test_of_longer_steps_no_part_is_passed_over() -> None:
    seen = readings(per_step=150, steps_per_s=2)
    gaps = [after - before for before, after in pairwise(seen)]
    assert max(gaps) <= 192
    # No more than it takes: each reading finds at least half of a ring new, or a second has passed.
    assert min(gaps) >= 96


def test_boards_on_which_nothing_moves_are_not_read() -> None:
    assert len(readings(per_step=9, steps_per_s=0)) == 0


@given(
    st.lists(st.tuples(*[st.integers(min_value=0, max_value=SECOND)] * 3), min_size=2, max_size=40)
)
def test_no_share_is_more_than_the_whole_and_no_lag_is_negative(
    gaps: list[tuple[int, int, int]],
) -> None:
    meter = ArrivalMeter((0, 1, 2))
    clocks, seen = [1, 1, 1], {rank: dict[ArrivalKey, int]() for rank in range(3)}
    for number, gap in enumerate(gaps, start=1):
        for rank in range(3):
            clocks[rank] += gap[rank]
            seen[rank]["dp_shard", number] = clocks[rank]
    meter.take(seen, 0.1)
    for rank in range(3):
        late = meter.of(rank)
        if late is not None:
            assert late.lag_s >= 0
            assert 0 <= late.score <= 1
