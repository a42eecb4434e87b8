"""Changing a job after it was submitted."""

import json

import pytest

from services.cli.course import _best
from services.cli.request_bodies import read_model
from services.contract.api.requests import JobPatch
from services.contract.jobs.spec_parts import KeepBestSpec
from services.contract.messages.commands import RetireCheckpoint, StopGang
from services.contract.messages.facts import Evaluated
from services.contract.redis import redis_keys as keys
from services.controller.api.guard import AccessPolicy
from services.controller.domain.errors import InvalidRequestError, PreconditionFailedError
from services.controller.domain.job.events import PatchAsked
from services.controller.domain.job.job import Job
from tests.controller.conftest import ControlPlane, job_body, open_plane
from tests.controller.histories import NODE, commands, new_job, play, running, saved
from tests.controller.test_best import Course, committed
from tests.waiting import until

pytestmark = pytest.mark.redis


def ask(revisions: frozenset[int] | None = None, **fields: object) -> PatchAsked:
    return PatchAsked(JobPatch.model_validate(fields), revisions)


def test_a_patch_changes_what_it_names_and_null_brings_defaults_back() -> None:
    job = new_job(priority=3, labels={"a": "1", "b": "2"}, faults={"max_restarts": 9})
    patch = ask(labels={"a": None, "c": "3"}, checkpoint={"keep_last": 5})
    after = play(job, [patch, ask(priority=None, faults={"max_restarts": None})]).job
    assert after.spec.labels == {"b": "2", "c": "3"}
    assert after.spec.checkpoint.keep_last == 5
    assert (after.spec.priority, after.spec.faults.max_restarts) == (0, 3)
    assert (after.spec.train, after.revision) == (job.spec.train, 2)


def test_a_patch_that_changes_nothing_makes_no_revision_and_no_event() -> None:
    decision = play(new_job(priority=3), [ask(priority=3), ask()])
    assert (decision.job.revision, decision.notes) == (0, ())


def many_labels(value: str) -> dict[str, str]:
    """As many and as long as a job may have."""
    return {f"{number:02}-{'k' * 50}": f"{value}{'v' * 240}" for number in range(64)}


def test_an_event_tells_of_many_changes_the_first_and_counts_the_others() -> None:
    decision = play(new_job(labels=many_labels("a")), [ask(labels=many_labels("b"))])
    (note,) = decision.notes
    told = note.data["changed"]
    assert isinstance(told, dict)
    assert told == {
        f"/labels/{key}": [f"a{'v' * 240}", f"b{'v' * 240}"]
        for key in sorted(many_labels(""))[: len(told)]
    }
    assert len(told) > 1
    assert note.data["left_out"] == 64 - len(told)
    assert note.message.endswith(f"; and {64 - len(told)} more")
    assert len(json.dumps([note.message, note.data])) < 6_000


def test_an_event_counts_a_change_that_is_too_long_to_tell() -> None:
    decision = play(
        new_job(labels={"note": "\N{LONG RIGHTWARDS ARROW}" * 256}),
        [ask(labels={"note": "\N{LONG LEFTWARDS ARROW}" * 256})],
    )
    (note,) = decision.notes
    assert note.message == "changed on request: 1 too long to tell"
    assert note.data == {"changed": {}, "left_out": 1}


def test_whoever_patches_without_end_does_not_fill_redis(
    redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keys, "HISTORY_BYTES", 1 << 17)
    with open_plane(redis_url, AccessPolicy(), leads=False, replays=False) as plane:
        job_id = plane.submit()
        for number in range(40):
            answer = plane.client.patch(
                f"/v1/jobs/{job_id}",
                json={"labels": many_labels(str(number))},
                headers={"If-Match": "*"},
            )
            assert answer.status_code == 200, answer.text
        sizes = [
            int(str(plane.redis.memory_usage(key(job_id), samples=0)))
            for key in (keys.job_history, keys.job_events)
        ]
        assert max(sizes) < 1 << 18
        small = plane.client.patch(
            f"/v1/jobs/{job_id}", json={"priority": 1}, headers={"If-Match": "*"}
        )
        assert small.status_code == 200
        assert int(str(plane.redis.xlen(keys.job_history(job_id)))) > 2


def test_a_patch_on_an_older_revision_changes_nothing() -> None:
    job = play(new_job(), [ask(frozenset({0}), priority=1)]).job
    with pytest.raises(PreconditionFailedError):
        play(job, [ask(frozenset({0}), priority=2)])
    assert play(job, [ask(frozenset({0, 1}), priority=2)]).job.spec.priority == 2


