"""The course of a job that runs a script, and what is refused of one."""

from services.contract.api.views import StopRequest
from services.contract.jobs.entry_points import EntryPoints
from services.contract.jobs.specs import JobSpec
from services.contract.messages.telemetry import StepRecord
from services.contract.words.ids import new_job_id
from services.contract.words.problems import Fault
from services.contract.words.states import ExitReason, JobState
from services.controller.domain.job.events import PauseAsked
from services.controller.domain.job.job import Job
from services.controller.domain.job.spec_rules import against_the_rules
from services.controller.domain.job.support import unsupported
from services.controller.domain.plans import default_plan
from services.controller.use_cases.progress import measure
from tests.controller.histories import (
    NOW,
    began,
    crashed,
    finished,
    killed,
    launched,
    linked,
    placed,
    play,
    progressed,
    saved,
    vote,
    votes,
)


def spec(**changes: object) -> JobSpec:
    fields: dict[str, object] = {
        "entrypoint": {"script": "train.py"},
        "resources": {"ranks": 2},
    }
    return JobSpec.model_validate(fields | changes)


def started(**changes: object) -> Job:
    """A job whose script runs and has not reported a step."""
    job = Job(id=new_job_id(NOW, bytes(10)), spec=spec(**changes), created_ms=NOW, updated_ms=NOW)
    return play(job, [placed(job), launched(job), progressed(job, step=0)]).job


def reporting(**changes: object) -> Job:
    job = started(**changes)
    return play(job, [progressed(job, step=1)]).job


def test_a_script_runs_before_it_reports_a_step() -> None:
    job = started()
    assert (job.state, job.reason) == (JobState.RUNNING, "attempt 1 runs train.py")
    assert job.attempts[-1].first_step is None
    assert reporting().attempts[-1].first_step == 1


def test_an_exception_before_the_first_report_is_not_tried_again() -> None:
    job = started()
    job = play(job, [crashed(job, "ImportError: no module named data", step=0)]).job
    assert (job.state, job.exit_reason) == (JobState.FAILED, ExitReason.USER_ERROR)
    job = reporting()
    assert play(job, [crashed(job, "OSError: gone")]).job.state == JobState.RESTARTING


def test_a_script_needs_no_checkpoint_to_be_done_but_waits_for_one_that_it_began() -> None:
    job = reporting()
    assert play(job, [finished(job, step=9)]).job.state == JobState.SUCCEEDED
    waits = play(job, [began(job, 9), *votes(job, 9), finished(job, step=9)]).job
    assert (waits.state, waits.exit_reason) == (JobState.RUNNING, None)
    done = play(waits, [linked(job, 9)]).job
    assert (done.state, done.exit_reason) == (JobState.SUCCEEDED, ExitReason.COMPLETED)


def test_a_script_whose_last_state_was_not_saved_is_tried_again() -> None:
    job = reporting()
    lost = play(job, [began(job, 9), vote(job, 9, 0), finished(job, step=9)]).job
    assert lost.state == JobState.RESTARTING
    assert lost.attempts[-1].exit_reason == ExitReason.CHECKPOINT_FAILED


def test_a_script_that_stops_when_it_is_asked_is_paused_and_one_that_ends_meanwhile_is_done() -> (
    None
):
    job = reporting()
    job = play(job, [*saved(job, 5), PauseAsked(StopRequest())]).job
    assert job.state == JobState.PAUSING
    paused = play(job, [finished(job, step=5, drained=True)]).job
    assert (paused.state, paused.reason) == (JobState.PAUSED, "paused on request; at step 5")
    assert play(job, [finished(job, step=9)]).job.state == JobState.SUCCEEDED
    deaf = play(job, [killed(job, step=9)]).job
    assert (deaf.state, deaf.reason) == (
        JobState.PAUSED,
        "paused on request; what is saved ends at step 5",
    )


def test_the_eta_of_a_script_is_by_what_it_says_of_its_steps() -> None:
    def of(job: Job, told: int | None) -> tuple[int | None, float | None]:
        record = StepRecord(step=10, fence=1, loss=1.0, tokens_per_s=1.0, step_time_s=0.5, of=told)
        found = measure(job, [record], {})
        return found.of, found.eta_s

    assert of(reporting(), None) == (None, None)
    assert of(reporting(), 30) == (30, 10.0)
    assert of(reporting(train={"steps": 20}), 30) == (20, 5.0)


def test_a_script_has_a_plan_of_its_ranks_alone_and_is_judged_by_its_name() -> None:
    asked = spec(mesh={"dp_shard": 1, "tp": 2})
    assert unsupported(asked) == []
    assert default_plan.shard(spec()).mesh.dp_shard == 2
    (fault,) = against_the_rules(asked, EntryPoints(("runs",)))
    assert (fault.pointer, fault.code) == ("/entrypoint/script", "script_not_allowed")
    told = spec(entrypoint={"script": "runs/a.py", "args": ["redis://me:secret@host"]})
    (fault,) = against_the_rules(told, EntryPoints(("runs",)))
    assert isinstance(fault, Fault)
    assert fault.pointer == "/entrypoint/args/0"


def test_what_ranks_say_has_no_effect_is_an_event_once_and_bounded() -> None:
    job = started()
    told = [progressed(job, step=1).model_copy(update={"notices": ("a", "b")})] * 2
    decision = play(job, told)
    assert [n.message for n in decision.notes if n.kind == "attempt.notice"] == ["a", "b"]
    assert decision.job.reason == "attempt 1 runs train.py; a; b"
    more = tuple(str(number) for number in range(20))
    later = play(decision.job, [progressed(job).model_copy(update={"notices": more})])
    assert len(later.notes) == 6
    again = play(later.job, [progressed(job).model_copy(update={"notices": ("new",)})])
    assert again.notes == ()


def test_a_script_that_tells_no_samples_has_no_speed() -> None:
    for told, shown in ((0.0, None), (3.0, 3.0)):
        record = StepRecord(step=1, fence=1, loss=1.0, tokens_per_s=told, step_time_s=0.5)
        assert measure(reporting(), [record], {}).tokens_per_s == shown
