"""What the controller makes of jobs that storage tells of."""

import pytest

from services.contract.api.views import StopRequest
from services.contract.messages.commands import LaunchGang, RetireCheckpoint
from services.contract.messages.facts import JobFound
from services.contract.storage.job_cards import JobCard
from services.contract.storage.manifests import DamagedRecord
from services.contract.words.ids import checkpoint_id, new_job_id
from services.contract.words.states import CheckpointState, ExitReason, JobState
from services.controller.domain.decisions.recovery import ADOPTED_WITHIN_MS, found_again
from services.controller.domain.job.effects import Decision
from services.controller.domain.job.events import (
    FoundInStorage,
    KillAsked,
    PauseAsked,
    PinAsked,
    ResumeAsked,
)
from services.controller.domain.job.job import Job, Origin
from services.controller.use_cases.present import job_view
from tests.controller.histories import (
    NODE,
    NOW,
    STEPS,
    commands,
    crashed,
    finished,
    kept_standings,
    killed,
    launched,
    linked,
    new_job,
    placed,
    play,
    progressed,
    saved,
)

LATER = NOW + 60_000
NODES = {NODE: "life-9", "loom-2": "life-1"}


def found(
    steps: dict[int, int],
    *,
    fence: int = 3,
    source: int = 10,
    is_running: bool = False,
    last_step: int = 0,
    standing: JobState = JobState.PAUSED,
) -> JobFound:
    """A chain with attempt 1's checkpoints of these steps, by number; ``fence`` began at one."""
    job = new_job()
    plan = placed(job).plan
    card = JobCard(
        job_id=job.id,
        spec=job.spec,
        owner="ada",
        created_ms=NOW,
        fence=fence,
        plan=plan,
        resume_from=checkpoint_id(job.id, source, 1) if fence > 1 else None,
        standing=standing,
    )
    manifests = {number: linked(job, step).manifest for number, step in steps.items()}
    return JobFound(
        job_id=job.id,
        fence=fence,
        node_id=NODE,
        card=card,
        manifests=manifests,
        is_running=is_running,
        last_step=last_step,
    )


def take_in(fact: JobFound) -> Decision:
    """As the use case does: make it again, then take in what the fact tells."""
    made = found_again(fact, LATER)
    return made.then(play(made.job, [FoundInStorage(fact, NODES)], LATER))


def test_a_found_job_stands_with_its_checkpoints_and_a_fence_behind_all_others() -> None:
    decision = take_in(found({2: 10, 5: 20}, source=20))
    job = decision.job
    assert (job.state, job.fence, job.owner, job.created_ms) == (JobState.PAUSED, 3, "ada", NOW)
    assert {c.step: (c.state, c.number) for c in job.checkpoints.values()} == {
        10: (CheckpointState.COMMITTED, 2),
        20: (CheckpointState.COMMITTED, 5),
    }
    assert [note.kind for note in decision.notes] == ["job.found_again"]
    resumed = play(job, [ResumeAsked()]).job
    opened = play(resumed, [placed(resumed)]).job
    assert opened.fence == 4
    assert opened.attempts[-1].resumed_from == checkpoint_id(job.id, 20, 1)


def test_a_found_job_of_the_far_future_is_shown_and_is_not_newer_than_the_present() -> None:
    fact = found({2: 10})
    card = fact.card.model_copy(update={"created_ms": 10**18})
    job = take_in(fact.model_copy(update={"card": card})).job
    assert job.created_ms == LATER
    far = job.model_copy(update={"updated_ms": 10**18})
    assert job_view(far, (), {}).updated_at.year == 9999


def test_a_found_job_that_was_meant_to_run_is_queued_and_goes_on() -> None:
    fact = found({2: 10, 5: 20}, source=20, standing=JobState.QUEUED)
    job = take_in(fact).job
    # Its only node says that none of its ranks lives: nothing is there to wait for.
    assert (job.state, job.not_before_ms) == (JobState.QUEUED, LATER)
    opened = play(job, [placed(job)], LATER).job
    assert (opened.fence, opened.attempts[-1].resumed_step) == (4, 20)
    # Ranks of the attempt before are late now, and fenced.
    late = found({2: 10}, is_running=True, standing=JobState.QUEUED)
    assert play(opened, [FoundInStorage(late, NODES)], LATER).job.state is JobState.PLACING


@pytest.mark.parametrize("is_running", [False, True])
def test_a_found_job_waits_for_ranks_that_may_train_on_elsewhere(*, is_running: bool) -> None:
    teller = NODE if is_running else "loom-2"
    told = found({2: 10}, standing=JobState.QUEUED, is_running=is_running)
    told = told.model_copy(update={"node_id": teller})
    waiting = found_again(told, LATER).job
    assert (waiting.state, waiting.not_before_ms) == (JobState.QUEUED, LATER + ADOPTED_WITHIN_MS)
    later = found({2: 10}, is_running=True, last_step=42, standing=JobState.QUEUED)
    adopted = play(waiting, [FoundInStorage(later, NODES)], LATER).job
    assert (adopted.state, adopted.fence, adopted.restarts) == (JobState.RUNNING, 3, 0)


