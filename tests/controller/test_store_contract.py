"""One suite for both residents of the ports: Redis, and the twin in memory."""

import asyncio
import itertools
import os
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any, Protocol

import pytest
from redis import Redis

from fsdp_core.plan.model import Conditions
from services.contract.api.access import Scope
from services.contract.api.views import StopRequest
from services.contract.jobs.code_archives import digest_of, hex_of
from services.contract.messages.commands import COMMAND, Command, StopGang
from services.contract.messages.probing import (
    MeasureNode,
    ModelProbed,
    ProbeFailure,
    ProbeModel,
)
from services.contract.messages.telemetry import MetricRecord, RankStacks, StepRecord
from services.contract.redis import redis_keys as keys
from services.contract.words.ids import new_job_id, new_plan_id
from services.contract.words.states import JobState, NodeState, PlanState
from services.controller.adapters.memory import memory_ports
from services.controller.adapters.memory.server import MemoryServer
from services.controller.adapters.redis import redis_ports
from services.controller.domain.access.code import CodeLimits, UploadedCode
from services.controller.domain.decisions.dispatch import first_decision
from services.controller.domain.decisions.history import Occurrence
from services.controller.domain.errors import (
    CursorExpiredError,
    DeposedError,
    KeyReusedError,
    NotFoundError,
    StaleWriteError,
    StoreUnavailableError,
    TooManyJobsError,
)
from services.controller.domain.job.effects import Decision, Send
from services.controller.domain.job.events import KillAsked, PauseAsked, ResumeAsked
from services.controller.domain.job.job import Job
from services.controller.domain.plans.pace import PACES_KEPT, Pace
from services.controller.domain.plans.plan import Plan, fail
from services.controller.domain.scheduling.node import Drain, Lease, Measurement
from services.controller.ports.access import AuditRecord
from services.controller.ports.coordination import Ports
from services.controller.ports.jobs import Actor, Change, Claim, Place, Quota, Stored
from services.controller.ports.machines import Entry, Log
from services.controller.use_cases.change import apply_events
from tests.controller.histories import NODE, node, placed, play, saved, spec
from tests.controller.profiles import FACTS, answer_to

pytestmark = [pytest.mark.anyio, pytest.mark.redis]
ACTOR = Actor("test", "req-1")


class Outside(Protocol):
    """What other processes write and read, past the ports."""

    def fact(self, body: str) -> None: ...
    def lease(self, node_id: str, incarnation: str) -> None: ...
    def step(self, job_id: str, record: StepRecord) -> None: ...
    def metric(self, job_id: str, record: MetricRecord) -> None: ...
    def output(self, job_id: str, body: str) -> None: ...
    def trim(self, job_id: str) -> None: ...
    def inbox(self, node_id: str) -> list[Command]: ...


@dataclass
class OutsideRedis:
    redis: Redis

    def fact(self, body: str) -> None:
        self.redis.rpush(keys.ARRIVED_FACTS, body)

    def lease(self, node_id: str, incarnation: str) -> None:
        self.redis.set(keys.node_lease(node_id), incarnation, px=5000)

    def step(self, job_id: str, record: StepRecord) -> None:
        self.redis.xadd(keys.job_steps(job_id), {keys.MESSAGE_FIELD: record.model_dump_json()})

    def metric(self, job_id: str, record: MetricRecord) -> None:
        self.redis.xadd(keys.job_metrics(job_id), {keys.MESSAGE_FIELD: record.model_dump_json()})

    def output(self, job_id: str, body: str) -> None:
        self.redis.xadd(keys.job_logs(job_id), {keys.MESSAGE_FIELD: body})

    def trim(self, job_id: str) -> None:
        self.redis.xtrim(keys.job_logs(job_id), maxlen=1, approximate=False)

    def inbox(self, node_id: str) -> list[Command]:
        entries = self.redis.xrange(keys.node_inbox(node_id)) or []
        return [COMMAND.validate_json(f[keys.MESSAGE_FIELD]) for _, f in entries if f]


@dataclass
class OutsideMemory:
    server: MemoryServer

    def fact(self, body: str) -> None:
        self.server.facts.append(self.server.entry(body))

    def lease(self, node_id: str, incarnation: str) -> None:
        self.server.leases[node_id] = Lease(incarnation, 5000)

    def step(self, job_id: str, record: StepRecord) -> None:
        self.server.steps[job_id].append(record)

    def metric(self, job_id: str, record: MetricRecord) -> None:
        self.server.metrics[job_id].append(record)

    def output(self, job_id: str, body: str) -> None:
        self.server.logs[job_id, Log.OUTPUT].append(self.server.entry(body))

    def trim(self, job_id: str) -> None:
        del self.server.logs[job_id, Log.OUTPUT][:-1]

    def inbox(self, node_id: str) -> list[Command]:
        return self.server.commands(node_id)


@dataclass
class World:
    ports: Ports
    outside: Outside

    async def keep(self, job: Job, claim: Claim | None = None) -> Stored:
        return await self.ports.jobs.create(first_decision(job), ACTOR, claim)


