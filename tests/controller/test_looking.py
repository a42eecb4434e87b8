"""What a client sees of jobs, ranks, steps, nodes, logs and events."""

import asyncio
import base64
import dataclasses
import json
import re
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from fastapi import Request

from meshloom.client.metrics import Metrics
from services.cli.metrics import rows_of
from services.contract.api.plan_views import JobEstimate, MemoryView
from services.contract.api.views import JobView, MetricsView, StepView
from services.contract.messages.facts import GangProgressed
from services.contract.messages.telemetry import MetricRecord, RankSample, StepRecord
from services.contract.redis import redis_keys as keys
from services.contract.words.bounds import FIELDS_OF_A_STEP
from services.controller.api import conditional
from services.controller.ports.machines import Telemetry
from services.controller.use_cases import jobs
from services.controller.use_cases.present import job_view
from tests.controller.agent_double import AgentDouble
from tests.controller.conftest import ControlPlane
from tests.controller.histories import NODE, running
from tests.waiting import until

pytestmark = pytest.mark.redis


def test_who_polls_gets_304_until_something_changes(plane: ControlPlane) -> None:
    job_id = plane.submit()
    plane.agent.join()
    gang = plane.agent.launches(job_id)
    plane.in_state(job_id, "STARTING")
    paths = ["", "/ranks", "/metrics", "/events", "/checkpoints", "/logs", "/attempts"]
    for path in [f"/v1/jobs/{job_id}{path}" for path in paths] + ["/v1/jobs", "/version"]:
        first = plane.client.get(path)
        known = {"If-None-Match": f'"other", W/{first.headers["etag"]}'}
        again = plane.client.get(path, headers=known)
        assert (again.status_code, again.content) == (304, b""), path
    known = {"If-None-Match": plane.client.get(f"/v1/jobs/{job_id}").headers["etag"]}
    plane.agent.trains(gang, [1])
    assert plane.client.get(f"/v1/jobs/{job_id}", headers=known).status_code == 200


def test_jobs_come_in_pages_and_by_filter(quiet_plane: ControlPlane) -> None:
    ids = [quiet_plane.submit(name=f"run-{n}", labels={"n": str(n)}) for n in range(5)]
    first = quiet_plane.client.get("/v1/jobs", params={"limit": 2, "state": "QUEUED"})
    assert [job["id"] for job in first.json()["items"]] == [ids[4], ids[3]]
    link = re.fullmatch(r'<(.*)>; rel="next"', first.headers["link"])
    assert link is not None
    quiet_plane.submit(name="later")
    second = quiet_plane.client.get(link.group(1))
    assert [job["id"] for job in second.json()["items"]] == [ids[2], ids[1]]
    assert "cursor" in second.headers["link"]
    for query, found in {
        "label=n%3D3": [ids[3]],
        "label=n": ids[::-1],
        "q=RUN-1": [ids[1]],
        "state=RUNNING": [],
        "label=n%3D3&label=x": [],
    }.items():
        page = quiet_plane.get(f"/v1/jobs?{query}")
        assert [job["id"] for job in page["items"]] == found, query
        assert page["next_cursor"] is None


def test_jobs_are_sorted_and_pages_stay_what_they_are_when_jobs_come(
    quiet_plane: ControlPlane,
) -> None:
    ranks = (1, -1, 1, 0)
    ids = [quiet_plane.submit(name=f"run-{n}", priority=rank) for n, rank in enumerate(ranks)]
    orders = {
        "created": [0, 1, 2, 3],
        "-created": [3, 2, 1, 0],
        "updated": [0, 1, 2, 3],
        "-updated": [3, 2, 1, 0],
        "priority": [1, 3, 0, 2],
        "-priority": [2, 0, 3, 1],
    }
    for order, expected in orders.items():
        whole = quiet_plane.get(f"/v1/jobs?sort={order}&q=run")
        assert [job["id"] for job in whole["items"]] == [ids[n] for n in expected], order
        assert whole["next_cursor"] is None
    for order, expected in orders.items():
        first = quiet_plane.client.get(f"/v1/jobs?sort={order}&q=run&limit=3")
        link = re.fullmatch(r'<(.*)>; rel="next"', first.headers["link"])
        assert link is not None
        shown = [job["id"] for job in first.json()["items"]]
        # Of the lists that rise this is the last, of the others the first.
        late = quiet_plane.submit(name="run-late", priority=2)
        rest = [job["id"] for job in quiet_plane.client.get(link.group(1)).json()["items"]]
        rises = not order.startswith("-")
        assert [*shown, *rest] == [*(ids[n] for n in expected), *([late] if rises else [])], order
        quiet_plane.client.post(f"/v1/jobs/{late}/cancel")
        assert quiet_plane.client.delete(f"/v1/jobs/{late}").status_code == 204


