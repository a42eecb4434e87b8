"""Checkpoints that are kept, verified, deleted, and found to be corrupt."""

import pytest

from services.contract.api.views import StopRequest
from services.contract.messages.commands import (
    CommitCheckpoint,
    LaunchGang,
    RetireCheckpoint,
    VerifyCheckpoint,
)
from services.contract.messages.facts import (
    ChainDamaged,
    CheckpointCorrupt,
    CheckpointLost,
    CheckpointUnread,
    CheckpointVerified,
    JobPurged,
)
from services.contract.storage.manifests import DamagedRecord
from services.contract.words.ids import checkpoint_id, new_job_id
from services.contract.words.states import CheckpointState, ExitReason, JobState
from services.controller.domain.errors import NotFoundError, StateConflictError
from services.controller.domain.job.checkpoint import MOST_KEPT, MOST_SHARDS
from services.controller.domain.job.events import (
    AnswerOverdue,
    CancelAsked,
    ExportAsked,
    HoldAsked,
    HoldReleased,
    JobEvent,
    KillAsked,
    NodeLost,
    PauseAsked,
    PinAsked,
    PurgeAsked,
    RemovalAsked,
    ResumeAsked,
    VerifyAsked,
)
from services.controller.domain.job.job import Job
from tests.controller.histories import (
    NODE,
    NOW,
    began,
    commands,
    crashed,
    finished,
    killed,
    launched,
    linked,
    placed,
    play,
    progressed,
    running,
    saved,
    votes,
)


def named(job: Job, step: int, fence: int = 1) -> str:
    return checkpoint_id(job.id, step, fence)


def corrupt(job: Job, step: int, *, fence: int | None = None, of: int = 1) -> CheckpointCorrupt:
    return CheckpointCorrupt(
        job_id=job.id,
        fence=job.fence if fence is None else fence,
        node_id=NODE,
        checkpoint_id=named(job, step, of),
        file="shards/x/rank-00001.safetensors",
        reason="its sha256 differs",
    )


def verified(job: Job, step: int) -> CheckpointVerified:
    return CheckpointVerified(
        job_id=job.id, fence=1, node_id=NODE, checkpoint_id=named(job, step), bytes=20
    )


def with_saved(*steps: int, **spec: object) -> Job:
    job = running(**spec)
    for number, step in enumerate(steps, start=2):
        job = play(job, saved(job, step, number=number)).job
    return job


def states(job: Job) -> dict[int, CheckpointState]:
    return {c.step: c.state for c in job.checkpoints.values()}


def loading_again(job: Job) -> Job:
    """Its second attempt is launched and has made no step."""
    job = play(job, [killed(job)]).job
    return play(job, [placed(job), launched(job, 2)]).job


def test_an_attempt_that_finds_its_checkpoint_corrupt_is_followed_by_one_from_the_previous() -> (
    None
):
    job = loading_again(with_saved(10, 20))
    decision = play(job, [corrupt(job, 20), crashed(job, "CorruptShardError: no", 2, step=20)])
    after = decision.job
    assert after.state is JobState.RESTARTING
    assert after.restarts == job.restarts, "it is the storage's fault"
    assert "rank-00001.safetensors" in str(after.reason)
    assert "resuming from step 10" in str(after.reason)
    assert states(after) == {10: CheckpointState.COMMITTED, 20: CheckpointState.CORRUPT}
    notes = [note for note in decision.notes if note.kind == "checkpoint.corrupt"]
    assert [note.data["file"] for note in notes] == ["shards/x/rank-00001.safetensors"]
    (launch,) = commands(play(after, [placed(after)]))
    assert isinstance(launch, LaunchGang)
    assert launch.resume_from == named(job, 10)


def test_an_attempt_that_saved_and_calls_what_it_loaded_corrupt_costs_a_restart() -> None:
    """A rank that does so each time would be started again without end: there is always a newer checkpoint."""
    job = loading_again(with_saved(10, 20))
    saving = play(job, [progressed(job, 21, 2), *saved(job, 30, 2, 4)]).job
    after = play(saving, [corrupt(saving, 20), crashed(saving, "no", 2, step=30)]).job
    assert after.state is JobState.RESTARTING
    assert after.restarts == job.restarts + 1
    assert "not counted" not in str(after.reason)
    assert states(after)[20] is CheckpointState.CORRUPT