@pytest.fixture(params=["memory", "redis"])
async def world(request: pytest.FixtureRequest) -> AsyncIterator[World]:
    if request.param == "memory":
        ticks = itertools.count(1_000_000)
        server = MemoryServer(now_ms=lambda: next(ticks))
        yield World(memory_ports(server), OutsideMemory(server))
        return
    url = request.getfixturevalue("redis_url")
    with Redis.from_url(url, decode_responses=True) as redis:
        async with redis_ports(url) as ports:
            yield World(ports, OutsideRedis(redis))


def job(created_ms: int = 5, name: str = "job") -> Job:
    return Job(
        id=new_job_id(created_ms, os.urandom(10)),
        spec=spec(name=name),
        created_ms=created_ms,
        updated_ms=created_ms,
    )


async def test_a_job_comes_back_as_it_was_kept(world: World) -> None:
    kept = await world.keep(job())
    assert await world.ports.jobs.load(kept.job.id) == kept
    assert [stored.job for stored in await world.ports.jobs.active()] == [kept.job]
    with pytest.raises(NotFoundError):
        await world.ports.jobs.load("job_" + "0" * 26)


async def test_a_claim_answers_the_first_job_again_and_refuses_another_body(world: World) -> None:
    claim = Claim("alice", "key", "digest")
    assert await world.ports.jobs.claimed(claim) is None
    first = await world.keep(job(), claim)
    again = await world.keep(job(), claim)
    assert again == first
    assert await world.ports.jobs.claimed(claim) == first
    assert len(await world.ports.jobs.page(None, 10)) == 1
    with pytest.raises(KeyReusedError):
        await world.keep(job(), Claim("alice", "key", "other"))
    with pytest.raises(KeyReusedError):
        await world.ports.jobs.claimed(Claim("alice", "key", "other"))


async def test_a_claim_is_of_its_subject_alone(world: World) -> None:
    hers, his = Claim("alice", "key", "digest"), Claim("bob", "key", "another")
    first = await world.keep(job(), hers)
    assert await world.ports.jobs.claimed(his) is None
    second = await world.keep(job(), his)
    assert second.job.id != first.job.id
    assert await world.ports.jobs.claimed(hers) == first


async def with_quota(request: pytest.FixtureRequest, quota: Quota) -> AsyncIterator[Ports]:
    if request.param == "memory":
        yield memory_ports(MemoryServer(now_ms=lambda: 1), quota)
        return
    async with redis_ports(request.getfixturevalue("redis_url"), quota=quota) as ports:
        yield ports


@pytest.fixture(params=["memory", "redis"])
async def of_three(request: pytest.FixtureRequest) -> AsyncIterator[Ports]:
    async for ports in with_quota(request, Quota(not_ended=3, kept=5)):
        yield ports


def ended(before: Job) -> Job:
    return before.model_copy(update={"state": JobState.CANCELLED})


async def test_of_jobs_that_are_created_at_once_no_more_are_kept_than_their_owner_may_have(
    of_three: Ports,
) -> None:
    jobs = [job(number) for number in range(9)]
    made = await asyncio.gather(
        *(of_three.jobs.create(first_decision(one), ACTOR, None) for one in jobs),
        return_exceptions=True,
    )
    assert sum(isinstance(one, Stored) for one in made) == 3
    assert sum(isinstance(one, TooManyJobsError) for one in made) == 6
    others = job().model_copy(update={"owner": "another"})
    stored = await of_three.jobs.create(first_decision(others), ACTOR, None)
    assert stored.job.owner == "another"


async def test_jobs_that_have_ended_go_on_only_as_far_as_their_owner_may_have_more(
    of_three: Ports,
) -> None:
    store = of_three.jobs
    over = []
    for number in range(2):
        begun = await store.create(first_decision(job(number)), ACTOR, None)
        over.append(await store.commit(Change(begun, Decision(ended(begun.job)), ACTOR)))
    for number in range(2):
        await store.create(first_decision(job(9 + number)), ACTOR, None)
    resumed = [Change(one, Decision(_queued(one.job)), ACTOR) for one in over]
    first, second = await asyncio.gather(*map(store.commit, resumed), return_exceptions=True)
    assert sorted([type(first), type(second)], key=str) == [TooManyJobsError, Stored]


async def test_an_owner_has_a_bound_of_jobs_that_have_ended_too(of_three: Ports) -> None:
    store = of_three.jobs
    over = []
    for number in range(5):
        begun = await store.create(first_decision(job(number)), ACTOR, None)
        over.append(await store.commit(Change(begun, Decision(ended(begun.job)), ACTOR)))
    with pytest.raises(TooManyJobsError, match="has 5 jobs"):
        await store.create(first_decision(job(9)), ACTOR, None)
    await store.delete(over[-1])
    await store.create(first_decision(job(9)), ACTOR, None)