@pytest.mark.parametrize("state", [JobState.PAUSED, JobState.CANCELLED, JobState.FAILED])
def test_a_job_that_a_person_stopped_or_that_ended_is_found_as_it_stood(state: JobState) -> None:
    fact = found({2: 10}, standing=state)
    kept = {"reason": "as it was", "exit_reason": ExitReason.USER_ERROR}
    fact = fact.model_copy(update={"card": fact.card.model_copy(update=kept)})
    job = take_in(fact).job
    assert (job.state, job.exit_reason) == (state, ExitReason.USER_ERROR)
    assert str(job.reason).endswith("; as it was")
    assert (job.ended_ms is None) == (state is JobState.PAUSED)
    assert play(job, [ResumeAsked()], LATER).job.resume_point.step == 10


def test_a_job_without_a_readable_commit_does_not_begin_again_by_itself() -> None:
    damage = (DamagedRecord(number=2, name="00000002.json", reason="no JSON"),)
    fact = found({}, standing=JobState.QUEUED).model_copy(update={"damaged": damage})
    job = take_in(fact).job
    assert job.state is JobState.PAUSED
    assert "would start over" in str(job.reason)


def test_storage_is_told_where_a_job_stands_whenever_that_changes() -> None:
    job = new_job()
    assert (
        kept_standings(play(job, [PauseAsked(StopRequest())])) == []
    )  # it knows nothing of the job
    started = play(job, [placed(job), launched(job), progressed(job)])
    assert kept_standings(started) == []  # whoever opens the attempt writes it
    pausing = play(started.job, [PauseAsked(StopRequest())])
    assert kept_standings(pausing) == [JobState.PAUSED]
    paused = play(pausing.job, [finished(job, step=20, drained=True)])
    assert (paused.job.state, kept_standings(paused)) == (JobState.PAUSED, [])
    assert kept_standings(play(paused.job, [ResumeAsked()])) == [JobState.QUEUED]
    assert kept_standings(play(paused.job, [KillAsked()])) == [JobState.CANCELLED]
    assert kept_standings(play(started.job, [killed(job)])) == []
    failed = play(started.job, [crashed(job, "ValueError: no", step=1)])
    assert kept_standings(failed) == []
    events = [*saved(job, STEPS), finished(job)]
    assert kept_standings(play(started.job, events)) == [JobState.SUCCEEDED]


def test_a_job_whose_last_step_is_committed_is_found_done() -> None:
    job = take_in(found({2: STEPS})).job
    assert job.state is JobState.SUCCEEDED


def test_ranks_that_train_on_are_adopted_and_their_commits_and_end_count() -> None:
    job = take_in(found({2: 10}, is_running=True, last_step=42)).job
    assert job.state is JobState.RUNNING
    assert job.attempt is not None
    assert job.attempt.incarnations == {NODE: "life-9"}
    assert (job.attempt.fence, job.attempt.resumed_step, job.attempt.last_step) == (3, 10, 42)
    done = play(job, [*saved(job, STEPS, fence=3, number=7), finished(job, 3)], LATER).job
    assert done.state is JobState.SUCCEEDED
    assert done.attempts[-1].fence == 3


def test_a_second_node_that_tells_of_the_same_job_changes_nothing() -> None:
    running = take_in(found({2: 10}, is_running=True, last_step=42)).job
    again = play(running, [FoundInStorage(found({2: 10}), NODES)], LATER)
    assert again.job == running


def test_the_node_with_the_ranks_may_tell_after_one_without() -> None:
    standing = take_in(found({2: 10})).job
    adopted = play(standing, [FoundInStorage(found({2: 10}, is_running=True), NODES)], LATER)
    assert adopted.job.state is JobState.RUNNING


def test_ranks_are_adopted_only_once_all_nodes_of_theirs_have_joined() -> None:
    fact = found({2: 10}, is_running=True)
    standing = found_again(fact, LATER).job
    waiting = play(standing, [FoundInStorage(fact, {"loom-2": "life-1"})], LATER).job
    assert waiting.state is JobState.PAUSED
    assert play(waiting, [FoundInStorage(fact, NODES)], LATER).job.state is JobState.RUNNING


def test_ranks_are_not_adopted_once_somebody_resumed_the_job() -> None:
    standing = take_in(found({2: 10})).job
    resumed = play(standing, [ResumeAsked()], LATER).job
    late = play(resumed, [FoundInStorage(found({2: 10}, is_running=True), NODES)], LATER)
    assert late.job == resumed


