"""Whether ranks hang, on virtual time."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.contract.messages.commands import StopGang
from services.contract.messages.facts import GangDiagnosed
from services.contract.messages.findings import Findings
from services.contract.messages.rank_pipe import RankFinished
from services.contract.words.states import RankPhase
from services.worker.agent.gangs.decisions import LOOKED_INTO_WITHIN_S, decide
from services.worker.agent.gangs.events import (
    DiagnosisAsked,
    Effect,
    Kill,
    LookedAt,
    LookedInto,
    LookInto,
    MessageCame,
    StopAsked,
    Tell,
    Ticked,
)
from services.worker.agent.gangs.state import GangState, RankState
from services.worker.agent.telemetry.hang import (
    CUT_OFF_S,
    SLOW_PHASE_S,
    STOPPED_ALLOWED_S,
    Mark,
    Progress,
    look,
)
from tests.agent.conftest import JOB, NODE

TICK_S = 0.1


def mark(number: int, phase: RankPhase = RankPhase.FORWARD) -> Mark:
    return Mark(step=3, phase=phase, issued=(number,), completed=(number,))


def gang(*, stepped: bool = True, asked_s: float | None = None) -> GangState:
    return GangState(
        job_id=JOB,
        fence=1,
        node_id=NODE,
        ranks={rank: RankState(rank=rank, pid=100 + rank, step_seen=stepped) for rank in (0, 1)},
        hang_timeout_s=asked_s,
    )


def standing_still(
    state: GangState,
    seconds: float,
    *,
    start: float = 0.0,
    phase: RankPhase = RankPhase.FORWARD,
    usual_step_s: float | None = 0.1,
    cut_off: frozenset[int] = frozenset(),
) -> tuple[GangState, list[tuple[float, Effect]]]:
    """Look ten times a second at boards on which nothing moves; what was decided, and when."""
    seen: list[tuple[float, Effect]] = []
    for tick in range(round(seconds / TICK_S) + 1):
        now = start + tick * TICK_S
        boards = {0: mark(5, phase), 1: mark(4, phase)}
        for event in (LookedAt(boards, usual_step_s, cut_off=cut_off), Ticked()):
            state, effects = decide(state, event, now)
            seen += [(now, effect) for effect in effects]
    return state, seen


def first_look_into(seen: list[tuple[float, Effect]]) -> float:
    return next(now for now, effect in seen if isinstance(effect, LookInto))


def findings(why: str = "hang") -> Findings:
    return Findings.model_validate({"why": why, "still_s": 5.1, "allowed_s": 5.0, "ranks": ()})


def test_ranks_of_quick_steps_hang_after_five_seconds() -> None:
    _, seen = standing_still(gang(), 6)
    assert 5.0 < first_look_into(seen) < 5.3
    assert len(seen) == 1


def test_ranks_of_slow_steps_hang_after_three_usual_ones() -> None:
    assert standing_still(gang(), 29, usual_step_s=10)[1] == []
    assert 30 < first_look_into(standing_still(gang(), 31, usual_step_s=10)[1]) < 30.3


def test_what_the_spec_says_overrides_both() -> None:
    assert 1.5 < first_look_into(standing_still(gang(asked_s=1.5), 3)[1]) < 1.8
    assert standing_still(gang(asked_s=60), 59)[1] == []


@pytest.mark.parametrize("phase", [RankPhase.CHECKPOINT, RankPhase.EVAL, RankPhase.TRACE])
def test_before_the_first_step_and_in_slow_phases_they_have_five_minutes(phase: RankPhase) -> None:
    assert standing_still(gang(stepped=False), SLOW_PHASE_S - 1, usual_step_s=None)[1] == []
    assert standing_still(gang(), SLOW_PHASE_S - 1, phase=phase)[1] == []
    _, seen = standing_still(gang(), SLOW_PHASE_S + 1, phase=phase)
    assert SLOW_PHASE_S < first_look_into(seen) < SLOW_PHASE_S + 0.3


def test_ranks_that_meet_hang_sooner_on_a_link_that_carries_nothing() -> None:
    meeting, cut = RankPhase.RENDEZVOUS, frozenset({1})
    before = gang(stepped=False, asked_s=600)
    _, seen = standing_still(before, CUT_OFF_S + 1, phase=meeting, cut_off=cut)
    assert CUT_OFF_S < first_look_into(seen) < CUT_OFF_S + 0.3
    assert standing_still(before, SLOW_PHASE_S - 1, phase=meeting)[1] == []
    assert standing_still(before, SLOW_PHASE_S - 1, phase=RankPhase.LOAD, cut_off=cut)[1] == []


def test_one_rank_that_moves_speaks_for_all() -> None:
    state, seen = gang(), list[Effect]()
    for tick in range(200):
        event = LookedAt({0: mark(5), 1: mark(tick // 20)}, 0.1)
        state, effects = decide(state, event, tick * TICK_S)
        seen += effects
    assert seen == []


@pytest.mark.parametrize(("asked_s", "allowed_s"), [(None, STOPPED_ALLOWED_S), (7.0, 7.0)])
def test_a_stopped_rank_of_a_script_that_reports_nothing_is_noticed(
    asked_s: float | None, allowed_s: float
) -> None:
    state = replace(gang(stepped=False, asked_s=asked_s), is_script=True)
    moving = [LookedAt({0: mark(n), 1: mark(4)}, None) for n in range(2)]
    found: LookInto | None = None
    for stops, expected in ((False, False), (True, True)):
        found = None
        now = 0.0
        while found is None and now < allowed_s + 1:
            number = round(now / TICK_S)
            stopped = frozenset({1} if stops else {1} if number % 50 else ())
            event = replace(moving[number % 2], stopped=stopped)
            state, effects = decide(state, event, now)
            found = next((each for each in effects if isinstance(each, LookInto)), None)
            now += TICK_S
        assert (found is not None) is expected
        state = replace(state, progress=Progress())
    assert found is not None
    assert allowed_s < found.stall.still_s < allowed_s + 0.3
    assert found.stall.allowed_s == allowed_s


def test_a_break_of_the_agent_is_not_held_against_a_stopped_rank() -> None:
    state = replace(gang(stepped=False), is_script=True)
    stopped = LookedAt({0: mark(5), 1: mark(4)}, None, frozenset({1}))
    for now in (0.0, 0.1, 500.0, 500.1):
        state, effects = decide(state, stopped, now)
        assert effects == ()


def test_a_break_of_the_agent_itself_is_not_held_against_the_ranks() -> None:
    state, _ = standing_still(gang(), 3)
    state, seen = standing_still(state, 1.8, start=100)
    assert seen == []
    _, seen = standing_still(state, 2, start=101.9)
    assert len(seen) == 1


def test_a_hung_gang_is_killed_once_it_was_looked_into() -> None:
    state, _ = standing_still(gang(), 6)
    state, effects = decide(state, LookedInto(findings()), 6.2)
    assert effects == (Kill((0, 1)),)
    assert state.hang == findings()
    assert standing_still(state, 20, start=6.3)[1] == []


def test_a_hung_gang_that_cannot_be_looked_into_is_killed_all_the_same() -> None:
    state, seen = standing_still(gang(), 6)
    late = first_look_into(seen) + LOOKED_INTO_WITHIN_S
    _, seen = standing_still(state, LOOKED_INTO_WITHIN_S, start=6.1)
    assert [(round(now - late, 1) <= 0.1, effect) for now, effect in seen] == [(True, Kill((0, 1)))]


def test_a_kill_while_a_hung_gang_is_looked_into_waits_for_what_is_found() -> None:
    state, _ = standing_still(gang(), 6)
    kill = StopGang(job_id=JOB, fence=1, mode="kill")
    state, effects = decide(state, StopAsked(kill), 6.1)
    assert effects == ()
    again, effects = decide(state, LookedInto(findings()), 6.2)
    assert effects == (Kill((0, 1)),)
    assert again.hang == findings()
    _, seen = standing_still(state, LOOKED_INTO_WITHIN_S, start=6.1)
    assert [effect for _, effect in seen] == [Kill((0, 1))]


def test_who_asks_learns_what_was_found_and_nobody_is_killed() -> None:
    state, seen = standing_still(gang(), 2)
    state, effects = decide(state, DiagnosisAsked(), 2.0)
    (wanted,) = effects
    assert isinstance(wanted, LookInto)
    assert (wanted.why, round(wanted.stall.still_s)) == ("asked", 2)
    state, effects = decide(state, LookedInto(findings("asked")), 2.5)
    assert effects == (
        Tell(GangDiagnosed(job_id=JOB, fence=1, node_id=NODE, findings=findings("asked"))),
    )
    assert (seen, state.hang) == ([], None)


def test_a_rank_that_has_finished_is_not_waited_for() -> None:
    state, _ = decide(gang(), MessageCame(0, RankFinished(step=9, drained=False)), 0.0)
    state = replace(
        state, ranks={**state.ranks, 1: replace(state.ranks[1], finished=state.ranks[0].finished)}
    )
    seen = [e for _, e in standing_still(state, 6)[1] if isinstance(e, LookInto)]
    assert seen == []


@given(st.lists(st.tuples(st.floats(0.01, 0.45), st.booleans()), min_size=1, max_size=200))
def test_the_time_that_counts_is_the_time_since_anything_moved(
    course: list[tuple[float, bool]],
) -> None:
    progress, now, number, still = Progress(), 0.0, 0, 0.0
    progress, _ = look(progress, {0: mark(number)}, 5.0, now)
    for passed, moves in course:
        now += passed
        number += moves
        still = 0.0 if moves else still + passed
        progress, stall = look(progress, {0: mark(number)}, 5.0, now)
        assert abs(stall.still_s - still) < 1e-6
        assert stall.is_hang == (stall.still_s > 5.0)


def test_a_script_is_looked_for_hangs_after_its_first_report_alone() -> None:
    silent = replace(gang(stepped=False), is_script=True)
    assert standing_still(silent, 2 * SLOW_PHASE_S, phase=RankPhase.SCRIPT)[1] == []
    # One rank's report is enough: the others may not make any.
    one = {**silent.ranks, 0: replace(silent.ranks[0], step_seen=True)}
    reporting = replace(silent, ranks=one)
    assert standing_still(reporting, 59, phase=RankPhase.SCRIPT)[1] == []
    assert first_look_into(standing_still(reporting, 61, phase=RankPhase.SCRIPT)[1]) > 60
    asked = replace(reporting, hang_timeout_s=2.0)
    assert first_look_into(standing_still(asked, 3, phase=RankPhase.SCRIPT)[1]) < 2.5
    assert standing_still(reporting, 250, phase=RankPhase.EVAL)[1] == []
