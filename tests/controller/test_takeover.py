"""Two controllers: one leads, the other takes over, and the first may write no more.

The promise of ten seconds follows from the lease (4 s) and how often it is asked for (0.5 s); here
the outcome is asserted, and how long it took is recorded.
"""

import asyncio
import contextlib
import functools
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from http import HTTPStatus

import httpx2
import pytest
from redis import Redis

from services.contract.jobs.specs import JobSpec
from services.contract.messages.commands import StopGang
from services.contract.redis import redis_keys as keys
from services.contract.words.ids import new_job_id
from services.controller.adapters.redis import redis_ports
from services.controller.domain.decisions.dispatch import first_decision
from services.controller.domain.decisions.history import Occurrence
from services.controller.domain.errors import DeposedError
from services.controller.domain.job.events import KillAsked
from services.controller.domain.job.job import Job
from services.controller.loops import leader
from services.controller.ports.jobs import Actor
from services.controller.use_cases.change import apply_events
from tests.controller.agent_double import AgentDouble
from tests.controller.conftest import job_body
from tests.controller.replays import replay_all
from tests.controller.simulated_agents import SimulatedAgent
from tests.controller.test_process import Controller, started
from tests.waiting import until

pytestmark = [pytest.mark.redis, pytest.mark.system]
Record = Callable[[str, object], None]


def leads(controller: Controller) -> bool:
    told = controller.client.get("/readyz").json()["checks"]["leadership"]
    return str(told).startswith("leading")


def _is_ready(controller: Controller) -> bool:
    return controller.client.get("/readyz").status_code == HTTPStatus.OK


def took_over(controller: Controller, since: float) -> float:
    """Seconds until it led."""
    until(lambda: leads(controller), every_s=0.02)
    return time.monotonic() - since


def submitted(controller: Controller) -> str:
    return str(controller.client.post("/v1/jobs", json=job_body()).json()["id"])


def test_the_lease_and_the_asking_leave_room_for_the_promised_ten_seconds() -> None:
    assert leader._LEASE_S + 2 * leader._ASK_EVERY_S < 10
    assert leader._RENEW_EVERY_S * 3 < leader._LEASE_S


def test_the_other_takes_over_from_a_frozen_leader_and_from_a_killed_one(
    redis_url: str, record_testsuite_property: Record
) -> None:
    with (
        Redis.from_url(redis_url, decode_responses=True) as redis,
        started(redis_url) as first,
        started(redis_url) as second,
    ):
        until(lambda: leads(first) or leads(second))
        frozen, other = (first, second) if leads(first) else (second, first)
        agent = AgentDouble(redis)
        agent.join()
        job_id = submitted(frozen)
        gang = agent.launches(job_id)
        agent.trains(gang, range(1, 4))
        until(lambda: other.state(job_id) == "RUNNING", every_s=0.02)
        epoch = str(redis.get(keys.EPOCH))

        # Its connection lives on: what is told now is delivered to a process that stands still.
        os.kill(frozen.process.pid, signal.SIGSTOP)
        since = time.monotonic()
        name = agent.votes(gang, 3)
        record_testsuite_property("takeover_from_frozen_s", took_over(other, since))
        assert agent.saves(gang, 3) == name
        waiting = submitted(other)
        assert agent.launches(waiting).fence == 1
        assert int(str(redis.get(keys.EPOCH))) == int(epoch) + 1

        os.kill(frozen.process.pid, signal.SIGCONT)
        until(lambda: frozen.said("no_longer_leading"))
        assert not leads(frozen)
        assert leads(other)
        with pytest.raises(DeposedError):
            asyncio.run(_write_as_of(redis_url, job_id, int(epoch)))
        # People may ask either of them: a request needs no lead.
        frozen.client.post(f"/v1/jobs/{job_id}/kill")
        agent.awaits(StopGang, job_id)
        agent.ends(gang, 3, signal=9)
        until(lambda: frozen.state(job_id) == "CANCELLED", every_s=0.02)

        os.kill(other.process.pid, signal.SIGKILL)
        since = time.monotonic()
        record_testsuite_property("takeover_from_killed_s", took_over(frozen, since))
        assert int(str(redis.get(keys.EPOCH))) == int(epoch) + 2
        another = submitted(frozen)
        agent.launches(another)
        until(lambda: frozen.state(another) == "STARTING", every_s=0.02)
        assert [c.kind for c in agent.commands()].count("launch_gang") == 3
        kinds = _kinds(frozen, job_id)
        assert len(kinds) == len(set(kinds)), "nothing was decided twice"
        assert len(asyncio.run(_replayed(redis_url))) == 3


class Balanced:
    """What a proxy before the controllers does: a request goes to one that is ready, or else to the next one."""

    def __init__(self, controllers: list[Controller]) -> None:
        self.controllers = controllers
        self.answered = 0

    def get(self, path: str) -> httpx2.Response:
        """The answer of the first that gives one.

        Raises:
            AssertionError: None of them did.
        """
        faults: list[object] = []
        for controller in list(self.controllers):
            try:
                answer = controller.client.get(path)
            except httpx2.TransportError as fault:
                faults.append(fault)
                continue
            if answer.status_code != HTTPStatus.SERVICE_UNAVAILABLE:
                self.answered += 1
                return answer
            faults.append(answer)
        raise AssertionError(f"no controller answered {path}: {faults}")

    @contextlib.contextmanager
    def asked_for(self, path: str) -> Iterator[None]:
        """Requests one after the other until the block ends; each must be answered with 200."""
        stop = threading.Event()
        faults: list[BaseException] = []

        def ask() -> None:
            try:
                while not stop.wait(0.02):
                    assert self.get(path).status_code == HTTPStatus.OK
            except BaseException as fault:  # noqa: BLE001 raised again below
                faults.append(fault)

        asking = threading.Thread(target=ask)
        asking.start()
        try:
            yield
        finally:
            stop.set()
            asking.join()
        assert faults == []