def test_an_index_that_fell_behind_is_completed_and_damage_is_told() -> None:
    job: Job = take_in(found({2: 10})).job
    fact = found({2: 10, 4: 30}).model_copy(
        update={"damaged": (DamagedRecord(number=2, name="00000002.json", reason="no JSON"),)}
    )
    decision = play(job, [FoundInStorage(fact, {})], LATER)
    assert {c.step: c.state for c in decision.job.checkpoints.values()} == {
        10: CheckpointState.CORRUPT,
        30: CheckpointState.COMMITTED,
    }
    assert "checkpoint.chain_damaged" in [note.kind for note in decision.notes]


def test_found_checkpoints_are_pinned_until_somebody_unpins_them() -> None:
    steps = {2: 10, 3: 20, 4: 30}
    job = take_in(found(steps, is_running=True, last_step=35)).job
    saved_more = play(job, saved(job, 40, fence=3, number=7), LATER)
    assert not [c for c in commands(saved_more) if isinstance(c, RetireCheckpoint)]
    # Told again, or by another node, it does not take back what somebody said since.
    freed = play(saved_more.job, [PinAsked(checkpoint_id(job.id, 10, 1), pin=False)], LATER)
    again = play(freed.job, [FoundInStorage(found(steps), NODES)], LATER)
    later = play(again.job, saved(job, 50, fence=3, number=8), LATER)
    retired = [c.checkpoint_id for c in commands(later) if isinstance(c, RetireCheckpoint)]
    assert retired == [checkpoint_id(job.id, 10, 1)]


def test_an_event_says_why_found_checkpoints_are_pinned() -> None:
    made = take_in(found({2: 10}))
    assert "pinned, because Redis lost pins and holds" in made.notes[0].message
    more = play(made.job, [FoundInStorage(found({2: 10, 4: 30}), NODES)], LATER)
    assert [(n.kind, n.data["step"]) for n in more.notes] == [("checkpoint.pinned", 30)]


def test_a_clone_without_a_checkpoint_of_its_own_begins_with_its_origins_again() -> None:
    source = new_job_id(NOW - 1, bytes(10))
    begun = checkpoint_id(source, 50, 2)
    fact = found({})
    fact = fact.model_copy(update={"card": fact.card.model_copy(update={"resume_from": begun})})
    resumed = play(take_in(fact).job, [ResumeAsked()], LATER).job
    opened = play(resumed, [placed(resumed)], LATER)
    (launch,) = [c for c in commands(opened) if isinstance(c, LaunchGang)]
    assert launch.resume_from == begun
    origin = Origin(job_id=source, checkpoint_id=begun, step=50, held=True, found=True)
    assert opened.job.origin == origin
    own = fact.model_copy(update={"manifests": found({3: 60}).manifests})
    assert take_in(own).job.resume_point.step == 60


def test_a_job_that_was_resumed_from_an_older_checkpoint_does_not_return_to_the_line_it_left() -> (
    None
):
    # The card of attempt 3 says that it began with the checkpoint of step 10.
    made = take_in(found({2: 10, 5: 40}, is_running=True, last_step=15))
    assert "it had discarded later ones" in made.notes[0].message
    job = made.job
    lost = play(job, [killed(job, fence=3, step=15)], LATER).job
    assert (lost.state, lost.resume_point.step) == (JobState.RESTARTING, 10)
    gone_on = play(job, [*saved(job, 20, fence=3, number=7), killed(job, 3, 25)], LATER).job
    assert gone_on.resume_point.step == 20


def test_a_line_whose_beginning_is_gone_does_not_make_a_job_start_over() -> None:
    job = take_in(found({5: 40})).job
    assert job.resume_point.step == 40


def test_ranks_that_drain_although_nobody_is_known_to_have_asked_cost_nothing() -> None:
    adopted = take_in(found({2: 10}, is_running=True, last_step=42)).job
    drained = finished(adopted, 3, step=43, drained=True)
    job = play(adopted, [*saved(adopted, 43, fence=3, number=7), drained], LATER).job
    assert (job.state, job.restarts, job.attempts[-1].exit_reason) == (
        JobState.PAUSED,
        0,
        ExitReason.PAUSED,
    )
    assert "a stop had been requested, and Redis lost by whom" in str(job.reason)
    assert "step 43" in str(job.reason)
    # Redis may also have lost no more than its last second.
    for told in ([], [launched(adopted)], [launched(adopted), progressed(adopted)]):
        fresh = new_job()
        events = [placed(fresh), *told, finished(fresh, step=5, drained=True)]
        stood = play(fresh, events).job
        assert (stood.state, stood.restarts) == (JobState.PAUSED, 0)
