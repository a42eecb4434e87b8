"""What facts may say of jobs, checkpoints and ranks that are not their node's, and which numbers are none."""

import dataclasses

import pytest
from pydantic import ValidationError

from services.contract.messages.facts import (
    FACT,
    ChainDamaged,
    CheckpointCorrupt,
    CheckpointLost,
    CheckpointVerified,
    Evaluated,
    Fact,
    GangDiagnosed,
    GangEnded,
    GangLaunched,
    NodeJoined,
    NodeLeaving,
    NodeLeft,
    RankExit,
)
from services.contract.messages.findings import Findings, RankFinding
from services.contract.storage.manifests import DamagedRecord
from services.contract.words.ids import checkpoint_id, new_job_id
from services.contract.words.states import CheckpointState, JobState
from services.controller.domain.decisions.dispatch import decide, first_decision, was_told_to_load
from services.controller.domain.job.effects import Decision
from services.controller.domain.job.events import (
    FoundInStorage,
    GangFact,
    JobEvent,
    NodeLost,
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
