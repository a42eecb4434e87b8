"""What facts may say of checkpoints that are not their own job's, and which numbers are none."""

import dataclasses

import pytest
from pydantic import ValidationError

from services.contract.api.views import StopRequest
from services.contract.messages.commands import RetireCheckpoint
from services.contract.messages.facts import (
    FACT,
    ChainDamaged,
    CheckpointCorrupt,
    CheckpointExported,
    CheckpointLost,
    CheckpointRetired,
    CheckpointUnread,
    CheckpointVerified,
    Evaluated,
    ExportFailed,
    Fact,
    GangDiagnosed,
    GangEnded,
    GangLaunched,
    JobFound,
    JobPurged,
    NodeJoined,
    NodeLeaving,
    NodeLeft,
    RankExit,
)
from services.contract.messages.findings import Findings, RankFinding
from services.contract.storage.manifests import DamagedRecord
from services.contract.words.bounds import MOST_ATTEMPTS, MOST_TOLD_ATTEMPTS, MOST_WHOLE
from services.contract.words.ids import checkpoint_id, new_job_id
from services.contract.words.states import CheckpointState, JobState
from services.controller.domain.decisions.dispatch import decide, first_decision, was_told_to_load
from services.controller.domain.decisions.purge import is_purged
from services.controller.domain.decisions.recovery import awaits_adoption, found_again
from services.controller.domain.job.checkpoint import MOST_KEPT
from services.controller.domain.job.effects import Decision
from services.controller.domain.job.events import (
    ExportAsked,
    FoundInStorage,
    GangFact,
    JobEvent,
    NodeLost,
    PauseAsked,
    PurgeAsked,
    VerifyAsked,
)
from services.controller.domain.job.job import Job, Origin
from services.controller.domain.scheduling.node import Lease
from services.controller.ports.jobs import Actor
from services.controller.ports.machines import FactEntry
from services.controller.use_cases.facts import apply_facts
from services.controller.use_cases.reconcile import Reconciler
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
    node,
    placed,
    progressed,
    running,
    saved,
    vote,
    votes,
)
from tests.controller.histories import play as played
from tests.controller.test_after_a_loss import Leader, found, joined, play
from tests.controller.test_plans import measured

ADA = Actor("ada")
OTHER_ID = new_job_id(NOW, b"\x01" * 10)
IDS = [new_job_id(NOW, bytes([n]) * 10) for n in (2, 3)]


def corrupt(job: Job, named: str, fence: int = 1) -> CheckpointCorrupt:
    return CheckpointCorrupt(
        job_id=job.id,
        fence=fence,
        node_id=NODE,
        checkpoint_id=named,
        file="shards/x/rank-00000.safetensors",
        reason="its sha256 differs",
    )


async def keep(leader: Leader, job: Job, *events: JobEvent) -> None:
    await leader.ports.jobs.create(first_decision(job), ADA, None)
    if events:
        await leader.happen(job, *events)


def sams() -> Job:
    return new_job().model_copy(update={"id": OTHER_ID})


def trained() -> tuple[Job, list[JobEvent]]:
    """A job whose first attempt is done, with one checkpoint of its last step."""
    job = new_job()
    return job, [placed(job), launched(job), progressed(job), *saved(job, STEPS), finished(job)]


@pytest.mark.parametrize("is_a_clone", [False, True])
def test_only_an_attempt_that_loads_another_jobs_checkpoint_can_find_it_corrupt(
    is_a_clone: bool,  # noqa: FBT001 a parameter of the test
) -> None:
    async def course(leader: Leader) -> None:
        sue, happened = trained()
        await keep(leader, sue, *happened)
        name = checkpoint_id(sue.id, STEPS, 1)
        origin = Origin(job_id=sue.id, checkpoint_id=name, step=STEPS, held=is_a_clone)
        sam = sams().model_copy(update={"origin": origin})
        await keep(leader, sam, placed(sam), launched(sam))
        elsewhere = corrupt(sam, name).model_copy(update={"node_id": "loom-7"})
        await leader.hear(elsewhere)
        assert (await leader.job(sue.id)).checkpoints[name].state is CheckpointState.COMMITTED
        await leader.hear(corrupt(sam, name))
        marked = (await leader.job(sue.id)).checkpoints[name]
        expected = CheckpointState.CORRUPT if is_a_clone else CheckpointState.COMMITTED
        assert marked.state is expected

    play(course)


