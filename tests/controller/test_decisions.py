"""A job's course: what each event makes of it."""

import pytest

from services.contract.api.views import StopRequest
from services.contract.messages.commands import (
    CommitCheckpoint,
    LaunchGang,
    RetireCheckpoint,
    StopGang,
)
from services.contract.messages.facts import (
    AGENT_DIED,
    FACT,
    CheckpointRetired,
    Evaluated,
    ExitStanding,
    LaunchRefused,
)
from services.contract.messages.rank_pipe import RANK_MESSAGE, RankEvaluated
from services.contract.words.ids import checkpoint_id
from services.contract.words.states import CheckpointState, ExitReason, FailureClass, JobState
from services.controller.domain.decisions.retry import BACKOFF_MS
from services.controller.domain.job.attempt import ATTEMPTS_KEPT
from services.controller.domain.job.events import (
    AnswerOverdue,
    CancelAsked,
    JobEvent,
    NodeLost,
    PauseAsked,
    PlacementDelayed,
)
from services.controller.domain.job.job import Job
from services.controller.domain.job.lifecycle import TRANSITIONS
from services.controller.use_cases.present import attempt_views
from tests.controller.histories import (
    NODE,
    NOW,
    STEPS,
    began,
    commands,
    crashed,
    finished,
    killed,
    launched,
    linked,
    new_job,
    placed,
    play,
    progressed,
    running,
    saved,
    vote,
    votes,
)

PAUSE = PauseAsked(StopRequest())
CANCEL = CancelAsked(StopRequest())
REQUIRED = StopRequest(checkpoint="required", grace_s=30)


def test_a_placed_job_opens_attempt_one_and_commands_its_launch() -> None:
    job = new_job()
    decision = play(job, [placed(job)])
    (launch,) = commands(decision)
    assert isinstance(launch, LaunchGang)
    assert (launch.fence, launch.resume_from, launch.plan.world_size) == (1, None, 2)
    assert decision.job.state is JobState.PLACING


def test_a_job_walks_from_the_queue_to_success() -> None:
    job = new_job()
    assert play(job, [placed(job), launched(job)]).job.state is JobState.STARTING
    assert running().state is JobState.RUNNING
    done = play(running(), [*saved(job, STEPS), finished(job)]).job
    assert done.state is JobState.SUCCEEDED
    assert done.exit_reason is ExitReason.COMPLETED


def test_success_waits_for_the_link_of_the_last_checkpoint() -> None:
    job = running()
    waiting = play(job, [began(job, STEPS), *votes(job, STEPS), finished(job)])
    assert waiting.job.state is JobState.RUNNING
    assert "committed" in str(waiting.job.reason)
    assert play(waiting.job, [linked(job, STEPS)]).job.state is JobState.SUCCEEDED


def test_the_last_vote_commands_the_commit_once() -> None:
    job = running()
    decision = play(job, [began(job, 10), vote(job, 10, 1), vote(job, 10, 1), vote(job, 10, 0)])
    (commit,) = commands(decision)
    assert isinstance(commit, CommitCheckpoint)
    assert [s.rank for s in commit.manifest.shards] == [0, 1]
    assert play(decision.job, votes(job, 10)).sends == ()


def test_ranks_that_disagree_on_their_data_do_not_commit() -> None:
    job = running()
    decision = play(job, [vote(job, 10, 0, digest="a"), vote(job, 10, 1, digest="b")])
    (checkpoint,) = decision.job.checkpoints.values()
    assert checkpoint.state is CheckpointState.ABORTED
    assert decision.sends == ()


def test_a_crash_before_the_first_step_fails_at_once_with_the_traceback() -> None:
    job = new_job()
    failed = play(job, [placed(job), launched(job), crashed(job, "NameError: x", step=0)]).job
    assert failed.state is JobState.FAILED
    assert failed.exit_reason is ExitReason.USER_ERROR
    assert failed.failure is not None
    assert failed.failure.rank == 1
    assert "Traceback" in str(failed.failure.traceback)


def test_want_of_processes_before_the_first_step_is_tried_again() -> None:
    """Another job of the same user may have had all that there are."""
    job = new_job()
    end = crashed(job, "RuntimeError: Resource temporarily unavailable", step=0)
    again = play(job, [placed(job), launched(job), end]).job
    assert (again.state, again.restarts) == (JobState.RESTARTING, 1)


