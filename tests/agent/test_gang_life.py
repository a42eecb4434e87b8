"""From a launch to the last fact of a gang, with real processes."""

import os
import signal
from functools import partial
from pathlib import Path

import psutil
import pytest
from pydantic import BaseModel

from services.contract.api.requests import JobPatch
from services.contract.messages.commands import RetireCheckpoint, StopGang, TakeCheckpoint
from services.contract.messages.facts import (
    OLDER_COPY,
    CheckpointVoted,
    Evaluated,
    GangEnded,
    GangLaunched,
    GangProgressed,
    LaunchRefused,
    NodeJoined,
)
from services.contract.messages.telemetry import RankSample
from services.contract.redis import redis_keys
from services.contract.storage.commit_chain import CommitChain
from services.contract.storage.manifests import AttemptOpened
from services.contract.words.ids import checkpoint_id, new_job_id
from services.controller.domain.decisions.patch import with_patch
from services.worker.agent.gangs.runtime import _PATCHED
from tests.agent.conftest import (
    FOREVER,
    JOB,
    NODE,
    AgentProcess,
    Controller,
    StartAgent,
    ended,
    is_gone,
    launch,
    launched,
    running,
)
from tests.s3_server import BUCKET, s3_server
from tests.waiting import until


def test_a_gang_runs_to_its_end_and_tells_it_in_order(
    agent: AgentProcess, controller: Controller
) -> None:
    controller.send(launch(steps=5))
    end = ended(controller)
    kinds = [fact.kind for fact in controller.facts()]
    assert kinds[:2] == ["node_joined", "gang_launched"]
    assert kinds[-1] == "gang_ended"
    assert kinds.count("checkpoint_began") == 1
    # The units of its figures are told once they are known, and that all ranks are ready: both may be
    # after the first step.
    assert kinds.count("gang_progressed") in {1, 2, 3}
    assert kinds.count("checkpoint_voted") == 2
    assert controller.all_of(Evaluated)[0].baselines == {"bigram": 2.4}
    assert end.last_step == 5
    assert all(e.finished and e.exit_code == 0 and e.step == 5 for e in end.exits)
    assert {e.rank: e.pid for e in end.exits} == launched(controller).pids
    until(lambda: not agent.folder.attempt(JOB, 1).boards.exists())


def test_a_gang_ends_while_much_waits_for_a_bucket_that_does_not_answer(
    start_agent: StartAgent, controller: Controller
) -> None:
    with s3_server() as server:
        controller.open_job()
        start_agent(**server.environment, MESHLOOM_CHECKPOINT_ROOT=f"s3://{BUCKET}/silent")
        controller.fact(NodeJoined)
        running(controller)
        server.freeze()
        others = [new_job_id(1_700_000_000_000, bytes([n] * 10)) for n in range(1, 65)]
        controller.send(
            *(
                RetireCheckpoint(job_id=job, fence=1, checkpoint_id=checkpoint_id(job, 1, 1))
                for job in others
            )
        )
        controller.send(StopGang(job_id=JOB, fence=1, mode="kill"))
        assert all(one.signal == signal.SIGKILL for one in ended(controller).exits)


def test_an_agent_leaves_while_much_waits_for_a_bucket_that_does_not_answer(
    start_agent: StartAgent, controller: Controller
) -> None:
    with s3_server() as server:
        agent = start_agent(**server.environment, MESHLOOM_CHECKPOINT_ROOT=f"s3://{BUCKET}/silent")
        controller.fact(NodeJoined)
        inbox = redis_keys.node_inbox(NODE)
        until(lambda: controller.client.exists(inbox))  # with the group of those who read it
        server.freeze()
        jobs = [new_job_id(1_700_000_000_000, bytes([n] * 10)) for n in range(1, 33)]
        controller.send(
            *(
                RetireCheckpoint(job_id=job, fence=1, checkpoint_id=checkpoint_id(job, 1, 1))
                for job in jobs
            )
        )
        pending = partial(controller.client.xpending, inbox, redis_keys.INBOX_GROUP)
        until(lambda: pending()["pending"] == len(jobs))
        assert agent.stop() == 0


