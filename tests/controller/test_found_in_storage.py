"""Who may say what storage holds of a job, and what becomes of checkpoints that it does not hold."""

import pytest
from pydantic import ValidationError

from services.contract.api.views import StopRequest
from services.contract.messages.commands import RetireCheckpoint
from services.contract.messages.facts import (
    FACT,
    ChainDamaged,
    CheckpointExported,
    CheckpointRetired,
    CheckpointUnread,
    CheckpointVerified,
    ExportFailed,
    JobFound,
    JobPurged,
)
from services.contract.storage.manifests import DamagedRecord
from services.contract.words.bounds import MOST_ATTEMPTS, MOST_TOLD_ATTEMPTS, MOST_WHOLE
from services.contract.words.ids import checkpoint_id
from services.contract.words.states import CheckpointState, JobState
from services.controller.domain.decisions.dispatch import decide
from services.controller.domain.decisions.purge import is_purged
from services.controller.domain.decisions.recovery import awaits_adoption, found_again
from services.controller.domain.job.checkpoint import MOST_KEPT
from services.controller.domain.job.effects import Decision
from services.controller.domain.job.events import (
    ExportAsked,
    FoundInStorage,
    GangFact,
    JobEvent,
    PauseAsked,
    PurgeAsked,
    VerifyAsked,
)
from services.controller.ports.machines import FactEntry
from services.controller.use_cases.facts import apply_facts
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
    progressed,
    running,
    saved,
    votes,
)
from tests.controller.histories import play as played
from tests.controller.test_after_a_loss import Leader, found, play
from tests.controller.test_foreign_facts import corrupt, keep, sams, trained


def test_what_storage_holds_of_a_job_its_own_nodes_can_tell_and_those_that_were_asked() -> None:
    job = played(running(), saved(running(), 10)).job
    name = checkpoint_id(job.id, 10, 1)
    about = {"job_id": job.id, "fence": 1, "node_id": "loom-7", "checkpoint_id": name}
    broken = {"number": 2, "name": "00000002.json", "reason": "no JSON"}
    facts: list[GangFact] = [
        corrupt(job, name).model_copy(update={"node_id": "loom-7"}),
        ChainDamaged.model_validate(about | {"records": [broken]}),
        CheckpointVerified.model_validate(about | {"bytes": 1}),
        CheckpointUnread.model_validate(about | {"reason": "no mount"}),
        CheckpointExported.model_validate(about | {"files": ["a"], "bytes": 1}),
        ExportFailed.model_validate(about | {"reason": "no room"}),
    ]
    for fact in facts:
        assert decide(job, fact, NOW) == Decision(job)
        for asked in (VerifyAsked(name, "loom-7"), ExportAsked(name, "loom-7")):
            reading = decide(job, asked, NOW).job
            assert decide(reading, fact, NOW).job.checkpoints != reading.checkpoints
    linked_elsewhere = linked(job, 20, number=3).model_copy(update={"node_id": "loom-7"})
    assert decide(job, linked_elsewhere, NOW) == Decision(job)
    told = found(job).model_copy(
        update={"node_id": "loom-7", "damaged": (DamagedRecord.model_validate(broken),)}
    )
    after = decide(job, FoundInStorage(told, {}), NOW).job
    assert after.checkpoints[name].state is CheckpointState.COMMITTED


def test_a_job_is_not_found_with_a_checkpoint_of_another_job() -> None:
    """It would go on from it: with the weights of whoever's job that is."""
    sue, sam = new_job(), sams()
    told = found(sue, 10)
    foreign = linked(sam, 20).manifest
    FACT.validate_json(told.model_dump_json())
    for forged in (foreign, foreign.model_copy(update={"job_id": sue.id})):
        body = told.model_copy(update={"manifests": {**told.manifests, 9: forged}})
        with pytest.raises(ValidationError, match="a checkpoint that is not of"):
            FACT.validate_json(body.model_dump_json())