async def test_a_repeated_request_is_answered_where_its_owner_may_have_no_more(
    of_three: Ports,
) -> None:
    claim = Claim("sue", "key", "digest")
    first = await of_three.jobs.create(first_decision(job()), ACTOR, claim)
    for number in range(2):
        await of_three.jobs.create(first_decision(job(number)), ACTOR, None)
    again = await of_three.jobs.create(first_decision(job(9)), ACTOR, claim)
    assert again.job.id == first.job.id
    with pytest.raises(TooManyJobsError):
        await of_three.jobs.create(first_decision(job()), ACTOR, Claim("sue", "b", "digest"))
    assert await of_three.jobs.claimed(Claim("sue", "b", "digest")) is None


async def test_the_newest_claims_of_a_subject_are_kept_and_those_of_others(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keys, "CLAIMS_KEPT", 3)
    store = world.ports.jobs
    others = Claim("sam", "key", "digest")
    await world.keep(job(1), others)
    claims = [Claim("sue", f"key-{number}", "digest") for number in range(5)]
    for number, claim in enumerate(claims):
        await world.keep(job(10 + number), claim)
    kept = [claim for claim in (others, *claims) if await store.claimed(claim) is not None]
    assert kept == [others, *claims[2:]]


async def test_of_an_owners_plans_the_oldest_that_are_made_are_forgotten(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keys, "PLANS_KEPT", 3)
    plans = world.ports.plans

    def made(number: int, owner: str = "sue") -> Plan:
        return plan(number).model_copy(update={"owner": owner, "created_ms": 1_000_000 + number})

    first, of_sam, second = made(1), made(2, "sam"), made(3)
    for each in (first, of_sam, second):
        await plans.keep(each, ASK, None)
    await plans.conclude(fail(second, "crashed", "it crashed"))
    later = [made(number) for number in range(4, 7)]
    for each in later:
        await plans.keep(each, ASK, None)
    # The first is being made yet, and nobody takes another's place.
    expected = [each.id for each in (*later[::-1], of_sam, first)]
    assert [each.id for each in await plans.page(None, 9)] == expected
    with pytest.raises(NotFoundError):
        await plans.load(second.id)
    late = plan(7).model_copy(
        update={"owner": "sue", "created_ms": 1_100_000, "answer_by_ms": 1_160_000}
    )
    await plans.keep(late, ASK, None)
    assert first.id not in [each.id for each in await plans.page(None, 9)]


def _queued(before: Job) -> Job:
    return before.model_copy(update={"state": JobState.QUEUED})


async def test_a_decision_is_committed_as_a_whole(world: World) -> None:
    before = await world.keep(job())
    decision = play(before.job, [placed(before.job), *saved(before.job, 10)])
    after = await world.ports.jobs.commit(Change(before, decision, ACTOR))
    assert await world.ports.jobs.load(before.job.id) == after
    assert after.version == before.version + 1
    kinds = [c.kind for c in world.outside.inbox(NODE)]
    assert kinds == ["launch_gang", "commit_checkpoint"]
    events = await world.ports.telemetry.read(before.job.id, Log.EVENTS, None, 100)
    assert len(events) == 1 + len(decision.notes)
    assert '"req-1"' in events[-1].body
    removed = after.job.model_copy(update={"checkpoints": {}})
    await world.ports.jobs.commit(Change(after, Decision(removed), ACTOR))
    assert (await world.ports.jobs.load(before.job.id)).job.checkpoints == {}


async def test_the_events_of_all_jobs_stand_in_one_feed_in_the_order_of_the_writes(
    world: World,
) -> None:
    ports = world.ports
    assert await ports.events.newest() == "0-0"
    first = await world.keep(job(name="first"))
    second = await world.keep(job(name="second"))
    decision = play(first.job, [placed(first.job)])
    await ports.jobs.commit(Change(first, decision, ACTOR))
    lost = job(name="third")
    epoch = await ports.leadership.take("a")
    assert epoch is not None
    assert await ports.jobs.restore(first_decision(lost), ACTOR, epoch)
    entries = await ports.events.read(None, 100)
    placings = [first.job.id] * len(decision.notes)
    ids = [entry.job_id for entry in entries]
    assert ids == [first.job.id, second.job.id, *placings, lost.id]
    log = await ports.telemetry.read(first.job.id, Log.EVENTS, None, 100)
    of_first = [entry.body for entry in entries if entry.job_id == first.job.id]
    assert of_first == [entry.body for entry in log]
    assert await ports.events.newest() == entries[-1].id
    assert await ports.events.read(entries[1].id, 2) == entries[2:4]
    await ports.events.wait(entries[0].id, 60)


async def test_a_reader_of_the_feed_is_told_that_events_were_trimmed(redis_url: str) -> None:
    async with redis_ports(redis_url) as ports:
        for _ in range(3):
            await ports.jobs.create(first_decision(job()), ACTOR, None)
        entries = await ports.events.read(None, 100)
        with Redis.from_url(redis_url) as redis:
            redis.xtrim(keys.EVENT_FEED, maxlen=1, approximate=False)
        assert await ports.events.read(None, 100) == entries[-1:]
        with pytest.raises(CursorExpiredError):
            await ports.events.read(entries[0].id, 100)
        with Redis.from_url(redis_url) as redis:
            redis.set(keys.EVENT_FEED, "of another type")
        await ports.jobs.create(first_decision(job(name="kept-all-the-same")), ACTOR, None)