def test_gangs_that_end_at_one_moment_are_all_told_of_and_the_agent_goes_on(
    agent: AgentProcess, controller: Controller
) -> None:
    jobs = [new_job_id(1_700_000_000_000, bytes([n] * 10)) for n in range(1, 9)]
    for job in jobs:
        controller.client.hset(redis_keys.job(job), "fence", "1")
        endless = launch(ranks=1, steps=FOREVER, pause_s=0.01)
        controller.send(endless.model_copy(update={"job_id": job}))
    until(lambda: {fact.job_id for fact in controller.all_of(GangProgressed)} == set(jobs))
    controller.send(*(StopGang(job_id=job, fence=1, mode="kill") for job in jobs))
    until(lambda: {end.job_id for end in controller.all_of(GangEnded)} == set(jobs))
    assert len(controller.all_of(GangEnded)) == len(jobs)
    controller.send(launch())
    controller.fact(GangEnded, lambda end: end.job_id == JOB)
    assert agent.process.poll() is None


@pytest.mark.usefixtures("agent")
def test_every_step_and_every_line_is_written_once_and_exactly(controller: Controller) -> None:
    controller.send(launch(steps=2_000, pause_s=0.001, lines=700))
    ended(controller)
    steps = controller.steps()
    assert [record.step for record in steps] == list(range(1, 2_001))
    assert [record.loss for record in steps] == [1 / step for step in range(1, 2_001)]
    assert steps[6].learning_rate == 1e-3 / 3
    # Of both ranks rank 1 holds more.
    assert {record.memory_bytes for record in steps[-1_000:]} == {4097}
    times = [record.time_ms or 0 for record in steps]
    assert times == sorted(times)
    assert times[-1] - times[0] >= 1_999
    for rank in (0, 1):
        lines = [line.text for line in controller.logs() if line.rank == rank]
        assert lines == [f"line {number}" for number in range(700)]


@pytest.mark.usefixtures("agent")
def test_a_steps_figures_that_are_no_numbers_are_null(controller: Controller) -> None:
    controller.send(launch(steps=3, loss="nan"))
    ended(controller)
    assert [record.loss for record in controller.steps()] == [None] * 3


@pytest.mark.usefixtures("agent")
def test_the_first_rank_to_fail_is_named_with_its_traceback(controller: Controller) -> None:
    controller.send(launch(ranks=3, steps=FOREVER, pause_s=0.01, then="raise", at_step=4))
    end = ended(controller)
    first, *others = end.exits
    assert (first.rank, first.order, first.exit_code, first.step) == (1, 0, 1, 3)
    assert first.error == "ValueError: the model has a fault"
    assert first.traceback is not None
    assert first.traceback.startswith("Traceback")
    assert "_misbehave" in first.traceback
    assert [e.signal for e in others] == [signal.SIGKILL] * 2
    assert all("another rank" in (e.error or "") for e in others)
    errors = [line.text for line in controller.logs() if line.level == "error"]
    assert "ValueError: the model has a fault" in errors


@pytest.mark.usefixtures("agent")
def test_an_exit_code_without_an_exception_is_a_failure(controller: Controller) -> None:
    controller.send(launch(steps=FOREVER, pause_s=0.01, then="exit"))
    first = ended(controller).exits[0]
    assert (first.rank, first.exit_code, first.finished) == (1, 7, False)


@pytest.mark.usefixtures("agent")
def test_a_rank_that_is_killed_from_outside_is_named_first(controller: Controller) -> None:
    pids = running(controller).pids
    os.kill(pids[1], signal.SIGKILL)
    first, other = ended(controller).exits
    assert (first.rank, first.signal, first.error) == (1, signal.SIGKILL, "ended by SIGKILL")
    assert (other.rank, other.signal, other.order) == (0, signal.SIGKILL, 1)
    assert first.phase == "INIT"
    assert first.step >= 1


@pytest.mark.usefixtures("agent")
def test_a_gang_drains_with_a_checkpoint(controller: Controller) -> None:
    running(controller)
    controller.send(StopGang(job_id=JOB, fence=1, mode="drain"))
    end = ended(controller)
    assert all(e.drained and e.exit_code == 0 for e in end.exits)
    assert len(controller.all_of(CheckpointVoted)) == 2


@pytest.mark.usefixtures("agent")
def test_a_gang_that_does_not_drain_in_time_is_killed(controller: Controller) -> None:
    running(controller, then="hang", at_step=2)
    controller.send(StopGang(job_id=JOB, fence=1, mode="drain", grace_s=0.2))
    end = ended(controller)
    hung = next(e for e in end.exits if e.rank == 1)
    assert hung.signal == signal.SIGKILL
    assert hung.error == "killed: it did not drain within its grace"