def test_checkpoints_that_storage_does_not_have_cost_a_job_one_attempt_together() -> None:
    """Any node may tell of as many as it likes: with an attempt for each the job would not train for hours."""

    async def course(leader: Leader) -> None:
        job, other = new_job(), "loom-7"
        await keep(leader, job, placed(job), launched(job), progressed(job), *saved(job, 10))
        await leader.hear(killed(job), found(job, *range(20, 60, 10), teller=other))
        leader.now += 3_600_000
        await leader.happen(job, placed(job))
        forged = (await leader.job(job.id)).attempts[-1].resumed_from
        assert forged == checkpoint_id(job.id, 50, 1)
        all_there_is = {"fence": 2, "is_all": True}
        # One that has no ranks of the attempt says nothing of what storage lacks, nor one whose fact is a part.
        await leader.hear(
            found(job, teller=other).model_copy(update=all_there_is),
            found(job).model_copy(update={"fence": 2}),
        )
        book = (await leader.job(job.id)).checkpoints.values()
        assert {c.state for c in book} == {CheckpointState.COMMITTED}
        lacks = corrupt(job, forged, 2).model_copy(update={"file": "chain"})
        await leader.hear(
            found(job, 10).model_copy(update=all_there_is),
            launched(job, 2),
            lacks,
            crashed(job, "ChainError: it is not committed", 2, step=10),
        )
        after = await leader.job(job.id)
        assert after.restarts == 1  # of the kill alone
        lost = [c.step for c in after.checkpoints.values() if c.state == CheckpointState.CORRUPT]
        assert sorted(lost) == [20, 30, 40, 50]
        await leader.happen(job, placed(job))
        assert (await leader.job(job.id)).attempts[-1].resumed_step == 10

    play(course)


def test_checkpoints_whose_votes_were_counted_stay_where_a_node_has_an_older_copy_of_storage() -> (
    None
):
    async def course(leader: Leader) -> None:
        job = new_job()
        kept = [*saved(job, 10, number=2), *saved(job, 20, number=3)]
        await keep(leader, job, placed(job), launched(job), progressed(job), *kept)
        await leader.hear(killed(job), found(job, 30, 40, teller="loom-7"))
        # What a node has read since is there.
        read = checkpoint_id(job.id, 40, 1)
        await leader.hear(
            CheckpointVerified(job_id=job.id, fence=1, node_id=NODE, checkpoint_id=read, bytes=1)
        )
        leader.now += 3_600_000
        await leader.happen(job, placed(job))
        older = found(job, 10).model_copy(update={"fence": 2, "is_all": True})
        await leader.hear(older)
        book = (await leader.job(job.id)).checkpoints.values()
        assert {c.step: c.state for c in book if c.state != CheckpointState.COMMITTED} == {
            30: CheckpointState.CORRUPT
        }

    play(course)


@pytest.mark.parametrize("has_begun", [False, True])
@pytest.mark.parametrize("teller", ["loom-7", NODE])
def test_what_ranks_write_now_is_committed_by_their_votes_alone(
    *, has_begun: bool, teller: str
) -> None:
    """Whoever says that the last one is committed would have the job SUCCEED without it."""

    async def course(leader: Leader) -> None:
        job = new_job()
        begun = [began(job, STEPS)]
        history = [placed(job), launched(job), progressed(job), *saved(job, 10)]
        await keep(leader, job, *history, *(begun if has_begun else ()))
        await leader.hear(found(job, STEPS, teller=teller))
        await leader.happen(job, *(() if has_begun else begun), *votes(job, STEPS), finished(job))
        waiting = await leader.job(job.id)
        assert waiting.state != JobState.SUCCEEDED
        last = waiting.checkpoints[checkpoint_id(job.id, STEPS, 1)]
        assert last.state == CheckpointState.SEALED
        assert any(c.kind == "commit_checkpoint" for c in leader.server.commands(NODE))
        await leader.happen(job, linked(job, STEPS, 1, 3))
        assert (await leader.job(job.id)).state == JobState.SUCCEEDED

    play(course)


