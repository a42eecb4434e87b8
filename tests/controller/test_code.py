"""Uploaded code on a real Redis: judged, kept while a job names it, refused where it is not taken."""

import asyncio
import itertools
import socket
from collections.abc import Iterator
from dataclasses import replace

import pytest
from httpx2 import Response

from services.contract.jobs.code_archives import MOST_CODE_MIB, digest_of, hex_of, pack
from services.contract.jobs.entry_points import EntryPoints
from services.contract.jobs.specs import JobSpec
from services.contract.messages.probe_ids import probe_id
from services.contract.redis import redis_keys as keys
from services.controller.adapters.memory import memory_ports
from services.controller.adapters.memory.server import MemoryServer
from services.controller.api.guard import AccessPolicy
from services.controller.domain.decisions.dispatch import first_decision
from services.controller.domain.job.job import Job
from services.controller.ports.jobs import Actor, Place, Stored
from services.controller.use_cases import code
from services.controller.use_cases.code import forget_unused
from services.local.embedded_redis import EmbeddedRedis
from tests.agent.test_probes import question
from tests.contract.test_code_archives import HOSTILE
from tests.controller.conftest import ControlPlane, job_body, open_plane
from tests.controller.planning_office import Office, play
from tests.controller.test_process import Controller, started
from tests.waiting import until

pytestmark = pytest.mark.redis
CODE = pack([("models.py", b"class Model: ...\n", False)])
DIGEST = digest_of(CODE)
TOKEN = "the-operators-own-token"  # noqa: S105 a test's
SHOWN = {"Authorization": f"Bearer {TOKEN}"}
GZIP = {"Content-Type": "application/gzip"}


def put(plane: ControlPlane, body: bytes, digest: str | None = None) -> Response:
    path = f"/v1/code/{digest or digest_of(body)}"
    return plane.client.put(path, content=body, headers=GZIP)


def test_code_is_kept_once_and_a_job_that_names_it_is_taken(quiet_plane: ControlPlane) -> None:
    plane = quiet_plane
    body = job_body(model={"factory": "models:Model"}, code=DIGEST)
    for path in ("/v1/jobs", "/v1/plans"):
        refused = plane.client.post(path, json=body)
        (fault,) = refused.json()["errors"]
        assert (refused.status_code, fault["pointer"]) == (422, "/code")
        assert (fault["code"], "--code DIR" in fault["detail"]) == ("code_unknown", True)
    assert plane.client.get(f"/v1/code/{DIGEST}").status_code == 404
    first, again = put(plane, CODE), put(plane, CODE)
    assert (first.status_code, again.status_code) == (201, 200)
    assert first.headers["Location"] == f"/v1/code/{DIGEST}"
    assert first.json() == again.json() == plane.get(f"/v1/code/{DIGEST}")
    assert first.json() | {"uploaded_at": ""} == {
        "digest": DIGEST,
        "bytes": len(CODE),
        "files": 1,
        "unpacked_bytes": 17,
        "uploaded_by": "local",
        "uploaded_at": "",
    }
    job_id = plane.submit(**body)
    assert plane.job(job_id)["spec"]["code"] == DIGEST
    clone = plane.act(job_id, "clone", {})
    assert clone["spec"]["code"] == DIGEST
    unknown = "sha256:" + "0" * 64
    refused = plane.client.post(f"/v1/jobs/{job_id}/clone", json={"overrides": {"code": unknown}})
    assert refused.json()["errors"][0]["pointer"] == "/overrides/code"


def test_what_is_no_archive_or_not_this_one_is_refused_and_not_kept(
    quiet_plane: ControlPlane,
) -> None:
    plane = quiet_plane
    for body, _ in HOSTILE.values():
        refused = put(plane, body)
        assert (refused.status_code, refused.json()["errors"][0]["code"]) == (422, "bad_archive")
    other = put(plane, CODE, "sha256:" + "0" * 64)
    assert other.json()["errors"][0]["code"] == "digest_mismatch"
    assert put(plane, CODE, "sha256:../../x").status_code in {404, 422}
    path = f"/v1/code/{DIGEST}"
    as_json = plane.client.put(path, content=CODE, headers={"Content-Type": "application/json"})
    assert as_json.status_code == 415
    foreign = plane.client.put(path, content=CODE, headers=GZIP | {"Origin": "https://evil.test"})
    assert foreign.status_code == 403
    assert plane.redis.keys("ml:code*") == []