async def test_a_stale_writer_writes_nothing(world: World) -> None:
    before = await world.keep(job())
    decision = play(before.job, [placed(before.job)])
    await world.ports.jobs.commit(Change(before, decision, ACTOR))
    with pytest.raises(StaleWriteError):
        await world.ports.jobs.commit(Change(before, decision, ACTOR))
    assert len(world.outside.inbox(NODE)) == 1


async def test_a_lower_fence_is_refused_even_with_the_right_version(world: World) -> None:
    before = await world.keep(job())
    decision = play(before.job, [placed(before.job)])
    after = await world.ports.jobs.commit(Change(before, decision, ACTOR))
    older = Change(Stored(after.job, after.version), Decision(before.job), ACTOR)
    with pytest.raises(StaleWriteError):
        await world.ports.jobs.commit(older)


async def test_a_deposed_leader_writes_nothing(world: World) -> None:
    lead = world.ports.leadership
    first = await lead.take("a")
    assert first is not None
    assert await lead.take("b") is None
    assert await lead.renew("a")
    assert not await lead.renew("b")
    await lead.release("b")
    await lead.release("a")
    second = await lead.take("b")
    assert second == first + 1
    before = await world.keep(job())
    change = Change(before, play(before.job, [placed(before.job)]), ACTOR)
    with pytest.raises(DeposedError):
        await world.ports.jobs.commit(change, first)
    with pytest.raises(DeposedError):
        await world.ports.nodes.put(node(), first, None)
    kill = StopGang(job_id=before.job.id, fence=1, mode="kill")
    with pytest.raises(DeposedError):
        await world.ports.jobs.send((Send(NODE, kill),), first)
    assert world.outside.inbox(NODE) == []
    await world.ports.jobs.send((Send(NODE, kill),), second)
    await world.ports.jobs.commit(change, second)
    assert [c.kind for c in world.outside.inbox(NODE)] == ["stop_gang", "launch_gang"]


async def test_a_deleted_job_is_gone_with_all_of_its_own(world: World) -> None:
    kept = await world.keep(job())
    world.outside.output(kept.job.id, "x")
    with pytest.raises(StaleWriteError):
        await world.ports.jobs.delete(Stored(kept.job, 99))
    await world.ports.jobs.delete(kept)
    with pytest.raises(NotFoundError):
        await world.ports.jobs.load(kept.job.id)
    with pytest.raises(NotFoundError):
        await world.ports.jobs.commit(Change(kept, Decision(kept.job), ACTOR))
    assert await world.ports.jobs.page(None, 10) == []
    assert await world.ports.telemetry.read(kept.job.id, Log.OUTPUT, None, 10) == []


async def test_a_job_is_deleted_together_with_a_commit_of_another_or_not_at_all(
    world: World,
) -> None:
    before, doomed = await world.keep(job()), await world.keep(job(created_ms=6))
    decision = play(before.job, [placed(before.job)])
    stale = Stored(doomed.job, 99)
    with pytest.raises(StaleWriteError):
        await world.ports.jobs.commit(Change(before, decision, ACTOR, deletes=stale))
    assert await world.ports.jobs.load(before.job.id) == before
    assert await world.ports.jobs.load(doomed.job.id) == doomed
    after = await world.ports.jobs.commit(Change(before, decision, ACTOR, deletes=doomed))
    assert await world.ports.jobs.active() == [after]
    assert len(world.outside.inbox(NODE)) == 1
    assert await world.ports.telemetry.read(doomed.job.id, Log.EVENTS, None, 10) == []
    assert [s.job.id for s in await world.ports.jobs.page(None, 10)] == [before.job.id]


@pytest.mark.parametrize("with_another", [False, True])
async def test_only_a_deleted_job_that_storage_may_know_is_remembered(
    world: World,
    with_another: bool,  # noqa: FBT001 a parameter of the test
) -> None:
    other = await world.keep(job())
    idle = await world.keep(job(created_ms=6))
    ran = await world.keep(job(created_ms=7))
    ran = await world.ports.jobs.commit(Change(ran, play(ran.job, [placed(ran.job)]), ACTOR))
    for doomed in (idle, ran):
        if with_another:
            empty = Change(other, Decision(other.job), ACTOR, deletes=doomed)
            other = await world.ports.jobs.commit(empty)
        else:
            await world.ports.jobs.delete(doomed)
    assert not await world.ports.jobs.was_deleted(idle.job.id)
    assert await world.ports.jobs.was_deleted(ran.job.id)


async def test_pages_go_from_new_to_old_and_bear_equal_times(world: World) -> None:
    kept = [await world.keep(job(created)) for created in (1, 2, 2, 2, 3)]
    expected = sorted((Place(s.job.created_ms, s.job.id) for s in kept), reverse=True)
    seen: list[Place] = []
    place = None
    while page := await world.ports.jobs.page(place, 2):
        seen += [Place(s.job.created_ms, s.job.id) for s in page]
        place = seen[-1]
    assert seen == expected


