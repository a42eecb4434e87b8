"""Whose layouts are chosen first: a job does not wait for all that others have queued."""

from services.contract.words.states import PlanState
from services.controller.ports.jobs import Actor
from tests.controller.planning_office import Office, play
from tests.controller.profiles import ARGS

BOB = Actor("bob")


async def _queues(office: Office, *names: str) -> list[str]:
    """Jobs of these names whose models are different ones, so that each is asked for."""
    models = [{"factory": "decoder", "args": ARGS | {"vocab": ord(name)}} for name in names]
    return [
        await office.submits(name=name, model=model)
        for name, model in zip(names, models, strict=True)
    ]


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