def test_want_of_memory_before_the_first_step_fails_at_once_with_that_reason() -> None:
    job = new_job()
    end = crashed(job, "MemoryError: 7 MiB were free", step=0)
    types = ("builtins.MemoryError",)
    exits = tuple(e.model_copy(update={"error_types": types}) for e in end.exits)
    end = end.model_copy(update={"exits": exits})
    failed = play(job, [placed(job), launched(job), end]).job
    assert (failed.state, failed.exit_reason) == (JobState.FAILED, ExitReason.OUT_OF_MEMORY)
    assert failed.attempts[-1].diagnosis is not None
    assert failed.attempts[-1].diagnosis.verdict is FailureClass.OUT_OF_MEMORY


LEFT = {"exit_code": 3, "signal": None, "error": "exited with code 3"}
CRASHED = {"signal": 11, "error": "ended by SIGSEGV"}
KILLED = {"signal": 9, "error": "ended by SIGKILL"}
AGENT = {"signal": 9, "error": AGENT_DIED}


def raised(error: str, *types: str) -> dict[str, object]:
    end = {"exit_code": 1, "signal": None, "error": error, "traceback": f"Traceback…\n{error}"}
    return end | {"error_types": types}


NO_THREAD = raised("RuntimeError: can't start new thread", "builtins.RuntimeError")


def failed_twice(
    ways: tuple[dict[str, object], dict[str, object]],
    steps: tuple[int, int] = (5, 5),
    oom_kills: int = 0,
) -> Job:
    """A job of which the first rank ended in these ways, in two attempts in a row."""
    job = running()
    for fence, (way, step) in enumerate(zip(ways, steps, strict=True), start=1):
        if fence > 1:
            assert job.state is JobState.RESTARTING
            job = play(job, [placed(job), launched(job, 2), progressed(job, 1, 2)]).job
        end = killed(job, fence, step)
        first, *others = end.exits
        victims = [each.model_copy(update={"standing": ExitStanding.VICTIM}) for each in others]
        exits = (first.model_copy(update=way), *victims)
        end = end.model_copy(update={"exits": exits, "oom_kills": oom_kills})
        job = play(job, [end]).job
    return job


@pytest.mark.parametrize(
    ("ways", "oom_kills", "why"),
    [
        ((raised("ValueError: at 0xaa"), raised("ValueError: at 0xbb")), 0, ExitReason.USER_ERROR),
        ((LEFT, LEFT), 0, ExitReason.RANK_LOST),
        ((CRASHED, CRASHED), 0, ExitReason.RANK_LOST),
        ((KILLED, KILLED), 1, ExitReason.OUT_OF_MEMORY),
        (
            (
                raised("MemoryError: 7 MiB were free", "builtins.MemoryError"),
                raised("MemoryError: 9 MiB were free", "builtins.MemoryError"),
            ),
            0,
            ExitReason.OUT_OF_MEMORY,
        ),
    ],
    ids=["raised", "left", "crashed", "killed by the kernel for memory", "out of memory"],
)
def test_the_same_end_at_the_same_step_is_not_tried_a_third_time(
    ways: tuple[dict[str, object], dict[str, object]], oom_kills: int, why: ExitReason
) -> None:
    job = failed_twice(ways, oom_kills=oom_kills)
    assert (job.state, job.exit_reason, job.restarts) == (JobState.FAILED, why, 1)
    assert str(job.reason).endswith(", the second time at this step")


@pytest.mark.parametrize(
    ("ways", "steps"),
    [
        ((LEFT, LEFT), (5, 6)),
        ((LEFT, CRASHED), (5, 5)),
        ((KILLED, KILLED), (5, 5)),
        ((AGENT, AGENT), (5, 5)),
        ((raised("ValueError: one"), raised("ValueError: two")), (5, 5)),
        ((NO_THREAD, NO_THREAD), (5, 5)),
    ],
    ids=["other step", "other way", "from outside", "with its agent", "other words", "no thread"],
)
def test_an_end_that_need_not_come_again_is_tried_within_the_budget(
    ways: tuple[dict[str, object], dict[str, object]], steps: tuple[int, int]
) -> None:
    job = failed_twice(ways, steps)
    assert (job.state, job.restarts) == (JobState.RESTARTING, 2)


def test_lost_ranks_restart_within_the_budget_and_back_off() -> None:
    job = running(faults={"max_restarts": 2})
    waits = []
    for fence in (1, 2):
        job = play(job, [killed(job, fence)]).job
        assert job.state is JobState.RESTARTING
        waits.append(job.not_before_ms - NOW)
        job = play(job, [placed(job), launched(job, fence + 1), progressed(job, 1, fence + 1)]).job
    assert waits == [0, 1000]
    failed = play(job, [killed(job, 3)]).job
    assert failed.state is JobState.FAILED
    assert failed.exit_reason is ExitReason.RESTARTS_EXHAUSTED


