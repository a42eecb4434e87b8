"""Plans, questions to nodes and their answers, in Redis and in memory."""

import asyncio
import gc

import pytest
from pydantic_core import SchemaValidator
from redis import Redis

from services.contract.messages import probing
from services.contract.messages.probing import ModelProbed, ProbeFailure
from services.contract.redis import redis_keys as keys
from services.contract.system import long_work
from services.contract.words.states import PlanState
from services.controller.adapters.redis import plans as redis_plans
from services.controller.adapters.redis import redis_ports
from services.controller.adapters.redis.connection import Unreadable
from services.controller.domain.errors import DeposedError, NotFoundError
from services.controller.domain.plans.pace import PACES_KEPT, Pace
from services.controller.domain.plans.plan import Plan, fail
from services.controller.domain.scheduling.node import Measurement
from services.controller.ports.jobs import Place
from services.controller.ports.machines import FactEntry
from services.controller.ports.plans import ALL_PLANS, AmongPlans
from services.controller.use_cases.facts import apply_facts
from services.controller.use_cases.plan_list import PlanFilter, list_plans
from services.controller.use_cases.plans import Drawing
from tests.controller.histories import NODE
from tests.controller.profiles import answer_to
from tests.controller.stores.worlds import ASK, ASK_ID, MEASURE, QUESTION, World, plan
from tests.waiting import Rounds

pytestmark = [pytest.mark.anyio, pytest.mark.redis]


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
    assert [each.id for each in (await plans.page(None, 9)).plans] == expected
    with pytest.raises(NotFoundError):
        await plans.load(second.id)
    late = plan(7).model_copy(
        update={"owner": "sue", "created_ms": 1_100_000, "answer_by_ms": 1_160_000}
    )
    await plans.keep(late, ASK, None)
    assert first.id not in [each.id for each in (await plans.page(None, 9)).plans]


async def test_of_an_owners_plans_so_many_wait_for_a_node_at_a_time(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keys, "PLANS_PROBING", 2)
    plans = world.ports.plans

    def asked(number: int, owner: str = "sue", later_ms: int = 0) -> Plan:
        changed = {
            "owner": owner,
            "created_ms": plan().created_ms + later_ms,
            "answer_by_ms": plan().answer_by_ms + later_ms,
        }
        return plan(number).model_copy(update=changed)

    assert await plans.keep(asked(1), ASK, None) == "asked"
    assert await plans.keep(asked(2), ASK, None) == "pending"
    assert await plans.keep(asked(3), ASK, None) == "too_many"
    assert await plans.keep(asked(3), ASK, None, fresh=True) == "too_many"
    with pytest.raises(NotFoundError):
        await plans.load(asked(3).id)
    assert await plans.keep(asked(4, "sam"), ASK, None) == "pending"
    await plans.conclude(fail(asked(1), "crashed", "it crashed"))
    assert await plans.keep(asked(5), ASK, None) == "pending"
    assert await plans.keep(asked(6), ASK, None) == "too_many"
    # For those that were given up meanwhile nobody waits.
    patience_ms = plan().answer_by_ms - plan().created_ms
    assert await plans.keep(asked(7, later_ms=patience_ms + 1), ASK, None) == "pending"
    epoch = await world.ports.leadership.take("a")
    assert epoch is not None
    await plans.keep_answer(answer_to(QUESTION), epoch)
    for number in (8, 9):
        assert await plans.keep(asked(number), ASK, None) == "cached"


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
    assert await places_of(world, 3) == expected
    assert await places_of(world, 1) == expected
    concluded = fail(made[0], "crashed", "it crashed")
    await plans.conclude(concluded)
    assert (await plans.page(None, 8)).plans[-1] == concluded


async def places_of(world: World, limit: int, among: AmongPlans = ALL_PLANS) -> list[Place]:
    """All places of plans, page by page."""
    seen: list[Place] = []
    place: Place | None = None
    while True:
        found, place = await world.ports.plans.page(place, limit, among)
        assert len(found) <= limit
        seen += [Place(each.created_ms, each.id) for each in found]
        if place is None:
            return seen