def test_few_commits_are_under_way_at_a_time_and_the_newest_checkpoint_waits_for_its_turn() -> None:
    """A rank votes as fast as it can: what is not answered must not grow for as long as it lives."""
    job, commanded = running(), []
    for step in range(1, 101):
        decision = play(job, votes(job, step))
        job = decision.job
        commanded += commands(decision)
    assert [c.manifest.step for c in commanded if isinstance(c, CommitCheckpoint)] == [
        *range(1, 17)
    ]
    sealed = [step for step, state in states(job).items() if state is CheckpointState.SEALED]
    assert sorted(sealed) == [*range(1, 17), 100]
    assert "a later one was written" in str(job.checkpoints[named(job, 99)].reason)
    assert len(job.checkpoints) < 30
    again = commands(play(job, [AnswerOverdue()]))
    # A later one may take the place of the one that waits: it must not be committed behind that.
    assert [c.manifest.step for c in again if isinstance(c, CommitCheckpoint)] == [*range(1, 17)]
    decision = play(job, [linked(job, 1)])
    (next_one,) = [c for c in commands(decision) if isinstance(c, CommitCheckpoint)]
    assert next_one.manifest.step == 100
    lost = CheckpointLost(
        job_id=job.id, fence=1, node_id=NODE, checkpoint_id=named(job, 2), reason="no"
    )
    decision = play(decision.job, [lost, *votes(job, 101)])
    (next_one,) = [c for c in commands(decision) if isinstance(c, CommitCheckpoint)]
    assert next_one.manifest.step == 101


def test_a_job_whose_only_checkpoint_is_corrupt_fails_clearly_and_never_starts_over() -> None:
    job = loading_again(with_saved(10))
    failed = play(job, [corrupt(job, 10), crashed(job, "CorruptShardError: no", 2, step=10)]).job
    assert failed.state is JobState.FAILED
    assert failed.exit_reason is ExitReason.CHECKPOINT_FAILED
    assert "there is no other committed checkpoint" in str(failed.reason)
    with pytest.raises(StateConflictError, match="corrupt"):
        play(failed, [ResumeAsked()])
    forgotten = play(failed, [RemovalAsked(named(job, 10), NODE)])
    assert [type(command) for command in commands(forgotten)] == [RetireCheckpoint]


def test_a_running_job_whose_checkpoints_prove_corrupt_does_not_begin_again_after_a_crash() -> None:
    job = with_saved(10)
    failed = play(job, [corrupt(job, 10), killed(job)]).job
    assert failed.state is JobState.FAILED
    waiting = play(job, [killed(job), corrupt(job, 10)]).job
    assert waiting.state is JobState.RESTARTING
    assert play(waiting, [placed(waiting)]).job.state is JobState.PAUSED


def test_a_restored_checkpoint_counts_again_once_it_is_verified() -> None:
    job = with_saved(10, 20)
    broken = play(job, [corrupt(job, 20), corrupt(job, 20)])
    assert broken.job.latest_checkpoint == job.checkpoints[named(job, 10)]
    assert [note.kind for note in broken.notes] == ["checkpoint.corrupt"]
    whole = play(broken.job, [verified(job, 20)]).job
    assert whole.latest_checkpoint is not None
    assert whole.latest_checkpoint.step == 20
    assert whole.latest_checkpoint.verified_ms == NOW
    assert whole.latest_checkpoint.corrupt_file is None


def test_a_checkpoint_is_verified_again_although_the_clock_was_set_back() -> None:
    job = with_saved(10)
    before = play(job, [verified(job, 10)], NOW + 3_600_000).job
    after = play(before, [verified(job, 10)]).job
    assert after.checkpoints[named(job, 10)].verified_ms == NOW


def test_a_node_that_cannot_read_proves_nothing() -> None:
    job = with_saved(10)
    unread = CheckpointUnread(
        job_id=job.id, fence=1, node_id=NODE, checkpoint_id=named(job, 10), reason="no mount"
    )
    decision = play(job, [unread], NOW + 5)
    assert states(decision.job) == {10: CheckpointState.COMMITTED}
    assert decision.job.checkpoints[named(job, 10)].checked_ms == NOW + 5
    assert [note.kind for note in decision.notes] == ["checkpoint.unread"]


def test_a_damaged_record_makes_the_checkpoint_that_it_commits_corrupt_once() -> None:
    job = with_saved(10, 20)
    damage = ChainDamaged(
        job_id=job.id,
        fence=1,
        node_id=NODE,
        records=(DamagedRecord(number=3, name="00000003.json", reason="no JSON"),),
    )
    decision = play(job, [damage, damage])
    assert states(decision.job) == {10: CheckpointState.COMMITTED, 20: CheckpointState.CORRUPT}
    assert [n.kind for n in decision.notes] == ["checkpoint.chain_damaged", "checkpoint.corrupt"]
    assert decision.job.checkpoints[named(job, 20)].corrupt_file == "chain/00000003.json"


