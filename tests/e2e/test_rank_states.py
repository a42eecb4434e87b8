"""Where ranks stand, told while they run: who is late, who hangs, and why, by injecting it."""

import os
import signal
from collections.abc import Sequence
from pathlib import Path

import pytest

from services.contract.api.views import DiagnosisView, JobView, RankView
from services.contract.words.states import ExitReason, FailureClass, JobState
from tests.e2e.conftest import Stack
from tests.waiting import until

pytestmark = [pytest.mark.ranks, pytest.mark.redis]

ENDLESS = {"train": {"steps": 1_000_000, "global_batch": 4, "seed": 7}}
# A machine with much else to do must not make a hang of what is to end by itself.
ONE_TRY = {"max_restarts": 0, "hang_timeout_s": 120.0}
QUICK = {"max_restarts": 0, "hang_timeout_s": 4.0}


def troubled(kind: str, **args: object) -> dict[str, object]:
    return {
        "name": kind,
        "model": {"factory": f"troubled_models:{kind}", "args": args},
        "mesh": {"dp_shard": 2},
        "plan": {"units": [{"modules": ["blocks.*"]}]},
        **ENDLESS,
    }


INJECTED = {
    "crash": troubled("Crashes") | {"faults": ONE_TRY},
    "user error": troubled("Raises") | {"faults": ONE_TRY},
    "memory": troubled("RunsOutOfMemory") | {"faults": ONE_TRY},
    "nan": troubled("TurnsNaN") | {"faults": {"on_nan": "stop"}},
    "lock": troubled("HoldsTheLock") | {"faults": QUICK},
    "wait": troubled("WaitsForever") | {"faults": QUICK},
    "mismatch": troubled("SkipsAUnit") | {"faults": QUICK},
    "data": troubled("Calm")
    | {"faults": QUICK, "data": {"factory": "troubled_models:StallingData"}},
}


@pytest.fixture(scope="module")
def injected(stack: Stack) -> dict[str, str]:
    """Jobs that get into trouble by themselves, queued at once: two run at a time."""
    return {name: stack.submit(**spec).id for name, spec in INJECTED.items()}


def failed(stack: Stack, job_id: str) -> tuple[JobView, DiagnosisView]:
    job = stack.rested(job_id, timeout_s=240)
    assert job.state is JobState.FAILED, job.reason
    return job, stack.client.diagnosis(job_id)


def stacks_of(diagnosis: DiagnosisView) -> dict[int, str]:
    return {entry.rank: entry.text for entry in diagnosis.stacks}


def test_an_exit_is_told_apart_by_its_cause(stack: Stack, injected: dict[str, str]) -> None:
    for name, kind in {
        "crash": FailureClass.CRASH,
        "user error": FailureClass.USER_ERROR,
        "memory": FailureClass.OUT_OF_MEMORY,
    }.items():
        _, found = failed(stack, injected[name])
        assert (found.verdict, found.rank, found.live) == (kind, 1, False), found
        assert found.evidence
        assert found.advice


def test_a_bad_loss_stops_the_job_at_once_and_poisons_no_checkpoint(
    stack: Stack, injected: dict[str, str]
) -> None:
    job, found = failed(stack, injected["nan"])
    assert found.verdict is FailureClass.NAN
    assert (job.exit_reason, job.restarts) == (ExitReason.NON_FINITE_LOSS, 0)
    assert stack.client.checkpoints(job.id).items == ()
    assert job.progress.step == 2


def test_a_rank_that_holds_the_interpreters_lock_is_found_and_still_shows_its_stacks(
    stack: Stack, injected: dict[str, str]
) -> None:
    job, found = failed(stack, injected["lock"])
    assert (found.verdict, found.rank) == (FailureClass.GIL_HELD, 1), found
    assert "troubled_models.py" in found.summary
    assert "in trouble" in stacks_of(found)[1]
    assert job.failure is not None
    assert job.failure.rank == 1
    (attempt,) = stack.client.attempts(job.id).items
    assert attempt.exit_reason is ExitReason.HANG