@pytest.mark.usefixtures("agent")
def test_a_kill_and_its_repetition_end_a_gang_once(controller: Controller) -> None:
    running(controller)
    stop = StopGang(job_id=JOB, fence=1, mode="kill")
    controller.send(stop, stop)
    assert {e.signal for e in ended(controller).exits} == {signal.SIGKILL}


@pytest.mark.usefixtures("agent")
def test_a_checkpoint_is_taken_and_the_gang_goes_on(controller: Controller) -> None:
    pids = running(controller).pids
    controller.send(TakeCheckpoint(job_id=JOB, fence=1))
    vote = controller.fact(CheckpointVoted)
    assert not any(is_gone(pid) for pid in pids.values())
    assert not controller.all_of(GangEnded)
    controller.send(StopGang(job_id=JOB, fence=1, mode="drain", checkpoint="none"))
    assert all(e.drained for e in ended(controller).exits)
    # These ranks agree on nothing: of them only the one that was asked takes it.
    assert controller.all_of(CheckpointVoted) == [vote]


@pytest.mark.usefixtures("agent")
def test_a_repeated_launch_starts_nothing_and_is_answered_again(controller: Controller) -> None:
    """Else a job whose answer Redis lost would wait for it while it trains."""
    command = launch(steps=300, pause_s=0.001)
    controller.send(command, command)
    end = ended(controller)
    first, again = controller.all_of(GangLaunched)
    assert again == first
    controller.send(command)
    until(lambda: len(controller.all_of(GangEnded)) == 2)
    assert controller.all_of(GangEnded) == [end, end]
    assert len(controller.steps()) == 300


@pytest.mark.usefixtures("agent")
def test_a_gang_that_trains_says_so_again_when_its_launch_is_repeated(
    controller: Controller,
) -> None:
    running(controller)
    command = launch(1, 2, FOREVER, pause_s=0.01)
    patch = JobPatch.model_validate(PATCH).model_dump(mode="json", exclude_unset=True)
    # One that was chosen gives way to new bounds of an elastic job.
    patch |= {"train": {"micro_batch": 1}}
    controller.send(command.model_copy(update={"spec": with_patch(command.spec, patch)}))
    kinds = until(
        lambda: told if (told := kinds_told(controller)).count("gang_launched") == 2 else []
    )
    behind = len(kinds) - kinds[::-1].index("gang_launched")
    until(lambda: "gang_progressed" in kinds_told(controller)[behind:])


# All that a person may change of a job that is not elastic.
PATCH = {
    "priority": 5,
    "labels": {"team": "a"},
    "checkpoint": {"keep_last": 7, "keep_best": {"metric": "loss"}},
    "faults": {"max_restarts": 9},
}


def test_whatever_may_be_patched_makes_no_other_attempt_of_a_launch() -> None:
    patchable = {
        name: set(part.model_fields)
        if isinstance(part := field.annotation, type) and issubclass(part, BaseModel)
        else True
        for name, field in JobPatch.model_fields.items()
    }
    assert patchable | {"train": {"micro_batch"}} == dict(_PATCHED)


def kinds_told(controller: Controller) -> list[str]:
    return [fact.kind for fact in controller.facts()]


@pytest.mark.usefixtures("agent")
@pytest.mark.parametrize("changed", ["spec", "plan", "resume_from"])
def test_ranks_of_another_attempt_whose_number_is_given_again_are_not_taken_for_it(
    controller: Controller, changed: str
) -> None:
    """Redis is back with an older copy, and the job was changed since: what they train is not what is asked for."""
    running(controller)
    command = launch(1, 2, FOREVER, pause_s=0.01)
    others = {
        "spec": launch(1, 2, FOREVER, pause_s=0.02).spec,
        "plan": launch(1, 1).plan,
        "resume_from": checkpoint_id(JOB, 20, 1),
    }
    controller.send(command.model_copy(update={changed: others[changed]}))
    assert {gone.signal for gone in ended(controller).exits} == {signal.SIGKILL}
    assert len(controller.all_of(GangLaunched)) == 1


@pytest.mark.usefixtures("agent")
@pytest.mark.parametrize("child", ["of the rank's session", "of its own session"])
def test_what_a_rank_leaves_behind_is_swept(controller: Controller, child: str) -> None:
    controller.send(launch(steps=2, child=child))
    ended(controller)
    children = [int(line.text.split()[1]) for line in controller.logs() if "child" in line.text]
    assert len(children) == 2
    until(lambda: all(is_gone(pid) for pid in children))