@pytest.mark.parametrize("teller", ["loom-7", NODE])
def test_while_ranks_write_no_node_adds_what_older_attempts_committed(teller: str) -> None:
    """Nobody would wait for a last commit that a full disk holds up: a later one would take its place."""

    async def course(leader: Leader) -> None:
        job = new_job()
        again: list[JobEvent] = [killed(job), placed(job), launched(job, 2)]
        await keep(leader, job, placed(job), launched(job), *saved(job, 10), *again)
        await leader.happen(job, progressed(job, 11, 2))
        await leader.hear(found(job, STEPS, teller=teller))
        book = (await leader.job(job.id)).checkpoints
        assert [c.step for c in book.values()] == [10]

    play(course)


@pytest.mark.parametrize("is_paused", [False, True])
@pytest.mark.parametrize("fence", [2, 3])
def test_before_a_launch_its_node_tells_of_attempts_that_redis_lost(
    *, is_paused: bool, fence: int
) -> None:
    """Else the job would FAIL for want of a checkpoint, beside later ones in storage."""

    async def course(leader: Leader) -> None:
        job = new_job()
        await keep(leader, job, placed(job), launched(job), *saved(job, 10), killed(job))
        leader.now += 3_600_000
        await leader.happen(job, placed(job), *((PauseAsked(StopRequest()),) if is_paused else ()))
        told = found(job, 30)
        (manifest,) = told.manifests.values()
        lost = manifest.model_copy(
            update={"checkpoint_id": checkpoint_id(job.id, 30, fence), "fence": fence}
        )
        others = told.model_copy(update={"fence": fence, "manifests": {7: lost}})
        await leader.hear(others.model_copy(update={"node_id": "loom-7"}))
        assert lost.checkpoint_id not in (await leader.job(job.id)).checkpoints
        await leader.hear(others)
        assert lost.checkpoint_id in (await leader.job(job.id)).checkpoints

    play(course)


def test_a_last_commit_of_which_its_node_told_with_all_it_found_ends_the_job_once_it_is_linked() -> (
    None
):
    job = running().model_copy(update={"found": True})
    waiting = played(job, [began(job, STEPS), *votes(job, STEPS), finished(job)]).job
    told = decide(waiting, FoundInStorage(found(job, STEPS), {}), NOW).job
    assert told.state is not JobState.SUCCEEDED
    assert decide(told, linked(job, STEPS, 1, 2), NOW).job.state is JobState.SUCCEEDED


def test_of_an_attempt_to_come_no_node_knows_what_it_commits() -> None:
    async def course(leader: Leader) -> None:
        job = new_job()
        await keep(leader, job, placed(job), launched(job), progressed(job), killed(job))
        told = found(job, 50)
        (manifest,) = told.manifests.values()
        later = checkpoint_id(job.id, 50, 2)
        for fence in (1, 2):
            forged = manifest.model_copy(update={"checkpoint_id": later, "fence": fence})
            await leader.hear(told.model_copy(update={"manifests": {2: forged}}))
        assert not (await leader.job(job.id)).checkpoints

    play(course)


def test_where_the_checkpoint_to_load_is_in_storage_none_is_given_up() -> None:
    async def course(leader: Leader) -> None:
        job = new_job()
        await keep(leader, job, placed(job), launched(job), progressed(job), *saved(job, 10))
        await leader.hear(killed(job), found(job, 20, 30, teller="loom-7"))
        leader.now += 3_600_000
        await leader.happen(job, placed(job))
        source = (await leader.job(job.id)).attempts[-1].resumed_from
        assert source == checkpoint_id(job.id, 30, 1)
        await leader.hear(found(job, 10, 30).model_copy(update={"fence": 2, "is_all": True}))
        book = (await leader.job(job.id)).checkpoints.values()
        assert {c.state for c in book} == {CheckpointState.COMMITTED}

    play(course)