def test_a_node_that_tells_of_a_clone_cannot_find_what_that_begins_with_corrupt() -> None:
    """It names the job's ranks and the checkpoint itself: any checkpoint of anybody's would be corrupt by its word."""

    async def course(leader: Leader) -> None:
        sue, happened = trained()
        await keep(leader, sue, *happened)
        name = checkpoint_id(sue.id, STEPS, 1)
        sam, other = sams(), "loom-7"
        opened = placed(sam)
        seats = tuple(seat.model_copy(update={"node_id": other}) for seat in opened.plan.ranks)
        plan = opened.plan.model_copy(update={"ranks": seats})
        told = found(sam, teller=other, is_running=True, resume_from=name)
        told = told.model_copy(update={"card": told.card.model_copy(update={"plan": plan})})
        queued = told.card.model_copy(update={"standing": JobState.QUEUED})
        await leader.hear(joined(other), told.model_copy(update={"card": queued}))
        (attempt,) = (await leader.job(sam.id)).attempts
        assert (attempt.resumed_from, *attempt.incarnations) == (name, other)
        origin = (await leader.job(sam.id)).origin
        assert origin is not None
        assert origin.found, "also once a person has resumed it"
        await leader.hear(corrupt(sam, name).model_copy(update={"node_id": other}))
        assert (await leader.job(sue.id)).checkpoints[name].state is CheckpointState.COMMITTED
        # Its own attempt is not at fault all the same.
        assert (await leader.job(sam.id)).attempts[-1].corrupt_source is not None

    play(course)


def test_an_attempt_is_not_blamed_for_what_a_clones_attempt_of_the_same_number_found() -> None:
    sue = running()
    sue = played(sue, [*saved(sue, 10), killed(sue)]).job
    sue = played(sue, [placed(sue), launched(sue, 2)]).job
    found = corrupt(sams(), checkpoint_id(sue.id, 10, 1), fence=2)
    sams_attempt = sue.model_copy(update={"id": OTHER_ID})
    assert was_told_to_load(sams_attempt, found)
    after = decide(sue, found, NOW).job
    assert after.attempt is not None
    assert after.attempt.corrupt_source is None
    assert after.checkpoints[found.checkpoint_id].state is CheckpointState.CORRUPT


def test_facts_about_another_jobs_checkpoints_change_nothing() -> None:
    sue = running()
    sam = sams()
    name = checkpoint_id(sam.id, 10, 1)
    about = {"job_id": sue.id, "fence": 1, "node_id": NODE, "checkpoint_id": name}
    facts: list[GangFact] = [
        began(sam, 10).model_copy(update={"job_id": sue.id}),
        vote(sam, 10, 0).model_copy(update={"job_id": sue.id}),
        linked(sam, 10).model_copy(update={"job_id": sue.id}),
        CheckpointLost.model_validate(about | {"reason": "no"}),
        CheckpointVerified.model_validate(about | {"bytes": 1}),
        corrupt(sue, name),
    ]
    for fact in facts:
        assert decide(sue, fact, NOW) == Decision(sue)


def test_what_a_node_says_of_ranks_that_it_has_not_or_of_one_again_changes_nothing() -> None:
    job = running()
    ranks = (1, 1, 2, 60_000)
    exits = tuple(
        RankExit(rank=rank, pid=1, exit_code=1, order=n, step=9, phase="F", error=f"{rank} of {n}")
        for n, rank in enumerate(ranks)
    )
    found = Findings(
        why="hang",
        still_s=9,
        allowed_s=1,
        ranks=tuple(RankFinding(rank=rank, pid=1, phase="F") for rank in ranks),
    )
    about = {"job_id": job.id, "fence": 1, "node_id": NODE}
    asked = found.model_copy(update={"why": "asked"})
    looked = decide(job, GangDiagnosed(**about, findings=asked), NOW).job.attempts[-1]
    assert [rank.rank for rank in looked.looks[0].findings.ranks] == [1]
    assert looked.diagnosis is not None
    assert len(looked.diagnosis.evidence) == 1
    ended = decide(job, GangEnded(**about, exits=exits, last_step=9, hang=found), NOW).job
    diagnosis = ended.attempts[-1].diagnosis
    assert diagnosis is not None
    assert len(diagnosis.evidence) == 1
    failed = decide(job, GangEnded(**about, exits=exits[1:], last_step=9), NOW).job
    assert failed.attempts[-1].failure is not None
    assert failed.attempts[-1].failure.error == "1 of 1"
    foreign = GangEnded(**about, exits=exits[2:], last_step=9)
    assert decide(job, foreign, NOW) == Decision(job)


