"""The verdict of each class, from the facts that speak for it."""

import pytest

from services.contract.messages.base import Address
from services.contract.messages.facts import AGENT_DIED, RankExit
from services.contract.messages.findings import Findings, RankFinding, Unanswered
from services.contract.messages.telemetry import RankSample
from services.contract.words.states import ExitReason, FailureClass, JobState
from services.controller.domain.decisions import diagnose, retry
from services.controller.domain.decisions.dispatch import decide
from services.controller.domain.job.attempt import Attempt, Diagnosis, NodeExit, NodeFindings
from services.controller.domain.job.events import DiagnosisAsked, KillAsked, NodeLost
from services.controller.domain.job.job import Job
from services.controller.use_cases.last_seen import trained_on_s
from tests.controller.histories import (
    NODE,
    NOW,
    commands,
    crashed,
    ended,
    launched,
    new_job,
    placed,
    play,
    progressed,
    running,
    saved,
)

COMPUTING = ("troubled_models.py:31 in forward",)
WAITING = (
    "fsdp_core/comm/desync.py:149 in _wait",
    "fsdp_core/comm/desync.py:140 in wait_in_step",
)


def finding(rank: int, **facts: object) -> RankFinding:
    """A rank that waits in a collective."""
    fields: dict[str, object] = {
        "rank": rank,
        "pid": 100 + rank,
        "phase": "FORWARD",
        "step": 3,
        "process": "S",
        "still_s": 5.2,
        "pulse_age_s": 0.1,
        "issued": {"dp_shard": 40},
        "completed": {"dp_shard": 39},
        "frames": WAITING,
    }
    return RankFinding.model_validate(fields | facts)


def verdict(*ranks: RankFinding, why: str = "hang", still_s: float = 5.2) -> Diagnosis:
    found = Findings.model_validate(
        {"why": why, "still_s": still_s, "allowed_s": 5.0, "ranks": ranks}
    )
    return diagnose.of_findings([NodeFindings(node_id=NODE, findings=found)], len(ranks))


def test_a_stopped_process_is_frozen() -> None:
    found = verdict(finding(0), finding(1, process="T", pulse_age_s=6.0, frames=()))
    assert (found.verdict, found.rank, found.node_id) == (FailureClass.FROZEN, 1, NODE)
    assert "process T" in found.evidence[1]
    assert "SIGSTOP" in found.advice


def test_an_awake_process_without_pulse_holds_the_interpreters_lock() -> None:
    found = verdict(finding(0), finding(1, pulse_age_s=5.0, frames=COMPUTING))
    assert (found.verdict, found.rank) == (FailureClass.GIL_HELD, 1)
    assert COMPUTING[0] in found.summary


def test_a_process_asleep_in_the_kernel_cannot_beat_and_holds_no_lock() -> None:
    found = verdict(finding(0), finding(1, pulse_age_s=5.0, process="D", frames=COMPUTING))
    assert (found.verdict, found.rank) == (FailureClass.HANG, 1)


def test_a_rank_that_fetches_data_while_others_wait_has_a_stalled_source() -> None:
    found = verdict(finding(0), finding(1, phase="DATA", frames=("source.py:9 in batch",)))
    assert (found.verdict, found.rank) == (FailureClass.DATA_STALL, 1)


def test_a_rank_that_waits_in_no_collective_while_others_do_is_to_blame() -> None:
    found = verdict(finding(1), finding(0, frames=COMPUTING, issued={"dp_shard": 39}))
    assert (found.verdict, found.rank) == (FailureClass.HANG, 0)


def test_of_ranks_in_code_of_their_own_the_one_behind_within_its_group_is_named() -> None:
    ranks = [finding(rank, frames=COMPUTING, issued={"dp_shard": 40 - rank}) for rank in (0, 1)]
    assert verdict(*ranks).rank == 1
    assert diagnose.behind(ranks) == (1,)


def test_ranks_that_all_wait_have_started_different_collectives() -> None:
    found = verdict(finding(0), finding(1))
    assert (found.verdict, found.rank) == (FailureClass.COLLECTIVE_MISMATCH, None)
    found = verdict(finding(0), finding(1, issued={"dp_shard": 38}))
    assert (found.verdict, found.rank) == (FailureClass.COLLECTIVE_MISMATCH, 1)


def test_a_rank_to_blame_is_found_on_whichever_node_it_is() -> None:
    parts = [
        NodeFindings(
            node_id=f"node-{rank}",
            findings=Findings(why="hang", still_s=5.0 + rank, allowed_s=5.0, ranks=(one,)),
        )
        for rank, one in enumerate((finding(0), finding(1, process="T")))
    ]
    found = diagnose.of_findings(parts, 2)
    assert (found.verdict, found.rank, found.node_id) == (FailureClass.FROZEN, 1, "node-1")
    # The other node has not told: that all wait here is no sign of different collectives.
    found = diagnose.of_findings(parts[:1], 2)
    assert (found.verdict, found.rank) == (FailureClass.HANG, None)