def test_a_cursor_belongs_to_its_order(quiet_plane: ControlPlane) -> None:
    for _ in range(2):
        quiet_plane.submit()
    for order, other in (("priority", "-priority"), ("-created", "updated"), ("created", None)):
        cursor = quiet_plane.get(f"/v1/jobs?limit=1&sort={order}")["next_cursor"]
        sort = {} if other is None else {"sort": other}
        answer = quiet_plane.client.get("/v1/jobs", params={"cursor": cursor, **sort})
        assert answer.status_code == 422, order
        assert answer.json()["errors"][0]["code"] == "invalid_cursor"
    assert quiet_plane.client.get("/v1/jobs?sort=loss").status_code == 422


def test_only_the_fields_that_are_asked_for_are_told(quiet_plane: ControlPlane) -> None:
    job_id = quiet_plane.submit(priority=3)
    (whole,) = quiet_plane.get("/v1/jobs")["items"]
    (job,) = quiet_plane.get("/v1/jobs?fields=priority,%20created_at")["items"]
    assert job == {name: whole[name] for name in ("id", "priority", "created_at")}
    assert job["id"] == job_id
    refused = quiet_plane.client.get("/v1/jobs", params={"fields": "state,secrets,"})
    faults = refused.json()["errors"]
    assert refused.status_code == 422
    assert {fault["code"] for fault in faults} == {"unknown_field"}
    assert ["'secrets'" in fault["detail"] for fault in faults] == [False, True]
    assert "latest_checkpoint" in faults[1]["detail"]


def test_ranks_show_who_is_behind(plane: ControlPlane) -> None:
    plane.agent.join()
    job_id = plane.submit()
    gang = plane.agent.launches(job_id)
    ranks = plane.get(f"/v1/jobs/{job_id}/ranks")
    assert [(r["rank"], r["phase"]) for r in ranks["items"]] == [(0, "PENDING"), (1, "PENDING")]
    plane.agent.samples(gang, [10, 7])
    ranks = plane.get(f"/v1/jobs/{job_id}/ranks")
    assert [r["collectives_behind"] for r in ranks["items"]] == [0, 3]
    assert plane.get(f"/v1/jobs/{job_id}/ranks/1")["last_seen_at"] == "2023-11-14T22:13:20Z"
    assert plane.client.get(f"/v1/jobs/{job_id}/ranks/2").status_code == 404
    assert plane.job(job_id)["progress"]["step"] == 3


def test_the_rank_that_keeps_the_others_waiting_most_is_named_while_the_job_runs(
    plane: ControlPlane,
) -> None:
    plane.agent.join()
    job_id = plane.submit(faults={"max_restarts": 0})
    gang = plane.agent.launches(job_id)

    def named(*scores: float) -> list[bool]:
        plane.agent.samples(gang, [7, 7], scores=scores)
        ranks = plane.get(f"/v1/jobs/{job_id}/ranks")["items"]
        assert [rank["straggler_score"] for rank in ranks] == list(scores)
        return [rank["is_straggler"] for rank in ranks]

    assert named(0.02, 0.4) == [False, False]
    plane.agent.trains(gang, [1])
    plane.in_state(job_id, "RUNNING")
    assert named(0.0, 16 / 292) == [False, False]
    assert named(0.30, 0.38) == [False, False]
    assert named(0.02, 0.13) == [False, True]
    plane.agent.ends(gang, 1, exit_code=1, error="ValueError: x", traceback="Traceback")
    plane.in_state(job_id, "FAILED")
    assert named(0.02, 0.4) == [False, False]