def test_ranks_see_no_credentials_and_lead_their_own_sessions(
    start_agent: StartAgent, controller: Controller, tmp_path: Path
) -> None:
    controller.open_job()
    private = ("MESHLOOM_TOKEN", "HF_TOKEN", "AWS_SECRET_ACCESS_KEY")
    start_agent(**dict.fromkeys(private, "hidden"), COLOUR="blue", MESHLOOM_RANK_ENV="COLOUR")
    seen = tmp_path / "environment.json"
    running(controller, environment_to=str(seen))
    rank = psutil.Process(launched(controller).pids[0])
    assert os.getsid(rank.pid) == os.getpgid(rank.pid) == rank.pid
    for environment in (seen.read_text(), str(rank.environ())):
        assert "COLOUR" in environment
        for word in (*private, "REDIS_URL", "redis.sock", "MESHLOOM_HOME", "hidden"):
            assert word not in environment


@pytest.mark.usefixtures("agent")
def test_samples_show_where_each_rank_stands(controller: Controller) -> None:
    pids = running(controller).pids

    def look() -> dict[int, RankSample]:
        rows = controller.client.hgetall(redis_keys.job_ranks(JOB))
        samples = {int(rank): RankSample.model_validate_json(row) for rank, row in rows.items()}
        return samples if samples and all(s.step > 3 for s in samples.values()) else {}

    samples = until(look)
    now_ms = controller.client.time()[0] * 1000
    assert {rank: s.pid for rank, s in samples.items()} == pids
    assert all(
        abs(s.seen_ms - now_ms) < 30_000
        and (s.memory_bytes, s.peak_bytes, s.fragments_bytes) == (4096 + s.rank, 1024, 512)
        for s in samples.values()
    )
    assert samples[0].issued == {"dp": 0}


@pytest.mark.usefixtures("agent")
@pytest.mark.parametrize(
    ("here", "words"),
    [((), "places no rank on node"), ((1,), "did not receive the address of rank 0")],
)
def test_a_plan_that_this_node_cannot_begin_is_refused(
    controller: Controller, here: tuple[int, ...], words: str
) -> None:
    command = launch()
    seats = tuple(
        seat if seat.rank in here else seat.model_copy(update={"node_id": "elsewhere"})
        for seat in command.plan.ranks
    )
    plan = command.plan.model_copy(update={"ranks": seats})
    controller.send(command.model_copy(update={"plan": plan}))
    assert words in controller.fact(LaunchRefused).reason


@pytest.mark.parametrize(("then", "state"), [("stop", "T"), ("stop for its parent", "t")])
def test_a_rank_that_is_stopped_is_named_though_the_other_makes_progress(
    agent: AgentProcess, controller: Controller, then: str, state: str
) -> None:
    command = launch(1, 2, FOREVER, pause_s=0.01, then=then)
    faults = command.spec.faults.model_copy(update={"hang_timeout_s": 2.0})
    controller.send(
        command.model_copy(update={"spec": command.spec.model_copy(update={"faults": faults})})
    )
    end = ended(controller)
    assert end.hang is not None
    assert {each.rank: each.process == state for each in end.hang.ranks} == {0: False, 1: True}
    assert end.hang.still_s > end.hang.allowed_s == 2.0
    assert agent.process.poll() is None


@pytest.mark.usefixtures("agent")
def test_an_error_whose_text_is_no_unicode_is_told(controller: Controller) -> None:
    controller.send(launch(1, 2, FOREVER, pause_s=0.01, then="raise what is no text"))
    first = min(ended(controller).exits, key=lambda each: each.order)
    assert first.error == "ValueError: no samples in a\\udc80b"
    assert "_raises_what_is_no_text" in (first.traceback or "")


def test_an_attempt_whose_number_a_later_one_passed_in_storage_is_refused_for_that(
    controller: Controller, agent: AgentProcess
) -> None:
    """Its ranks could commit nothing: Redis is back with an older copy of its data."""
    chain = CommitChain(agent.checkpoint_root, JOB)
    for fence in (1, 2):
        chain.append(AttemptOpened(job_id=JOB, fence=fence))
    controller.send(launch())
    refused = controller.fact(LaunchRefused)
    assert (refused.condition, "attempt 2 is open" in refused.reason) == (OLDER_COPY, True)
