"""How long each try took to be noticed, followed, and under way, on virtual time."""

from services.contract.api.views import StopRequest
from services.controller.domain.job.events import NodeLost, PauseAsked
from services.controller.use_cases.present import attempt_views
from tests.controller.histories import (
    NODE,
    NOW,
    finished,
    killed,
    launched,
    new_job,
    placed,
    play,
    progressed,
)


def test_an_attempt_tells_how_long_detection_restart_and_first_step_took() -> None:
    job = new_job()
    job = play(job, [placed(job)], NOW).job
    job = play(job, [launched(job), progressed(job)], NOW + 1_500).job
    exit_told = killed(job).model_copy(update={"first_exit_s": 0.25})
    job = play(job, [exit_told], NOW + 9_000).job
    job = play(job, [placed(job)], NOW + 10_000).job
    first, second = attempt_views(job)
    assert (first.time_to_first_step_s, first.time_to_detect_s) == (1.5, 0.25)
    assert (first.time_to_restart_s, second.time_to_restart_s) == (1.0, None)
    assert (second.time_to_first_step_s, second.time_to_detect_s) == (None, None)
    assert first.mesh is not None
    assert first.mesh.dp_shard == 2


def test_a_lost_nodes_failure_counts_from_its_last_word() -> None:
    job = new_job()
    job = play(job, [placed(job)], NOW).job
    lost = NodeLost(NODE, "its lease ran out", seen_ms=NOW + 2_000)
    (view,) = attempt_views(play(job, [lost], NOW + 8_500).job)
    assert view.time_to_detect_s == 6.5


def test_what_people_stopped_has_no_time_to_restart() -> None:
    job = new_job()
    job = play(job, [placed(job), PauseAsked(StopRequest())], NOW).job
    job = play(job, [finished(job, step=3, drained=True)], NOW + 1_000).job
    job = play(job.model_copy(update={"state": "QUEUED"}), [placed(job)], NOW + 60_000).job
    first, _ = attempt_views(job)
    assert (first.time_to_restart_s, first.time_to_detect_s) == (None, None)