def test_ranks_that_make_progress_are_well_when_somebody_asks() -> None:
    ranks = (finding(0, still_s=0.1), finding(1, still_s=0.1, frames=COMPUTING))
    found = verdict(*ranks, why="asked", still_s=0.1)
    assert (found.verdict, found.rank) == (FailureClass.NONE, None)
    stopped = finding(1, process="T", frames=())
    assert verdict(ranks[0], stopped, why="asked", still_s=0.5).verdict is FailureClass.FROZEN


@pytest.mark.parametrize(
    ("how", "oom_kills", "kind"),
    [
        ({"signal": 11, "error": "ended by SIGSEGV"}, 0, FailureClass.CRASH),
        ({"exit_code": 7, "error": "exited with code 7"}, 0, FailureClass.CRASH),
        ({"signal": 9, "error": "ended by SIGKILL"}, 0, FailureClass.KILLED_BY_OPERATOR),
        ({"signal": 15, "error": "ended by SIGTERM"}, 0, FailureClass.KILLED_BY_OPERATOR),
        ({"signal": 9, "error": "ended by SIGKILL"}, 1, FailureClass.OUT_OF_MEMORY),
        ({"signal": 9, "error": AGENT_DIED}, 0, FailureClass.NODE_LOST),
        (
            {
                "exit_code": 1,
                "error": "ValueError: no",
                "error_types": ("builtins.ValueError",),
                "traceback": "T",
            },
            0,
            FailureClass.USER_ERROR,
        ),
        (
            {
                "exit_code": 1,
                "error": "MemoryError",
                "error_types": ("builtins.MemoryError",),
                "traceback": "T",
            },
            0,
            FailureClass.OUT_OF_MEMORY,
        ),
        (
            {
                "exit_code": 1,
                "error": "RuntimeError: [enforce fail at alloc_cpu.cpp:128] DefaultCPUAllocator: "
                "can't allocate memory: you tried to allocate 1073741824 bytes.",
                "error_types": ("builtins.RuntimeError",),
                "traceback": "T",
            },
            0,
            FailureClass.OUT_OF_MEMORY,
        ),
        (
            {
                "exit_code": 1,
                "error": "DesyncError: Ranks ran different units",
                "error_types": ("fsdp_core.errors.DesyncError", "builtins.RuntimeError"),
                "traceback": "T",
            },
            0,
            FailureClass.COLLECTIVE_MISMATCH,
        ),
        (
            {
                "exit_code": 1,
                "error": "NonFiniteLossError: the loss of step 3 is nan",
                "error_types": (diagnose.NON_FINITE_LOSS, "builtins.ArithmeticError"),
                "traceback": "T",
            },
            0,
            FailureClass.NAN,
        ),
    ],
)
def test_how_the_first_rank_ended_tells_the_class(
    how: dict[str, object], oom_kills: int, kind: FailureClass
) -> None:
    first = RankExit.model_validate(
        {"rank": 1, "pid": 5, "order": 0, "step": 2, "phase": "FORWARD", **how}
    )
    peer = RankExit(
        rank=0, pid=4, order=1, step=2, phase="FORWARD", signal=9, error="killed: a peer failed"
    )
    attempt = Attempt(
        fence=1,
        world_size=2,
        incarnations={NODE: "life"},
        started_ms=NOW,
        exits=tuple(NodeExit(node_id=NODE, exit=gone) for gone in (peer, first)),
        oom_kills=oom_kills,
    )
    failure = retry.first_failure(attempt)
    found = diagnose.of_end(attempt, retry.cause(attempt, failure), failure)
    assert found is not None
    assert (found.verdict, found.rank, found.node_id) == (kind, 1, NODE)
    assert any("killed: a peer failed" in line for line in found.evidence)
    assert found.advice


def test_of_thousands_of_ranks_that_failed_a_record_keeps_the_errors_of_some() -> None:
    exits = tuple(
        NodeExit(
            node_id=NODE,
            exit=RankExit(
                rank=rank,
                pid=4,
                order=rank,
                step=2,
                phase="FORWARD",
                exit_code=1,
                error="\1" * 4096,
            ),
        )
        for rank in range(2000)
    )
    attempt = Attempt(
        fence=1, world_size=2000, incarnations={NODE: "life"}, started_ms=NOW, exits=exits
    )
    failure = retry.first_failure(attempt)
    found = diagnose.of_end(attempt, retry.cause(attempt, failure), failure)
    assert found is not None
    assert len(found.model_dump_json()) < 100_000
    assert found.evidence[-1] == f"and {2000 - len(found.evidence) + 1} more"