def test_controllers_are_replaced_one_after_the_other_while_a_job_trains_and_people_ask(
    redis_url: str,
) -> None:
    """As docs/operations.md says: those that do not lead first, the leader last."""
    with (
        Redis.from_url(redis_url, decode_responses=True) as redis,
        contextlib.ExitStack() as each,
    ):
        old = [each.enter_context(started(redis_url)) for _ in range(2)]
        until(lambda: any(map(leads, old)))
        old.sort(key=leads)
        balanced = Balanced(list(old))
        agent = AgentDouble(redis)
        agent.join()
        job_id = submitted(old[0])
        gang = agent.launches(job_id)
        step = 0
        with balanced.asked_for(f"/v1/jobs/{job_id}"):
            for before in old:
                step += 10
                agent.trains(gang, range(step - 9, step + 1))
                name = agent.votes(gang, step)
                new = each.enter_context(started(redis_url))
                until(functools.partial(_is_ready, new))
                balanced.controllers = [new, *balanced.controllers]
                # The vote may reach the one that ends or the one that comes: one of them commits.
                before.process.send_signal(signal.SIGTERM)
                assert before.process.wait(120) == 0
                balanced.controllers = [c for c in balanced.controllers if c is not before]
                assert agent.saves(gang, step) == name
            until(lambda: any(map(leads, balanced.controllers)))
        assert balanced.answered > 2
        (new, _) = balanced.controllers
        agent.trains(gang, range(step + 1, step + 11))
        agent.ends(gang, step + 10)
        until(lambda: new.state(job_id) == "SUCCEEDED")
        steps = new.client.get(f"/v1/jobs/{job_id}/metrics").json()["items"]
        assert [item["step"] for item in steps] == list(range(1, step + 11))
        assert new.client.get(f"/v1/jobs/{job_id}").json()["attempt"] == 1
        kinds = _kinds(new, job_id)
        assert kinds.count("checkpoint.committed") == len(old)
        assert [c.kind for c in agent.commands()].count("launch_gang") == 1


JOBS = 160


def test_two_controllers_and_five_agents_lose_none_of_hundreds_of_jobs_and_run_each_once(
    redis_url: str,
) -> None:
    with started(redis_url) as first, started(redis_url) as second:
        until(lambda: leads(first) or leads(second))
        leading, other = (first, second) if leads(first) else (second, first)
        agents = [SimulatedAgent(redis_url, f"loom-{number}", slots=8) for number in range(5)]
        asyncio.run(_killed_half_way(redis_url, agents, leading, other))
        jobs = asyncio.run(_replayed(redis_url))
    assert len(jobs) == JOBS
    assert {(job.state, job.fence) for job in jobs} == {("SUCCEEDED", 1)}
    starts = sum((agent.starts for agent in agents), start=Counter())
    assert starts == {(job.id, 1): 1 for job in jobs}


async def _killed_half_way(
    redis_url: str, agents: Sequence[SimulatedAgent], leading: Controller, other: Controller
) -> None:
    """Have the agents run all jobs; the leader is killed while most of them wait."""

    tasks: list[asyncio.Task[None]] = []

    def ended() -> int:
        for task in tasks:
            if task.done():
                task.result()
        return sum(len(agent.ended) for agent in agents)

    async with redis_ports(redis_url) as ports:
        now_ms = await ports.clock.now_ms()
        wanted = JobSpec.model_validate(job_body(resources={"ranks": 1}))
        for number in range(JOBS):
            job_id = new_job_id(now_ms + number, os.urandom(10))
            job = Job(id=job_id, spec=wanted, created_ms=now_ms, updated_ms=now_ms)
            await ports.jobs.create(first_decision(job), Actor("test"), None)
        tasks += [asyncio.create_task(agent.run()) for agent in agents]
        await asyncio.to_thread(until, lambda: ended() >= JOBS // 4)
        os.kill(leading.process.pid, signal.SIGKILL)
        assert ended() < JOBS
        await asyncio.to_thread(until, lambda: leads(other))
        await asyncio.to_thread(until, lambda: ended() == JOBS)
        with Redis.from_url(redis_url) as redis:
            succeeded = keys.jobs_in_state("SUCCEEDED")
            await asyncio.to_thread(until, lambda: redis.zcard(succeeded) == JOBS)
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)


def _kinds(controller: Controller, job_id: str) -> list[str]:
    items = controller.client.get(f"/v1/jobs/{job_id}/events").json()["items"]
    return [str(event["kind"]) for event in items]


async def _write_as_of(url: str, job_id: str, epoch: int) -> None:
    """A leader's write in the name of that epoch."""
    async with redis_ports(url) as ports:
        kill = Occurrence(KillAsked(), await ports.clock.now_ms())
        await apply_events(ports, job_id, [kill], Actor("controller"), epoch)


async def _replayed(url: str) -> list[Job]:
    async with redis_ports(url) as ports:
        return await replay_all(ports)
