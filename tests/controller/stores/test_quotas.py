"""How much a subject may keep, in Redis and in memory."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from services.contract.redis import redis_keys as keys
from services.contract.words.states import JobState
from services.controller.domain.decisions.dispatch import first_decision
from services.controller.domain.errors import TooManyJobsError
from services.controller.domain.job.effects import Decision
from services.controller.domain.job.job import Job
from services.controller.ports.coordination import Ports
from services.controller.ports.jobs import Change, Claim, JobStore, Quota, Stored
from tests.controller.histories import spec
from tests.controller.stores.worlds import ACTOR, World, job, with_quota

LARGE = spec(model={"factory": "m:n", "args": {"text": "x" * 60_000}})

pytestmark = [pytest.mark.anyio, pytest.mark.redis]


@pytest.fixture(params=["memory", "redis"])
async def of_three(request: pytest.FixtureRequest) -> AsyncIterator[Ports]:
    async for ports in with_quota(request.param, request, Quota(not_ended=3, kept=5)):
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
    resumed = [Change(one, Decision(queued(one.job)), ACTOR) for one in over]
    first, second = await asyncio.gather(*map(store.commit, resumed), return_exceptions=True)
    assert sorted([type(first), type(second)], key=str) == [TooManyJobsError, Stored]


@pytest.mark.parametrize("resident", ["memory", "redis"])
async def test_specs_of_an_owners_jobs_that_have_not_ended_are_no_larger_together_than_the_bound(
    request: pytest.FixtureRequest, resident: str
) -> None:
    """The controller has them in memory: two thousand of 64 KiB in small lists would take three gigabytes."""
    async for ports in with_quota(resident, request, Quota(spec_bytes=200_000)):
        store = ports.jobs
        first, *_ = [await made(store, number) for number in range(3)]
        with pytest.raises(TooManyJobsError, match="more than 200000 bytes"):
            await made(store, 3)
        small = job(4).model_copy(update={"owner": "sue"})
        await store.create(first_decision(small), ACTOR, None)
        await made(store, 5, "sam")
        over = await store.commit(Change(first, Decision(ended(first.job)), ACTOR))
        await made(store, 6)
        with pytest.raises(TooManyJobsError, match="wait until some jobs end"):
            await store.commit(Change(over, Decision(queued(over.job)), ACTOR))


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


def queued(before: Job) -> Job:
    return before.model_copy(update={"state": JobState.QUEUED})


async def made(store: JobStore, number: int, owner: str = "sue") -> Stored:
    """A job with a large spec."""
    one = job(number).model_copy(update={"owner": owner, "spec": LARGE})
    return await store.create(first_decision(one), ACTOR, None)