def test_a_vote_for_a_rank_that_its_node_has_not_is_none() -> None:
    job = running()
    assert decide(job, vote(job, 10, 2), NOW) == Decision(job)


def test_of_ranks_that_a_node_has_not_and_of_other_attempts_no_stacks_are_kept() -> None:
    async def course(leader: Leader) -> None:
        job = new_job()
        await keep(leader, job, placed(job), launched(job))
        ranks = tuple(RankFinding(rank=rank, pid=1, phase="F", stacks="s") for rank in (1, 2))
        findings = Findings(why="asked", still_s=0, allowed_s=0, ranks=ranks)
        for fence in (1, 7):
            about = {"job_id": job.id, "fence": fence, "node_id": NODE}
            await leader.hear(GangDiagnosed(**about, findings=findings))
        kept = await leader.ports.telemetry.stacks(job.id)
        assert [(told.rank, told.fence) for told in kept] == [(1, 1)]

    play(course)


def test_of_checkpoints_that_are_begun_and_never_voted_for_few_are_kept() -> None:
    job = running()
    decision = played(job, [began(job, step) for step in range(1, 101)])
    states = [c.state for c in decision.job.checkpoints.values()]
    assert states.count(CheckpointState.WRITING) == 16
    assert len(states) < 30
    assert commands(decision) == []
    last = checkpoint_id(job.id, 100, 1)
    assert decision.job.checkpoints[last].state is CheckpointState.WRITING


def test_a_number_that_a_record_cannot_hold_makes_no_fact_or_is_left_out() -> None:
    of_attempt = f'"job_id": "{new_job().id}", "fence": 1, "node_id": "{NODE}"'
    ended = '"kind": "gang_ended", "exits": [], "last_step": 1, "first_exit_s": 1e308'
    with pytest.raises(ValidationError):
        FACT.validate_json(f"{{{of_attempt}, {ended}}}")
    gangs = ", ".join([f'{{"job_id": "{new_job().id}", "fence": 1, "ranks": []}}'] * 1_025)
    inventory = '{"hostname": "h", "cpu_slots": 1, "cpu_count": 1, "memory_bytes": 1}'
    joined = f'"node_id": "{NODE}", "incarnation": "x", "inventory": {inventory}'
    with pytest.raises(ValidationError, match="more than 1024 items"):
        NodeJoined.model_validate_json(f'{{{joined}, "gangs": [{gangs}]}}')
    passed = '"kind": "evaluated", "step": 1, "loss": 2.0, "tokens": 1, "baselines": {"a": 1e400}'
    fact = FACT.validate_json(f"{{{of_attempt}, {passed}}}")
    assert isinstance(fact, Evaluated)
    assert fact.baselines == {}


def test_facts_of_two_jobs_that_alternate_cost_each_job_one_commit() -> None:
    async def course(leader: Leader) -> None:
        sue, sam = new_job(), sams()
        for job in (sue, sam):
            await keep(leader, job, placed(job), launched(job), progressed(job))
        before = [(await leader.ports.jobs.load(job.id)).version for job in (sue, sam)]
        await leader.hear(*(began(job, step) for step in (10, 20, 30) for job in (sue, sam)))
        for job, version in zip((sue, sam), before, strict=True):
            stored = await leader.ports.jobs.load(job.id)
            assert stored.version == version + 1
            assert {each.step for each in stored.job.checkpoints.values()} == {10, 20, 30}

    play(course)


def test_a_node_without_ranks_of_the_attempt_changes_nothing_of_it() -> None:
    """Each name of a node could else add to its record, without end."""
    job = running()
    about = {"job_id": job.id, "fence": 1, "node_id": "elsewhere"}
    looked = Findings(why="asked", still_s=0, allowed_s=0, ranks=())
    facts: list[GangFact] = [
        GangLaunched.model_validate(about | {"pids": {}}),
        GangDiagnosed.model_validate(about | {"findings": looked}),
        vote(job, 10, 0).model_copy(update={"node_id": "elsewhere"}),
    ]
    for fact in facts:
        assert decide(job, fact, NOW) == Decision(job)
        assert decide(job, fact.model_copy(update={"node_id": NODE}), NOW) != Decision(job) or (
            isinstance(fact, GangLaunched)  # it was
        )