def newest(job: Job) -> Diagnosis:
    found = job.attempts[-1].diagnosis
    assert found is not None
    return found


def test_a_lost_node_and_a_kill_on_request_have_their_verdicts() -> None:
    job = play(running(), [NodeLost(NODE, "its lease ran out")]).job
    assert newest(job).verdict is FailureClass.NODE_LOST
    job = running()
    job = play(job, [KillAsked(), crashed(job, "killed")]).job
    assert newest(job).verdict is FailureClass.KILLED_BY_OPERATOR
    assert job.exit_reason is ExitReason.KILLED


def hung(job: Job, fence: int = 1) -> object:
    exits = [
        RankExit(rank=r, pid=100 + r, signal=9, order=r, step=3, phase="FORWARD", error="killed")
        for r in (0, 1)
    ]
    found = Findings(
        why="hang", still_s=5.2, allowed_s=5.0, ranks=(finding(0), finding(1, process="T"))
    )
    return ended(job, exits, fence).model_copy(update={"hang": found})


def test_a_hang_restarts_the_job_within_its_budget_and_names_the_rank() -> None:
    job = running(faults={"max_restarts": 1})
    job = decide(job, hung(job), NOW).job  # type: ignore[arg-type]  # a GangEnded
    assert (job.state, job.restarts) == (JobState.RESTARTING, 1)
    attempt = job.attempts[-1]
    assert attempt.exit_reason is ExitReason.HANG
    assert attempt.failure is not None
    assert attempt.failure.rank == 1
    assert newest(job).verdict is FailureClass.FROZEN
    assert attempt.hang == ()
    job = play(job, [placed(job), launched(job, 2), progressed(job, 4, 2), hung(job, 2)]).job  # type: ignore[list-item]
    assert (job.state, job.exit_reason) == (JobState.FAILED, ExitReason.RESTARTS_EXHAUSTED)


def test_a_hang_behind_a_thread_that_was_refused_memory_is_told_as_want_of_memory() -> None:
    job = running(faults={"max_restarts": 1})
    end = hung(job)
    found = Findings(
        why="hang", still_s=5.2, allowed_s=5.0, ranks=(finding(0), finding(1, lost_thread=True))
    )
    job = decide(job, end.model_copy(update={"hang": found}), NOW).job  # type: ignore[attr-defined]
    attempt = job.attempts[-1]
    assert attempt.exit_reason is ExitReason.OUT_OF_MEMORY
    assert (newest(job).verdict, newest(job).rank) == (FailureClass.OUT_OF_MEMORY, 1)


def nan(job: Job, fence: int = 1, step: int = 5) -> object:
    fact = crashed(job, f"NonFiniteLossError: the loss of step {step} is nan", fence, step - 1)
    exits = [
        gone.model_copy(update={"error_types": (diagnose.NON_FINITE_LOSS,)})
        if gone.traceback
        else gone
        for gone in fact.exits
    ]
    return fact.model_copy(update={"exits": tuple(exits)})


def test_stop_ends_a_job_at_its_first_bad_loss() -> None:
    job = running()
    job = decide(job, nan(job), NOW).job  # type: ignore[arg-type]  # a GangEnded
    assert (job.state, job.exit_reason) == (JobState.FAILED, ExitReason.NON_FINITE_LOSS)
    assert newest(job).verdict is FailureClass.NAN


def test_rollback_goes_on_from_the_last_checkpoint_and_gives_up_the_second_time() -> None:
    job = running(faults={"on_nan": "rollback", "max_restarts": 5})
    job = play(job, [*saved(job, 3), nan(job)]).job  # type: ignore[list-item]
    assert (job.state, job.restarts) == (JobState.RESTARTING, 1)
    again = play(job, [placed(job), launched(job, 2), progressed(job, 4, 2)])
    assert again.job.attempts[-1].resumed_step == 3
    later = play(again.job, [nan(job, 2, step=7)]).job  # type: ignore[list-item]
    assert (later.state, later.restarts) == (JobState.RESTARTING, 2)
    same = play(again.job, [nan(job, 2)]).job  # type: ignore[list-item]
    assert (same.state, same.exit_reason) == (JobState.FAILED, ExitReason.NON_FINITE_LOSS)
    assert "the second time at this step" in (same.reason or "")


def test_a_rollback_costs_a_restart_of_the_budget() -> None:
    job = running(faults={"on_nan": "rollback", "max_restarts": 0})
    job = decide(job, nan(job), NOW).job  # type: ignore[arg-type]  # a GangEnded
    assert job.state is JobState.FAILED


def test_asking_looks_into_the_nodes_of_the_newest_attempt() -> None:
    job = running()
    decision = decide(job, DiagnosisAsked(), NOW)
    assert [command.kind for command in commands(decision)] == ["diagnose_gang"]
    assert decision.job.state is JobState.RUNNING