def test_where_entry_points_are_restricted_code_is_taken_only_if_the_operator_says_so(
    redis_url: str,
) -> None:
    body = job_body(model={"factory": "models:Model"}, code=DIGEST)
    listed = EntryPoints(("zoo",))
    with open_plane(redis_url, AccessPolicy(), leads=False, entry_points=listed) as plane:
        refused = put(plane, CODE)
        assert (refused.status_code, refused.json()["code"]) == (403, "code_not_allowed")
        answer = plane.client.post("/v1/jobs", json=body).json()
        found = {fault["pointer"]: fault["code"] for fault in answer["errors"]}
        assert found["/code"] == "code_not_allowed"
        assert found["/model/factory"] == "factory_not_allowed"
    allowing = EntryPoints(("zoo",), uploads=True)
    with open_plane(redis_url, AccessPolicy(), leads=False, entry_points=allowing) as plane:
        assert put(plane, CODE).status_code == 201
        plane.submit(**body)
        without = plane.client.post("/v1/jobs", json={**body, "code": None})
        assert without.json()["errors"][0]["pointer"] == "/model/factory"


def test_the_same_question_about_other_code_is_another_question() -> None:
    asked = question("models:Model", {})
    plain = probe_id(asked, {})
    of_code = [
        probe_id(asked.model_copy(update={"spec": asked.spec.model_copy(update={"code": c})}), {})
        for c in (DIGEST, digest_of(b""), DIGEST)
    ]
    assert of_code[0] == of_code[2]
    assert len({plain, *of_code}) == 3


# --- removal ------------------------------------------------------------------------------------


def named(server: MemoryServer, digest: str | None, asked: str | None = None) -> Job:
    spec = JobSpec.model_validate(job_body(code=digest))
    known = None if asked is None else JobSpec.model_validate(job_body(code=asked))
    now_ms = server.now_ms()
    job_id = f"job_{now_ms:026d}"
    return Job(id=job_id, spec=spec, asked=known, created_ms=now_ms, updated_ms=now_ms)


@pytest.mark.anyio
async def test_what_no_job_names_is_forgotten_after_a_day() -> None:
    """By the port's twin, whose clock a test can move; the store contract holds both to the same."""
    now = [1_000_000]
    server = MemoryServer(now_ms=lambda: now[0], epoch=1)
    ports = memory_ports(server)
    bodies = [pack([(f"m{n}.py", b"", False)]) for n in range(4)]
    for body in bodies:
        server.code[digest_of(body)] = (None, body)  # type: ignore[assignment] # is not looked at
        await ports.codes.use(digest_of(body))
    by_a_job, by_request, by_none, fresh = map(digest_of, bodies)
    await ports.jobs.create(first_decision(named(server, by_a_job)), Actor("a"), None)
    now[0] += 1
    requested = first_decision(named(server, None, by_request))
    stored = await ports.jobs.create(requested, Actor("a"), None)
    now[0] += keys.CODE_KEPT_S * 1000 - 10
    assert await forget_unused(ports, 1) == []
    now[0] += 1_000
    await ports.codes.use(fresh)
    assert await forget_unused(ports, 1) == [by_none]
    unread = replace(ports, unreadable=lambda: (keys.job(stored.job.id),))
    await ports.jobs.delete(stored)
    assert await forget_unused(ports, 1) == []  # a day, again, for what was named until now
    now[0] += keys.CODE_KEPT_S * 1000 + 1_000
    await ports.codes.use(fresh)
    assert await forget_unused(unread, 1) == []  # a job that cannot be read may name it
    assert await forget_unused(ports, 1) == [by_request]
    assert set(server.code) == {by_a_job, fresh}


def test_a_leader_forgets_by_itself(redis_url: str) -> None:
    other = pack([("other.py", b"", False)])
    with open_plane(redis_url, AccessPolicy(), leads=False) as plane:
        assert (put(plane, CODE).status_code, put(plane, other).status_code) == (201, 201)
        plane.submit(code=digest_of(other))
        for digest in (DIGEST, digest_of(other)):
            plane.redis.zadd(keys.CODES, {hex_of(digest): 1})
    with open_plane(redis_url, AccessPolicy()) as plane:
        until(lambda: plane.client.get(f"/v1/code/{DIGEST}").status_code == 404)
        assert plane.client.get(f"/v1/code/{digest_of(other)}").status_code == 200
        counted = str(16_384 + len(other))
        assert plane.redis.hgetall(keys.CODES_BYTES) == {"": counted, "local": counted}


