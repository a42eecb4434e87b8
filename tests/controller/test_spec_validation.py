"""A spec is validated where it enters a process, and nowhere else in it."""

import asyncio
import itertools
import sys
from collections.abc import Callable
from types import FrameType

import httpx

from services.contract.jobs.specs import JobSpec
from services.contract.messages.commands import COMMAND, LaunchGang
from services.controller.adapters.memory import memory_ports
from services.controller.adapters.memory.server import MemoryServer
from services.controller.api.app import create_app
from services.controller.api.context import Context
from services.controller.api.guard import AccessPolicy
from services.controller.api.monitoring import Monitor
from services.controller.domain.job.job import Job
from tests.controller.conftest import job_body
from tests.controller.histories import new_job, placed, play

_LAST_VALIDATOR = JobSpec._batch_divides.__code__


def validations(work: Callable[[], object]) -> int:
    """How often the last validator of a spec runs in this thread while ``work`` does."""
    count = 0

    def note(frame: FrameType, event: str, _arg: object) -> None:
        nonlocal count
        count += event == "call" and frame.f_code is _LAST_VALIDATOR

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        work()
    finally:
        sys.setprofile(before)
    return count


def test_a_submission_is_validated_once_and_what_is_kept_in_memory_never_again() -> None:
    ticks = itertools.count(1)
    ports = memory_ports(MemoryServer(now_ms=lambda: next(ticks)))
    app = create_app(Context(ports, Monitor(), asyncio.Event(), lambda: None), AccessPolicy())

    def ask(method: str, path: str, body: object = None) -> httpx.Response:
        async def once() -> httpx.Response:
            transport = httpx.ASGITransport(app)
            async with httpx.AsyncClient(
                transport=transport, base_url="http://localhost"
            ) as client:
                return await client.request(method, path, json=body)

        return asyncio.run(once())

    job_id = ""

    def submit() -> None:
        nonlocal job_id
        answer = ask("POST", "/v1/jobs", job_body())
        assert answer.status_code == 201
        job_id = answer.json()["id"]

    assert validations(submit) == 1
    for method, path, body in (
        ("GET", f"/v1/jobs/{job_id}", None),
        ("GET", "/v1/jobs", None),
        ("POST", f"/v1/jobs/{job_id}/pause", {}),
    ):
        assert validations(lambda: ask(method, path, body).raise_for_status()) == 0, path  # noqa: B023 called at once


def test_placing_a_job_validates_nothing_and_reading_record_and_command_once_each() -> None:
    job = new_job()
    sent: list[LaunchGang] = []

    def place() -> None:
        decision = play(job, [placed(job)])
        sent.extend(s.command for s in decision.sends if isinstance(s.command, LaunchGang))

    assert validations(place) == 0
    (command,) = sent
    body, record = command.model_dump_json(), job.model_dump_json()
    assert validations(lambda: COMMAND.validate_json(body)) == 1
    assert validations(lambda: Job.model_validate_json(record)) == 1
