"""Forgetting a job together with its checkpoints."""

import pytest

from services.contract.messages.commands import PurgeJob
from services.contract.messages.facts import JobPurged
from services.controller.domain.errors import StateConflictError
from services.controller.domain.job.events import PurgeAsked
from tests.controller.agent_double import AgentDouble
from tests.controller.conftest import ControlPlane
from tests.controller.histories import NODE, STEPS, finished, play, running, saved
from tests.waiting import until

pytestmark = pytest.mark.redis


def ended(plane: ControlPlane) -> str:
    plane.agent.join()
    job_id = plane.submit()
    gang = plane.agent.launches(job_id)
    plane.agent.trains(gang, range(1, 11))
    plane.agent.saves(gang, 10)
    plane.agent.ends(gang, 10)
    plane.in_state(job_id, "SUCCEEDED")
    return job_id


def purge(plane: ControlPlane, job_id: str) -> int:
    return plane.client.delete(f"/v1/jobs/{job_id}?purge_checkpoints=true").status_code


def purged(
    job_id: str, error: str | None = None, fence: int = 1, node_id: str = "loom-1"
) -> JobPurged:
    return JobPurged(job_id=job_id, fence=fence, node_id=node_id, error=error)


def test_a_job_is_forgotten_only_when_its_checkpoints_are_gone(plane: ControlPlane) -> None:
    job_id = ended(plane)
    assert purge(plane, job_id) == 202
    command = plane.agent.awaits(PurgeJob, job_id)
    job = plane.job(job_id)
    assert (job["state"], "removed by loom-1" in job["reason"]) == ("SUCCEEDED", True)
    assert purge(plane, job_id) == 202
    # A node that was not told to has nothing to say of it.
    other = AgentDouble(plane.redis, "loom-2")
    for error in (None, "Read-only file system"):
        other.tell(purged(job_id, error, command.fence, "loom-2"))
    other.join()
    until(lambda: plane.client.get("/v1/nodes/loom-2").status_code == 200, every_s=0.01)
    assert plane.job(job_id)["reason"] == job["reason"]
    plane.agent.tell(purged(job_id, fence=command.fence))
    until(lambda: plane.client.get(f"/v1/jobs/{job_id}").status_code == 404, every_s=0.01)
    # Told again, for it was commanded twice: of a job that nobody knows.
    plane.agent.tell(purged(job_id))
    assert purge(plane, job_id) == 404


def test_a_purge_that_fails_is_told_and_the_job_stays(plane: ControlPlane) -> None:
    job_id = ended(plane)
    purge(plane, job_id)
    plane.agent.tell(purged(job_id, "Read-only file system"))
    until(lambda: "Read-only" in plane.job(job_id)["reason"], every_s=0.01)
    kinds = [e["kind"] for e in plane.get(f"/v1/jobs/{job_id}/events")["items"]]
    assert kinds[-2:] == ["job.purging", "job.purge_failed"]
    # What is told of a purge that nobody wants any more removes nothing.
    plane.agent.tell(purged(job_id))
    plane.agent.join()
    plane.agent.launches(plane.submit())
    assert plane.job(job_id)["state"] == "SUCCEEDED"


def test_what_lives_or_is_needed_or_cannot_be_reached_is_not_purged(plane: ControlPlane) -> None:
    plane.agent.join()
    waiting = plane.submit(resources={"ranks": 4})
    plane.agent.launches(waiting)
    assert purge(plane, waiting) == 409
    plane.act(waiting, "kill")
    plane.agent.ends(plane.agent.launches(waiting), 0, signal=9)
    job_id = ended(plane)
    body = {"overrides": {"train": {"steps": 20}}, "from_checkpoint": "latest"}
    clone = plane.act(job_id, "clone", body)
    refused = plane.client.delete(f"/v1/jobs/{job_id}?purge_checkpoints=true")
    assert refused.status_code == 409
    assert clone["id"] in refused.json()["detail"]
    plane.agent.lose_lease()
    nobody = plane.client.delete(f"/v1/jobs/{waiting}?purge_checkpoints=true")
    assert (nobody.status_code, "no live agent" in nobody.json()["detail"]) == (409, True)


def test_a_job_that_never_ran_has_nothing_to_purge(quiet_plane: ControlPlane) -> None:
    job_id = quiet_plane.submit()
    quiet_plane.act(job_id, "cancel")
    assert purge(quiet_plane, job_id) == 204


def test_a_job_that_is_being_purged_is_not_resumed(plane: ControlPlane) -> None:
    plane.agent.join()
    job_id = plane.submit()
    gang = plane.agent.launches(job_id)
    plane.act(job_id, "kill")
    plane.agent.ends(gang, 0, signal=9)
    plane.in_state(job_id, "CANCELLED")
    assert purge(plane, job_id) == 202
    assert plane.client.post(f"/v1/jobs/{job_id}/resume").status_code == 409


def test_a_pinned_checkpoint_keeps_its_job() -> None:
    job = running()
    done = play(job, [*saved(job, STEPS), finished(job)]).job
    (kept,) = done.checkpoints.values()
    pinned = done.model_copy(
        update={"checkpoints": {kept.id: kept.model_copy(update={"pinned": True})}}
    )
    with pytest.raises(StateConflictError, match="unpin"):
        play(pinned, [PurgeAsked(NODE)])
    assert len(play(done, [PurgeAsked(NODE)]).sends) == 1