@pytest.mark.parametrize(
    ("predicted", "measured", "ratio"),
    [(60 << 20, 90 << 20, None), (64 << 20, 96 << 20, 1.5), (64 << 20, 0, None)],
)
def test_what_was_measured_is_compared_only_with_an_estimate_that_can_be_told_from_noise(
    predicted: int, measured: int, ratio: float | None
) -> None:
    estimate = JobEstimate(
        plan_id=f"plan_{0:026d}",
        peak=MemoryView(total=predicted),
        where="optimizer",
        unit="",
        micro_batch=1,
    )
    job = running().model_copy(update={"estimate": estimate})
    sample = RankSample(
        rank=0,
        local_rank=0,
        fence=1,
        node_id=NODE,
        device="cpu",
        pid=1,
        phase="FORWARD",
        step=1,
        peak_bytes=measured or None,
    )
    seen = job_view(job, (), {0: sample}).estimate
    assert seen is not None
    assert (seen.measured_peak_bytes, seen.ratio) == (measured or None, ratio)


def test_metrics_show_the_newest_attempt_of_each_step_thinned_out(plane: ControlPlane) -> None:
    plane.agent.join()
    job_id = plane.submit(train={"steps": 100})
    gang = plane.agent.launches(job_id)
    plane.agent.trains(gang, range(1, 61))
    plane.agent.trains(gang.model_copy(update={"fence": 2}), range(50, 101))
    metrics = plane.get(f"/v1/jobs/{job_id}/metrics?max_points=7")
    steps = [record["step"] for record in metrics["items"]]
    assert (len(steps), steps[0], steps[-1], metrics["total"]) == (7, 1, 100, 100)
    some = plane.get(f"/v1/jobs/{job_id}/metrics?name=loss,tokens_per_s&max_points=7")
    assert [set(item) for item in some["items"]] == [{"step", "fence", "loss", "tokens_per_s"}] * 7
    assert [item["loss"] for item in some["items"]] == [r["loss"] for r in metrics["items"]]
    refused = plane.client.get(f"/v1/jobs/{job_id}/metrics?name=loss,colour")
    assert (refused.status_code, refused.json()["errors"][0]["code"]) == (422, "unknown_metric")
    part = plane.get(f"/v1/jobs/{job_id}/metrics?from_step=49&to_step=51")
    assert [(r["step"], r["fence"]) for r in part["items"]] == [(49, 1), (50, 2), (51, 2)]


def test_metrics_of_the_user_are_named_thinned_out_and_bounded(plane: ControlPlane) -> None:
    plane.agent.join()
    job_id = plane.submit(train={"steps": 100})
    gang = plane.agent.launches(job_id)
    plane.agent.trains(gang, [1, 2])
    plane.in_state(job_id, "RUNNING")
    assert plane.get(f"/v1/jobs/{job_id}/metrics")["names"] == []
    plane.agent.tells_metrics(
        gang,
        *(
            MetricRecord(step=n, fence=1, values={"hits": n / 100, "gap": None})
            for n in range(1, 61)
        ),
        MetricRecord(step=60, fence=1, values={"validation/hits": 0.5}, left_out=7),
    )
    again = gang.model_copy(update={"fence": 2})
    plane.agent.tells_metrics(
        again, *(MetricRecord(step=n, fence=2, values={"hits": -n}) for n in range(50, 81))
    )
    whole = plane.get(f"/v1/jobs/{job_id}/metrics?max_points=9")
    assert whole["names"] == ["gap", "hits", "validation/hits"]
    assert whole["names_left_out"] == 7
    assert [p["step"] for p in whole["user_metrics"]] == [1, 11, 21, 31, 41, 50, 60, 70, 80]
    assert [p["fence"] for p in whole["user_metrics"]] == [1] * 5 + [2] * 4
    one = plane.get(f"/v1/jobs/{job_id}/metrics?name=hits&from_step=49&to_step=50")
    assert one["items"] == [
        {"step": 49, "fence": 1, "hits": 0.49},
        {"step": 50, "fence": 2, "hits": -50.0},
    ]
    both = plane.get(f"/v1/jobs/{job_id}/metrics?name=loss&name=hits&to_step=3")["items"]
    assert [set(item) - {"step", "fence"} for item in both] == [{"loss", "hits"}] * 2 + [{"hits"}]
    assert plane.get(f"/v1/jobs/{job_id}")["progress"]["metrics"] == {"hits": -80.0}
    many = [MetricRecord(step=90, fence=2, values={f"n{k}": k}) for k in range(500)]
    plane.agent.tells_metrics(again, *many)
    flooded = plane.get(f"/v1/jobs/{job_id}/metrics")
    assert len(flooded["names"]) == 64
    assert flooded["names_left_out"] == 7 + 503 - 64
    assert set(flooded["names"]) >= {name for p in flooded["user_metrics"] for name in p["values"]}
    refused = plane.client.get(f"/v1/jobs/{job_id}/metrics?name=n499")
    assert (refused.status_code, refused.json()["errors"][0]["code"]) == (422, "unknown_metric")