def test_retention_keeps_the_last_verified_one_pinned_ones_and_those_of_other_jobs() -> None:
    other = new_job_id(NOW, bytes(9) + b"\1")
    job = with_saved(10, 20, checkpoint={"keep_last": 2})
    job = play(job, [verified(job, 10), PinAsked(named(job, 20))]).job
    for number, step in enumerate((30, 40, 50, 60), start=4):
        job = play(job, saved(job, step, number=number)).job
        if step == 40:
            job = play(job, [HoldAsked(named(job, 30), other)]).job
    kept = {step for step, state in states(job).items() if state is CheckpointState.COMMITTED}
    assert kept == {10, 20, 30, 50, 60}
    let_go = HoldReleased(named(job, 30), other)
    unpin = PinAsked(named(job, 20), pin=False)
    job = play(job, [let_go, unpin, verified(job, 60), *saved(job, 70, number=8)]).job
    kept = {step for step, state in states(job).items() if state is CheckpointState.COMMITTED}
    assert kept == {60, 70}


@pytest.mark.parametrize("ranks", [1, 64, 1 << 16])
def test_of_any_number_that_keep_last_names_a_record_has_room_for_so_many(ranks: int) -> None:
    job = with_saved(10, checkpoint={"keep_last": 1_000_000_000})
    (one,) = job.checkpoints.values()
    votes = dict.fromkeys(range(ranks), next(iter(one.votes.values())))
    most = min(MOST_KEPT, MOST_SHARDS // ranks)
    numbered = {
        name: one.model_copy(update={"id": name, "step": step, "number": step, "votes": votes})
        for step in range(10, most + 10)
        for name in [named(job, step)]
    }
    full = job.model_copy(update={"checkpoints": numbered})
    after = play(full, saved(full, most + 10, number=most + 10)).job
    kept = [s for s, state in states(after).items() if state is CheckpointState.COMMITTED]
    assert len(kept) == most
    assert max(kept) == most + 10

    corrupt = {
        name: c.model_copy(update={"state": CheckpointState.CORRUPT})
        for name, c in numbered.items()
    }
    corrupt[named(job, most + 20)] = one.model_copy(
        update={"id": named(job, most + 20), "state": CheckpointState.CORRUPT, "number": most + 20}
    )
    damaged = job.model_copy(update={"checkpoints": corrupt})
    after = play(damaged, saved(damaged, most + 30, number=most + 30)).job
    assert list(states(after).values()).count(CheckpointState.CORRUPT) == most

    pinned = {name: c.model_copy(update={"pinned": True}) for name, c in numbered.items()}
    full = play(
        job.model_copy(update={"checkpoints": pinned}), saved(full, most + 10, number=most + 10)
    ).job
    with pytest.raises(StateConflictError, match="no room for more: unpin some"):
        play(full, [PinAsked(named(job, most + 10))])


def test_retention_counts_only_what_the_job_may_go_on_from() -> None:
    job = with_saved(20, 40, checkpoint={"keep_last": 2})
    job = play(job, [PauseAsked(StopRequest(checkpoint="none"))]).job
    job = play(job, [finished(job, step=41, drained=True), ResumeAsked(named(job, 20))]).job
    job = play(job, [placed(job), launched(job, 2), progressed(job, 21, 2)]).job
    job = play(job, saved(job, 30, fence=2, number=6)).job
    assert states(job) == {
        20: CheckpointState.COMMITTED,
        40: CheckpointState.DELETING,
        30: CheckpointState.COMMITTED,
    }
    # The newest proves to be corrupt: there is one to fall back on.
    job = play(job, [killed(job, fence=2, step=35)]).job
    job = play(job, [placed(job)], NOW + 20_000).job
    broken: list[JobEvent] = [
        corrupt(job, 30, of=2),
        crashed(job, "CorruptCheckpointError", fence=3, step=0),
    ]
    job = play(job, broken, NOW + 20_001).job
    assert (job.state, job.resume_point.step) == (JobState.RESTARTING, 20)


def test_the_verified_checkpoint_that_is_kept_is_one_to_go_on_from() -> None:
    job = with_saved(20, 40, checkpoint={"keep_last": 2})
    job = play(job, [verified(job, 20), PauseAsked(StopRequest(checkpoint="none"))]).job
    job = play(job, [finished(job, step=41, drained=True), ResumeAsked(named(job, 20))]).job
    job = play(job, [placed(job), launched(job, 2), progressed(job, 21, 2)]).job
    for number, step in enumerate((50, 60, 70), start=6):
        job = play(job, saved(job, step, fence=2, number=number)).job
        if step == 50:
            job = play(job, [verified(job, 40)]).job
    kept = {step for step, state in states(job).items() if state is CheckpointState.COMMITTED}
    assert kept == {20, 60, 70}


def test_a_late_commit_does_not_retire_what_the_living_attempt_began_with() -> None:
    job = with_saved(20, checkpoint={"keep_last": 1})
    job = play(job, [began(job, 40), *votes(job, 40), NodeLost(NODE, "lost")]).job
    job = play(job, [placed(job, "life-2"), launched(job, 2)], NOW + 30_000).job
    assert job.attempts[-1].resumed_from == named(job, 20)
    job = play(job, [linked(job, 40, number=3)], NOW + 30_001).job
    assert states(job)[20] is CheckpointState.COMMITTED
    job = play(job, [progressed(job, 21, 2)], NOW + 30_002).job
    job = play(job, [linked(job, 39, number=4)], NOW + 30_003).job
    assert states(job)[20] is CheckpointState.COMMITTED
    # Its own commit is what it would go on from, had it not been overtaken.
    job = play(job, saved(job, 50, fence=2, number=5), NOW + 30_004).job
    assert states(job)[20] is CheckpointState.DELETING


def test_nothing_is_asked_of_checkpoints_that_are_being_purged() -> None:
    job = with_saved(10)
    job = play(job, [KillAsked(), killed(job)]).job
    name = named(job, 10)
    purged = play(job, [PurgeAsked(NODE)]).job
    requests: list[JobEvent] = [
        HoldAsked(name, new_job_id(NOW, bytes(9) + b"\1")),
        PinAsked(name),
        VerifyAsked(name, NODE),
        ExportAsked(name, NODE),
    ]
    for request in requests:
        with pytest.raises(StateConflictError, match="are being removed by loom-1"):
            play(purged, [request])
    failed = JobPurged(job_id=job.id, fence=job.fence, node_id=NODE, error="read-only")
    for request in requests:
        assert play(purged, [failed, request]).notes


def test_what_something_still_needs_is_not_deleted() -> None:
    job = with_saved(10, 20, 30, checkpoint={"keep_last": 3})
    job = play(job, [verified(job, 20), PinAsked(named(job, 10))]).job
    for step, why in ((10, "pinned"), (20, "last verified"), (30, "would resume from it")):
        with pytest.raises(StateConflictError, match=why):
            play(job, [RemovalAsked(named(job, step), NODE)])
    with pytest.raises(NotFoundError):
        play(job, [RemovalAsked(named(job, 99), NODE)])
    job = play(job, [PinAsked(named(job, 10), pin=False)]).job
    with pytest.raises(StateConflictError, match="no node is ready"):
        play(job, [RemovalAsked(named(job, 10), None)])
    decision = play(job, [RemovalAsked(named(job, 10), NODE)])
    assert states(decision.job)[10] is CheckpointState.DELETING
    assert [type(command) for command in commands(decision)] == [RetireCheckpoint]
    assert len(commands(play(decision.job, [RemovalAsked(named(job, 10), NODE)]))) == 1


def test_a_checkpoint_that_is_being_loaded_is_not_deleted() -> None:
    job = loading_again(with_saved(10))
    stopping = play(job, [CancelAsked(StopRequest())]).job
    with pytest.raises(StateConflictError, match="attempt 2 is loading it"):
        play(stopping, [RemovalAsked(named(job, 10), NODE)])


def test_the_last_checkpoint_of_a_job_that_has_ended_can_be_deleted() -> None:
    job = running()
    done = play(job, [*saved(job, 100), finished(job)]).job
    assert done.state is JobState.SUCCEEDED
    assert states(play(done, [RemovalAsked(named(job, 100), NODE)]).job) == {
        100: CheckpointState.DELETING
    }


def test_verification_is_commanded_at_any_time_and_only_of_what_is_committed() -> None:
    job = with_saved(10)
    (command,) = commands(play(job, [VerifyAsked(named(job, 10), "loom-2")]))
    assert command == VerifyCheckpoint(
        job_id=job.id, fence=1, checkpoint_id=named(job, 10), owner=job.owner
    )
    deleting = play(
        play(job, saved(job, 20, number=3)).job, [RemovalAsked(named(job, 10), NODE)]
    ).job
    with pytest.raises(StateConflictError, match="DELETING"):
        play(deleting, [VerifyAsked(named(job, 10), NODE)])


def test_facts_of_the_second_attempt_do_not_touch_the_first_ones_source() -> None:
    job = loading_again(with_saved(10, 20))
    stale = play(job, [corrupt(job, 20, fence=1)]).job
    assert stale.attempt is not None
    assert stale.attempt.corrupt_source is None, "another attempt's finding"
    assert states(stale)[20] is CheckpointState.CORRUPT, "yet it is corrupt"
    assert play(stale, [progressed(job, 21, 2)]).job.state is JobState.RUNNING