def test_that_a_checkpoint_is_lost_only_nodes_of_its_attempts_can_tell() -> None:
    job = played(running(), [began(running(), 10)]).job
    name = checkpoint_id(job.id, 10, 1)
    about = {"job_id": job.id, "fence": 1, "checkpoint_id": name, "reason": "no"}
    foreign = CheckpointLost.model_validate(about | {"node_id": "elsewhere"})
    assert decide(job, foreign, NOW) == Decision(job)
    own = decide(job, foreign.model_copy(update={"node_id": NODE}), NOW).job
    assert own.checkpoints[name].state is CheckpointState.ABORTED


@pytest.mark.parametrize("fence", [2, 3])
def test_of_what_ranks_write_a_node_that_had_an_earlier_attempt_can_tell_nothing(
    fence: int,
) -> None:
    """It would have the job SUCCEED without its last checkpoint, or commit none of an attempt, of those to come, too."""
    job = new_job()
    earlier = placed(job)
    moved = dataclasses.replace(earlier, incarnations={"loom-7": "life-1"})
    gone = NodeLost("loom-7", "it is away", 0, NOW)
    again: list[JobEvent] = [earlier, launched(job, 2), progressed(job, 1, 2)]
    now = played(job, [moved, gone, *again]).job
    assert now.attempt_nodes == {"loom-7", NODE}
    theirs = linked(job, STEPS, fence).model_copy(update={"node_id": "loom-7"})
    named = {"manifest": theirs.manifest.model_copy(update={"fence": 1})}
    lost = CheckpointLost(
        job_id=job.id,
        fence=fence,
        node_id="loom-7",
        checkpoint_id=checkpoint_id(job.id, STEPS, fence),
        reason="no",
    )
    for fact in (theirs, theirs.model_copy(update=named), lost):
        assert decide(now, fact, NOW) == Decision(now)
    # What it committed of its own attempt counts, however late it tells.
    late = linked(job, 5, 1).model_copy(update={"node_id": "loom-7"})
    assert checkpoint_id(job.id, 5, 1) in decide(now, late, NOW).job.checkpoints
    misnamed = {"manifest": late.manifest.model_copy(update={"step": STEPS})}
    assert decide(now, late.model_copy(update=misnamed), NOW) == Decision(now)


def test_that_a_checkpoint_is_corrupt_no_node_can_tell_that_had_an_earlier_attempt_alone() -> None:
    """Each checkpoint of the job would be, and the job would wait for a person after its next fault."""
    job = new_job()
    earlier = placed(job)
    moved = dataclasses.replace(earlier, incarnations={"loom-7": "life-1"})
    gone = NodeLost("loom-7", "it is away", 0, NOW)
    again: list[JobEvent] = [earlier, launched(job, 2), progressed(job, 1, 2), *saved(job, 10, 2)]
    now = played(job, [moved, gone, *again]).job
    name = checkpoint_id(job.id, 10, 2)
    records = (DamagedRecord(number=2, name="00000002.json", reason="no JSON"),)
    for is_found in (False, True):
        known = now.model_copy(update={"found": is_found})
        damaged = ChainDamaged(job_id=job.id, fence=1, node_id="loom-7", records=records)
        of_storage = found(job).model_copy(update={"node_id": "loom-7", "damaged": records})
        theirs = corrupt(job, name).model_copy(update={"node_id": "loom-7"})
        for event in (theirs, damaged, FoundInStorage(of_storage, {})):
            after = decide(known, event, NOW).job
            assert after.checkpoints[name].state is CheckpointState.COMMITTED
        own = decide(known, damaged.model_copy(update={"node_id": NODE}), NOW).job
        assert own.checkpoints[name].state is CheckpointState.CORRUPT


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


def test_a_device_of_a_found_jobs_card_that_no_node_has_stops_no_look() -> None:
    async def course(leader: Leader) -> None:
        leader.server.leases[NODE] = Lease("life-1", 5_000)
        await leader.hear(joined(NODE))
        told = found(sams(), is_running=True).model_dump_json()
        assert '"device":"cpu"' in told
        forged = told.replace('"device":"cpu"', f'"device":"cuda:{"9" * 5_000}"')
        await apply_facts(leader.ports, [FactEntry(f"{leader.now}-9", forged, NODE)], 1)
        waiting = new_job()
        await keep(leader, waiting)
        await Reconciler(leader.ports, 1).look()
        assert (await leader.job(waiting.id)).state is JobState.PLACING

    play(course)