def test_metrics_that_are_called_as_fields_of_a_step_take_no_fields_place(
    plane: ControlPlane,
) -> None:
    assert StepView.model_fields.keys() == FIELDS_OF_A_STEP
    plane.agent.join()
    job_id = plane.submit(train={"steps": 100})
    gang = plane.agent.launches(job_id)
    plane.agent.trains(gang, [1, 2])
    plane.in_state(job_id, "RUNNING")
    users = dict.fromkeys(FIELDS_OF_A_STEP, 70.0)
    plane.agent.tells_metrics(gang, MetricRecord(step=2, fence=1, values=users))
    whole = MetricsView.model_validate(plane.get(f"/v1/jobs/{job_id}/metrics"))
    for rows in (list(Metrics(whole)), rows_of(whole)):
        assert [(row["step"], row["fence"]) for row in rows] == [(1, 1), (2, 1)]
        assert rows[1]["loss"] == whole.items[1].loss
        assert {name for name, value in rows[1].items() if value == 70.0} == set(whole.names)
    (row,) = plane.get(f"/v1/jobs/{job_id}/metrics?name=user/step")["items"]
    assert row == {"step": 2, "fence": 1, "user/step": 70.0}


def test_ranks_that_train_and_of_which_no_sample_comes_have_agents_with_another_redis(
    plane: ControlPlane, monkeypatch: pytest.MonkeyPatch
) -> None:
    plane.agent.join()
    job_id = plane.submit(train={"steps": 100})
    gang = plane.agent.launches(job_id)
    plane.agent.trains(gang, [1, 2])
    plane.in_state(job_id, "RUNNING")
    assert not plane.job(job_id)["telemetry_away"], "half a minute is not over"
    monkeypatch.setattr(jobs, "SILENT_MS", 0)
    assert plane.job(job_id)["telemetry_away"]
    plane.agent.samples(gang.model_copy(update={"fence": 7}), [1, 1])
    assert plane.job(job_id)["telemetry_away"], "those are of another attempt"
    plane.agent.samples(gang, [1, 1])
    assert not plane.job(job_id)["telemetry_away"]


def test_the_units_of_a_job_are_those_that_its_ranks_told_last(plane: ControlPlane) -> None:
    plane.agent.join()
    job_id = plane.submit()
    gang = plane.agent.launches(job_id)
    progressed = GangProgressed(job_id=job_id, fence=1, node_id=NODE, step=1)

    def units() -> tuple[str, str]:
        told = plane.get(f"/v1/jobs/{job_id}")["progress"]
        return told["throughput_unit"], told["loss_unit"]

    plane.agent.trains(gang, [1])  # an older agent tells none
    plane.in_state(job_id, "RUNNING")
    assert units() == ("tokens", "nats")
    late = progressed.model_copy(update={"throughput_unit": "samples", "loss_unit": ""})
    plane.agent.tell(late)
    until(lambda: units() == ("samples", ""))
    metrics = plane.get(f"/v1/jobs/{job_id}/metrics")
    assert (metrics["throughput_unit"], metrics["loss_unit"]) == ("samples", "")


@pytest.mark.parametrize(
    ("told", "mfu"),
    [
        ({}, None),
        ({"model_flops": 4 * 10**12}, None),
        ({"model_flops": 4 * 10**12, "peak_flops": 1e13}, 0.4),
    ],
)
def test_the_utilisation_is_known_where_operations_and_the_peak_are(
    told: dict[str, Any], mfu: float | None
) -> None:
    memory = MemoryView(total=1)
    estimate = JobEstimate(
        plan_id=f"plan_{0:026d}", peak=memory, where="", unit="", micro_batch=1, **told
    )
    job = running().model_copy(update={"estimate": estimate})
    world = job.attempts[-1].world_size
    step = StepRecord(step=1, fence=1, loss=1, tokens_per_s=1, step_time_s=1 / world)
    assert job_view(job, (step,), {}).progress.mfu == mfu