def test_of_a_job_that_has_not_begun_no_node_can_tell_what_storage_holds() -> None:
    """It would wait for a checkpoint that there is not, and nothing of it would be in storage."""
    job = new_job()
    forged = linked(job, 20, number=1)
    assert decide(job, forged, NOW) == Decision(job)
    again = found_again(found(job), NOW).job
    assert not again.attempts
    assert forged.manifest.checkpoint_id in decide(again, forged, NOW).job.checkpoints


def test_of_a_job_whose_attempts_redis_lost_alone_later_commits_count() -> None:
    """Its ranks go on, in an attempt of which a copy of Redis knows nothing: what they commit is where it goes on."""
    job = new_job()
    again = decide(job, FoundInStorage(found(job, 20), {}), NOW).job
    later = linked(job, 30, number=3)
    assert not again.attempts
    assert later.manifest.checkpoint_id in decide(again, later, NOW).job.checkpoints


def test_of_damaged_records_few_are_noted_and_all_of_their_checkpoints_are_corrupt() -> None:
    job = played(running(), saved(running(), 10)).job
    (known,) = job.checkpoints.values()
    assert known.number is not None
    numbers = [*range(1_000, 61_000), known.number]
    records = [{"number": number, "name": "x", "reason": "torn"} for number in numbers]
    about = {"job_id": job.id, "fence": 1, "node_id": NODE, "records": records}
    decision = decide(job, ChainDamaged.model_validate(about), NOW)
    assert len(decision.job.damaged_records) == 256
    assert len(decision.notes) < 300
    assert decision.job.checkpoints[known.id].state is CheckpointState.CORRUPT


def test_what_links_that_there_are_not_had_given_up_comes_back_from_storage() -> None:
    """The commands name those for which it is given up: the chain lacks them, so its agent keeps it."""
    job = running()
    decision = played(job, [*saved(job, 10), *(linked(job, n, number=n) for n in (8_000, 9_000))])
    first = checkpoint_id(job.id, 10, 1)
    (retire,) = [c for c in commands(decision) if isinstance(c, RetireCheckpoint)]
    assert retire.checkpoint_id == first
    assert set(retire.kept) == {checkpoint_id(job.id, n, 1) for n in (8_000, 9_000)}
    about = {"job_id": job.id, "fence": 1, "node_id": NODE, "checkpoint_id": first, "bytes": 1}
    job = decide(decision.job, CheckpointVerified.model_validate(about), NOW).job
    assert job.checkpoints[first].state is CheckpointState.COMMITTED
    retired = CheckpointRetired.model_validate(about)
    assert first in decide(job, retired, NOW).job.checkpoints, "it was not commanded"
    assert first not in decide(decision.job, retired, NOW).job.checkpoints


def test_a_card_says_no_more_than_that_a_job_stays_or_goes_on() -> None:
    """Ranks may write where cards lie; without an attempt a job neither runs nor ends."""
    told = found(running())
    for standing, state in ((JobState.RUNNING, JobState.PAUSED), (JobState.QUEUED,) * 2):
        card = told.card.model_copy(update={"standing": standing})
        fact = told.model_copy(update={"card": card})
        assert found_again(fact, NOW).job.state is state