def test_a_job_that_saved_something_since_its_last_failure_need_not_wait() -> None:
    job = running(faults={"max_restarts": 10})
    for fence in range(1, 6):
        job = play(job, [*saved(job, 10 * fence, fence, fence + 1), killed(job, fence)]).job
        assert (job.state, job.not_before_ms) == (JobState.RESTARTING, NOW)
        job = play(job, [placed(job), launched(job, fence + 1), progressed(job, 1, fence + 1)]).job
    waits = []
    for fence in range(6, 9):
        job = play(job, [killed(job, fence)]).job
        waits.append(job.not_before_ms - NOW)
        job = play(job, [placed(job), launched(job, fence + 1), progressed(job, 1, fence + 1)]).job
    assert waits == [0, 1000, 5000]


def test_an_error_that_tells_of_a_lost_peer_is_no_fault_of_the_job() -> None:
    job = running()
    lost = "RuntimeError: Connection closed by peer"
    job = play(job, [crashed(job, lost, step=0, standing=ExitStanding.ECHO)]).job
    assert job.state is JobState.RESTARTING
    assert job.attempts[-1].exit_reason is ExitReason.RANK_LOST


def test_a_restart_goes_on_from_the_latest_commit_and_counts_the_lost_steps() -> None:
    job = running()
    job = play(job, [*saved(job, 10), killed(job, step=17)]).job
    assert job.attempts[-1].lost_steps == 7
    (launch,) = commands(play(job, [placed(job)]))
    assert isinstance(launch, LaunchGang)
    assert launch.resume_from == checkpoint_id(job.id, 10, 1)


def test_a_refused_launch_is_tried_again() -> None:
    job = new_job()
    job = play(job, [placed(job)]).job
    refused = LaunchRefused(job_id=job.id, fence=1, node_id=NODE, reason="no space left")
    job = play(job, [refused]).job
    assert job.state is JobState.RESTARTING
    assert "no space left" in str(job.reason)
    assert job.attempts[-1].exit_reason is ExitReason.LAUNCH_FAILED


def test_a_lost_node_loses_the_attempt_and_is_told_to_kill_it() -> None:
    job = running()
    decision = play(job, [NodeLost(NODE, "its lease ran out", last_step=40)])
    (kill,) = commands(decision)
    assert isinstance(kill, StopGang)
    assert (kill.mode, kill.fence) == ("kill", 1)
    assert decision.job.state is JobState.RESTARTING
    assert decision.job.attempts[-1].exit_reason is ExitReason.NODE_LOST
    assert decision.job.attempts[-1].lost_steps == 40


def test_an_agent_that_is_stopped_in_an_orderly_way_costs_no_restart() -> None:
    job = running(faults={"max_restarts": 0})
    left = play(job, [NodeLost(NODE, "its agent was stopped", farewell=True)]).job
    assert left.state is JobState.RESTARTING
    assert (left.restarts, left.not_before_ms) == (0, NOW)
    lost = play(job, [NodeLost(NODE, "its lease ran out")]).job
    assert lost.state is JobState.FAILED


def test_facts_of_an_older_attempt_change_nothing() -> None:
    job = play(running(), [killed(running())]).job
    job = play(job, [placed(job)]).job
    old: list[JobEvent] = [
        launched(job),
        progressed(job),
        began(job, 9),
        *votes(job, 9),
        finished(job),
    ]
    decision = play(job, old)
    assert decision.job == job
    assert decision.sends == ()


def test_a_late_link_of_an_older_attempt_is_still_true() -> None:
    job = running()
    job = play(job, [began(job, 10), *votes(job, 10), NodeLost(NODE, "gone")]).job
    assert job.latest_checkpoint is None
    job = play(job, [linked(job, 10)]).job
    assert job.latest_checkpoint is not None
    assert job.latest_checkpoint.step == 10


def test_a_last_commit_that_is_reported_late_makes_the_job_succeed() -> None:
    job = running()
    job = play(job, [*votes(job, STEPS), finished(job), NodeLost(NODE, "gone")]).job
    assert job.state is JobState.RESTARTING
    assert play(job, [linked(job, STEPS)]).job.state is JobState.SUCCEEDED