def test_a_job_is_shown_with_all_fields_of_its_view_also_where_the_plan_is_kept_as_text() -> None:
    job = running()
    view = job_view(job, (), {})
    assert view.plan is not None
    asked = Request({"type": "http", "method": "GET", "headers": []})
    for _ in range(2):
        body = bytes(conditional.answer(asked, view).body)
        assert JobView.model_validate_json(body) == view
        assert json.loads(body) == json.loads(view.model_dump_json())


def test_nodes_show_what_runs_there(plane: ControlPlane) -> None:
    plane.agent.join()
    job_id = plane.submit()
    plane.agent.launches(job_id)
    view = plane.get("/v1/nodes/loom-1")
    assert (view["state"], view["cpu_slots_used"], view["jobs"]) == ("READY", 2, [job_id])
    assert view["lease_s"] > 0
    assert plane.client.get("/v1/nodes/nobody").status_code == 404
    assert plane.client.get("/v1/checkpoints/ckpt_nope").status_code == 404


def test_nodes_are_listed_page_by_page_while_others_join_and_go(plane: ControlPlane) -> None:
    names = [f"loom-{number}" for number in range(1, 6)]
    for name in names:
        AgentDouble(plane.redis, name).join()
    until(lambda: len(plane.get("/v1/nodes")["items"]) == len(names), every_s=0.01)
    first = plane.get("/v1/nodes?limit=2")
    assert [node["id"] for node in first["items"]] == names[:2]
    # Behind the page comes one more, in it another goes: the next page begins where this one ended.
    AgentDouble(plane.redis, "loom-0").join()
    until(lambda: len(plane.get("/v1/nodes")["items"]) == len(names) + 1, every_s=0.01)
    plane.redis.hdel(keys.NODES, names[1])
    answer = plane.client.get("/v1/nodes", params={"limit": 2, "cursor": first["next_cursor"]})
    assert [node["id"] for node in answer.json()["items"]] == names[2:4]
    last = plane.client.get(answer.links["next"]["url"]).json()
    assert [node["id"] for node in last["items"]] == names[4:]
    assert last["next_cursor"] is None
    jobs_cursor = base64.urlsafe_b64encode(b"1700000000000 job_x").decode()
    for cursor in ("nonsense", jobs_cursor):
        assert plane.client.get("/v1/nodes", params={"cursor": cursor}).status_code == 422


def test_logs_are_filtered_and_paged(plane: ControlPlane) -> None:
    plane.agent.join()
    job_id = plane.submit()
    gang = plane.agent.launches(job_id)
    for number in range(4):
        plane.agent.writes(gang, number % 2, f"line {number}", is_error=number == 3)
    path = f"/v1/jobs/{job_id}/logs"
    texts = {
        "rank=1": ["line 1", "line 3"],
        "stream=stderr": ["line 3"],
        "level=warning": ["line 3"],
        "level=info&text=LINE%202": ["line 2"],
    }
    for query, expected in texts.items():
        assert [line["text"] for line in plane.get(f"{path}?{query}")["items"]] == expected
    for query, expected in {
        "tail=2": ["line 2", "line 3"],
        "tail=1&rank=0": ["line 2"],
        "tail=0": [],
        "tail=9&text=line+1": ["line 1"],
    }.items():
        assert [line["text"] for line in plane.get(f"{path}?{query}")["items"]] == expected
        told = plane.client.get(f"{path}?{query}", headers={"Accept": "text/event-stream"}).text
        assert re.findall(r"line [0-9]", told) == expected
    (first, *_) = plane.get(path)["items"]
    again = {"Accept": "text/event-stream", "Last-Event-ID": first["id"]}
    told = plane.client.get(f"{path}?tail=1", headers=again).text
    assert re.findall(r"line [0-9]", told) == ["line 1", "line 2", "line 3"]
    assert plane.client.get(f"{path}?tail=1001").status_code == 422
    page = plane.get(f"{path}?limit=3")
    rest = plane.get(f"{path}?cursor={page['next_cursor']}")
    assert [line["text"] for line in rest["items"]] == ["line 3"]


