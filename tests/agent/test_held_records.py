"""What waits for a server that is away: how much, in which order, and what is let go."""

from services.contract.messages.telemetry import LogLine, MetricRecord, StepRecord
from services.worker.agent.telemetry.gang_telemetry import STEPS_PER_BEAT, Records
from services.worker.agent.telemetry.held_records import (
    LINES_HELD,
    LINES_OF_ALL,
    STEPS_HELD,
    STEPS_OF_ALL,
    HeldRecords,
)

ENDED, RUNNING = ("ended", 1), ("running", 2)


def records(gang: tuple[str, int], first: int, count: int, lines: int = 0) -> Records:
    numbers = range(first, first + count)
    step = StepRecord(step=1, fence=1, loss=0.5, tokens_per_s=1.0, step_time_s=0.1)
    line = LogLine(rank=0, fence=1, stream="stdout", text="Hello", time_ms=1)
    metrics = (MetricRecord(step=first, fence=1, values={"hits": 0.5}),)
    steps = tuple(step.model_copy(update={"step": number}) for number in numbers)
    return Records(*gang, steps, (line,) * lines, metrics)


def steps_of(beat: list[Records], gang: tuple[str, int]) -> list[int]:
    return [s.step for told in beat if (told.job_id, told.fence) == gang for s in told.steps]


def test_what_waited_comes_in_order_and_in_parts_a_beat_can_carry() -> None:
    held = HeldRecords()
    held.add([records(ENDED, 1, STEPS_PER_BEAT), records(RUNNING, 1, 1)])
    held.add([records(ENDED, STEPS_PER_BEAT + 1, 10)])
    first = held.next_beat()
    assert steps_of(first, ENDED) == list(range(1, STEPS_PER_BEAT + 1))
    assert steps_of(first, RUNNING) == [1]
    assert held.gangs == {ENDED}
    assert steps_of(held.next_beat(), ENDED) == list(range(STEPS_PER_BEAT + 1, STEPS_PER_BEAT + 11))
    assert held.gangs == set()
    assert held.next_beat() == []


def test_what_could_not_be_written_comes_before_what_came_since() -> None:
    held = HeldRecords()
    held.add([records(RUNNING, 1, 2)])
    beat = held.next_beat()
    held.add([records(RUNNING, 3, 1)])
    held.put_back(beat)
    (told,) = held.next_beat()
    assert [step.step for step in told.steps] == [1, 2, 3]
    assert [metric.step for metric in told.metrics] == [1, 3]


def test_of_all_gangs_together_the_oldest_is_let_go() -> None:
    held = HeldRecords()
    held.add([records(ENDED, 1, 60, lines=LINES_HELD)])
    held.add([records(RUNNING, 1, STEPS_HELD - 10, lines=7)])
    beat = held.next_beat()
    assert steps_of(beat, ENDED) == list(range(51, 61))
    told = {(r.job_id, r.fence): r for r in beat}
    assert len(told[RUNNING].steps) == STEPS_PER_BEAT
    lines = 0
    while beat:
        lines += sum(len(told.logs) for told in beat)
        beat = held.next_beat()
    assert lines == LINES_HELD


def test_of_gangs_that_tell_much_a_beat_takes_a_share_and_of_one_that_tells_little_all() -> None:
    """Of 64 gangs that tell as much as they can, a beat took the loop and Redis longer than the lease lasts."""
    held = HeldRecords()
    loud = [(f"loud {number}", 1) for number in range(64)]
    held.add([records(gang, 1, 1_000, lines=100) for gang in loud])
    held.add([records(RUNNING, 1, 3, lines=2)])
    beat = held.next_beat()
    assert steps_of(beat, RUNNING) == [1, 2, 3]
    assert {len(steps_of(beat, gang)) for gang in loud} == {156, 157}
    assert sum(len(told.logs) for told in beat) <= LINES_OF_ALL
    total = 0
    while beat:
        total += sum(len(told.steps) for told in beat)
        beat = held.next_beat()
        assert sum(len(told.steps) for told in beat) <= STEPS_OF_ALL
    assert total == 64 * 1_000 + 3