async def test_paused_jobs_are_counted_but_not_active(world: World) -> None:
    before = await world.keep(job())
    paused = play(before.job, [PauseAsked(StopRequest())])
    await world.ports.jobs.commit(Change(before, paused, ACTOR))
    assert await world.ports.jobs.active() == []
    counts = await world.ports.jobs.counts()
    assert counts[JobState.PAUSED] == 1
    assert sum(counts.values()) == 1


async def test_facts_come_until_they_are_acknowledged(world: World) -> None:
    facts = world.ports.facts
    await facts.prepare()
    await facts.prepare()
    assert await facts.next(10, 0.01) == []
    for number in range(3):
        world.outside.fact(str(number))
    first = await facts.next(2, 1)
    assert [entry.body for entry in first] == ["0", "1"]
    assert [entry.body for entry in await facts.next(2, 1)] == ["2"]
    assert [entry.body for entry in await facts.unacknowledged(10)] == ["0", "1", "2"]
    await facts.acknowledge([entry.id for entry in first])
    assert [entry.body for entry in await facts.unacknowledged(10)] == ["2"]


async def test_nodes_and_leases_are_kept_apart(world: World) -> None:
    epoch = await world.ports.leadership.take("a")
    assert epoch is not None
    await world.ports.nodes.put(node("b"), epoch, None)
    await world.ports.nodes.put(node("a"), epoch, None)
    world.outside.lease("a", "life-1")
    assert [n.id for n in await world.ports.nodes.nodes()] == ["a", "b"]
    leases = await world.ports.nodes.leases(["a", "b"])
    assert list(leases) == ["a"]
    assert leases["a"].incarnation == "life-1"
    assert 0 < leases["a"].left_ms <= 5000


async def test_a_drain_stands_whatever_the_leader_writes_of_the_node(world: World) -> None:
    epoch = await world.ports.leadership.take("a")
    assert epoch is not None
    nodes = world.ports.nodes
    with pytest.raises(NotFoundError):
        await nodes.drain("a", Drain(asked_ms=1))
    await nodes.put(node("a"), epoch, None)
    (before,) = await nodes.nodes()
    await nodes.drain("a", Drain(asked_ms=1, grace_s=5))
    await nodes.put(before, epoch, None)
    (draining,) = await nodes.nodes()
    assert draining.drain == Drain(asked_ms=1, grace_s=5)
    assert draining.shown_state is NodeState.DRAINING
    await nodes.put(draining, epoch, None)
    await nodes.drain("a", None)
    assert [n.shown_state for n in await nodes.nodes()] == [NodeState.READY]


async def test_a_node_that_joined_meanwhile_is_not_overwritten(world: World) -> None:
    epoch = await world.ports.leadership.take("a")
    assert epoch is not None
    nodes = world.ports.nodes
    await nodes.put(node("a"), epoch, None)
    (before,) = await nodes.nodes()
    joined = before.model_copy(update={"incarnation": "life-2", "fact_id": "2-0"})
    await nodes.put(joined, epoch, before)
    with pytest.raises(StaleWriteError):
        await nodes.put(before.model_copy(update={"state": NodeState.LOST}), epoch, before)
    with pytest.raises(StaleWriteError):
        await nodes.put(node("b"), epoch, node("b"))
    assert await nodes.nodes() == [joined]


async def test_a_node_is_forgotten_with_all_of_its_own_unless_it_lives(world: World) -> None:
    epoch = await world.ports.leadership.take("a")
    assert epoch is not None
    nodes = world.ports.nodes
    for name in ("a", "a-2"):
        await nodes.put(node(name), epoch, None)
        await nodes.drain(name, Drain(asked_ms=1))
        await nodes.keep_measured(name, "cpu", Measurement(at_ms=1), epoch)
    known, other = await nodes.nodes()
    assert [await nodes.node(name) for name in ("a", "a-2", "a-3")] == [known, other, None]
    with pytest.raises(DeposedError):
        await nodes.forget(known, epoch + 1)
    with pytest.raises(StaleWriteError):
        await nodes.forget(known.model_copy(update={"fact_id": "2-0"}), None)
    await nodes.forget(known, epoch)
    assert await nodes.nodes() == [other]
    await nodes.put(node("a"), epoch, None)
    assert (await nodes.nodes())[0] == node("a")
    world.outside.lease("a", "life-1")
    with pytest.raises(StaleWriteError):
        await nodes.forget(node("a"), None)


async def test_what_a_job_told_is_kept_for_some_days_after_its_end(redis_url: str) -> None:
    with Redis.from_url(redis_url, decode_responses=True) as redis:
        async with redis_ports(redis_url, telemetry_kept_s=1_000) as ports:
            world = World(ports, OutsideRedis(redis))
            stored = await world.keep(job())
            name = stored.job.id
            world.outside.step(
                name, StepRecord(step=1, fence=1, loss=1, tokens_per_s=1, step_time_s=1)
            )
            world.outside.output(name, "{}")
            world.outside.metric(name, MetricRecord(step=1, fence=1, values={"hits": 1}))
            streams = (
                keys.job_steps(name),
                keys.job_metrics(name),
                keys.job_logs(name),
                keys.job_history(name),
            )
            for event, kept in (
                (PauseAsked(StopRequest()), False),
                (KillAsked(), True),
                (ResumeAsked(), False),
            ):
                happened = [Occurrence(event, 10)]
                stored = await apply_events(ports, name, happened, ACTOR)
                found = [redis.ttl(stream) for stream in streams]
                assert all(0 < left <= 1_000 if kept else left == -1 for left in found), event
            assert redis.ttl(keys.job_events(name)) == -1


