"""Jobs and their events: what is created, committed, listed and deleted, in Redis and in memory."""

import asyncio
import json

import pytest
from redis import Redis

from services.contract.api.requests import JobPatch
from services.contract.api.views import StopRequest
from services.contract.jobs.bounded_json import JUDGED
from services.contract.jobs.specs import MAX_SPEC_BYTES, JobSpec
from services.contract.messages.commands import StopGang
from services.contract.redis import redis_keys as keys
from services.contract.system import long_work
from services.contract.words.ids import checkpoint_id
from services.contract.words.states import JobState
from services.controller.adapters.redis import redis_ports
from services.controller.adapters.redis.jobs import RedisJobs
from services.controller.adapters.redis.shared_reads import SharedReads
from services.controller.domain.decisions.dispatch import first_decision
from services.controller.domain.decisions.history import Occurrence
from services.controller.domain.errors import (
    CursorExpiredError,
    DeposedError,
    KeyReusedError,
    NotFoundError,
    StaleWriteError,
    StoreUnavailableError,
)
from services.controller.domain.job.checkpoint import begin
from services.controller.domain.job.effects import Decision, Send
from services.controller.domain.job.events import PatchAsked, PauseAsked
from services.controller.ports.jobs import Actor, Change, Claim, Place, Stored
from services.controller.ports.machines import Log
from services.controller.use_cases.change import apply_events
from tests.controller.histories import NODE, node, placed, play, saved
from tests.controller.stores.worlds import ACTOR, ASK, OutsideRedis, World, job, plan
from tests.waiting import Rounds

pytestmark = [pytest.mark.anyio, pytest.mark.redis]


async def test_a_job_comes_back_as_it_was_kept(world: World) -> None:
    kept = await world.keep(job())
    assert await world.ports.jobs.load(kept.job.id) == kept
    assert [stored.job for stored in await world.ports.jobs.active()] == [kept.job]
    with pytest.raises(NotFoundError):
        await world.ports.jobs.load("job_" + "0" * 26)


async def test_of_those_who_ask_for_a_job_at_once_two_read_it(redis_url: str) -> None:
    """Of eight thousand checkpoints each that reads takes fifty megabytes."""
    with Redis.from_url(redis_url, decode_responses=True) as redis:
        async with redis_ports(redis_url) as ports:
            kept = await World(ports, OutsideRedis(redis)).keep(job())
            redis.config_resetstat()
            asking = [asyncio.create_task(ports.jobs.load(kept.job.id)) for _ in range(30)]
            await asyncio.sleep(0)
            asking[0].cancel()  # who reads goes away
            asking[2].cancel()  # and so does one that waits
            found = await asyncio.gather(*asking, return_exceptions=True)
            reads = redis.info("commandstats")["cmdstat_hgetall"]["calls"]
            assert [one for one in found if not isinstance(one, asyncio.CancelledError)] == [
                kept
            ] * 28
            assert reads <= 3  # the one that was given up, too

            patched = PatchAsked(JobPatch(priority=7))
            asked = asyncio.create_task(ports.jobs.load(kept.job.id))
            await asyncio.sleep(0)
            changed = await apply_events(ports, kept.job.id, [Occurrence(patched, 5)], ACTOR)
            assert (await ports.jobs.load(kept.job.id)) == changed
            await asked


async def test_who_waits_for_a_read_of_a_store_that_is_away_does_not_try_it_again() -> None:
    """Each of thirty would wait for five seconds, one after another."""
    tries = 0

    async def read() -> Stored:
        nonlocal tries
        tries += 1
        await asyncio.sleep(0)
        raise StoreUnavailableError("it is away", "its address")

    reads = SharedReads[Stored]()
    told = await asyncio.gather(*(reads.of("a", read) for _ in range(30)), return_exceptions=True)
    assert {one.why for one in told if isinstance(one, StoreUnavailableError)} == {"its address"}
    assert tries == 1
    with pytest.raises(StoreUnavailableError):
        await reads.of("a", read)
    assert tries == 2