def test_logs_are_narrowed_by_the_times_that_their_lines_show(plane: ControlPlane) -> None:
    plane.agent.join()
    job_id = plane.submit()
    gang = plane.agent.launches(job_id)
    for second in range(4):
        plane.agent.writes(gang, 0, f"at {second}", time_ms=1_700_000_000_000 + second * 1000)
    path = f"/v1/jobs/{job_id}/logs"

    def between(**times: str) -> list[str]:
        answer = plane.client.get(path, params=times)
        assert answer.status_code == 200, answer.text
        return [line["text"] for line in answer.json()["items"]]

    assert between(since="2023-11-14T22:13:21Z") == ["at 1", "at 2", "at 3"]
    assert between(until="2023-11-14T22:13:21Z") == ["at 0"]
    shifted = {"since": "2023-11-14T23:13:20.5+01:00", "until": "2023-11-14T23:13:22.5+01:00"}
    assert between(**shifted) == ["at 1", "at 2"]
    told = plane.client.get(path, params=shifted, headers={"Accept": "text/event-stream"}).text
    assert re.findall(r"at [0-9]", told) == ["at 1", "at 2"]
    for vague in ("2023-11-14T22:13:21", "yesterday"):
        assert plane.client.get(path, params={"since": vague}).status_code == 422


def test_a_trimmed_log_answers_410_to_an_old_cursor(plane: ControlPlane) -> None:
    plane.agent.join()
    job_id = plane.submit()
    gang = plane.agent.launches(job_id)
    for number in range(4):
        plane.agent.writes(gang, 0, f"line {number}")
    path = f"/v1/jobs/{job_id}/logs"
    cursor = plane.get(f"{path}?limit=1")["next_cursor"]
    plane.redis.xtrim(keys.job_logs(job_id), maxlen=1, approximate=False)
    stream = {"Accept": "text/event-stream", "Last-Event-ID": cursor}
    for answer in (
        plane.client.get(path, params={"cursor": cursor}),
        plane.client.get(path, headers=stream),
    ):
        assert (answer.status_code, answer.json()["code"]) == (410, "cursor_expired")


def test_a_stream_tells_all_resumes_and_ends_with_the_job(plane: ControlPlane) -> None:
    job_id = plane.submit()
    plane.act(job_id, "cancel")
    path = f"/v1/jobs/{job_id}/events"
    stream = plane.client.get(path, headers={"Accept": "text/event-stream"})
    assert stream.headers["content-type"].startswith("text/event-stream")
    told = re.findall(r"^id: (.*)$", stream.text, re.MULTILINE)
    assert told == [event["id"] for event in plane.get(path)["items"]]
    assert stream.text.endswith("event: end\ndata: {}\n\n")
    headers = {"Accept": "text/event-stream", "Last-Event-ID": told[0]}
    rest = plane.client.get(path, headers=headers)
    assert re.findall(r"^id: (.*)$", rest.text, re.MULTILINE) == told[1:]
    missing = plane.client.get("/v1/jobs/job_nope/events", headers=headers)
    assert missing.status_code == 404
    assert plane.client.get(f"/v1/jobs/{job_id}:events").status_code == 404


class OneReader:
    """The telemetry of a controller, which sees how many read all steps at once."""

    def __init__(self, telemetry: Telemetry) -> None:
        self._telemetry = telemetry
        self.readers = 0
        self.most = 0
        self.reads = 0

    def __getattr__(self, name: str) -> object:
        return getattr(self._telemetry, name)

    async def steps(self, job_id: str) -> list[StepRecord]:
        self.readers += 1
        self.reads += 1
        self.most = max(self.most, self.readers)
        try:
            for _ in range(20):  # others get their turn, if they may
                await asyncio.sleep(0)
            return await self._telemetry.steps(job_id)
        finally:
            self.readers -= 1


def test_however_many_ask_for_metrics_one_jobs_steps_are_in_memory_at_a_time(
    quiet_plane: ControlPlane,
) -> None:
    job_id = quiet_plane.submit()
    state: Any = quiet_plane.client.app
    context = state.state.context
    seen = OneReader(context.ports.telemetry)
    ports = dataclasses.replace(context.ports, telemetry=seen)
    state.state.context = dataclasses.replace(context, ports=ports)
    with ThreadPoolExecutor(8) as pool:
        paths = [f"/v1/jobs/{job_id}/metrics", f"/v1/jobs/{job_id}/metrics?name=loss"] * 8
        answers = list(pool.map(quiet_plane.client.get, paths))
    assert {answer.status_code for answer in answers} == {200}
    assert (seen.reads, seen.most) == (16, 1)
