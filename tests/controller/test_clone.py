"""Another job of the same spec, and the checkpoint that it begins with."""

import itertools
from dataclasses import replace

import pytest

from services.contract.api.requests import CloneRequest
from services.contract.jobs.entry_points import EntryPoints
from services.contract.messages.commands import RetireCheckpoint
from services.contract.redis import redis_keys as keys
from services.controller.adapters.memory import memory_ports
from services.controller.adapters.memory.jobs import MemoryJobs
from services.controller.adapters.memory.server import MemoryServer
from services.controller.domain.errors import (
    KeyReusedError,
    MeshloomError,
    StaleWriteError,
    StoreUnavailableError,
)
from services.controller.domain.job.effects import Decision
from services.controller.domain.job.events import HoldAsked, HoldReleased, KillAsked
from services.controller.domain.job.job import Origin
from services.controller.ports.jobs import Actor, Claim, Stored
from services.controller.use_cases.clone import Cloning, clone
from services.controller.use_cases.jobs import change_course, delete_job
from tests.controller.conftest import ControlPlane
from tests.controller.histories import (
    NOW,
    commands,
    killed,
    launched,
    new_job,
    placed,
    play,
    progressed,
    running,
    saved,
)
from tests.waiting import until

pytestmark = pytest.mark.redis


def trained(plane: ControlPlane, **changes: object) -> tuple[str, str]:
    """A job that has ended, and its one checkpoint."""
    plane.agent.join()
    job_id = plane.submit(**changes)
    gang = plane.agent.launches(job_id)
    plane.agent.trains(gang, range(1, 11))
    name = plane.agent.saves(gang, 10)
    plane.agent.ends(gang, 10)
    plane.in_state(job_id, "SUCCEEDED")
    return job_id, name


def test_a_clone_begins_with_the_named_checkpoint_and_its_overrides(plane: ControlPlane) -> None:
    source, name = trained(plane, labels={"team": "demo"})
    path = f"/v1/jobs/{source}/clone"
    body = {
        "overrides": {"train": {"steps": 20}, "labels": {"team": None}, "name": "more"},
        "from_checkpoint": "latest",
    }
    answer = plane.client.post(path, json=body, headers={"Idempotency-Key": "once"})
    assert answer.status_code == 202, answer.text
    clone = answer.json()
    assert answer.headers["location"] == f"/v1/jobs/{clone['id']}"
    assert (clone["spec"]["train"]["steps"], clone["labels"], clone["name"]) == (20, {}, "more")
    assert clone["cloned_from"] == {"job_id": source, "checkpoint_id": name, "step": 10}
    again = plane.client.post(path, json=body, headers={"Idempotency-Key": "once"})
    assert again.json()["id"] == clone["id"]
    other = plane.client.post(path, json={}, headers={"Idempotency-Key": "once"})
    assert other.json()["code"] == "idempotency_key_reused"
    gang = plane.agent.launches(clone["id"])
    assert gang.resume_from == name
    assert plane.job(clone["id"])["progress"]["step"] == 10
    held = plane.get(f"/v1/jobs/{source}/events")["items"][-1]
    assert (held["kind"], held["data"]["holder"]) == ("checkpoint.held", clone["id"])
    plane.agent.trains(gang, range(11, 16))
    plane.agent.saves(gang, 15)
    until(lambda: _last_kind(plane, source) == "checkpoint.released", every_s=0.01)
    plane.agent.ends(gang, 15, signal=9, error="ended by SIGKILL")
    assert plane.agent.launches(clone["id"], 2).resume_from != name


def test_a_clone_without_a_checkpoint_starts_over(plane: ControlPlane) -> None:
    source, _ = trained(plane)
    clone = plane.act(source, "clone")
    assert clone["cloned_from"] == {"job_id": source, "checkpoint_id": None, "step": 0}
    assert plane.agent.launches(clone["id"]).resume_from is None


def test_a_clone_that_cannot_be_is_refused_with_pointers_and_holds_nothing(
    plane: ControlPlane,
) -> None:
    source, _ = trained(plane)
    path = f"/v1/jobs/{source}/clone"
    foreign = "ckpt_" + "0" * 26 + "-s000000001-a0001"
    for body, pointer in (
        ({"overrides": {"train": {"steps": 0}}}, "/overrides/train/steps"),
        ({"overrides": {"colour": "red"}}, "/overrides/colour"),
        ({"overrides": {"resources": {"ranks": 32}}}, "/overrides/resources"),
        ({"from_checkpoint": "latest"}, "/overrides/train/steps"),
        ({"from_checkpoint": foreign}, "/from_checkpoint"),
    ):
        refused = plane.client.post(path, json=body)
        assert refused.status_code == 422, refused.text
        assert [fault["pointer"] for fault in refused.json()["errors"]] == [pointer]
    assert _last_kind(plane, source) == "job.succeeded"
    dry = plane.client.post(f"{path}?dry_run=true", json={})
    assert (dry.status_code, dry.json()["state"]) == (200, "QUEUED")
    assert len(plane.get("/v1/jobs")["items"]) == 1


def test_a_deleted_clone_gives_its_checkpoint_back(plane: ControlPlane) -> None:
    source, _ = trained(plane)
    body = {"overrides": {"train": {"steps": 20}}, "from_checkpoint": "latest"}
    clone = plane.act(source, "clone", body)
    gang = plane.agent.launches(clone["id"])
    plane.act(clone["id"], "kill")
    plane.agent.ends(gang, 10, signal=9)
    plane.in_state(clone["id"], "CANCELLED")
    assert _last_kind(plane, source) == "checkpoint.held"
    assert plane.client.delete(f"/v1/jobs/{clone['id']}").status_code == 204
    assert _last_kind(plane, source) == "checkpoint.released"
    assert plane.redis.exists(keys.job(clone["id"])) == 0