def test_who_asks_of_a_job_without_ranks_is_told_where_to_look() -> None:
    with pytest.raises(Exception, match="diagnosis"):
        decide(new_job(), DiagnosisAsked(), NOW)


HERE, THERE = "fd71::3", "fd71::4"
ADDRESSES = {"loom-1": ("10.0.0.3", HERE), "loom-2": ("10.0.0.4", THERE)}


def silent(here: str, there: str, retries: int, port: int = 4711) -> Unanswered:
    ends = (Address(host=here, port=port), Address(host=there, port=port + 1))
    return Unanswered(here=ends[0], there=ends[1], retries=retries, waiting_bytes=96)


def over_two(*ranks: RankFinding) -> Diagnosis:
    """The first of the ranks is on one node, the others are on the other."""
    parts = [
        NodeFindings(
            node_id=node,
            findings=Findings(why="hang", still_s=5.2, allowed_s=5.0, ranks=its),
        )
        for node, its in (("loom-1", ranks[:1]), ("loom-2", ranks[1:]))
        if its
    ]
    return diagnose.of_findings(parts, 2, ADDRESSES)


def test_a_link_that_carries_nothing_is_named_with_its_nodes_and_the_ranks_that_wait() -> None:
    found = over_two(
        finding(0, unanswered=(silent(HERE, THERE, 4),)),
        finding(
            1,
            unanswered=(
                silent(THERE, HERE, 3, port=4712).model_copy(
                    update={"there": Address(host=HERE, port=4711)}
                ),
            ),
        ),
    )
    assert (found.verdict, found.rank) == (FailureClass.NETWORK, None)
    assert "nodes loom-1 and loom-2 do not reach each other" in found.summary
    assert "rank 0 on loom-1 waits for rank 1 on loom-2" in found.summary
    assert "96 bytes to fd71::4 port 4712 sent again 4 times" in found.evidence[0]
    assert "MESHLOOM_INTERFACE" in found.advice


def test_a_link_is_named_by_what_one_end_alone_has_seen() -> None:
    found = over_two(finding(0, unanswered=(silent(HERE, THERE, 3),)))
    assert found.verdict is FailureClass.NETWORK
    assert "rank 0 on loom-1 waits for ranks on loom-2" in found.summary


@pytest.mark.parametrize(
    "connection",
    [
        silent(HERE, THERE, 2),  # as on any link that loses a packet
        silent(HERE, "192.0.2.9", 9),  # of the user's own code, to a host of no gang
        silent(HERE, "10.0.0.3", 9),  # to itself
    ],
)
def test_other_connections_without_an_answer_are_no_broken_link(connection: Unanswered) -> None:
    found = over_two(finding(0, unanswered=(connection,)), finding(1))
    assert found.verdict is FailureClass.COLLECTIVE_MISMATCH


def test_an_address_that_nodes_of_one_machine_share_names_no_link() -> None:
    shared = {"loom-1": ("127.0.0.1",), "loom-2": ("127.0.0.1",)}
    part = NodeFindings(
        node_id="loom-1",
        findings=Findings(
            why="hang",
            still_s=5.2,
            allowed_s=5.0,
            ranks=(finding(0, unanswered=(silent("127.0.0.1", "127.0.0.1", 9),)),),
        ),
    )
    assert diagnose.of_findings([part], 2, shared).verdict is FailureClass.HANG


def test_a_process_that_is_stopped_comes_before_a_link_that_carries_nothing() -> None:
    tried = (silent(HERE, THERE, 4),)
    found = over_two(finding(0, unanswered=tried), finding(1, process="T", frames=()))
    assert (found.verdict, found.rank) == (FailureClass.FROZEN, 1)


def sample(rank: int, node: str, step: int, seen_ms: int, age_s: float = 0.0) -> RankSample:
    return RankSample(
        rank=rank, local_rank=0, fence=1, node_id=node, device="cpu", pid=1, phase="FORWARD",
        step=step, seen_ms=seen_ms, beat_age_s=age_s,
    )  # fmt: skip


def test_ranks_of_a_silent_node_lived_as_long_as_others_made_steps_with_them() -> None:
    lost = sample(0, "loom-1", 10, 100_000)
    assert trained_on_s([lost, sample(1, "loom-2", 20, 105_000, 1.0)], "loom-1") == 4.0
    # One step more may have been done before; and who waits has made none since.
    assert trained_on_s([lost, sample(1, "loom-2", 11, 105_000)], "loom-1") is None
    assert trained_on_s([lost, sample(1, "loom-2", 20, 105_000, 4.5)], "loom-1") is None
    assert trained_on_s([sample(1, "loom-2", 20, 105_000)], "loom-1") is None