def test_a_node_that_tells_of_one_device_twice_is_none_and_stops_no_look() -> None:
    """It would count as free while a job has it, and the next job be placed there without ranks."""

    async def course(leader: Leader) -> None:
        for name in (NODE, "loom-7"):
            leader.server.leases[name] = Lease("life-1", 5_000)
        joins = joined("loom-7").model_copy(update={"inventory": node(gpus=2).inventory})
        twice = joins.model_dump_json().replace('"index":1', '"index":0')
        await apply_facts(leader.ports, [FactEntry(f"{leader.now}-9", twice, "loom-7")], 1)
        await leader.hear(joined(NODE))
        jobs = [new_job(resources={"ranks": 1, "device": "auto"}) for _ in range(2)]
        jobs = [job.model_copy(update={"id": name}) for job, name in zip(jobs, IDS, strict=True)]
        for job in jobs:
            await keep(leader, job)
            await Reconciler(leader.ports, 1).look()
        assert [(await leader.job(job.id)).state for job in jobs] == [JobState.PLACING] * 2
        assert [known.id for known in await leader.ports.nodes.nodes()] == [NODE]

    play(course)


def test_a_job_that_cannot_be_placed_says_so_and_stops_no_other() -> None:
    """One device twice in a record, as it could be until joins with that were refused."""

    async def course(leader: Leader) -> None:
        leader.server.leases[NODE] = Lease("life-1", 5_000)
        known = node(gpus=2)
        device = known.inventory.accelerators[0]
        twice = known.inventory.model_copy(update={"accelerators": (device, device)})
        leader.server.nodes[NODE] = known.model_copy(update={"inventory": twice})
        gpus, more, cpus = (
            new_job(resources={"ranks": 1, "device": device}).model_copy(update={"id": name})
            for name, device in zip((*IDS, OTHER_ID), ("cuda", "cuda", "cpu"), strict=True)
        )
        for job in (gpus, more, cpus):
            await keep(leader, job)
            await Reconciler(leader.ports, 1).look()
        states = [(await leader.job(job.id)).state for job in (gpus, more, cpus)]
        assert states == [JobState.PLACING, JobState.QUEUED, JobState.PLACING]
        assert "cannot be placed: PlanError" in ((await leader.job(more.id)).reason or "")

    play(course)


def test_a_node_tells_of_no_ranks_that_only_others_have() -> None:
    async def course(leader: Leader) -> None:
        await leader.hear(joined(NODE), joined("loom-7"))
        told = found(sams(), is_running=True)
        await leader.hear(told.model_copy(update={"node_id": "loom-7"}))
        assert (await leader.job(OTHER_ID)).attempts == ()
        await leader.hear(told)
        assert (await leader.job(OTHER_ID)).state is JobState.RUNNING

    play(course)


def test_what_an_agent_tells_in_the_name_of_another_node_changes_nothing() -> None:
    async def course(leader: Leader) -> None:
        job = new_job()
        await leader.hear(joined(NODE))
        await keep(leader, job, placed(job), launched(job), progressed(job), began(job, 10))
        before = (await leader.job(job.id), await leader.ports.nodes.nodes())
        sent = leader.server.commands(NODE)
        forged: list[Fact] = [
            joined(NODE, life="life-2"),
            NodeLeaving(node_id=NODE, incarnation="life-1", grace_s=5),
            NodeLeft(node_id=NODE, incarnation="life-1"),
            vote(job, 10, 0),
            killed(job),
            found(sams()),
            measured(),
        ]
        await leader.hear(*forged, sender="loom-2")
        assert (await leader.job(job.id), await leader.ports.nodes.nodes()) == before
        assert leader.server.commands(NODE) == sent
        assert list(leader.server.jobs) == [job.id]
        assert leader.server.measured == {}
        await leader.hear(*forged)
        assert (await leader.job(job.id), await leader.ports.nodes.nodes()) != before

    play(course)


def test_a_join_without_the_lease_that_the_nodes_agent_holds_is_not_one() -> None:
    """Any agent may say that another node has joined; its lease nobody else can write."""

    async def course(leader: Leader) -> None:
        leader.server.leases[NODE] = Lease("life-1", 5_000)
        await leader.hear(joined(NODE), joined(NODE, life="life-2"))
        known = await leader.ports.nodes.node(NODE)
        assert known is not None
        assert known.incarnation == "life-1"
        del leader.server.leases[NODE]
        await leader.hear(joined(NODE, life="life-2"))
        known = await leader.ports.nodes.node(NODE)
        assert known is not None
        assert known.incarnation == "life-2"

    play(course)


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