def test_a_patch_that_would_make_no_spec_is_refused() -> None:
    many = {f"label-{n}": "x" for n in range(40)}
    job = play(new_job(), [ask(labels=many)]).job
    with pytest.raises(InvalidRequestError) as refused:
        play(job, [ask(labels={f"other-{n}": "x" for n in range(40)})])
    assert [fault.pointer for fault in refused.value.faults] == ["/labels"]


def test_elastic_bounds_are_changed_one_by_one_and_only_to_what_is_possible() -> None:
    elastic = {"world": {"min": 2, "max": 6}}
    job = play(new_job(resources=elastic), [ask(resources={"world": {"max": 12}})]).job
    assert job.spec.worlds == (2, 3, 4, 6, 12)
    job = play(job, [ask(resources={"world": {"min": None}})]).job
    assert job.spec.worlds[0] == 1
    for bounds, pointer in (
        ({"min": 13}, "/resources/world/min"),
        ({"min": 7, "max": 11}, "/resources/world"),
        ({"max": None}, "/resources/world/max"),
    ):
        with pytest.raises(InvalidRequestError) as refused:
            play(job, [ask(resources={"world": bounds})])
        assert [fault.pointer for fault in refused.value.faults] == [pointer]
    with pytest.raises(InvalidRequestError, match="clone it"):
        play(new_job(), [ask(resources={"world": {"max": 4}})])


def test_keeping_fewer_checkpoints_retires_the_surplus_at_once() -> None:
    job = running()
    events = [e for n, step in enumerate((10, 20)) for e in saved(job, step, number=n + 2)]
    decision = play(play(job, events).job, [ask(checkpoint={"keep_last": 1})])
    (retire,) = commands(decision)
    assert isinstance(retire, RetireCheckpoint)
    assert "s000000010" in retire.checkpoint_id


def test_the_best_are_kept_by_a_metric_that_evaluations_have_had() -> None:
    course = Course(running(checkpoint={"keep_last": 1}))
    best = {"metric": "f1", "mode": "max"}
    with pytest.raises(InvalidRequestError, match="so far \\(there was none\\)") as refused:
        play(course.job, [ask(checkpoint={"keep_best": best})])
    assert [fault.pointer for fault in refused.value.faults] == ["/checkpoint/keep_best/metric"]
    course.job = play(course.job, [evaluated(course.job, 2, {"f1": 0.9})]).job
    with pytest.raises(InvalidRequestError, match=r"had f2 so far \(they gave f1, loss\)"):
        play(course.job, [ask(checkpoint={"keep_best": {"metric": "f2"}})])
    course.job = play(course.job, [ask(checkpoint={"keep_best": best})]).job
    for step, f1 in ((2, 0.9), (4, 0.8), (6, 0.7)):
        course.saves(step, {"loss": 1.0, "f1": f1})
    assert committed(course.job) == {2, 6}
    course.job = play(course.job, [ask(checkpoint={"keep_best": {"count": 2}})]).job
    course.saves(8, {"loss": 1.0, "f1": 0.8})
    assert committed(course.job) == {2, 8}
    assert course.job.spec.checkpoint.keep_best == KeepBestSpec(metric="f1", mode="max", count=2)


def test_who_keeps_no_best_any_more_retires_them_at_once() -> None:
    keep = {"keep_last": 1, "keep_best": {"metric": "f1", "mode": "max"}}
    course = Course(running(checkpoint=keep))
    for step, f1 in ((2, 0.9), (4, 0.8)):
        course.saves(step, {"f1": f1})
    decision = play(course.job, [ask(checkpoint={"keep_best": None})])
    (retire,) = commands(decision)
    assert isinstance(retire, RetireCheckpoint)
    assert "s000000002" in retire.checkpoint_id


def test_before_its_first_attempt_a_job_may_keep_the_best_by_any_metric() -> None:
    job = play(new_job(), [ask(checkpoint={"keep_best": {"metric": "f1"}})]).job
    assert job.spec.checkpoint.keep_best == KeepBestSpec(metric="f1")


@pytest.mark.parametrize(
    ("typed", "asked"),
    [
        ("f1:max:2", {"metric": "f1", "mode": "max", "count": 2}),
        ("f1", {"metric": "f1"}),
        ("::3", {"count": 3}),
        ("none", None),
    ],
)
def test_the_command_line_says_which_are_best_in_one_word(
    typed: str, asked: dict[str, object] | None
) -> None:
    wanted = read_model(JobPatch, {"checkpoint": {"keep_best": _best(typed)}})
    assert wanted == JobPatch.model_validate({"checkpoint": {"keep_best": asked}})


def evaluated(job: Job, step: int, metrics: dict[str, float | None]) -> Evaluated:
    return Evaluated(
        job_id=job.id, fence=1, node_id=NODE, step=step, loss=1.0, tokens=1, metrics=metrics
    )