def test_a_rank_that_waits_in_its_own_code_is_found_beside_one_stuck_in_a_collective(
    stack: Stack, injected: dict[str, str]
) -> None:
    _, found = failed(stack, injected["wait"])
    assert (found.verdict, found.rank) == (FailureClass.HANG, 1), found
    stacks = stacks_of(found)
    assert "in trouble" in stacks[1]
    assert "in trouble" not in stacks[0]
    assert "wait" in stacks[0]


def test_ranks_that_start_different_collectives_are_told_so(
    stack: Stack, injected: dict[str, str]
) -> None:
    _, found = failed(stack, injected["mismatch"])
    assert found.verdict is FailureClass.COLLECTIVE_MISMATCH, found


def test_a_data_source_that_stalls_is_found(stack: Stack, injected: dict[str, str]) -> None:
    _, found = failed(stack, injected["data"])
    assert (found.verdict, found.rank) == (FailureClass.DATA_STALL, 1), found
    assert "in batch" in stacks_of(found)[1]


def test_ranks_that_are_well_go_on_while_they_are_looked_into_and_a_frozen_one_is_named(
    stack: Stack, injected: dict[str, str]
) -> None:
    assert injected  # they are queued before this one
    job_id = stack.submit(**troubled("Calm"), faults=QUICK).id
    stack.at_step(job_id, 5)
    stack.client.diagnose(job_id)
    found = until(lambda: diagnosis(stack, job_id))
    assert (found.live, found.rank) == (True, None)
    assert found.verdict is FailureClass.NONE
    assert sorted(stacks_of(found)) == [0, 1]
    step = stack.job(job_id).progress.step
    stack.at_step(job_id, step + 5)

    (victim,) = (r.pid for r in stack.client.ranks(job_id).items if r.rank == 1)
    assert victim is not None
    os.kill(victim, signal.SIGSTOP)
    job, found = failed(stack, job_id)
    assert (found.verdict, found.rank) == (FailureClass.FROZEN, 1), found
    assert 0 in stacks_of(found)
    assert job.failure is not None


def diagnosis(stack: Stack, job_id: str) -> DiagnosisView | None:
    kinds = {event.kind for event in stack.client.events(job_id).items}
    return stack.client.diagnosis(job_id) if "job.diagnosed" in kinds else None


def test_a_rank_that_somebody_kills_is_told_apart_and_a_slow_one_is_named_by_its_lateness(
    stack: Stack,
) -> None:
    """By its lateness, not by its step time, which is the same on all ranks."""
    job_id = stack.submit(**troubled("SlowOnRankOne"), faults=ONE_TRY).id

    def named() -> Sequence[RankView] | None:
        ranks = stack.client.ranks(job_id).items
        if not ranks:  # it is not placed yet
            return None
        # A busy machine delays either rank now and then; the mean of many collectives tells.
        is_later = (ranks[1].arrival_lag_s or 0) > (ranks[0].arrival_lag_s or 0)
        return ranks if ranks[1].is_straggler and is_later else None

    first, second = until(named, timeout_s=240)
    assert (first.is_straggler, second.is_straggler) == (False, True)
    assert (second.straggler_score or 0) > (first.straggler_score or 0)
    assert second.pid is not None
    os.kill(second.pid, signal.SIGKILL)
    _, found = failed(stack, job_id)
    assert (found.verdict, found.rank) == (FailureClass.KILLED_BY_OPERATOR, 1), found


def test_rollback_goes_on_from_the_last_checkpoint_after_a_bad_loss(
    stack: Stack, tmp_path: Path
) -> None:
    spec = troubled("TurnsNaN", once=str(tmp_path / "spoilt"))
    changes = {
        "train": {"steps": 6, "global_batch": 4, "seed": 7},
        "faults": {"on_nan": "rollback", "max_restarts": 1},
        # In this mode all ranks have voted for it before the next step begins.
        "checkpoint": {"every_steps": 2, "mode": "sync"},
    }
    job = stack.rested(stack.submit(**(spec | changes)).id, timeout_s=240)
    assert job.state is JobState.SUCCEEDED, job.reason
    first, second = stack.client.attempts(job.id).items
    assert first.exit_reason is ExitReason.NON_FINITE_LOSS
    assert (second.first_step, job.restarts) == (3, 1)
    assert second.resumed_from is not None