def test_of_a_number_of_attempts_that_no_job_has_had_a_job_takes_no_notice() -> None:
    """It would have no next attempt, and hold its slots in the queue for ever."""

    async def course(leader: Leader) -> None:
        job = new_job()
        await keep(leader, job)
        told = found(job).model_dump_json()
        assert told.count('"fence":1') == 2  # its own, and its card's
        for fence in (MOST_WHOLE, 10**10, MOST_TOLD_ATTEMPTS, MOST_ATTEMPTS + 1):
            forged = told.replace('"fence":1', f'"fence":{fence}', 1)
            await apply_facts(leader.ports, [FactEntry(f"{leader.now}-{fence}", forged, None)], 1)
        await leader.happen(job, placed(job))
        attempt = (await leader.job(job.id)).attempt
        assert attempt is not None
        assert attempt.fence == 1
        known = FACT.validate_json(told.replace('"fence":1', f'"fence":{MOST_ATTEMPTS}', 1))
        assert isinstance(known, JobFound)
        # One that Redis lost has the number of its ranks, which may live, and none of theirs is given again.
        behind = found_again(known.model_copy(update={"fence": MOST_ATTEMPTS + 1}), NOW).job
        assert behind.fence == MOST_ATTEMPTS + 1
        assert awaits_adoption(behind, behind.fence)
        assert not awaits_adoption(behind, behind.fence + 1)

    play(course)


def test_of_an_attempt_behind_the_highest_number_that_is_taken_from_a_node_nodes_can_tell() -> None:
    """Its launch would fail where the checkpoint to load is not in storage, which is told then, and the job with it."""
    idle = new_job()
    behind = found(idle).model_copy(update={"fence": MOST_ATTEMPTS})
    job = decide(idle, FoundInStorage(behind, {}), NOW).job
    job = played(job, [placed(job)]).job
    assert job.fence == MOST_ATTEMPTS + 1
    told = found(job, 10).model_copy(update={"fence": job.fence})
    assert FACT.validate_json(told.model_dump_json()) == told
    assert (
        checkpoint_id(job.id, 10, 1) in decide(job, FoundInStorage(told, {}), NOW).job.checkpoints
    )


def test_a_node_that_tells_of_a_job_does_not_void_the_answer_to_its_purge() -> None:
    """Its storage would be empty, and it would be said to be removed for ever."""
    job, happened = trained()
    job = decide(played(job, happened).job, PurgeAsked(NODE), NOW).job
    answer = JobPurged(job_id=job.id, fence=job.fence, node_id=NODE)
    told = found(job, teller="loom-7").model_copy(update={"fence": job.fence + 1})
    after = decide(job, FoundInStorage(told, {}), NOW).job
    assert is_purged(after, answer)


def test_of_a_job_that_is_found_so_many_checkpoints_are_kept() -> None:
    job = new_job()
    one = linked(job, 1).manifest

    def told(first: int, count: int) -> JobFound:
        names = {n: checkpoint_id(job.id, n, 1) for n in range(first, first + count)}
        manifests = {
            n + 1: one.model_copy(update={"step": n, "checkpoint_id": name})
            for n, name in names.items()
        }
        return found(job).model_copy(update={"manifests": manifests})

    newest = told(11, MOST_KEPT + 5)
    kept = found_again(newest, NOW).job
    assert len(kept.checkpoints) == MOST_KEPT
    assert checkpoint_id(job.id, MOST_KEPT + 15, 1) in kept.checkpoints
    after = decide(kept, FoundInStorage(told(1, 10), {}), NOW).job
    assert after.checkpoints.keys() == kept.checkpoints.keys()


def test_beside_as_many_checkpoints_as_retention_keeps_one_that_is_found_has_room() -> None:
    """Its link may be what Redis lost: without it the next attempt would go on from an older one."""
    job = running(checkpoint={"keep_last": 1_000_000_000})
    (one,) = played(job, saved(job, 1)).job.checkpoints.values()
    kept = {
        name: one.model_copy(update={"id": name, "step": step, "number": step + 1})
        for step in range(1, MOST_KEPT + 1)
        for name in [checkpoint_id(job.id, step, 1)]
    }
    full = played(job.model_copy(update={"checkpoints": kept}), [killed(job)]).job
    after = decide(full, FoundInStorage(found(job, MOST_KEPT + 1), {}), NOW).job
    assert after.latest_checkpoint is not None
    assert after.latest_checkpoint.step == MOST_KEPT + 1