@pytest.mark.parametrize("among_ms", [1, 100])
async def test_of_plans_that_are_not_wanted_no_record_is_read(
    world: World, monkeypatch: pytest.MonkeyPatch, among_ms: int
) -> None:
    """A list of the plans of nobody must not cost what all there are would."""
    monkeypatch.setattr(redis_plans, "_LOOKED_THROUGH", 4)
    made = [
        plan(number).model_copy(
            update={"owner": f"sue-{number % 3}", "created_ms": 1_000_000 + number * among_ms // 9}
        )
        for number in range(18)
    ]
    for number, each in enumerate(made):
        await world.ports.plans.keep(each, ASK, None)
        if number < 12:
            await world.ports.plans.conclude(fail(each, "crashed", "it crashed"))
    read = noted_reads(monkeypatch)
    failed, ready = frozenset({PlanState.FAILED}), frozenset({PlanState.READY})
    wanted = [
        *(
            (AmongPlans(owner="nobody"), set[int]()),
            (AmongPlans(owner="sue-1"), {*range(1, 18, 3)}),
        ),
        *((AmongPlans(failed), {*range(18)}), (AmongPlans(ready), {*range(12, 18)})),
        (AmongPlans(ready, "sue-2"), {14, 17}),
    ]
    for among, numbers in wanted:
        del read[:]
        expected = sorted((Place(made[n].created_ms, made[n].id) for n in numbers), reverse=True)
        assert await places_of(world, 2, among) == expected
        assert len(read) in {0, len(expected)}  # in memory there is nothing to be read


def noted_reads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the records that are read from now on."""
    read: list[str] = []
    forget = Unreadable.forget

    def forgets(self: Unreadable, name: str) -> None:
        if name.endswith(" doc"):  # a record was read
            read.append(name)
        forget(self, name)

    monkeypatch.setattr(Unreadable, "forget", forgets)
    return read


async def test_a_node_is_asked_to_measure_once_until_it_has_told(world: World) -> None:
    epoch = await world.ports.leadership.take("a")
    assert epoch is not None
    for number in range(2):
        await world.ports.plans.keep(plan(number), ASK, MEASURE)
    assert world.outside.inbox(NODE).count(MEASURE.command) == 1
    await world.ports.nodes.keep_measured(NODE, "cpu", Measurement(failure="busy", at_ms=1), epoch)
    await world.ports.plans.keep(plan(2), ASK, MEASURE)
    assert world.outside.inbox(NODE).count(MEASURE.command) == 2


async def test_while_an_answer_becomes_objects_no_garbage_is_looked_for(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of as many lists as are taken it would keep the loop, and with it the lead, for four times as long."""
    answer, seen, validator = answer_to(QUESTION), list[bool](), probing._profile_validator

    def noted() -> SchemaValidator:
        seen.append(gc.isenabled())
        return validator()

    epoch = await world.ports.leadership.take("a")
    assert epoch is not None
    await world.ports.plans.keep(plan(), ASK, None)
    monkeypatch.setattr(probing, "_profile_validator", noted)
    told = FactEntry("1-0", answer.model_dump_json(), answer.node_id)
    await apply_facts(world.ports, [told], epoch)
    assert await world.ports.plans.answer(QUESTION.probe_id) == answer
    assert set(seen) == {False}
    assert gc.isenabled()


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
    assert not await plans.keep_answer(answer_to(QUESTION, "another"), epoch)
    assert await plans.answer(QUESTION.probe_id) is None
    for _ in range(2):
        assert await plans.keep_answer(answer_to(QUESTION), epoch)
    assert not await plans.keep_answer(answer_to(QUESTION, "another"), epoch)
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


async def test_whom_a_controller_of_the_last_release_asks_may_answer(redis_url: str) -> None:
    async with redis_ports(redis_url) as ports:
        plans = ports.plans
        epoch = await ports.leadership.take("a")
        assert epoch is not None
        await plans.keep(plan(), ASK, None)
        assert await plans.keep_answer(answer_to(QUESTION), epoch)
        with Redis.from_url(redis_url) as redis:
            redis.delete(keys.probe(ASK_ID))
            redis.set(keys.probe_asked(ASK_ID), "1", px=240_000)
            assert await plans.keep_answer(answer_to(QUESTION, "another"), epoch)
        assert await plans.answer(ASK_ID) == answer_to(QUESTION, "another")
        assert not await plans.keep_answer(answer_to(QUESTION, "third"), epoch)


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
            assert (await ports.plans.page(None, 10)).plans == []
            week_ms = keys.PLAN_TTL_S * 1000
            later = plan(1).model_copy(
                update={
                    "created_ms": plan().created_ms + week_ms,
                    "answer_by_ms": plan().answer_by_ms + week_ms,
                }
            )
            await ports.plans.keep(later, ASK, None)
            assert redis.zrange(keys.PLANS, 0, -1) == [later.id]
            assert (await ports.plans.page(None, 10)).plans == [later]
            failed = ModelProbed(probe_id=ASK_ID, node_id=NODE, took_s=1, failure=failure)
            for answer, life_s in ((failed, 60), (answer_to(QUESTION), 86_400)):
                await ports.plans.keep_answer(answer, epoch)
                assert life_s - 10 < redis.ttl(keys.probe(ASK_ID)) <= life_s


async def test_a_page_behind_a_plan_reads_the_plans_of_the_page_alone(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(9):
        of_its_time = {"created_ms": 1_000_000 + number}
        await world.ports.plans.keep(plan(number).model_copy(update=of_its_time), ASK, None)
    (newest,) = (await world.ports.plans.page(None, 1)).plans
    read = noted_reads(monkeypatch)
    found, _ = await world.ports.plans.page(Place(newest.created_ms, newest.id), 3)
    assert [each.created_ms for each in found] == [1_000_007, 1_000_006, 1_000_005]
    assert len(read) <= 3  # in memory there is nothing to be read


async def test_plans_are_read_and_listed_one_by_one_with_turns_of_others_in_between(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(5):
        await world.ports.plans.keep(plan(number), ASK, None)
        await world.ports.plans.conclude(fail(plan(number), "crashed", "it crashed"))
    monkeypatch.setattr(long_work, "_TURN_S", 0.0)  # as if each took that long
    rounds, read, shown = Rounds(), list[int](), list[int]()
    forget, has_state = Unreadable.forget, PlanFilter.matches

    def forgets(self: Unreadable, name: str) -> None:
        if name.endswith(" doc"):  # a record was read
            read.append(rounds.made)
        forget(self, name)

    def matches(self: PlanFilter, known: Plan) -> bool:
        shown.append(rounds.made)
        return has_state(self, known)

    monkeypatch.setattr(Unreadable, "forget", forgets)
    monkeypatch.setattr(PlanFilter, "matches", matches)

    async with rounds:
        assert len((await list_plans(world.ports, PlanFilter(), None, 9, Drawing())).items) == 5
    assert len(set(shown)) == 5
    assert len(set(read)) == len(read)
