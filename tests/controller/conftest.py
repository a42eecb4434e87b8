"""A whole controller in this process, on a real Redis, with an agent that a test speaks for."""

import asyncio
import contextlib
import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import structlog
from anyio.from_thread import start_blocking_portal
from fastapi.testclient import TestClient
from redis import Redis

from services.contract.jobs.entry_points import EntryPoints
from services.contract.jobs.specs import HIGHEST_PRIORITY
from services.controller.adapters.redis import redis_ports
from services.controller.api.app import create_app
from services.controller.api.context import Context
from services.controller.api.guard import AccessPolicy
from services.controller.api.monitoring import Monitor
from services.controller.loops.leader import Leader
from services.controller.loops.leadership import run_term
from services.controller.use_cases.plans import Drawing
from tests.controller.agent_double import AgentDouble
from tests.controller.replays import replay_all
from tests.waiting import until

ANYTHING = EntryPoints()


@pytest.fixture(autouse=True, scope="session")
def _log_through_pytest() -> None:
    """Through the standard library, so that pytest keeps it and shows it of failures alone."""
    structlog.configure(
        processors=[structlog.stdlib.filter_by_level, structlog.stdlib.render_to_log_kwargs],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.stdlib.BoundLogger,
    )


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


BOOTSTRAP = "the-operators-own"


@dataclass(frozen=True)
class ControlPlane:
    """A controller that leads, a client of it, and an agent on the same Redis."""

    client: TestClient
    redis: Redis
    agent: AgentDouble

    def submit(self, **changes: object) -> str:
        """The id of a new job."""
        answer = self.client.post("/v1/jobs", json=job_body(**changes))
        assert answer.status_code == 201, answer.text
        return str(answer.json()["id"])

    def get(self, path: str) -> dict[str, Any]:
        answer = self.client.get(path)
        assert answer.status_code == 200, answer.text
        return dict(answer.json())

    def job(self, job_id: str) -> dict[str, Any]:
        return self.get(f"/v1/jobs/{job_id}")

    def in_state(self, job_id: str, state: str) -> dict[str, Any]:
        """The job once it is in that state."""

        def look() -> dict[str, Any] | None:
            job = self.job(job_id)
            return job if job["state"] == state else None

        return until(look, every_s=0.01)

    def act(self, job_id: str, verb: str, body: object = None) -> dict[str, Any]:
        """Ask for a change that is accepted."""
        answer = self.client.post(f"/v1/jobs/{job_id}/{verb}", json=body)
        assert answer.status_code == 202, answer.text
        return dict(answer.json())


def job_body(**changes: object) -> dict[str, object]:
    """A spec of two ranks and ten steps, whose layout is not open: it waits for no plan."""
    fields: dict[str, object] = {
        "model": {"factory": "decoder"},
        "data": {"factory": "stdlib_bytes"},
        "train": {"steps": 10},
        "resources": {"ranks": 2},
        "plan": "default",
    }
    return fields | changes


@contextlib.contextmanager
def open_plane(  # noqa: PLR0913 one parameter a setting
    redis_url: str,
    policy: AccessPolicy,
    *,
    leads: bool = True,
    entry_points: EntryPoints = ANYTHING,
    plan_wait_s: float = 20.0,
    replays: bool = True,
    most_priority: int = HIGHEST_PRIORITY,
) -> Iterator[ControlPlane]:
    """A controller on ``redis_url`` until the block ends; then all histories are replayed.

    Not those that another version decided: it said its reasons in other words.
    """
    with (
        Redis.from_url(redis_url, decode_responses=True) as redis,
        start_blocking_portal("asyncio") as portal,
        portal.wrap_async_context_manager(redis_ports(redis_url)) as ports,
    ):
        drawing = Drawing(wait_s=plan_wait_s)
        leader = Leader(
            ports.leadership, "test", functools.partial(run_term, ports, drawing=drawing)
        )
        context = Context(
            ports,
            Monitor(),
            portal.call(_event),
            lambda: leader.epoch,
            entry_points,
            drawing=drawing,
            most_priority=most_priority,
        )
        leading = portal.call(_start, leader) if leads else None
        client = TestClient(create_app(context, policy), base_url="http://127.0.0.1")
        client.portal = portal
        try:
            yield ControlPlane(client, redis, AgentDouble(redis))
            if replays:
                portal.call(replay_all, ports)
        finally:
            if leading is not None:
                # Its loops end before their connections do, and it gives the lead back.
                portal.call(_stop, leading)


async def _start(leader: Leader) -> "asyncio.Task[None]":
    return asyncio.create_task(leader.lead())


async def _stop(leading: "asyncio.Task[None]") -> None:
    # Not by anyio's cancel scopes: they cancel at every step, and so also what ends in good order.
    leading.cancel()
    async with asyncio.timeout(60):
        await asyncio.wait([leading])


async def _event() -> asyncio.Event:
    return asyncio.Event()


@pytest.fixture
def plane(redis_url: str) -> Iterator[ControlPlane]:
    with open_plane(redis_url, AccessPolicy()) as opened:
        yield opened


@pytest.fixture
def quiet_plane(redis_url: str) -> Iterator[ControlPlane]:
    """A controller that does not lead: jobs stay as they were submitted."""
    with open_plane(redis_url, AccessPolicy(), leads=False) as opened:
        yield opened


@pytest.fixture
def guarded(redis_url: str) -> Iterator[ControlPlane]:
    """A controller that wants tokens; its client shows none by itself."""
    with open_plane(redis_url, AccessPolicy(token=BOOTSTRAP), leads=False) as plane:
        yield plane
