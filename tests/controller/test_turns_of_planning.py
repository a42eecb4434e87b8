"""Whose layouts are chosen first: a job does not wait for all that others have queued."""

from services.contract.redis import redis_keys as keys
from services.contract.words.states import PlanState
from services.controller.ports.jobs import Actor, EventRecord
from tests.controller.planning_office import Office, play
from tests.controller.profiles import ARGS

BOB = Actor("bob")


async def _queues(office: Office, *names: str) -> list[str]:
    """Jobs of these names whose models are different ones, so that each is asked for."""
    models = [{"factory": "decoder", "args": ARGS | {"vocab": int(name, 36)}} for name in names]
    return [
        await office.submits(name=name, model=model)
        for name, model in zip(names, models, strict=True)
    ]


async def _planned(office: Office, *job_ids: str) -> list[str]:
    """Those of the jobs whose layouts are chosen, in the order in which they were."""
    told = await office.ports.events.read(None, 1000)
    kinds = [(one.job_id, EventRecord.model_validate_json(one.body).kind) for one in told]
    return [job_id for job_id, kind in kinds if kind == "job.planned" and job_id in job_ids]


def _owners(office: Office) -> list[str]:
    return [question.owner for question in office.asked()]


def test_of_each_owner_one_layout_is_begun_before_the_second_of_another_and_first_of_who_has_few() -> (
    None
):
    async def course(office: Office) -> None:
        await _queues(office, "k", "l", "m")
        await office.gets(BOB)
        await office.plans()
        assert _owners(office) == ["bob", "ada", "ada", "ada"]

    play(course)


def test_a_look_that_became_long_ends_and_the_next_one_sees_who_came_and_goes_on() -> None:
    async def course(office: Office) -> None:
        office.new_leader(part_s=0)
        hers = await _queues(office, "k", "l", "m")
        await office.plans()
        assert _owners(office) == ["ada"]
        his = await office.gets(BOB)
        await office.plans()
        assert _owners(office) == ["ada", "bob", "ada"]
        await office.answers(office.asked()[1])
        await office.plans()
        assert _owners(office) == ["ada", "bob", "ada", "ada"]
        job = await office.job(his)
        assert job.estimate is not None
        plan = await office.ports.plans.load(job.estimate.plan_id)
        assert plan.state is PlanState.READY
        for question in office.asked():
            await office.answers(question)
        for _ in hers:
            await office.plans()
        planned = [await office.job(job_id) for job_id in hers]
        assert all(job.estimate is not None for job in planned)

    play(course)


def test_jobs_to_which_nothing_can_happen_take_no_turn_of_those_whose_models_are_profiled() -> None:
    async def course(office: Office) -> None:
        hers = await _queues(office, "k", "l", "m", "n")
        his = [await office.gets(BOB) for _ in range(5)]
        await office.plans()
        _, the_one_of_his, *_, the_last_of_hers = office.asked()
        await office.answers(the_last_of_hers)
        await office.answers(the_one_of_his)
        await office.plans()
        assert await _planned(office, hers[-1], *his) == [hers[-1], *his]

    play(course)


def test_jobs_that_may_not_ask_for_a_profile_yet_take_no_turn_of_those_that_have_one() -> None:
    async def course(office: Office) -> None:
        names = [f"{each}" for each in range(10, keys.PLANS_PROBING + 13)]
        first, *_ = await _queues(office, *names)
        office.new_leader(part_s=0)
        for _ in range(keys.PLANS_PROBING):
            await office.plans()
        assert len(office.asked()) == keys.PLANS_PROBING
        await office.answers(office.asked()[0])
        await office.plans()
        assert await _planned(office, first) == [first]

    play(course)