async def test_metrics_of_users_are_kept_by_job(world: World) -> None:
    one, other = job().id, job().id
    telemetry = world.ports.telemetry
    records = [MetricRecord(step=n, fence=1, values={"hits": n / 7, "gap": None}) for n in (1, 2)]
    for record in records:
        world.outside.metric(one, record)
    assert await telemetry.metrics(one) == records
    assert await telemetry.metrics(other) == []
    assert await telemetry.last_metrics([other, one], 1) == {other: [], one: records[1:]}


async def test_output_is_read_behind_a_cursor_until_it_is_trimmed(world: World) -> None:
    name = job().id
    telemetry = world.ports.telemetry
    for number in range(5):
        world.outside.output(name, str(number))
    first = await telemetry.read(name, Log.OUTPUT, None, 2)
    rest = await telemetry.read(name, Log.OUTPUT, first[-1].id, 10)
    assert [entry.body for entry in first + rest] == ["0", "1", "2", "3", "4"]
    await telemetry.wait(name, Log.OUTPUT, first[-1].id, 10)
    await telemetry.wait(name, Log.OUTPUT, rest[-1].id, 0.01)
    world.outside.trim(name)
    with pytest.raises(CursorExpiredError):
        await telemetry.read(name, Log.OUTPUT, first[-1].id, 10)
    assert [entry.body for entry in await telemetry.read(name, Log.OUTPUT, None, 9)] == ["4"]


async def test_stacks_of_a_rank_take_the_place_of_those_before_and_go_with_the_job(
    world: World,
) -> None:
    stored = await world.keep(job())
    job_id = stored.job.id
    telemetry = world.ports.telemetry
    assert await telemetry.stacks(job_id) == []
    await telemetry.keep_stacks(job_id, [])
    await telemetry.keep_stacks(job_id, [stacks(1, "old"), stacks(0, "a")])
    await telemetry.keep_stacks(job_id, [stacks(1, "new")])
    assert await telemetry.stacks(job_id) == [stacks(0, "a"), stacks(1, "new")]
    await world.ports.jobs.delete(stored)
    assert await telemetry.stacks(job_id) == []


def stacks(rank: int, text: str) -> RankStacks:
    return RankStacks(rank=rank, fence=1, node_id=NODE, text=text)


async def test_steps_come_back_in_their_order(world: World) -> None:
    name, other = job().id, job().id
    records = [
        StepRecord(step=n, fence=1, loss=1.0, tokens_per_s=1, step_time_s=1) for n in (1, 2, 3)
    ]
    for record in records:
        world.outside.step(name, record)
    assert await world.ports.telemetry.steps(name) == records
    last = await world.ports.telemetry.last_steps([name, other], 2)
    assert last == {name: records[1:], other: []}
    assert await world.ports.telemetry.samples([name]) == {name: {}}
    assert await world.ports.telemetry.progress([name]) == {name: {}}


async def test_a_commit_wakes_who_listens(world: World) -> None:
    kept = await world.keep(job())
    async with world.ports.listen() as waker:
        waiting = asyncio.create_task(waker.wait(60))
        await asyncio.sleep(0)
        assert not waiting.done()
        change = Change(kept, play(kept.job, [placed(kept.job)]), ACTOR)
        await world.ports.jobs.commit(change)
        async with asyncio.timeout(20):
            await waiting
        await waker.wait(0.01)
    assert await world.ports.clock.now_ms() > 0


async def test_an_absent_redis_is_said_in_the_words_of_the_ports() -> None:
    async with redis_ports("redis://127.0.0.1:1/0") as ports:
        with pytest.raises(StoreUnavailableError):
            await ports.jobs.active()
        with pytest.raises(StoreUnavailableError):
            await ports.leadership.take("a")
        with pytest.raises(StoreUnavailableError):
            async with ports.listen():
                pass


async def test_what_a_node_measured_stands_whatever_the_leader_writes_of_it(world: World) -> None:
    epoch = await world.ports.leadership.take("a")
    assert epoch is not None
    nodes = world.ports.nodes
    await nodes.put(node("a"), epoch, None)
    await nodes.put(node("b"), epoch, None)
    found = Measurement(facts=FACTS, at_ms=7)
    await nodes.keep_measured("a", "cpu", found, epoch)
    for known in await nodes.nodes():
        await nodes.put(known, epoch, None)
    assert {n.id: n.measured for n in await nodes.nodes()} == {"a": {"cpu": found}, "b": {}}
    with pytest.raises(DeposedError):
        await nodes.keep_measured("a", "cpu", found, epoch - 1)


