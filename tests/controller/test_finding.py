"""What the controller makes of jobs that storage tells of."""

from services.contract.ids import checkpoint_id
from services.contract.job_cards import JobCard
from services.contract.manifests import DamagedRecord
from services.contract.messages.facts import JobFound
from services.contract.states import CheckpointState, JobState
from services.controller.domain.effects import Decision
from services.controller.domain.events import FoundInStorage, ResumeAsked
from services.controller.domain.finding import found_again
from services.controller.domain.job import Job
from tests.controller.histories import (
    NODE,
    NOW,
    STEPS,
    finished,
    linked,
    new_job,
    placed,
    play,
    saved,
)

LATER = NOW + 60_000
NODES = {NODE: "life-9", "loom-2": "life-1"}


def found(
    steps: dict[int, int], *, fence: int = 3, is_running: bool = False, last_step: int = 0
) -> JobFound:
    """A chain with checkpoints of these steps, by number."""
    job = new_job()
    plan = placed(job).plan
    card = JobCard(
        job_id=job.id,
        spec=job.spec,
        owner="ada",
        created_ms=NOW,
        fence=fence,
        plan=plan,
        resume_from=checkpoint_id(job.id, 10, 1) if fence > 1 else None,
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
    """As the use case does: make it anew, then take in what the fact tells."""
    made = found_again(fact, LATER)
    return made.then(play(made.job, [FoundInStorage(fact, NODES)], LATER))


def test_a_found_job_stands_with_its_checkpoints_and_a_fence_behind_all_others() -> None:
    decision = take_in(found({2: 10, 5: 20}))
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
