"""Two controllers: one leads, the other takes over, and the first may write no more.

The promise of ten seconds follows from the lease (4 s) and how often it is asked for (0.5 s); here
the outcome is asserted, and how long it took is recorded.
"""

import asyncio
import os
import signal
import time
from collections.abc import Callable

import pytest
from redis import Redis

from services.contract.messages.commands import StopGang
from services.contract.redis import redis_keys as keys
from services.controller.adapters.redis import redis_ports
from services.controller.domain.decisions.history import Occurrence
from services.controller.domain.errors import DeposedError
from services.controller.domain.job.events import KillAsked
from services.controller.loops import leader
from services.controller.ports.jobs import Actor
from services.controller.use_cases.change import apply_events
from tests.controller.agent_double import AgentDouble
from tests.controller.conftest import job_body
from tests.controller.replays import replay_all
from tests.controller.test_process import Controller, started
from tests.waiting import until

pytestmark = pytest.mark.redis
Record = Callable[[str, object], None]


def leads(controller: Controller) -> bool:
    told = controller.client.get("/readyz").json()["checks"]["leadership"]
    return str(told).startswith("leading")


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


def _kinds(controller: Controller, job_id: str) -> list[str]:
    items = controller.client.get(f"/v1/jobs/{job_id}/events").json()["items"]
    return [str(event["kind"]) for event in items]


async def _write_as_of(url: str, job_id: str, epoch: int) -> None:
    """A leader's write in the name of that epoch."""
    async with redis_ports(url) as ports:
        kill = Occurrence(KillAsked(), await ports.clock.now_ms())
        await apply_events(ports, job_id, [kill], Actor("controller"), epoch)


async def _replayed(url: str) -> list[object]:
    async with redis_ports(url) as ports:
        return list(await replay_all(ports))