def plan(number: int = 0) -> Plan:
    now = 1_000_000
    return Plan(
        id=new_plan_id(now + number, bytes(10)),
        spec=spec(),
        device_type="cpu",
        probe_id=QUESTION.probe_id,
        node_id=NODE,
        created_ms=now,
        answer_by_ms=now + 60_000,
    )


QUESTION = ProbeModel(
    probe_id=f"probe_{'0' * 32}", spec=spec(), device_type="cpu", conditions=(Conditions(),)
)
ASK = Send(NODE, QUESTION)
ASK_ID = QUESTION.probe_id
MEASURE = Send(NODE, MeasureNode(device_type="cpu"))


async def test_a_plan_is_kept_with_its_question_which_is_asked_once(world: World) -> None:
    plans = world.ports.plans
    assert await plans.keep(plan(), ASK, MEASURE) == "asked"
    assert await plans.keep(plan(1), ASK, MEASURE) == "pending"
    assert await plans.load(plan(1).id) == plan(1)
    assert world.outside.inbox(NODE) == [MEASURE.command, QUESTION]
    for absent in (plan(2).id, "plan_of_nothing", "ml:jobs"):
        with pytest.raises(NotFoundError):
            await plans.load(absent)


async def test_plans_are_listed_newest_first_page_by_page(world: World) -> None:
    plans = world.ports.plans
    made = [
        plan(number).model_copy(update={"created_ms": 1_000_000 + number // 3})
        for number in range(8)
    ]
    for each in made:
        await plans.keep(each, ASK, None)
    expected = sorted((Place(each.created_ms, each.id) for each in made), reverse=True)
    seen: list[Place] = []
    while page := await plans.page(seen[-1] if seen else None, 3):
        assert len(page) <= 3
        seen += [Place(each.created_ms, each.id) for each in page]
    assert seen == expected
    concluded = fail(made[0], "crashed", "it crashed")
    await plans.conclude(concluded)
    assert (await plans.page(None, 8))[-1] == concluded


async def test_a_node_is_asked_to_measure_once_until_it_has_told(world: World) -> None:
    epoch = await world.ports.leadership.take("a")
    assert epoch is not None
    for number in range(2):
        await world.ports.plans.keep(plan(number), ASK, MEASURE)
    assert world.outside.inbox(NODE).count(MEASURE.command) == 1
    await world.ports.nodes.keep_measured(NODE, "cpu", Measurement(failure="busy", at_ms=1), epoch)
    await world.ports.plans.keep(plan(2), ASK, MEASURE)
    assert world.outside.inbox(NODE).count(MEASURE.command) == 2


async def test_an_answer_is_kept_for_all_who_ask_the_same_until_one_asks_again(
    world: World,
) -> None:
    plans = world.ports.plans
    epoch = await world.ports.leadership.take("a")
    assert epoch is not None
    await plans.keep(plan(), ASK, None)
    assert await plans.answer(QUESTION.probe_id) is None
    await plans.wait(QUESTION.probe_id, 0.01)
    with pytest.raises(DeposedError):
        await plans.keep_answer(answer_to(QUESTION), epoch - 1)
    for _ in range(2):
        await plans.keep_answer(answer_to(QUESTION), epoch)
    async with asyncio.timeout(20):
        await plans.wait(QUESTION.probe_id, 60)
    assert await plans.answer(QUESTION.probe_id) == answer_to(QUESTION)
    assert await plans.keep(plan(1), ASK, None) == "cached"
    assert world.outside.inbox(NODE) == [QUESTION]
    assert await plans.keep(plan(2), ASK, None, fresh=True) == "asked"
    assert await plans.answer(QUESTION.probe_id) is None
    assert world.outside.inbox(NODE) == [QUESTION, QUESTION]
    # Who was asked may be gone: one who asks again does not wait for that.
    assert await plans.keep(plan(3), ASK, None) == "pending"
    assert await plans.keep(plan(4), ASK, None, fresh=True) == "asked"


async def test_how_long_steps_took_is_kept_with_the_profile_newest_first(world: World) -> None:
    plans = world.ports.plans
    assert await plans.paces(ASK_ID) == []
    paces = [
        Pace(job_id="job", fence=n, kind="k", foreseen_s=1, taken_s=n)
        for n in range(PACES_KEPT + 2)
    ]
    for each in paces:
        await plans.keep_pace(ASK_ID, each)
    assert await plans.paces(ASK_ID) == paces[:1:-1]


async def test_the_first_conclusion_of_a_plan_stands(world: World) -> None:
    plans = world.ports.plans
    with pytest.raises(NotFoundError):
        await plans.conclude(plan())
    await plans.keep(plan(), ASK, None)
    failed = fail(plan(), "crashed", "it crashed")
    assert await plans.conclude(failed) == failed
    late = plan().model_copy(update={"state": PlanState.READY})
    assert await plans.conclude(late) == failed
    assert await plans.load(plan().id) == failed


async def test_a_failure_is_forgotten_sooner_than_a_profile(redis_url: str) -> None:
    failure = ProbeFailure(code="timed_out", reason="too slow")
    async with redis_ports(redis_url) as ports:
        epoch = await ports.leadership.take("a")
        assert epoch is not None
        with Redis.from_url(redis_url, decode_responses=True) as redis:
            await ports.plans.keep(plan(), ASK, None)
            lives = {redis.ttl(keys.plan(plan().id)), redis.ttl(keys.probe_asked(ASK_ID))}
            lives.add(redis.ttl(keys.PLANS))
            assert all(0 < life <= keys.PLAN_TTL_S for life in lives)
            # What the list still has of a plan that is gone is passed over, and goes with the next.
            redis.delete(keys.plan(plan().id))
            assert await ports.plans.page(None, 10) == []
            week_ms = keys.PLAN_TTL_S * 1000
            later = plan(1).model_copy(
                update={
                    "created_ms": plan().created_ms + week_ms,
                    "answer_by_ms": plan().answer_by_ms + week_ms,
                }
            )
            await ports.plans.keep(later, ASK, None)
            assert redis.zrange(keys.PLANS, 0, -1) == [later.id]
            assert await ports.plans.page(None, 10) == [later]
            failed = ModelProbed(probe_id=ASK_ID, node_id=NODE, took_s=1, failure=failure)
            for answer, life_s in ((failed, 60), (answer_to(QUESTION), 86_400)):
                await ports.plans.keep_answer(answer, epoch)
                assert life_s - 10 < redis.ttl(keys.probe(ASK_ID)) <= life_s


def _code(body: bytes, subject: str = "alice") -> UploadedCode:
    return UploadedCode(
        digest=digest_of(body),
        bytes=len(body),
        files=1,
        unpacked_bytes=len(body),
        uploaded_by=subject,
        uploaded_ms=1,
    )


async def test_code_is_kept_whole_and_once(world: World) -> None:
    body, codes = os.urandom(keys.CODE_PART_BYTES * 5 + 7), world.ports.codes
    kept = _code(body)
    assert await codes.get(kept.digest) is None
    assert not await codes.use(kept.digest)
    assert await codes.keep(kept, body, CodeLimits()) == "new"
    assert await codes.keep(_code(body, "bob"), body, CodeLimits()) == "known"
    assert await codes.get(kept.digest) == kept
    if isinstance(world.outside, OutsideRedis):
        redis = world.outside.redis
        name = keys.code(hex_of(kept.digest))
        assert redis.keys("ml:code:*") == [name]  # no draft is left
        assert redis.ttl(name) == -1
        assert redis.hget(name, keys.CODE_PARTS) == "6"
        ask: Any = redis.execute_command
        parts = [ask("HGET", name, n, NEVER_DECODE=True) for n in range(6)]
        assert b"".join(parts) == body


async def test_code_is_forgotten_once_and_gives_its_room_back(world: World) -> None:
    codes, epoch = world.ports.codes, await world.ports.leadership.take("one")
    assert epoch is not None
    bodies = [os.urandom(5_000_000) for _ in range(4)]
    tight = CodeLimits(store_bytes=41 << 20)  # a share has room for two
    assert await codes.keep(_code(bodies[0]), bodies[0], tight) == "new"
    assert await codes.keep(_code(bodies[1]), bodies[1], tight) == "new"
    assert await codes.keep(_code(bodies[2]), bodies[2], tight) == "share"
    assert await codes.keep(_code(bodies[2], "bob"), bodies[2], tight) == "new"
    fourth = _code(bodies[3], "carol")
    assert await codes.keep(fourth, bodies[3], CodeLimits(store_bytes=15_100_000)) == "full"
    assert await codes.get(fourth.digest) is None
    first, later = digest_of(bodies[0]), await world.ports.clock.now_ms() + 60_000
    assert not await codes.forget(first, 1, epoch)  # it was used since
    assert len(await codes.unused(later)) == 3
    with pytest.raises(DeposedError):
        await codes.forget(first, later, epoch + 1)
    assert await codes.forget(first, later, epoch)
    assert not await codes.use(first)
    assert first not in await codes.unused(later)
    assert await codes.keep(_code(bodies[2]), bodies[2], tight) == "known"
    assert await codes.keep(_code(bodies[3]), bodies[3], tight) == "new"


async def test_what_others_do_and_refusals_push_nothing_of_operators_out_of_the_trail(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keys, "AUDIT_KEPT", 100)
    audit = world.ports.audit

    def entry(number: int, scope: Scope, status: int = 200) -> AuditRecord:
        return AuditRecord(
            actor="any",
            scope=scope,
            request_id=f"{scope}-{number}",
            method="POST",
            path="/v1/jobs",
            status=status,
        )

    await audit.append(entry(0, Scope.OPERATOR))
    for number in range(250):
        await audit.append(entry(number, Scope.SUBMITTER))
        await audit.append(entry(number, Scope.OPERATOR, status=409))
    whole = await audit.newest(None, 1_000)
    assert '"operator-0"' in whole[-1].body
    assert '"status":200' in whole[-1].body
    assert [each.place for each in whole] == sorted({e.place for e in whole}, reverse=True)
    pages: list[Entry] = []
    while page := await audit.newest(pages[-1].id if pages else None, 7):
        pages += page
    assert pages == whole