def test_a_larger_budget_is_that_of_the_next_failure() -> None:
    job = play(running(faults={"max_restarts": 0}), [ask(faults={"max_restarts": 1})]).job
    assert job.spec.faults.max_restarts == 1


def test_a_change_wants_the_etag_and_refuses_a_stale_one(quiet_plane: ControlPlane) -> None:
    client, job_id = quiet_plane.client, quiet_plane.submit(labels={"a": "1"})
    path = f"/v1/jobs/{job_id}"
    seen = client.get(path).headers["etag"]
    missing = client.patch(path, json={"priority": 2})
    assert (missing.status_code, missing.json()["code"]) == (428, "precondition_required")
    changed = client.patch(path, json={"priority": 2}, headers={"If-Match": seen})
    assert changed.status_code == 200, changed.text
    assert changed.json()["priority"] == 2
    stale = client.patch(path, json={"priority": 5}, headers={"If-Match": seen})
    assert (stale.status_code, stale.json()["code"]) == (412, "precondition_failed")
    weak = client.patch(path, json={}, headers={"If-Match": f"W/{changed.headers['etag']}"})
    assert weak.status_code == 412
    any_one = client.patch(
        path,
        content='{"labels": {"a": null}}',
        headers={"If-Match": "*", "Content-Type": "application/merge-patch+json"},
    )
    assert (any_one.status_code, any_one.json()["labels"]) == (200, {})
    kinds = [e["kind"] for e in quiet_plane.get(f"{path}/events")["items"]]
    assert kinds == ["job.queued", "job.patched", "job.patched"]


def test_an_elastic_jobs_bounds_are_shown_and_changed_over_rest(plane: ControlPlane) -> None:
    plane.agent.join()
    until(lambda: plane.get("/v1/nodes")["items"])
    elastic = job_body(resources={"world": {"min": 2, "max": 4}, "device": "cpu"})
    predicted = plane.client.post("/v1/jobs", params={"dry_run": True}, json=elastic).json()
    assert (predicted["world_size"], len(predicted["plan"]["ranks"])) == (4, 4)
    job_id = plane.submit(**elastic)
    gang = plane.agent.launches(job_id)
    plane.agent.trains(gang, range(1, 3))
    running = plane.in_state(job_id, "RUNNING")
    assert (running["world"], running["world_size"]) == ({"min": 2, "max": 4}, 4)
    assert running["spec"]["resources"] == {"device": "cpu", "world": {"min": 2, "max": 4}}
    path = f"/v1/jobs/{job_id}"
    etag = plane.client.get(path).headers["etag"]
    lower = {"resources": {"world": {"max": 2}}}
    changed = plane.client.patch(path, json=lower, headers={"If-Match": etag})
    assert changed.status_code == 200, changed.text
    assert changed.json()["world"] == {"min": 2, "max": 2}
    stop = plane.agent.awaits(StopGang, job_id)
    assert (stop.mode, stop.grace_s > 200) == ("drain", True)
    plane.agent.ends(gang, 2, exit_code=0, finished=True, drained=True)
    second = plane.agent.launches(job_id, fence=2)
    assert second.plan.world_size == 2
    sizes = [a["world_size"] for a in plane.get(f"{path}/attempts")["items"]]
    assert sizes == [4, 2]


def test_progress_does_not_make_an_edit_stale(plane: ControlPlane) -> None:
    plane.agent.join()
    job_id = plane.submit()
    gang = plane.agent.launches(job_id)
    seen = plane.client.get(f"/v1/jobs/{job_id}").headers["etag"]
    plane.agent.trains(gang, range(1, 5))
    plane.in_state(job_id, "RUNNING")
    path = f"/v1/jobs/{job_id}"
    assert plane.client.get(path).headers["etag"] != seen
    changed = plane.client.patch(path, json={"priority": 2}, headers={"If-Match": seen})
    assert changed.status_code == 200


def test_what_cannot_be_changed_is_refused_with_its_pointer(quiet_plane: ControlPlane) -> None:
    path = f"/v1/jobs/{quiet_plane.submit()}"
    body = {
        "train": {"steps": 5},
        "checkpoint": {"every_steps": 1},
        "faults": {"max_restarts": -1},
        "name": "x",
    }
    refused = quiet_plane.client.patch(path, json=body, headers={"If-Match": "*"})
    assert refused.status_code == 422
    told = {fault["pointer"]: fault["detail"] for fault in refused.json()["errors"]}
    assert set(told) == {"/train", "/checkpoint/every_steps", "/faults/max_restarts", "/name"}
    assert "clone" in told["/train"]
    assert quiet_plane.get(path)["revision"] == 0