async def test_a_spec_is_not_judged_again_wherever_its_record_is_read(redis_url: str) -> None:
    """For one of 64 KiB that would take the loop most of the time that reading it takes."""
    fields = job().spec.model_dump() | {"plan": {"units": ["x" * MAX_SPEC_BYTES]}}
    beyond = JobSpec.model_validate(fields, context=JUDGED)
    async with redis_ports(redis_url) as ports, redis_ports(redis_url) as others:
        kept = job().model_copy(update={"spec": beyond})
        await ports.jobs.create(Decision(kept), ACTOR, None)
        assert (await others.jobs.load(kept.id)).job.spec == beyond
        await ports.plans.keep(plan().model_copy(update={"spec": beyond}), ASK, None)
        assert (await others.plans.load(plan().id)).spec == beyond


async def test_checkpoints_of_a_job_are_read_by_turns_and_those_that_did_not_change_once(
    redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Retention and pins may keep sixteen thousand, which take half a second, after each change of their job."""
    monkeypatch.setattr(long_work, "_TURN_S", -1.0)
    with Redis.from_url(redis_url, decode_responses=True) as redis:
        async with redis_ports(redis_url) as ports:
            kept = await World(ports, OutsideRedis(redis)).keep(job())
            name = kept.job.id
            written = [begin(checkpoint_id(name, step, 1), name, 1, 5) for step in range(1, 101)]
            for each in written:
                redis.hset(keys.job_checkpoints(name), each.id, each.model_dump_json())
            async with Rounds() as rounds:
                before = (await ports.jobs.load(name)).job.checkpoints
            assert rounds.made >= 100
            changed = written[50].model_copy(update={"pinned": True})
            redis.hset(keys.job_checkpoints(name), changed.id, changed.model_dump_json())
            after = (await ports.jobs.load(name)).job.checkpoints
            assert [each for each in after if after[each] is not before[each]] == [changed.id]
            assert after[changed.id] == changed


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


async def test_a_record_with_a_field_of_a_later_version_is_read(redis_url: str) -> None:
    async with redis_ports(redis_url) as ports:
        stored = await ports.jobs.create(first_decision(job()), ACTOR, None)
        with Redis.from_url(redis_url, decode_responses=True) as redis:
            doc = json.loads(str(redis.hget(keys.job(stored.job.id), "doc")))
            doc["of_tomorrow"] = {"a": [1]}
            redis.hset(keys.job(stored.job.id), "doc", json.dumps(doc))
    async with redis_ports(redis_url) as ports:
        assert await ports.jobs.load(stored.job.id) == stored
        assert ports.unreadable() == ()


async def test_a_stale_writer_writes_nothing(world: World) -> None:
    before = await world.keep(job())
    decision = play(before.job, [placed(before.job)])
    await world.ports.jobs.commit(Change(before, decision, ACTOR))
    with pytest.raises(StaleWriteError):
        await world.ports.jobs.commit(Change(before, decision, ACTOR))
    assert len(world.outside.inbox(NODE)) == 1


async def test_of_those_who_change_a_job_at_once_nobody_is_too_slow(
    redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of eight requests won each time. The leader's fact lost among them, and others' facts waited with it."""
    async with redis_ports(redis_url) as ports:
        name = (await ports.jobs.create(first_decision(job()), ACTOR, None)).job.id
        order: list[str] = []
        commit = RedisJobs.commit

        async def noted(self: RedisJobs, change: Change, epoch: int | None = None) -> Stored:
            order.append(change.actor.name)
            return await commit(self, change, epoch)

        monkeypatch.setattr(RedisJobs, "commit", noted)
        who = ["sue"] * 8 + ["controller"]
        patches = [JobPatch(labels={"number": str(number)}) for number in range(len(who))]
        await asyncio.gather(
            *(
                apply_events(ports, name, [Occurrence(PatchAsked(patch, None), 5)], Actor(each))
                for patch, each in zip(patches, who, strict=True)
            )
        )
        assert sorted(order) == sorted(who)  # nothing was tried again
        assert order.index("controller") <= 1
        assert not ports.changes._turns


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