def test_retention_keeps_what_a_clone_begins_with() -> None:
    job = running(checkpoint={"keep_last": 1})
    job = play(job, saved(job, 10)).job
    name = str(job.resume_point.checkpoint_id)
    later = play(job, [HoldAsked(name, "job_clone"), *saved(job, 20, number=3)])
    assert [c for c in commands(later) if isinstance(c, RetireCheckpoint)] == []
    (retire,) = commands(play(later.job, [HoldReleased(name, "job_clone")]))
    assert isinstance(retire, RetireCheckpoint)
    assert retire.checkpoint_id == name


def test_a_clone_that_is_killed_early_begins_again_where_it_began() -> None:
    source = running()
    name = str(play(source, saved(source, 10)).job.resume_point.checkpoint_id)
    origin = Origin(job_id=source.id, checkpoint_id=name, step=10, held=True)
    clone = new_job().model_copy(update={"origin": origin})
    first = play(clone, [placed(clone), launched(clone), progressed(clone, 11)]).job
    assert first.attempts[-1].resumed_from == name
    lost = play(first, [killed(first, step=15)]).job
    assert lost.attempts[-1].lost_steps == 5
    assert (lost.resume_point.step, lost.resume_point.checkpoint_id) == (10, name)
    assert play(first, [*saved(first, 15), killed(first, step=17)]).job.resume_point.step == 15


class Failing(MemoryJobs):
    """Its store fails when a job is created: before or after that was done."""

    def __init__(self, server: MemoryServer, error: MeshloomError, *, too_late: bool) -> None:
        super().__init__(server)
        self._error = error
        self._too_late = too_late

    async def create(self, decision: Decision, actor: Actor, claim: Claim | None) -> Stored:
        if self._too_late:
            await super().create(decision, actor, claim)
        raise self._error


@pytest.mark.anyio
async def test_a_clone_that_came_not_to_be_holds_nothing_and_one_that_did_holds_on() -> None:
    source = play(running(), saved(running(), 10)).job
    cloning = Cloning(source.id, CloneRequest(from_checkpoint="latest"))
    ticks = itertools.count(NOW)
    for error, too_late in (
        (KeyReusedError("used"), False),
        (StoreUnavailableError("gone"), False),
        (StoreUnavailableError("gone"), True),
    ):
        server = MemoryServer(now_ms=lambda: next(ticks))
        server.jobs[source.id] = Stored(source, 1)
        ports = replace(memory_ports(server), jobs=Failing(server, error, too_late=too_late))
        with pytest.raises(type(error)):
            await clone(ports, cloning, Actor("ada"), EntryPoints())
        clones = [name for name in server.jobs if name != source.id]
        held = [name for names in server.jobs[source.id].job.holds.values() for name in names]
        assert held == clones
        assert len(clones) == int(too_late)


class Late(MemoryJobs):
    """What it answers about one job is of before that job's last change."""

    def __init__(self, server: MemoryServer, job_id: str) -> None:
        super().__init__(server)
        self._late = job_id

    async def load(self, job_id: str) -> Stored:
        found = await super().load(job_id)
        return Stored(found.job, found.version - 1) if job_id == self._late else found


@pytest.mark.anyio
async def test_a_clone_whose_deletion_is_refused_keeps_its_checkpoint() -> None:
    source = play(running(), saved(running(), 10)).job
    ticks = itertools.count(NOW)
    server = MemoryServer(now_ms=lambda: next(ticks))
    server.jobs[source.id] = Stored(source, 1)
    ports = memory_ports(server)
    actor = Actor("ada")
    made = await clone(
        ports, Cloning(source.id, CloneRequest(from_checkpoint="latest")), actor, EntryPoints()
    )
    await change_course(ports, made.id, KillAsked(), actor)
    with pytest.raises(StaleWriteError):
        await delete_job(replace(ports, jobs=Late(server, made.id)), made.id, actor)
    assert list(server.jobs[source.id].job.holds.values()) == [(made.id,)]
    await delete_job(ports, made.id, actor)
    assert list(server.jobs) == [source.id]
    assert server.jobs[source.id].job.holds == {}


def test_a_clone_whose_record_cannot_be_read_gives_its_checkpoint_back(plane: ControlPlane) -> None:
    source, _ = trained(plane)
    body = {"overrides": {"train": {"steps": 20}}, "from_checkpoint": "latest"}
    clone_id = plane.act(source, "clone", body)["id"]
    gang = plane.agent.launches(clone_id)
    plane.act(clone_id, "kill")
    plane.agent.ends(gang, 10, signal=9)
    plane.in_state(clone_id, "CANCELLED")  # nothing writes its record any more
    plane.redis.hset(keys.job(clone_id), "doc", "[" * 500)
    unread = plane.client.get(f"/v1/jobs/{clone_id}")
    assert (unread.status_code, unread.json()["code"]) == (409, "record_unreadable")
    assert _last_kind(plane, source) == "checkpoint.held"
    assert plane.client.delete(f"/v1/jobs/{clone_id}").status_code == 204
    assert _last_kind(plane, source) == "checkpoint.released"


def _last_kind(plane: ControlPlane, job_id: str) -> str:
    return str(plane.get(f"/v1/jobs/{job_id}/events")["items"][-1]["kind"])