# --- over real sockets --------------------------------------------------------------------------


@pytest.fixture(scope="module")
def controller(redis_server: EmbeddedRedis) -> Iterator[Controller]:
    """A controller that wants tokens and takes archives of 1 MiB."""
    redis_server.flush()
    settings = {"max_code_mib": "1", "uploaded_code": "true", "request_timeout_s": "120"}
    with started(redis_server.url, token=TOKEN, **settings) as controller:
        yield controller


def test_a_viewer_uploads_nothing_and_an_archive_has_a_largest_size(controller: Controller) -> None:
    made = controller.client.post(
        "/v1/tokens", json={"subject": "vi", "scope": "viewer"}, headers=SHOWN
    )
    viewer = {"Authorization": f"Bearer {made.json()['token']}"}
    path = f"/v1/code/{DIGEST}"
    assert controller.client.put(path, content=CODE, headers=GZIP | viewer).status_code == 403
    assert controller.client.get(path, headers=viewer).status_code == 403
    assert controller.client.put(path, content=CODE, headers=GZIP | SHOWN).status_code == 201
    large = bytes((1 << 20) + 1)
    for content in (large, itertools.repeat(bytes(1 << 16), 24)):
        refused = controller.client.put(path, content=content, headers=GZIP | SHOWN)
        assert (refused.status_code, refused.json()["code"]) == (413, "body_too_large")
    assert "MESHLOOM_MAX_CODE_MIB" in early_answer(controller, path, MOST_CODE_MIB << 20)


def early_answer(controller: Controller, path: str, size: int) -> str:
    """What is said to one that announces a large body, before it is sent."""
    url = controller.client.base_url
    head = (
        f"PUT {path} HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {TOKEN}\r\n"
        f"Content-Type: application/gzip\r\nContent-Length: {size}\r\n\r\n"
    )
    with socket.create_connection((url.host, url.port or 80)) as client:
        client.sendall(head.encode())
        client.settimeout(60)
        said = b""
        while b"MESHLOOM_MAX_CODE_MIB" not in said and (part := client.recv(65_536)):
            said += part
        return said.decode()


def test_two_slow_uploads_of_a_subject_leave_room_for_others(controller: Controller) -> None:
    url = controller.client.base_url
    made = controller.client.post(
        "/v1/tokens", json={"subject": "slow", "scope": "submitter"}, headers=SHOWN
    )
    slow = {"Authorization": f"Bearer {made.json()['token']}"}
    head = (
        f"PUT /v1/code/{DIGEST} HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000\r\n"
        f"Authorization: {slow['Authorization']}\r\nContent-Type: application/gzip\r\n"
        "Expect: 100-continue\r\n\r\n"
    )
    held = [socket.create_connection((url.host, url.port or 80)) for _ in range(2)]
    try:
        for client in held:
            client.sendall(head.encode())
            # It has its slot when its body is asked for.
            assert client.recv(4096).startswith(b"HTTP/1.1 100")

        def ask() -> Response:
            path = f"/v1/code/{DIGEST}"
            return controller.client.put(path, content=CODE, headers=GZIP | slow)

        refused = ask()
        assert refused.status_code == 503
        assert (refused.json()["code"], refused.headers["Retry-After"]) == ("too_many_uploads", "1")
        path = f"/v1/code/{DIGEST}"
        others = controller.client.put(path, content=CODE, headers=GZIP | SHOWN)
        assert others.is_success, others.text
    finally:
        for client in held:
            client.close()
    # Who goes away, or whose time is over, gives the slot back.
    until(lambda: ask().status_code == 200)


def test_while_all_jobs_are_read_for_the_code_that_they_name_the_loop_is_others_half_of_the_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Every request takes dozens of rounds of the loop, and each job with a large spec makes one long."""
    monkeypatch.setattr(code, "_CHUNK", 2)

    async def course(office: Office) -> None:
        for _ in range(4):
            await office.submits()
        page, seen = office.ports.jobs.page, list[float]()
        clock = asyncio.get_running_loop().time

        async def reads(before: Place | None, limit: int) -> list[Stored]:
            await asyncio.sleep(0.3)  # virtual, for a loop that reads as long
            seen.append(clock())
            return await page(before, limit)

        monkeypatch.setattr(office.ports.jobs, "page", reads)
        began = clock()
        assert await code._needed(office.ports) == set()
        assert [round(at - began, 1) for at in seen] == [0.3, 0.9, 1.5]

    play(course)