def test_a_job_that_failed_for_want_of_its_last_commit_succeeds_when_that_is_told() -> None:
    job = running(faults={"max_restarts": 0})
    events: list[JobEvent] = [*votes(job, STEPS), finished(job), NodeLost(NODE, "gone")]
    failed = play(job, events).job
    assert failed.state is JobState.FAILED
    done = play(failed, [linked(job, STEPS)]).job
    assert (done.state, done.failure) == (JobState.SUCCEEDED, None)
    # An earlier checkpoint proves nothing, and neither does one of ranks that did not finish.
    assert play(failed, [linked(job, 10)]).job.state is JobState.FAILED
    crash = play(job, [*votes(job, STEPS), NodeLost(NODE, "gone")]).job
    assert play(crash, [linked(job, STEPS)]).job.state is JobState.FAILED


# --- checkpoints, evaluations, reminders --------------------------------------------------------


def test_retention_retires_all_but_the_last_and_forgets_them_when_they_are_gone() -> None:
    job = running()
    events = [e for n, step in enumerate((10, 20, 30)) for e in saved(job, step, number=n + 2)]
    decision = play(job, events)
    retire = [c for c in commands(decision) if isinstance(c, RetireCheckpoint)]
    assert [c.checkpoint_id for c in retire] == [checkpoint_id(job.id, 10, 1)]
    gone = CheckpointRetired(
        job_id=job.id, fence=1, node_id=NODE, checkpoint_id=retire[0].checkpoint_id
    )
    job = play(decision.job, [gone]).job
    assert sorted(c.step for c in job.checkpoints.values()) == [20, 30]
    assert play(job, [*events, gone]).job == job


def test_an_evaluation_counts_once() -> None:
    job = running()
    fact = Evaluated(job_id=job.id, fence=1, node_id=NODE, step=10, loss=2.0, tokens=5)
    once = play(job, [fact])
    assert len(once.job.evaluations) == 1
    assert play(once.job, [fact]).notes == ()


def test_a_validation_loss_that_is_not_finite_is_told_as_such() -> None:
    job = running()
    nan = float("nan")
    fact = Evaluated(job_id=job.id, fence=1, node_id=NODE, step=10, loss=nan, tokens=5)
    carried = FACT.validate_json(fact.model_dump_json())
    assert isinstance(carried, Evaluated)
    for one in (fact, carried):
        decision = play(job, [one])
        assert [e.loss for e in decision.job.evaluations] == [None]
        assert "not finite" in decision.notes[-1].message
        assert play(decision.job, [one]).notes == ()
    report = RankEvaluated(step=1, loss=float("inf"), tokens=5)
    assert RANK_MESSAGE.validate_json(report.model_dump_json()) == RankEvaluated(
        step=1, loss=None, tokens=5
    )


def test_a_delayed_job_says_why_once() -> None:
    delayed = play(new_job(), [PlacementDelayed("no room")])
    assert delayed.job.reason == "no room"
    assert play(delayed.job, [PlacementDelayed("no room")]).notes == ()


def test_an_overdue_answer_sends_the_command_again() -> None:
    job = new_job()
    placing = play(job, [placed(job)]).job
    assert isinstance(commands(play(placing, [AnswerOverdue()]))[0], LaunchGang)
    pausing = play(running(), [PauseAsked(REQUIRED)]).job
    (stop,) = commands(play(pausing, [AnswerOverdue()], NOW + 45_000))
    assert isinstance(stop, StopGang)
    assert stop.grace_s == 0
    sealed = play(running(), votes(job, 10)).job
    assert isinstance(commands(play(sealed, [AnswerOverdue()]))[0], CommitCheckpoint)


def test_every_state_has_its_row_in_the_table() -> None:
    assert set(TRANSITIONS) == set(JobState)


def test_a_record_keeps_the_first_attempt_and_the_newest_and_says_how_many_it_left_out() -> None:
    job = new_job(faults={"max_restarts": 100})
    for fence in range(1, 61):
        job = play(job, [placed(job), launched(job, fence), killed(job, fence=fence)]).job
    assert job.state is JobState.RESTARTING
    assert [a.fence for a in job.attempts] == [1, *range(61 - ATTEMPTS_KEPT, 61)]
    assert job.attempts_left_out == 60 - ATTEMPTS_KEPT - 1
    assert (job.fence, job.restarts) == (60, 60)
    assert job.not_before_ms == NOW + BACKOFF_MS[-1]
    views = attempt_views(job)
    assert views[0].time_to_restart_s is None
    assert views[1].time_to_restart_s is not None
